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
    predict,
    ranked,
    search,
    shortlist,
    tree_candidates,
)
from specgen.tune.setting import PLAIN, Setting

if TYPE_CHECKING:
    from specgen.session import Session

LONGEST_CONTEXT = 1024
"""Longer contexts are measured by `specgen profile`; γ auto learns their costs as it goes."""
CALIBRATION_STEPS = 5
RECORD_SHARE = 0.35
"""Of the budget, until which plain answers are recorded."""
LEAST_CONFIRM_SHARE = 0.4
"""Of the budget, for confirming, however late it is."""
FEWEST_TOKENS, MOST_TOKENS = 24, 160
"""Of an answer that says something about acceptance; of an answer that is worth its time."""
LATELY = 4
"""Answers whose speed says how fast the machine is now."""
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
        """Of the best chain whose γ stays the same: servers that look up know no trees."""
        chains = (p.setting for p in ranked(self.predictions) if p.setting.tree == 1)
        return next((setting.gamma for setting in chains if setting.gamma is not None), 0)

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
        self._check_budget(steps)
        traces = self._record(steps)
        costs = self._costs(steps, traces)
        classes = list(dict.fromkeys(recorded.temperature for recorded in traces.values()))
        tuned = [self._tune(temperature, traces, costs, len(classes) - i) for i, temperature in enumerate(classes)]
        self._tell("done")
        notes = [f"{load} is left out: it does not fit into the context" for load in self._left_out]
        elapsed_s = self._clock() - self._began
        longest = max(one.max_tokens for one in traces.values())
        return TuneResult(costs, tuned, self._options.objective, len(traces), longest, elapsed_s, resumed, notes)

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

    def _check_budget(self, steps: Mapping[int, Mapping[int, float]]) -> None:
        """UsageError unless one short answer of every kind and class fits into its share of the budget."""
        groups = {(case.kind, case.temperature) for case in self._cases}
        first = {case.kind: case for case in reversed(self._cases)}
        needed_ms = sum(_reading_ms(case, steps) for case in first.values())
        needed_ms += FEWEST_TOKENS * len(groups) * steps[min(steps)][1]
        if needed_ms > 1e3 * RECORD_SHARE * self._options.budget_s:
            raise UsageError(
                f"a budget of {self._options.budget_s:g} s is too small to measure {len(groups)} kinds of answers",
                hint=f"use --budget {max(1, round(needed_ms / 1e3 / RECORD_SHARE + 0.5))} or more, "
                "or fewer kinds with --kind or --sampling greedy",
            )

    def _record(self, steps: Mapping[int, Mapping[int, float]]) -> dict[str, Recorded]:
        """Plain answers: at least one of every kind and class, more while their share of the budget lasts."""
        deadline = self._began + RECORD_SHARE * self._options.budget_s
        waiting = list(dict.fromkeys((case.kind, case.temperature) for case in self._cases))
        found: dict[str, Recorded] = {}
        for case in self._cases:
            group = (case.kind, case.temperature)
            if case.id not in self._state.recorded:
                if group not in waiting and self._clock() > deadline:
                    continue
                left_ms = 1e3 * (deadline - self._clock()) / max(1, len(waiting))
                # The machine may have become slower since it was calibrated.
                slower = self._ms_per_token(steps) / steps[min(steps)][1]
                tokens = int((left_ms - slower * _reading_ms(case, steps)) / self._ms_per_token(steps))
                self._tell(f"plain: {case.id}")
                short = _shortened(case, min(MOST_TOKENS, max(FEWEST_TOKENS, tokens)))
                self._state.recorded[case.id] = self._recorded(run_case(self._session, short, PLAIN, fresh=False))
                self._state.save()
            if group in waiting:
                waiting.remove(group)
            found[case.id] = self._state.recorded[case.id]
        return found

    def _ms_per_token(self, steps: Mapping[int, Mapping[int, float]]) -> float:
        """Of plain decoding lately: what calibration said until there are answers."""
        speeds = [one.tok_s for one in self._state.recorded.values() if one.tok_s is not None][-LATELY:]
        return 1e3 / median(speeds) if speeds else steps[min(steps)][1]

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
        cases = [
            _shortened(case, recorded[case.id].max_tokens)
            for case in self._cases
            if case.id in recorded and case.temperature == temperature
        ]
        traces = {case.id: self._trace(case, recorded[case.id].answer) for case in cases}
        by_kind = _by_kind(cases, traces)
        predictions = self._predict(candidates(), by_kind, costs)
        predictions += self._predict(tree_candidates(predictions, self._options.objective), by_kind, costs)
        self._known = costs
        confirmed = self._confirm(cases, traces, self._worth_running(predictions), classes_left)
        speeds = [speed for case in cases if (speed := recorded[case.id].tok_s) is not None]
        context = context_class(int(median(len(case.prompt.ids) for case in cases)))
        return Tuned(temperature, context, predictions, confirmed, choose(confirmed), median(speeds or [0.0]))

    def _predict(
        self, settings: Sequence[Setting], by_kind: Mapping[str, Sequence[Trace]], costs: Costs
    ) -> list[Prediction]:
        """Replay every setting."""
        found: list[Prediction] = []
        for prediction in search(settings, by_kind, costs):
            self._tell(f"replaying {prediction.setting.label}")
            found.append(prediction)
        return found

    def _trace(self, case: Case, answer: tuple[int, ...]) -> Trace:
        engine = self._session.engine
        widest, capacity = engine.runner.widths[-1], engine.cache.capacity
        return Trace(case.prompt.ids, answer, case.options.max_tokens, capacity, widest)

    def _worth_running(self, predictions: Sequence[Prediction]) -> list[Setting]:
        """The best few that are predicted to gain anything."""
        plain = next(p for p in predictions if p.setting.is_plain)
        gains = {p.setting: overall(p.speedups(plain, self._options.objective)) for p in predictions}
        return [s for s in shortlist(predictions, CONFIRMED, self._options.objective) if gains[s] > 1.0]

    def _confirm(
        self, cases: Sequence[Case], traces: Mapping[str, Trace], settings: Sequence[Setting], classes_left: int
    ) -> list[Confirmed]:
        """Plain and the settings in turns on every case: one round always, more while this class's time lasts. Answers
        are cut short where one round of whole ones would take too long."""
        now = self._clock() - self._began
        left_s = max(LEAST_CONFIRM_SHARE, 1.0 - now / self._options.budget_s) * self._options.budget_s / classes_left
        deadline = self._clock() + left_s
        runs = len(cases) * (1 + len(settings))
        tokens = max(FEWEST_TOKENS, int(1e3 * left_s / runs / self._ms_per_token(self._state.steps)))
        cases = [_shortened(case, tokens) for case in cases]
        self._take_turns(cases, settings, deadline)
        # Predicted anew, on exactly the tokens that were run.
        run = {case.id: self._trace(case, traces[case.id].answer[: case.options.max_tokens]) for case in cases}
        assert self._known is not None
        by_kind = _by_kind(cases, run)
        plain = predict(PLAIN, by_kind, self._known)
        found = [(s, self._ratios(cases, s), predict(s, by_kind, self._known)) for s in settings]
        return [Confirmed(s, ratios, p.speedups(plain, self._options.objective)) for s, ratios, p in found if ratios]

    def _take_turns(self, cases: Sequence[Case], settings: Sequence[Setting], deadline: float) -> None:
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
        run_case(self._session, _shortened(case, 1), PLAIN, fresh=False)  # brings the prompt into the cache
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


def _shortened(case: Case, tokens: int) -> Case:
    budget = min(tokens, case.options.max_tokens or tokens)
    return replace(case, options=replace(case.options, max_tokens=budget))


def _reading_ms(case: Case, steps: Mapping[int, Mapping[int, float]]) -> float:
    """About what the prompt takes to compute: rows of the widest step."""
    table = steps[min(steps)]
    return len(case.prompt.ids) * table[max(table)] / max(table)


def _by_kind(cases: Sequence[Case], traces: Mapping[str, Trace]) -> dict[str, list[Trace]]:
    found: dict[str, list[Trace]] = {}
    for case in cases:
        found.setdefault(case.kind, []).append(traces[case.id])
    return found


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
