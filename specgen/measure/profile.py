"""Everything about one model's speed: steps, survival, speed against γ, where a cycle's time goes.

Knows: what is swept, predicted and measured. Does not know: how curves are drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import TYPE_CHECKING

from specgen.measure.calibrate import calibrate, cycle_overheads, lookup_cost, mean_lookup, medians
from specgen.measure.guesses import draft_cost, model_drafter
from specgen.measure.runs import Case, Report, Run, run_case, silent, trace_of
from specgen.measure.timer import Spread
from specgen.options import NEED_DRAFT
from specgen.records import RunRecord
from specgen.tune.predict import Costs
from specgen.tune.replay import Trace
from specgen.tune.search import Interval, Prediction, overall, predict
from specgen.tune.setting import PLAIN, Setting

if TYPE_CHECKING:
    from specgen.session import Session

DEEPEST = 16
"""γ at which survival is looked at."""
TIMED_CASES = 2
"""Answers that are run to see what drafting takes."""


@dataclass(frozen=True, slots=True)
class Point:
    """One setting of the sweep. Speedups are over plain on the same text, geometric means over kinds."""

    setting: Setting
    predicted_speedup: float
    predicted_tok_s: float
    predicted_by_kind: Mapping[str, float]
    yields: Mapping[str, float]  # E[Y], by kind
    measured: Interval | None = None  # None: predicted only
    measured_tok_s: float | None = None
    measured_by_kind: Mapping[str, float] = field(default_factory=dict)

    @property
    def error(self) -> float | None:
        """Predicted over measured speed, less one."""
        return None if self.measured is None else self.predicted_speedup / self.measured.middle - 1.0


@dataclass(frozen=True, slots=True)
class CycleParts:
    """Mean milliseconds of a cycle."""

    label: str
    propose_ms: float
    verify_ms: float
    reconcile_ms: float
    other_ms: float
    measured: bool

    @property
    def total_ms(self) -> float:
        return self.propose_ms + self.verify_ms + self.reconcile_ms + self.other_ms


@dataclass(slots=True)
class Profile:
    steps: Mapping[int, Mapping[int, Spread]]  # context → rows → ms
    survival: Mapping[str, Sequence[float]]  # kind → s_1, s_2, …, of n-gram drafts of DEEPEST tokens
    points: list[Point]  # plain first
    cycles: list[CycleParts]
    tokens: int
    draft_survival: Mapping[str, Sequence[float]] = field(default_factory=dict)  # the same of the draft model's

    @property
    def best(self) -> Point:
        """The fastest that beats plain by more than the noise, else plain; as predicted where nothing was measured."""
        measured = {point.setting: point.measured for point in self.points if point.measured is not None}
        if not measured:
            return max(self.points, key=lambda p: p.predicted_speedup)
        sure = [p for p in self.points if p.setting in measured and measured[p.setting].low > 1.0]
        return max(sure, key=lambda p: measured[p.setting].middle, default=self.points[0])


@dataclass(frozen=True, slots=True)
class Sweep:
    """What is measured: every setting of `measured` is also in `predicted`; both begin with plain. Settings that need a
    draft model are for a session that has one."""

    contexts: Sequence[int]
    predicted: Sequence[Setting]
    measured: Sequence[Setting]
    repeats: int = 7  # steps of each row count
    rounds: int = 1  # of all measured settings on all cases

    @property
    def drafted(self) -> bool:
        return any(setting.proposer in NEED_DRAFT for setting in self.predicted)


class Profiler:
    """One profile of a session."""

    def __init__(self, session: Session, cases: Sequence[Case], sweep: Sweep) -> None:
        assert sweep.predicted[0] == PLAIN
        self._session = session
        self._cases = cases
        self._sweep = sweep
        self._report: Report = silent
        self._done = 0

    def run(self, report: Report = silent) -> Profile:
        self._report = report
        self._tell("calibrating steps", 0)
        times = calibrate(self._session, self._sweep.contexts, self._sweep.repeats)
        plain = [self._one(case, PLAIN, None) for case in self._cases]
        costs = _costs(medians(times), plain, self._session)
        if self._sweep.drafted:
            cost = draft_cost(self._session, self._cases[:TIMED_CASES], "model", costs)
            costs = replace(costs, propose={**costs.propose, "model": cost})
        traces: dict[str, list[Trace]] = {}
        for run in plain:
            traces.setdefault(run.case.kind, []).append(self._trace(run))
        predictions = {setting: predict(setting, traces, costs) for setting in self._sweep.predicted}
        runs = self._measure(costs)
        points = [self._point(predictions, setting, runs) for setting in self._sweep.predicted]
        steps = {
            context: {rows: spread for rows, values in table.items() if (spread := Spread.of(values)) is not None}
            for context, table in times.items()
        }
        survival, of_drafts = (
            _survival(predict(Setting(name, DEEPEST), traces, costs)) if name == "ngram" or self._sweep.drafted else {}
            for name in ("ngram", "model")
        )
        tokens = sum(len(run.finished.token_ids) for run in plain)
        self._tell("done", len(self._cases) * len(self._sweep.measured) * self._sweep.rounds)
        return Profile(steps, survival, points, self._parts(predictions, runs, costs), tokens, of_drafts)

    def _trace(self, run: Run) -> Trace:
        trace = trace_of(run, self._session)
        if not self._sweep.drafted:
            return trace
        return replace(trace, drafters={"model": model_drafter(self._session, run.case, trace)})

    def _tell(self, what: str, step: int = 1) -> None:
        self._done += step
        total = 1 + len(self._cases) * (1 + len(self._sweep.measured) * self._sweep.rounds)
        self._report(min(self._done, total), total, what)

    def _one(self, case: Case, setting: Setting, costs: Costs | None) -> Run:
        self._tell(f"{case.load.id}: {setting.label}")
        return run_case(self._session, case, setting, fresh=False, costs=costs)

    def _measure(self, costs: Costs) -> dict[Setting, dict[str, list[Run]]]:
        """setting → case → runs; settings take turns on each case, beginning with another one each time."""
        order = list(self._sweep.measured)
        found: dict[Setting, dict[str, list[Run]]] = {setting: {} for setting in order}
        for turn in range(self._sweep.rounds):
            for number, case in enumerate(self._cases):
                shift = (turn * len(self._cases) + number) % max(1, len(order))
                self._session.engine.rewind(0)
                for setting in order[shift:] + order[:shift]:
                    found[setting].setdefault(case.id, []).append(self._one(case, setting, costs))
        return found

    def _point(
        self,
        predictions: Mapping[Setting, Prediction],
        setting: Setting,
        runs: Mapping[Setting, Mapping[str, Sequence[Run]]],
    ) -> Point:
        plain, mine = predictions[PLAIN], predictions[setting]
        by_kind = mine.speedups(plain)
        predicted = overall(by_kind), 1e3 / fmean(mine.ms_per_token.values()), by_kind, mine.yields
        if setting not in runs or PLAIN not in runs:
            return Point(setting, *predicted)
        ratios: dict[str, list[float]] = {}
        speeds: list[float] = []
        for case in self._cases:
            for one, base in zip(runs[setting][case.id], runs[PLAIN][case.id], strict=True):
                if one.ms_per_token is not None and base.ms_per_token is not None:
                    ratios.setdefault(case.kind, []).append(base.ms_per_token / one.ms_per_token)
                    speeds.append(1e3 / one.ms_per_token)
        if not speeds:
            return Point(setting, *predicted)
        interval = Interval.of_ratios(ratios, by_kind)
        medians_ = {kind: median(values) for kind, values in ratios.items()}
        return Point(setting, *predicted, interval, median(speeds), medians_)

    def _parts(
        self,
        predictions: Mapping[Setting, Prediction],
        runs: Mapping[Setting, Mapping[str, Sequence[Run]]],
        costs: Costs,
    ) -> list[CycleParts]:
        """Measured where there are runs."""
        found = []
        for setting, prediction in predictions.items():
            measured = [run.finished.record for per_case in runs.get(setting, {}).values() for run in per_case]
            records = measured or [record for per_kind in prediction.records.values() for record in per_kind]
            found.append(_cycle_parts(setting.label, records, costs.cycle_ms, measured=bool(measured)))
        return found


def _costs(steps: Mapping[int, Mapping[int, float]], plain: Sequence[Run], session: Session) -> Costs:
    token_ms, cycle_ms = cycle_overheads([run.finished.record for run in plain])
    lookups = mean_lookup([(lookup_cost(trace_of(run, session)), run.started.prompt_tokens) for run in plain])
    return Costs(steps, token_ms, cycle_ms, {"ngram": lookups})


def _survival(prediction: Prediction) -> dict[str, list[float]]:
    """By kind; the cycles of all its answers together."""
    found: dict[str, list[float]] = {}
    for kind, records in prediction.records.items():
        found[kind] = RunRecord(cycles=[cycle for record in records for cycle in record.cycles]).survival()
    return found


def _cycle_parts(label: str, records: Sequence[RunRecord], cycle_ms: float, *, measured: bool) -> CycleParts:
    cycles = [cycle for record in records for cycle in record.cycles]
    count = max(1, len(cycles))
    return CycleParts(
        label,
        sum(cycle.propose_ms for cycle in cycles) / count,
        sum(cycle.verify_ms for cycle in cycles) / count,
        sum(cycle.reconcile_ms for cycle in cycles) / count,
        cycle_ms,
        measured,
    )
