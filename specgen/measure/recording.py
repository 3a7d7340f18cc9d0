"""The first part of a search: plain answers to every kind of prompt, as many as their share of the time allows.

Knows: the budget, which cases come first, what an interrupted search has recorded. Does not know: settings.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING

from specgen.errors import UsageError
from specgen.measure.calibrate import cycle_overheads, lookup_cost
from specgen.measure.runs import Case, Report, Run, run_case, silent, trace_of
from specgen.measure.tunestate import Recorded, TuneState
from specgen.measure.workloads import LONG_KIND, Workload, kinds_in_turn
from specgen.tune.setting import PLAIN

if TYPE_CHECKING:
    from specgen.session import Session

RECORD_SHARE = 0.35
"""Of the budget, until which plain answers are recorded."""
FEWEST_TOKENS, MOST_TOKENS = 24, 160
"""Of an answer that says something about acceptance; of an answer that is worth its time."""
LATELY = 4
"""Answers whose speed says how fast the machine is now."""

Steps = Mapping[int, Mapping[int, float]]
"""context tokens → t(R)"""


@dataclass(slots=True)
class Watch:
    """The time of one search."""

    budget_s: float
    clock: Callable[[], float] = time.perf_counter
    report: Report = silent
    began: float = field(init=False)

    def __post_init__(self) -> None:
        self.began = self.clock()

    @property
    def elapsed_s(self) -> float:
        return self.clock() - self.began

    def left_s(self, share: float = 1.0) -> float:
        """Until `share` of the budget is spent."""
        return share * self.budget_s - self.elapsed_s

    def tell(self, what: str) -> None:
        self.report(min(0.99 * self.budget_s, self.elapsed_s), self.budget_s, what)

    def done(self) -> None:
        self.report(self.budget_s, self.budget_s, "done")


def in_order(loads: Sequence[Workload]) -> list[Workload]:
    """One prompt of every kind, then all long ones (they share their beginning, which is then computed once), then the
    second of every kind, …"""
    long = [load for load in loads if load.kind == LONG_KIND]
    turns = kinds_in_turn([load for load in loads if load.kind != LONG_KIND])
    first = len({load.kind for load in turns})
    return [*turns[:first], *long, *turns[first:]]


def shortened(case: Case, tokens: int) -> Case:
    budget = min(tokens, case.options.max_tokens or tokens)
    return replace(case, options=replace(case.options, max_tokens=budget))


def readings_ms(cases: Sequence[Case], steps: Steps) -> list[float]:
    """About what each prompt takes to compute after the one before it: rows of the widest step."""
    table = steps[min(steps)]
    row_ms = table[max(table)] / max(table)
    found: list[float] = []
    before: Sequence[int] = ()
    for case in cases:
        ids = case.prompt.ids
        most = min(len(ids), len(before))
        shared = next((i for i in range(most) if ids[i] != before[i]), most)
        found.append((len(ids) - shared) * row_ms)
        before = ids
    return found


class Recorder:
    """`state` is what an earlier, interrupted search left; it is kept up to date for the next."""

    def __init__(self, session: Session, state: TuneState, watch: Watch, steps: Steps) -> None:
        self._session = session
        self._state = state
        self._watch = watch
        self._steps = steps

    def needed_s(self, cases: Sequence[Case]) -> float:
        """The smallest budget in which one short answer of every group fits into its share."""
        groups = {_group(case) for case in cases}
        first: dict[str, Case] = {_group(case)[0]: case for case in reversed(cases)}
        needed_ms = sum(readings_ms(list(first.values()), self._steps))
        needed_ms += FEWEST_TOKENS * len(groups) * self._steps[min(self._steps)][1]
        return needed_ms / 1e3 / RECORD_SHARE

    def check_budget(self, cases: Sequence[Case]) -> None:
        """UsageError unless the budget is large enough for these."""
        needed_s, budget_s = self.needed_s(cases), self._watch.budget_s
        if needed_s > budget_s:
            raise UsageError(
                f"a budget of {budget_s:g} s is too small to measure {len(set(map(_group, cases)))} kinds of answers",
                hint=f"use --budget {max(1, round(needed_s + 0.5))} or more, "
                "or fewer kinds with --kind or --sampling greedy",
            )

    def record(self, cases: Sequence[Case]) -> dict[str, Recorded]:
        """At least one plain answer of every group, more while their share of the budget lasts."""
        first = {_group(case): case.id for case in reversed(cases)}
        waiting = dict.fromkeys(map(_group, cases))
        reading_ms = {case.id: ms for case, ms in zip(cases, readings_ms(cases, self._steps), strict=True)}
        found: dict[str, Recorded] = {}
        for case in cases:
            if case.id not in self._state.recorded:
                if _group(case) not in waiting and self._watch.left_s(RECORD_SHARE) < 0:
                    continue
                ahead = {first[group] for group in waiting} | {case.id}
                tokens = self._tokens(sum(reading_ms[one] for one in ahead), max(1, len(waiting)))
                self._watch.tell(f"plain: {case.id}")
                run = run_case(self._session, shortened(case, tokens), PLAIN, fresh=False)
                self._state.recorded[case.id] = self._recorded(run)
                self._state.save()
            waiting.pop(_group(case), None)
            found[case.id] = self._state.recorded[case.id]
        return found

    def _tokens(self, reading_ms: float, answers: int) -> int:
        """Of the next of `answers`, before which prompts must be read."""
        # The machine may have become slower since it was calibrated.
        slower = self.ms_per_token() / self._steps[min(self._steps)][1]
        left_ms = 1e3 * self._watch.left_s(RECORD_SHARE) - slower * reading_ms
        return min(MOST_TOKENS, max(FEWEST_TOKENS, int(left_ms / answers / self.ms_per_token())))

    def ms_per_token(self) -> float:
        """Of plain decoding lately: what calibration said until there are answers."""
        speeds = [one.tok_s for one in self._state.recorded.values() if one.tok_s is not None][-LATELY:]
        return 1e3 / median(speeds) if speeds else self._steps[min(self._steps)][1]

    def _recorded(self, run: Run) -> Recorded:
        trace = trace_of(run, self._session)
        token_ms, cycle_ms = cycle_overheads([run.finished.record])
        return Recorded(
            kind=run.case.kind,
            temperature=run.case.temperature,
            max_tokens=trace.max_tokens or len(trace.answer),
            answer=trace.answer,
            token_ms=token_ms,
            cycle_ms=cycle_ms,
            lookup=lookup_cost(trace),
            tok_s=run.finished.record.decode_tok_s,
        )


def _group(case: Case) -> tuple[str, str]:
    """What an answer is wanted of: a kind, but every long prompt, for they are one kind and a class of their own."""
    return case.load.id if case.kind == LONG_KIND else case.kind, case.temperature
