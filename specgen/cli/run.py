"""`specgen run`: one prompt, one answer.

Knows: the order of things (check the options, read the prompt, load, answer, report). Does not know: how any is done.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast, get_args

import typer

from specgen.cancel import Cancel
from specgen.cli.console import Console, descriptor
from specgen.cli.fetchbar import fetch_bar
from specgen.cli.flags import (
    DecodingFlags,
    ModelFlags,
    OutputFlags,
    PromptFlags,
    SamplingFlags,
    WorkerFlags,
    on_command_line,
)
from specgen.cli.interrupt import exit_code, interrupts
from specgen.cli.outfile import OutFile
from specgen.cli.prompt import STDIN, PromptSource, argument_text, read_prompt
from specgen.cli.report import Outcome, answer_object, json_line, stats_tables, summary
from specgen.cli.screen import terminal_size, unechoed
from specgen.cli.shape import ConstraintFlags, Shape, ThinkFlags, reads_stdin
from specgen.cli.view import LiveView, View, choose_view, write_bytes
from specgen.cli.worker import warm_session
from specgen.config import ColorName
from specgen.errors import ExitCode, UsageError
from specgen.events import Finished, FinishReason, Started
from specgen.options import (
    NEED_DRAFT,
    DraftOptions,
    LoadOptions,
    RunOptions,
    SamplingOptions,
    WorkerOptions,
    check_choice,
    parse_size,
)

if TYPE_CHECKING:
    from specgen.prompt import Prompt
    from specgen.registry import ModelRef, Registry
    from specgen.session import Session
    from specgen.worker.client import RemoteSession


def run(
    context: typer.Context,
    prompt: PromptFlags,
    model: ModelFlags,
    sampling: SamplingFlags,
    decoding: DecodingFlags,
    constraint: ConstraintFlags,
    think: ThinkFlags,
    worker: WorkerFlags,
    output: OutputFlags,
) -> int:
    """Answer one prompt.

    specgen run -p "Why is the sky blue?"
    specgen run question.txt -n 200
    git diff | specgen run -p "Write a commit message"
    specgen run -p "Count to ten" --json | jq .timings
    """
    console = Console.of(context)
    apply_output_flags(console, output)
    chosen = sampling_choices(sampling)
    SamplingOptions(**chosen)  # a bad value is told before anything is read or fetched
    if reads_stdin(constraint) and prompt.prompt_file == STDIN:
        raise UsageError("prompt and schema cannot both be standard input", hint="put one of them into a file")
    shape = Shape.of(constraint, think, console.stdin)
    options = shape.applied(run_options(decoding, SamplingOptions()))
    load, keep = load_options(model), WorkerOptions(worker.keep_alive)
    destination = OutFile(output.output) if output.output not in (None, "-") else None
    if destination is None:
        console.answer()
    stdin = None if reads_stdin(constraint) else console.stdin
    system = None if prompt.system is None else argument_text("--system", prompt.system)
    text = read_prompt(PromptSource(prompt.prompt_file, prompt.prompt, prompt.raw), stdin, console.note)
    ref = find_model(model)
    options = shape.applied(run_options(decoding, SamplingOptions(**{**ref.entry.sampling, **chosen})))
    draft = find_draft(model, ref)
    check_draft(context, options, draft, load)
    warm = warm_session(console, ref, draft, load, keep)
    session = warm or load_session(console, ref, load, draft)
    ids = session.prompt_ids(text, system=system, raw=prompt.raw, think=shape.think)
    return _answer(console, session, ids, options, _Delivery(output, destination))


class _Delivery:
    """How the complete answer reaches the user, where it was not streamed."""

    def __init__(self, flags: OutputFlags, destination: OutFile | None) -> None:
        self.flags = flags
        self.destination = destination

    @property
    def whole(self) -> bool:
        return self.flags.json or self.destination is not None

    def deliver(self, console: Console, outcome: Outcome) -> None:
        if not self.whole:
            return
        text = json_line(answer_object(outcome)) + "\n" if self.flags.json else outcome.finished.text
        data = text.encode("utf-8")
        if self.destination is None:
            write_bytes(console.answer(), data)
        else:
            self.destination.write(data)


def _answer(
    console: Console, session: Session | RemoteSession, prompt: Prompt, options: RunOptions, delivery: _Delivery
) -> int:
    view = choose_view(console, whole=delivery.whole)
    cancel = Cancel()
    keyboard = descriptor(console.stdin) if isinstance(view, LiveView) else None
    with unechoed(keyboard) as restore, interrupts(cancel.set, lambda: tidy(restore, view)) as caught:
        try:
            started, finished = watch(console.note, view, session.generate(prompt, options, cancel))
        finally:
            view.close()
        outcome = Outcome(started, finished, options, session.report())
        delivery.deliver(console, outcome)
        tell(console, view, outcome, stats=delivery.flags.stats)
    if finished.reason is FinishReason.CANCELLED:
        return exit_code(caught.received[0]) if caught.received else int(ExitCode.INTERRUPTED)
    return int(ending_code(finished))


def ending_code(finished: Finished) -> ExitCode:
    """The exit code of an answer that was not interrupted."""
    if finished.reason is FinishReason.CONTEXT:
        return ExitCode.CONTEXT
    return ExitCode.OK if finished.complete else ExitCode.INCOMPLETE


def tidy(restore_keyboard: Callable[[], None], view: View) -> None:
    """Leave the terminal as it was, in the middle of an answer."""
    restore_keyboard()
    view.close()


def watch(note: Callable[[str], None], view: View, events: Iterator[Any]) -> tuple[Started, Finished]:
    """Show every event, and tell of notices. The iterator is closed on the way out: a failing view stops the engine."""
    started: Started | None = None
    finished: Finished | None = None
    with closing(cast("Any", events)):
        for event in events:
            if isinstance(event, Started):
                started = event
                for notice in event.notices:
                    note(notice)
            view.show(event)
            if isinstance(event, Finished):
                finished = event
    assert started is not None, "a session yields Started first"
    assert finished is not None, "a session yields Finished last"
    return started, finished


def tell(console: Console, view: View, outcome: Outcome, *, stats: bool) -> None:
    """What is said after the answer: a cut context always, a summary on a terminal, tables when asked for."""
    if outcome.finished.reason is FinishReason.CONTEXT:
        console.warn(f"the context is full: the answer ends at {outcome.started.context_tokens} tokens")
    elif not outcome.finished.complete and outcome.finished.reason is not FinishReason.CANCELLED:
        console.warn("the answer was cut before its grammar may end, so it does not parse")
    if console.can_steer(console.stderr) and not console.quiet:
        columns, _ = terminal_size(descriptor(console.stderr))
        console.line(summary(outcome, view.marks, columns), after_pipe=console.is_pipe(console.stdout))
    if stats:
        tables = console.rich()
        for table in stats_tables(outcome):
            tables.print(table)


class DisplayChoice(Protocol):
    """Flags that say how much is shown, and in which colours."""

    @property
    def color(self) -> str: ...

    @property
    def quiet(self) -> bool: ...

    @property
    def debug(self) -> bool: ...


def apply_output_flags(console: Console, output: DisplayChoice) -> None:
    check_choice("--color", output.color, get_args(ColorName))
    console.color = cast("ColorName", output.color)
    console.quiet = output.quiet
    console.debug = console.debug or output.debug


def sampling_choices(flags: SamplingFlags) -> dict[str, Any]:
    """What the command line sets, under the names of SamplingOptions."""
    names = [name for name in flags.__dataclass_fields__ if name != "logit_bias"]
    chosen = {name: getattr(flags, name) for name in names if getattr(flags, name) is not None}
    if flags.logit_bias:
        chosen["logit_bias"] = tuple(_bias(text) for text in flags.logit_bias)
    return chosen


def _bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise UsageError(f"--logit-bias {text!r} is not ID=VALUE", hint="for example --logit-bias 123=-2.5") from None


def run_options(flags: DecodingFlags, sampling: SamplingOptions) -> RunOptions:
    return RunOptions(
        sampling=sampling,
        max_tokens=flags.max_tokens,
        stop=tuple(unescaped(argument_text("--stop", text)) for text in flags.stop or ()),
        ignore_eos=flags.ignore_eos,
        proposer=cast("Any", flags.proposer),
        gamma=gamma_choice(flags.gamma),
        accept=cast("Any", flags.accept),
        tree=flags.tree,
        draft=DraftOptions(flags.draft_stop),
    )


def gamma_choice(text: str) -> int | None:
    if text == "auto":
        return None
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"--gamma is {text!r}", hint="it must be a whole number or auto") from None


_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "0": "\0", "\\": "\\"}
_ESCAPE = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|x([0-9A-Fa-f]{2})|([ntr0\\]))")


def unescaped(text: str) -> str:
    r"""\n, \t, \r, \0, \\, \xHH and \uHHHH become characters; any other backslash stays."""
    return _ESCAPE.sub(lambda m: _ESCAPES[m[3]] if m[3] else chr(int(m[1] or m[2], 16)), text)


def load_options(flags: ModelFlags) -> LoadOptions:
    return LoadOptions(
        device=flags.device,
        threads=flags.threads,
        context_tokens=flags.ctx,
        kv=cast("Any", flags.kv),
        quant=cast("Any", flags.quant),
        draft_quant=cast("Any", flags.draft_quant),
        max_memory_bytes=None if flags.max_memory is None else parse_size("--max-memory", flags.max_memory),
        ngram_store=flags.ngram_store,
        weight_cache_bytes=parse_size("--weight-cache", flags.weight_cache),
        graphs=not flags.no_graphs,
    )


def find_model(flags: ModelFlags) -> ModelRef:
    """The model that the flags name."""
    from specgen.registry import DEFAULT_MODEL, resolve_model

    return resolve_model(flags.model if flags.model is not None else DEFAULT_MODEL, _registry(flags))


def find_draft(flags: ModelFlags, target: ModelRef) -> ModelRef | None:
    """The model that drafts for `target`: the one that --draft names, else the one in the target's entry."""
    from specgen.registry import draft_of, resolve_model

    if flags.draft == "none":
        return None
    return draft_of(target) if flags.draft is None else resolve_model(flags.draft, _registry(flags))


