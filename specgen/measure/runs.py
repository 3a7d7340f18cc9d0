"""Answers as measurements: a prompt, a temperature and a setting in; what the session recorded out.

Knows: how to run a session so that nothing is left over from the run before. Does not know: what the figures are for.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol

from specgen.errors import ContextFullError, SpecgenError
from specgen.events import Event, Finished, Started
from specgen.measure.workloads import Workload
from specgen.options import RunOptions
from specgen.tune.cost import CostTable
from specgen.tune.plan import TemperatureClass, temperature_class
from specgen.tune.predict import Costs
from specgen.tune.replay import Trace
from specgen.tune.setting import Setting

if TYPE_CHECKING:
    from specgen.session import Prompt, Session

SamplingChoice = Literal["greedy", "own", "both"]
_WAYS: dict[SamplingChoice, tuple[float | None, ...]] = {"greedy": (0.0,), "own": (None,), "both": (0.0, None)}
MARGIN_TOKENS = 8
"""A prompt must leave room for at least so many."""


class Report(Protocol):
    """Where progress goes: seconds or items done of a total."""

    def __call__(self, done: float, total: float, what: str) -> None: ...


def silent(done: float, total: float, what: str) -> None:
    """Nobody is watching."""


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt as it is to be answered, whatever the setting."""

    load: Workload
    prompt: Prompt
    options: RunOptions  # sampling and the budget

    @property
    def kind(self) -> str:
        return self.load.kind

    @property
    def temperature(self) -> TemperatureClass:
        return temperature_class(self.options.sampling.temperature)

    @property
    def id(self) -> str:
        return f"{self.load.id} at {self.options.sampling.temperature:g}"


def make_cases(
    session: Session, loads: Sequence[Workload], sampling: SamplingChoice, max_tokens: int | None = None
) -> tuple[list[Case], list[str]]:
    """(cases in the order of `loads`, greedy and own temperature side by side; ids of prompts that do not fit).

    max_tokens: shortens every answer. ContextFullError when no prompt fits.
    """
    cases: list[Case] = []
    too_long: list[str] = []
    for load in loads:
        prompt = _prompt(session, load)
        if len(prompt.ids) + MARGIN_TOKENS > session.engine.cache.capacity:
            too_long.append(load.id)
            continue
        found = {load.options(way) for way in _WAYS[sampling]}
        for options in sorted(found, key=lambda options: options.sampling.temperature):
            budget = load.max_tokens if max_tokens is None else min(max_tokens, load.max_tokens)
            cases.append(Case(load, prompt, replace(options, max_tokens=budget)))
    if not cases:
        raise ContextFullError(
            f"no prompt fits into a context of {session.engine.cache.capacity} tokens",
            hint="raise --ctx, or give shorter prompts with --prompts",
        )
    return cases, too_long


def first_of_each(cases: Iterable[Case], key: Callable[[Case], Hashable]) -> list[Case]:
    """The first case of every key, in the order of the cases."""
    first: dict[Hashable, Case] = {}
    for case in cases:
        first.setdefault(key(case), case)
    return list(first.values())


def _prompt(session: Session, load: Workload) -> Prompt:
    if session.tokenizer.chat_template is not None:
        return session.prompt_ids(load.text, system=load.system)
    # A base model continues a text.
    return session.prompt_ids("\n\n".join(part for part in (load.system, load.text) if part), raw=True)


@dataclass(frozen=True, slots=True)
class Run:
    """One answer."""

    case: Case
    started: Started
    finished: Finished

    @property
    def ms_per_token(self) -> float | None:
        """Decoding alone; None for an answer of one cycle."""
        speed = self.finished.record.decode_tok_s
        return None if speed is None else 1e3 / speed


def run_case(
    session: Session, case: Case, setting: Setting | None, *, fresh: bool = True, costs: Costs | None = None
) -> Run:
    """Answer `case` as a new session would: from an empty cache (unless not `fresh`: a prompt that is still cached is
    then not computed again), and with no estimates but `costs` (None: those of the stored plan, else what earlier
    answers found). A draft model has read nothing in either case: its reading is part of decoding. Setting None: as
    `specgen run` would, stored plan included."""
    if fresh:
        session.engine.rewind(0)
    if session.speculation.draft is not None:
        session.speculation.draft.reader.forget()
    known = costs or session.plans.costs
    learned = CostTable(known_ms=session.speculation.learned.step_ms)
    if known is None:
        session.speculation.use_costs(learned)
    else:
        length = len(case.prompt.ids)
        session.speculation.use_costs(known.at(length), known.drafting(length))
    options = case.options if setting is None else setting.options(case.options)
    started: Started | None = None
    last: Event | None = None
    try:
        for last in session.generate(case.prompt, options):
            if isinstance(last, Started):
                started = last
    except SpecgenError as error:
        raise type(error)(f"{case.id}: {error.message}", error.hint) from error
    assert started is not None
    assert isinstance(last, Finished), "a session yields Finished last"
    return Run(case, started, last)


def trace_of(run: Run, session: Session) -> Trace:
    """What a plain run says about every other way of speculating."""
    runner, cache = session.engine.runner, session.engine.cache
    return Trace(
        run.case.prompt.ids, run.finished.token_ids, run.case.options.max_tokens, cache.capacity, runner.widths[-1]
    )
