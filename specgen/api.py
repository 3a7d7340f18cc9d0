"""The library in a few lines: load a model, generate text.

    from specgen import load

    with load("smollm2-135m") as model:
        for piece in model.generate("Why is the sky blue?", max_tokens=100):
            print(piece, end="", flush=True)

Knows: names of models and of options, as on the command line. Does not know: terminals. `import specgen` imports no
torch; `load` does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast, get_type_hints

from specgen.cancel import Cancel
from specgen.errors import UsageError, nearest
from specgen.events import Finished, Piece
from specgen.options import LoadOptions, RunOptions, SamplingOptions
from specgen.worker.codec import CodecError, decode, encode

if TYPE_CHECKING:
    from specgen.records import RunRecord
    from specgen.session import Prompt, Session

Messages = Sequence[Mapping[str, str]]
"""A conversation: `{"role": "user", "content": "…"}`, with the roles that the model's chat template knows."""


def load(
    model: str | Path | None = None,
    *,
    draft: str | Path | None = None,
    models: str | Path | None = None,
    **options: Any,
) -> Model:
    """A model in memory; its files are fetched first where they are not on this machine.

    model: a name of `specgen models list`, a path, or `hf:OWNER/REPO`; None: the default model.
    draft: a small model that drafts; None: the model's own, "none": none.
    models: a models.toml laid over the built-in one.
    options: the fields of `specgen.options.LoadOptions`, e.g. threads=2, context_tokens=4096, kv="int8".

    UsageError for options that make no sense, ModelError for a model that cannot be used, OutOfMemoryError when it does
    not fit; all are SpecgenError with a `message` and a `hint`.
    """
    checked = LoadOptions(**_known(_fields(LoadOptions), options))
    from specgen.registry import DEFAULT_MODEL, draft_of, load_registry, resolve_model

    registry = load_registry(None if models is None else Path(models))
    ref = resolve_model(DEFAULT_MODEL if model is None else str(model), registry)
    helper = draft_of(ref) if draft is None else None if str(draft) == "none" else resolve_model(str(draft), registry)
    from specgen.session import load as load_session

    return Model(load_session(ref, checked, draft=helper), ref.entry.sampling)


class Model:
    """A loaded model. One answer at a time; a prompt that begins like the last one is only computed from where it
    differs. Close it, or use it in a `with`, to give its memory back."""

    def __init__(self, session: Session, sampling: Mapping[str, float]) -> None:
        self._session: Session | None = session
        self._sampling = dict(sampling)  # the model's own defaults
        self._finished: Finished | None = None
        self._cancel = Cancel()

    def generate(
        self, prompt: str | Messages, *, system: str | None = None, raw: bool = False, **options: Any
    ) -> Iterator[str]:
        """The answer's text as it is committed, in whole characters. Closing the iterator early stops the model.

        prompt: the user's text, or a whole conversation as messages.
        system: a system message before a text; raw: no chat template, the text is continued as it is.
        options: the fields of `specgen.options.SamplingOptions` and `RunOptions`, e.g. temperature=0.7, seed=1,
        max_tokens=100, stop="END", proposer="none". What is not given is as the model's entry says, else the default.

        Errors come now, before any work: UsageError, ContextFullError.
        """
        session = self._open()
        chosen = self._options(options)
        ids = self._prompt(session, prompt, system, raw, chosen)
        self._finished, self._cancel = None, Cancel()
        return self._pieces(session.generate(ids, chosen, self._cancel))

    def text(self, prompt: str | Messages, **options: Any) -> str:
        """The whole answer at once; the arguments are those of `generate`."""
        return "".join(self.generate(prompt, **options))

    def cancel(self) -> None:
        """Stop the answer that is being made, from another thread."""
        self._cancel.set()

    @property
    def finished(self) -> Finished | None:
        """How the last answer ended: reason, text, token ids. None before the first, and while one is being made."""
        return self._finished

    @property
    def record(self) -> RunRecord | None:
        """Counts and times of the last answer, see `specgen.records`."""
        return None if self._finished is None else self._finished.record

    def report(self) -> dict[str, Any]:
        """Model, load time, memory and versions, as in `specgen run --json`."""
        return self._open().report()

    def close(self) -> None:
        """Let go of the model. May be called twice."""
        self._session = None

    def __enter__(self) -> Model:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> Session:
        if self._session is None:
            raise UsageError("the model is closed", hint="load it again")
        return self._session

    def _options(self, given: Mapping[str, Any]) -> RunOptions:
        sampling = {field.name for field in fields(SamplingOptions)}
        known = _known({**_fields(RunOptions), **_fields(SamplingOptions)}, _in_lists(given))
        chosen = {**self._sampling, **{name: known.pop(name) for name in sampling & known.keys()}}
        return RunOptions(**{"sampling": SamplingOptions(**chosen), **known})

    def _prompt(
        self, session: Session, prompt: str | Messages, system: str | None, raw: bool, options: RunOptions
    ) -> Prompt:
        if isinstance(prompt, str):
            return session.prompt_ids(prompt, system=system, raw=raw, think=options.think)
        if system is not None or raw:
            raise UsageError("messages go through the chat template as they are", hint="leave out system and raw")
        return session.chat_ids(prompt, options.think)

    def _pieces(self, events: Iterator[Any]) -> Iterator[str]:
        with closing(cast("Any", events)):
            for event in events:
                if isinstance(event, Piece) and event.text and not event.thinking:
                    yield event.text
                elif isinstance(event, Finished):
                    self._finished = event


def _fields(kind: type) -> dict[str, Any]:
    """Name → type of a dataclass's fields."""
    return get_type_hints(kind)


def _in_lists(given: Mapping[str, Any]) -> dict[str, Any]:
    """One stop string is a list of one, and biases may be a dict from token to bias."""
    values = dict(given)
    if isinstance(values.get("stop"), str):
        values["stop"] = [values["stop"]]
    if isinstance(values.get("logit_bias"), Mapping):
        values["logit_bias"] = list(values["logit_bias"].items())
    return values


def _known(hints: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """`given`, each with its type; UsageError for a name that is not known (with the nearest) or a wrong type."""
    values = {}
    for name, value in given.items():
        if name not in hints:
            raise UsageError(f"unknown option {name!r}", nearest(name, hints) or f"known: {', '.join(sorted(hints))}")
        try:
            values[name] = decode(hints[name], encode(value))
        except CodecError as error:
            raise UsageError(f"{name} is {value!r}", hint=str(error)) from error
    return values