def check_draft(context: typer.Context, options: RunOptions, draft: ModelRef | None, load: LoadOptions) -> None:
    """UsageError for what needs a draft model where there is none. How one is to draft may stand in config.toml all the
    same: it is for the models that have one."""
    if draft is not None:
        return
    stops = options.draft.stop_below > 0 and options.proposer != "skip"
    asked = {
        f"--proposer {options.proposer}": options.proposer in NEED_DRAFT,
        "--draft-quant": load.draft_quant is not None and on_command_line(context, "draft_quant"),
        "--draft-stop": stops and on_command_line(context, "draft_stop"),
    }
    for flag, present in asked.items():
        if present:
            raise UsageError(f"{flag} needs a draft model", hint="name one with --draft NAME|PATH")


def _registry(flags: ModelFlags) -> Registry:
    from specgen.registry import load_registry

    return load_registry(Path(flags.models) if flags.models is not None else None)


def load_session(console: Console, ref: ModelRef, options: LoadOptions, draft: ModelRef | None = None) -> Session:
    """The model in memory; its files are fetched first where they are not on this machine."""
    from specgen.registry import pull

    with fetch_bar(console) as progress:
        for one in (ref, draft):
            if one is not None:
                pull(one.entry, progress=progress)
    with console.busy(f"loading {ref.name}"):
        from specgen.session import load

        return load(ref, options, draft=draft)
