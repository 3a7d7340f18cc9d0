"""`specgen tune`: calibrate, record plain answers, replay every setting on them, confirm the best few, choose.

Knows: the order of the steps, the budget, what was done before an interruption. Does not know: how results are shown.
The search itself is pure (`specgen.tune`); this module supplies it with measurements.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from statistics import median
from typing import TYPE_CHECKING

from specgen.errors import UsageError
from specgen.measure.calibrate import calibrate, contexts_for, cycle_overheads, lookup_ms, medians
from specgen.measure.runs import Case, Report, Run, SamplingChoice, make_cases, run_case, silent, trace_of
from specgen.measure.tunestate import Pair, Recorded, TuneState
from specgen.measure.workloads import Workload, kinds_in_turn
from specgen.records import RunRecord
from specgen.tune.plan import ContextClass, Plan, TemperatureClass, context_class
from specgen.tune.predict import Costs, ProposeMs
from specgen.tune.replay import Trace
from specgen.tune.search import (
    Choice,
    Confirmed,
    Objective,
    Prediction,
    candidates,
    choose,
    overall,
    ranked,
    search,
    shortlist,
)
from specgen.tune.setting import PLAIN, Setting

if TYPE_CHECKING:
    from specgen.session import Session

LONGEST_CONTEXT = 1024
"""Longer contexts are measured by `specgen profile`; γ auto learns their costs as it goes."""
CALIBRATION_STEPS = 5
TRACE_SHARE = 0.2
"""Of the budget, for the plain answers."""
FEWEST_TOKENS, MOST_TOKENS = 24, 160
"""Of an answer that says something about acceptance; of an answer that is worth its time."""
CONFIRMED = 2
"""Settings that are run, besides plain."""


@dataclass(frozen=True, slots=True)
class TuneOptions:
    budget_s: float = 60.0
    objective: Objective = "tok/s"
    sampling: SamplingChoice = "both"


@dataclass(frozen=True, slots=True)
class Tuned:
    """What was found for one temperature class."""

    temperature: TemperatureClass
    context: ContextClass
    predictions: Sequence[Prediction]  # plain first
    confirmed: Sequence[Confirmed]
    choice: Choice
    plain_tok_s: float

    @property
    def plain(self) -> Prediction:
        return next(p for p in self.predictions if p.setting.is_plain)

    @property
    def fixed_gamma(self) -> int:
        """Of the best setting whose γ stays the same."""
        return next((p.setting.gamma for p in ranked(self.predictions) if p.setting.gamma is not None), 0)

    def predicted(self, setting: Setting, objective: Objective) -> dict[str, float]:
        found = next(p for p in self.predictions if p.setting == setting)
        return found.speedups(self.plain, objective)


@dataclass(slots=True)
class TuneResult:
    costs: Costs
    tuned: list[Tuned]
    objective: Objective
    prompts: int
    tokens: int  # of an answer, at most
    elapsed_s: float
    resumed: bool
    notes: list[str] = field(default_factory=list)


class Tuner:
    """One search. `state` is what an earlier, interrupted one left; it is kept up to date for the next."""

    def __init__(
        self,
        session: Session,
        loads: Sequence[Workload],
        options: TuneOptions,
        state: TuneState,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._session = session
        self._options = options
        self._state = state
        self._clock = clock
        self._began = clock()
        self._report: Report = silent
        self._known: Costs | None = None  # once all is calibrated
        self._cases, self._left_out = make_cases(session, kinds_in_turn(loads), options.sampling)

    def run(self, report: Report = silent) -> TuneResult:
        """UsageError when the budget cannot pay for one answer of every kind."""
        self._report = report
        resumed = bool(self._state.steps)
        steps = self._calibrate()
        tokens = self._affordable_tokens(steps)
        traces = self._record(tokens)
        costs = self._costs(steps, traces)
        classes = list(dict.fromkeys(recorded.temperature for recorded in traces.values()))
        tuned = [self._tune(temperature, traces, costs, len(classes) - i) for i, temperature in enumerate(classes)]
        self._tell("done")
        notes = [f"{load} is left out: it does not fit into the context" for load in self._left_out]
        elapsed_s = self._clock() - self._began
        return TuneResult(costs, tuned, self._options.objective, len(traces), tokens, elapsed_s, resumed, notes)

    def _tell(self, what: str) -> None:
        budget = self._options.budget_s
        self._report(budget if what == "done" else min(0.99 * budget, self._clock() - self._began), budget, what)

    def _calibrate(self) -> Mapping[int, Mapping[int, float]]:
        if not self._state.steps:
            self._tell("calibrating steps")
            contexts = [c for c in contexts_for(self._session.engine.cache.capacity) if c <= LONGEST_CONTEXT]
            self._state.steps = medians(calibrate(self._session, contexts, CALIBRATION_STEPS))
            self._state.save()
        return self._state.steps

    def _affordable_tokens(self, steps: Mapping[int, Mapping[int, float]]) -> int:
        """Answer length at which one prompt of every kind and class fits into its share of the budget."""
        if self._state.tokens:
            return self._state.tokens
        table = steps[min(steps)]
        widest = max(table)
        groups = {(case.kind, case.temperature) for case in self._cases}
        first = {case.kind: case for case in reversed(self._cases)}
        reading_ms = sum(len(case.prompt.ids) for case in first.values()) * table[widest] / widest
        left_ms = 1e3 * TRACE_SHARE * self._options.budget_s - reading_ms
        tokens = int(left_ms / (len(groups) * table[1]))
        if tokens < FEWEST_TOKENS:
            needed_ms = reading_ms + FEWEST_TOKENS * len(groups) * table[1]
            raise UsageError(
                f"a budget of {self._options.budget_s:g} s is too small to measure {len(groups)} kinds of answers",
                hint=f"use --budget {max(1, round(needed_ms / 1e3 / TRACE_SHARE + 0.5))} or more, "
                "or fewer kinds with --kind or --sampling greedy",
            )
        self._state.tokens = min(MOST_TOKENS, tokens)
        return self._state.tokens

    def _record(self, tokens: int) -> dict[str, Recorded]:
        """Plain answers: at least one of every kind and class, more while their share of the budget lasts."""
        deadline = self._began + 2 * TRACE_SHARE * self._options.budget_s  # calibrated and recorded by then
        seen: set[tuple[str, TemperatureClass]] = set()
        found: dict[str, Recorded] = {}
        for case in self._shortened(tokens):
            group = (case.kind, case.temperature)
            if case.id not in self._state.recorded:
                # A second prompt of a kind only while there is time left for confirming.
                if group in seen and self._clock() > deadline:
                    continue
                self._tell(f"plain: {case.id}")
                self._state.recorded[case.id] = self._recorded(run_case(self._session, case, PLAIN, fresh=False))
                self._state.save()
            seen.add(group)
            found[case.id] = self._state.recorded[case.id]
        return found

    def _shortened(self, tokens: int) -> list[Case]:
        cases = []
        for case in self._cases:
            budget = min(tokens, case.options.max_tokens or tokens)
            cases.append(replace(case, options=replace(case.options, max_tokens=budget)))
        return cases

    def _recorded(self, run: Run) -> Recorded:
        trace = trace_of(run, self._session)
        token_ms, cycle_ms = cycle_overheads([run.finished.record])
        return Recorded(
            kind=run.case.kind,
            temperature=run.case.temperature,
            answer=trace.answer,
            token_ms=token_ms,
            cycle_ms=cycle_ms,
            lookup_ms=lookup_ms(trace).once,
            tok_s=run.finished.record.decode_tok_s,
        )

    def _costs(self, steps: Mapping[int, Mapping[int, float]], traces: Mapping[str, Recorded]) -> Costs:
        parts = list(traces.values())
        return Costs(
            steps,
            token_ms=median(part.token_ms for part in parts),
            cycle_ms=median(part.cycle_ms for part in parts),
            propose={"ngram": ProposeMs(once=median(part.lookup_ms for part in parts))},
        )

    def _tune(
        self, temperature: TemperatureClass, recorded: Mapping[str, Recorded], costs: Costs, classes_left: int
    ) -> Tuned:
        cases = [c for c in self._shortened(self._state.tokens) if c.id in recorded and c.temperature == temperature]
        traces: dict[str, list[Trace]] = {}
        for case in cases:
            traces.setdefault(case.kind, []).append(self._trace(case, recorded[case.id]))
        predictions: list[Prediction] = []
        for prediction in search(candidates(), traces, costs):
            self._tell(f"replaying {temperature}: {prediction.setting.label}")
            predictions.append(prediction)
        plain = next(p for p in predictions if p.setting.is_plain)
        chosen = shortlist(predictions, CONFIRMED, self._options.objective)
        # A setting that is not even predicted to gain is not worth running.
        expected = {p.setting: p.speedups(plain, self._options.objective) for p in predictions if p.setting in chosen}
        chosen = [setting for setting in chosen if overall(expected[setting]) > 1.0]
        self._known = costs
        self._confirm(cases, chosen, classes_left)
        confirmed = [
            Confirmed(setting, self._ratios(cases, setting), expected[setting])
            for setting in chosen
            if self._ratios(cases, setting)
        ]
        speeds = [speed for case in cases if (speed := recorded[case.id].tok_s) is not None]
        context = context_class(int(median(len(case.prompt.ids) for case in cases)))
        return Tuned(temperature, context, predictions, confirmed, choose(confirmed), median(speeds or [0.0]))

    def _trace(self, case: Case, recorded: Recorded) -> Trace:
        engine = self._session.engine
        widest, capacity = engine.runner.widths[-1], engine.cache.capacity
        return Trace(case.prompt.ids, recorded.answer, case.options.max_tokens, capacity, widest)

    def _confirm(self, cases: Sequence[Case], settings: Sequence[Setting], classes_left: int) -> None:
        """Plain and the settings in turns on every case: one round always, more while this class's time lasts."""
        now = self._clock() - self._began
        deadline = self._began + now + max(0.0, self._options.budget_s - now) / classes_left
        turn = 0
        while settings and (turn == 0 or self._clock() < deadline):
            for number, case in enumerate(cases):
                known = [pair for pair in self._state.pairs if pair.case == case.id and pair.turn == turn]
                if {pair.setting for pair in known} >= set(settings):
                    continue
                if turn and self._clock() > deadline:
                    return
                self._tell(f"confirming {case.id}")
                self._state.pairs += self._pairs(case, settings, turn, number)
                self._state.save()
            turn += 1

    def _pairs(self, case: Case, settings: Sequence[Setting], turn: int, number: int) -> list[Pair]:
        order = [PLAIN, *settings]
        shift = (turn + number) % len(order)
        figures: dict[Setting, tuple[float, float] | None] = {}
        run_case(self._session, _first_tokens(case), PLAIN, fresh=False)  # brings the prompt into the cache
        for setting in order[shift:] + order[:shift]:
            figures[setting] = _figures(
                run_case(self._session, case, setting, fresh=False, costs=self._known).finished.record
            )
        plain = figures[PLAIN]
        found = []
        for setting in settings:
            mine = figures[setting]
            ratios = None if plain is None or mine is None else (plain[0] / mine[0], plain[1] / mine[1])
            found.append(Pair(case.id, case.kind, setting, turn, ratios))
        return found

    def _ratios(self, cases: Sequence[Case], setting: Setting) -> dict[str, list[float]]:
        ids = {case.id for case in cases}
        found: dict[str, list[float]] = {}
        for pair in self._state.pairs:
            if pair.case in ids and pair.setting == setting and pair.ratios is not None:
                ratio = pair.ratios[0 if self._options.objective == "tok/s" else 1]
                found.setdefault(pair.kind, []).append(ratio)
        return found


def _first_tokens(case: Case) -> Case:
    return replace(case, options=replace(case.options, max_tokens=1))


def _figures(record: RunRecord) -> tuple[float, float] | None:
    """(milliseconds per token, 95th percentile of the gaps); None for an answer that is too short to tell."""
    speed, gap = record.decode_tok_s, record.gap_percentile_ms(95)
    return None if speed is None or not gap else (1e3 / speed, gap)


def plans_of(result: TuneResult, session: Session) -> list[Plan]:
    """What there is to store, one plan for each temperature class."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return [
        Plan(
            scope=session.scope,
            model=session.loaded.name,
            temperature=one.temperature,
            context=one.context,
            setting=one.choice.setting,
            fixed_gamma=one.fixed_gamma,
            speedup=_finite(one.choice),
            by_kind=next((c.by_kind for c in one.confirmed if c.setting == one.choice.setting), {}),
            costs=result.costs,
            objective=result.objective,
            created=now,
            why=one.choice.why,
        )
        for one in result.tuned
    ]


def _finite(choice: Choice) -> tuple[float, float, float]:
    found = choice.speedup
    return found.low, found.middle, min(found.high, 1e6)
