"""A session that says what a script tells it, for tests of views and streams that need exact cycles and no model.

As a program (`python fake_session.py SCRIPT.json run -p x`) it is `specgen` with that session.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

from specgen.cancel import Cancel
from specgen.errors import ContextFullError, ModelError
from specgen.events import CycleDone, Event, Finished, FinishReason, Piece, Prefilled, Started
from specgen.options import LoadOptions, RunOptions
from specgen.records import CycleRecord, RunRecord

PROMPT = "{prompt}"
"""A piece with this text says the prompt back."""


@dataclass
class Script:
    """cycles: for each cycle its pieces as (text, drafted)."""

    cycles: Sequence[Sequence[tuple[str, bool]]] = ((("Hello", False),), ((" big", True), (" world", False)))
    delay_s: float = 0.0  # per cycle
    context_tokens: int = 100
    reason: str = "eos"
    lossless: bool = True
    notices: Sequence[str] = ()
    repeat: int = 1
    fail: str = ""  # an error in the middle: "context", "memory", "bug"


@dataclass
class FakeSession:
    script: Script
    calls: list[dict[str, Any]] = field(default_factory=list)
    closed: bool = False  # the iterator was closed or ran out
    prompt: str = ""

    def prompt_ids(self, text: str, *, system: str | None, raw: bool, think: str = "auto") -> Any:
        self.calls.append({"text": text, "system": system, "raw": raw})
        self.prompt = text
        return SimpleNamespace(ids=tuple(text.encode()), notices=())

    def generate(self, prompt: Any, options: RunOptions, cancel: Cancel) -> Iterator[Event]:
        self.calls.append({"options": options})
        try:
            yield from self._events(prompt, options, cancel)
        finally:
            self.closed = True

    def _events(self, prompt: Any, options: RunOptions, cancel: Cancel) -> Iterator[Event]:
        script, record = self.script, RunRecord(prompt_tokens=len(prompt.ids), prefill_ms=10.0, ttft_ms=12.0)
        gamma = "auto" if options.gamma is None else str(options.gamma)
        yield Started(
            "fake", "ngram", options.accept, script.lossless, gamma, len(prompt.ids), script.context_tokens,
            tuple(script.notices),
        )  # fmt: skip
        yield Prefilled(len(prompt.ids), 0, 10.0)
        text, reason = "", FinishReason(script.reason)
        for pieces in list(script.cycles) * script.repeat:
            if cancel.is_set():
                reason = FinishReason.CANCELLED
                break
            time.sleep(script.delay_s)
            record.cycles.append(_cycle(pieces))
            record.gaps_ms += [20.0] if len(record.cycles) > 1 else []
            record.decode_ms += 20.0 if len(record.cycles) > 1 else 0.0
            record.kv_tokens = len(prompt.ids) + record.completion_tokens - 1
            yield CycleDone(record.cycles[-1], record.kv_tokens)
            for words, drafted in pieces:
                words = words.replace(PROMPT, self.prompt)
                text += words
                yield Piece(words, drafted)
            self._fail()
        yield Finished(reason, text, tuple(range(record.completion_tokens)), record)

    def _fail(self) -> None:
        if self.script.fail == "context":
            raise ContextFullError("the context is full", hint="make it longer")
        if self.script.fail == "memory":
            raise MemoryError
        if self.script.fail == "bug":
            raise KeyError("a bug")

    def refresh_plans(self) -> None:
        pass

    def report(self) -> dict[str, Any]:
        return {"model": "fake", "load_s": 0.5, "memory": {"weights_bytes": 1000}, "versions": {"specgen": "0"}}


def _cycle(pieces: Sequence[tuple[str, bool]]) -> CycleRecord:
    drafted = sum(1 for _, was_drafted in pieces if was_drafted)
    depth = drafted + 1 if drafted else 0
    return CycleRecord(
        proposed=depth, depth=depth, accepted=drafted, committed=drafted + 1,
        ending="corrected" if depth else "plain", propose_ms=1.0, verify_ms=18.0, reconcile_ms=1.0,
        source="ngram" if depth else "none", fallback=None if depth else "no match",
    )  # fmt: skip


def install(script: Script, put: Callable[[str, ModuleType], object] = sys.modules.__setitem__) -> FakeSession:
    """Put the fakes where the command looks for `specgen.session` and `specgen.registry`."""
    session = FakeSession(script)

    def load(ref: Any, options: LoadOptions, *, draft: Any = None) -> FakeSession:
        session.calls.append({"load": asdict(options), "ref": ref.name, "draft": draft and draft.name})
        return session

    def resolve_model(name: str, registry: Any) -> Any:
        if name == "unknown":
            raise ModelError("unknown model 'unknown'", hint="did you mean 'fake'?")
        sampling = {"temperature": 0.5, "top_k": 7} if name == "warm" else {}
        return SimpleNamespace(name=name, entry=SimpleNamespace(sampling=sampling, draft=None))

    fakes: dict[str, dict[str, Any]] = {
        "specgen.session": {"load": load},
        "specgen.registry": {
            "DEFAULT_MODEL": "fake",
            "load_registry": lambda extra=None: None,
            "resolve_model": resolve_model,
            "draft_of": lambda ref: None,
            "pull": lambda entry, progress: None,
        },
    }
    for name, members in fakes.items():
        module = ModuleType(name)
        module.__dict__.update(members)
        put(name, module)
    return session


def main() -> None:
    with open(sys.argv.pop(1), encoding="utf-8") as file:
        install(Script(**json.load(file)))
    from specgen.cli.app import main as specgen_main

    specgen_main()


if __name__ == "__main__":
    main()
