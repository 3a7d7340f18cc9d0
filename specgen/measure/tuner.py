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

from specgen.errors import SpecgenError
from specgen.measure.calibrate import calibrate, contexts_for, mean_lookup, medians
from specgen.measure.guesses import draft_cost, model_drafter, skip_drafter
from specgen.measure.recording import FEWEST_TOKENS, Recorder, Watch, in_order, readings_ms, shortened
from specgen.measure.runs import Case, Report, SamplingChoice, make_cases, run_case, silent
from specgen.measure.tunestate import Pair, Recorded, TuneState
from specgen.measure.workloads import LONG_KIND, Workload
from specgen.options import ProposerName
from specgen.propose.skip import sublayers_of
from specgen.records import RunRecord
from specgen.tune.plan import ContextClass, Plan, TemperatureClass, context_class, texts_in_words
from specgen.tune.predict import Costs, ProposeMs
from specgen.tune.replay import Drafter, Trace
from specgen.tune.search import (
    Choice,
    Confirmed,
    Objective,
    Prediction,
    candidates,
    choose,
    drafted_candidates,
    mixed_candidates,
    overall,
    predict,
    ranked,
    search,
    shortlist,
    tree_candidates,
)
from specgen.tune.setting import PLAIN, Setting
from specgen.tune.skip_search import SkipChoice

if TYPE_CHECKING:
    from specgen.session import Session

CALIBRATION_STEPS = 5
SKIP_SHARE = 0.2
"""Of the budget, for the search of a skip set."""
PASS_SHARE = 0.1
"""Of the budget, for what a model that drafts would have said along all answers."""
SKIP_TEXTS, TIMED_CASES = 2, 2
"""Answers along which skip sets are compared; answers that are run to see what drafting takes."""
LEAST_CONFIRM_SHARE = 0.4
"""Of the budget, for confirming, however late it is."""
CONFIRMED = 2
"""Settings that are run, besides plain."""

_DRAFTERS: Mapping[ProposerName, ProposerName] = {"model": "model", "mix": "model", "skip": "skip"}
"""By proposer, what must have been along a trace for it to be replayed."""
TextClass = tuple[TemperatureClass, ContextClass]


@dataclass(frozen=True, slots=True)
class TuneOptions:
    budget_s: float = 60.0
    objective: Objective = "tok/s"
    sampling: SamplingChoice = "both"
    skip: bool = False  # search a skip set too


@dataclass(frozen=True, slots=True)
class Tuned:
    """What was found for one class of text."""

    temperature: TemperatureClass
    context: ContextClass
    predictions: Sequence[Prediction]  # plain first
    confirmed: Sequence[Confirmed]
    choice: Choice
    plain_tok_s: float

    @property
    def texts(self) -> str:
        return texts_in_words(self.temperature, self.context)

    @property
    def plain(self) -> Prediction:
        return next(p for p in self.predictions if p.setting.is_plain)

    @property
    def fixed_gamma(self) -> int:
        """Of the best chain whose γ stays the same, with the same drafts as the choice: servers know no more."""
        wanted = "model" if self.choice.setting.proposer in ("model", "mix") else "ngram"
        chains = (p.setting for p in ranked(self.predictions) if p.setting.proposer == wanted and p.setting.tree == 1)
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
    skip: SkipChoice | None = None  # where one was searched
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
        self._watch = Watch(options.budget_s, clock)
        self._skip: SkipChoice | None = None
        if options.skip:
            sublayers_of(session.speculation.model)  # refuses a model that has none, before any work
        self._cases, left_out = make_cases(session, in_order(loads), options.sampling)
        self._notes = [f"{load} is left out: it does not fit into the context" for load in left_out]

    def run(self, report: Report = silent) -> TuneResult:
        """UsageError when the budget cannot pay for one answer of every kind."""
        self._watch.report = report
        resumed = bool(self._state.steps)
        recorder = Recorder(self._session, self._state, self._watch, self._calibrate())
        self._fit_budget(recorder)
        recorded = recorder.record(self._cases)
        cases = [shortened(case, recorded[case.id].max_tokens) for case in self._cases if case.id in recorded]
        if self._options.skip:
            self._skip = self._find_skips(cases, recorded)
        evidence = self._evidence(cases, recorded)
        tuned = self._tune_classes(cases, evidence)
        self._watch.done()
        longest = max(one.max_tokens for one in recorded.values())
        return TuneResult(
            costs=evidence.costs,
            tuned=tuned,
            objective=self._options.objective,
            prompts=len(recorded),
            tokens=longest,
            elapsed_s=self._watch.elapsed_s,
            resumed=resumed,
            skip=self._skip,
            notes=self._notes,
        )

    def _calibrate(self) -> Mapping[int, Mapping[int, float]]:
        if not self._state.steps:
            self._watch.tell("calibrating steps")
            contexts = contexts_for(self._session.engine.cache.capacity)
            self._state.steps = medians(calibrate(self._session, contexts, CALIBRATION_STEPS))
            self._state.save()
        return self._state.steps

    def _fit_budget(self, recorder: Recorder) -> None:
        """Long prompts are left out where they would take too much of it."""
        short = [case for case in self._cases if case.kind != LONG_KIND]
        needed_s = recorder.needed_s(self._cases)
        if short and len(short) < len(self._cases) and needed_s > self._options.budget_s:
            self._cases = short
            self._notes.append(f"long prompts are left out: they need --budget {needed_s:.0f} or more here")
        recorder.check_budget(self._cases)

    def _find_skips(self, cases: Sequence[Case], recorded: Mapping[str, Recorded]) -> SkipChoice:
        """The skip set for these answers; it is stored."""
        self._watch.tell("searching what to leave out")
        first = {case.kind: case for case in reversed(cases) if case.temperature == cases[0].temperature}
        texts = [[*case.prompt.ids, *recorded[case.id].answer] for case in list(first.values())[-SKIP_TEXTS:]]
        speculation = self._session.speculation
        speculation.use_costs(Costs(self._state.steps).at(len(texts[0])))
        found = speculation.search_skips(texts, SKIP_SHARE * self._options.budget_s)
        try:
            speculation.use_skips(found)
        except SpecgenError as error:
            self._notes.append(error.message)
        return found

    def _evidence(self, cases: Sequence[Case], recorded: Mapping[str, Recorded]) -> Evidence:
        parts = list(recorded.values())
        costs = Costs(
            self._state.steps,
            token_ms=median(part.token_ms for part in parts),
            cycle_ms=median(part.cycle_ms for part in parts),
            propose={"ngram": mean_lookup([(recorded[case.id].lookup, len(case.prompt.ids)) for case in cases])},
        )
        whole = {case.id: self._trace(case, recorded[case.id].answer) for case in cases}
        traces: dict[str, Mapping[str, Trace]] = {"ngram": whole}
        for name in self._drafting():
            self._watch.tell(f"timing {name}")
            cost = draft_cost(self._session, cases[:TIMED_CASES], name, costs)
            costs = replace(costs, propose={**costs.propose, name: cost})
            traces[name] = self._drafted(name, cases, whole, cost)
        speeds = {case.id: speed for case in cases if (speed := recorded[case.id].tok_s) is not None}
        return Evidence(costs, speeds, traces)

    def _drafting(self) -> list[ProposerName]:
        """The proposers that are models, where there are such."""
        found: list[ProposerName] = ["model"] if self._session.speculation.draft is not None else []
        return found if self._skip is None else [*found, "skip"]

    def _drafted(
        self, name: ProposerName, cases: Sequence[Case], traces: Mapping[str, Trace], cost: ProposeMs
    ) -> dict[str, Trace]:
        """The traces with what a model would have said: as much of each as can be had in PASS_SHARE of the budget."""
        place_ms = cost.of(1 if self._skip is None or name != "skip" else self._skip.tries)
        reading_ms = sum(cost.read * len(case.prompt.ids) for case in cases)
        left_ms = 1e3 * PASS_SHARE * self._options.budget_s - reading_ms
        tokens = max(FEWEST_TOKENS, int(left_ms / len(cases) / max(place_ms, 1e-3)))
        pass_: Callable[[Session, Case, Trace], Drafter] = skip_drafter if name == "skip" else model_drafter
        found: dict[str, Trace] = {}
        for case in cases:
            self._watch.tell(f"{name} along {case.id}")
            trace = _cut(traces[case.id], tokens)
            found[case.id] = replace(trace, drafters={name: pass_(self._session, case, trace)})
        return found

    def _trace(self, case: Case, answer: tuple[int, ...]) -> Trace:
        engine = self._session.engine
        widest, capacity = engine.runner.widths[-1], engine.cache.capacity
        return Trace(case.prompt.ids, answer, case.options.max_tokens, capacity, widest)

    def _tune_classes(self, cases: Sequence[Case], evidence: Evidence) -> list[Tuned]:
        groups: dict[TextClass, list[Case]] = {}
        for case in cases:
            groups.setdefault((case.temperature, context_class(len(case.prompt.ids))), []).append(case)
        predicted = {text: self._predict_all(group, evidence) for text, group in groups.items()}
        # What is left, or a least share of the budget, for all classes together: so that each answers as many tokens.
        left_s = max(LEAST_CONFIRM_SHARE * self._options.budget_s, self._watch.left_s())
        end_s = self._watch.elapsed_s + left_s
        tuned: list[Tuned] = []
        for number, (text, group) in enumerate(groups.items()):
            waiting = list(groups.values())[number:]
            share_s = self._share_s(end_s - self._watch.elapsed_s, waiting, evidence)
            confirmed = self._confirm(group, evidence, self._worth_running(predicted[text]), share_s)
            tok_s = 1e3 / evidence.ms_per_token(group)
            tuned.append(Tuned(*text, predicted[text], confirmed, choose(confirmed), tok_s))
        return tuned

    def _share_s(self, left_s: float, waiting: Sequence[Sequence[Case]], evidence: Evidence) -> float:
        """Of the first of the classes that are still to be confirmed."""
        reading_s = [1e-3 * sum(readings_ms(cases, self._state.steps)) for cases in waiting]
        token_ms = [len(cases) * evidence.ms_per_token(cases) for cases in waiting]
        return reading_s[0] + max(0.0, left_s - sum(reading_s)) * token_ms[0] / sum(token_ms)

    def _predict_all(self, cases: Sequence[Case], evidence: Evidence) -> list[Prediction]:
        """Plain first."""
        objective = self._options.objective
        found = self._predict(candidates(), cases, evidence)
        found += self._predict(tree_candidates(found, objective), cases, evidence)
        drafting = self._drafting()
        found += self._predict(drafted_candidates(drafting), cases, evidence)
        if "model" in drafting:
            found += self._predict(mixed_candidates(found, objective), cases, evidence)
        return found

    def _predict(self, settings: Sequence[Setting], cases: Sequence[Case], evidence: Evidence) -> list[Prediction]:
        """Replay every setting."""
        found: list[Prediction] = []
        for setting in settings:
            self._watch.tell(f"replaying {setting.label}")
            found += search([setting], evidence.by_kind(cases, setting), evidence.costs)
        return found

    def _worth_running(self, predictions: Sequence[Prediction]) -> list[Setting]:
        """The best few that are predicted to gain anything."""
        plain = next(p for p in predictions if p.setting.is_plain)
        gains = {p.setting: overall(p.speedups(plain, self._options.objective)) for p in predictions}
        return [s for s in shortlist(predictions, CONFIRMED, self._options.objective) if gains[s] > 1.0]

    def _confirm(
        self, cases: Sequence[Case], evidence: Evidence, settings: Sequence[Setting], left_s: float
    ) -> list[Confirmed]:
        """Plain and the settings in turns on every case: one round always, more while `left_s` lasts. Answers are cut
        short where one round of whole ones would take too long."""
        deadline_s = self._watch.elapsed_s + left_s
        runs = len(cases) * (1 + len(settings))
        left_ms = 1e3 * left_s - sum(readings_ms(cases, self._state.steps))
        tokens = max(FEWEST_TOKENS, int(left_ms / runs / evidence.ms_per_token(cases)))
        cases = [shortened(case, tokens) for case in cases]
        self._take_turns(cases, settings, evidence.costs, deadline_s)
        found: list[Confirmed] = []
        for setting in settings:
            if ratios := self._ratios(cases, setting):
                found.append(Confirmed(setting, ratios, self._expected(setting, cases, evidence)))
        return found

    def _expected(self, setting: Setting, cases: Sequence[Case], evidence: Evidence) -> dict[str, float]:
        """Predicted anew, on no more tokens than were run."""
        by_kind = evidence.by_kind(cases, setting)
        mine, plain = (predict(one, by_kind, evidence.costs) for one in (setting, PLAIN))
        return mine.speedups(plain, self._options.objective)

    def _take_turns(self, cases: Sequence[Case], settings: Sequence[Setting], costs: Costs, deadline_s: float) -> None:
        turn = 0
        while settings and (turn == 0 or self._watch.elapsed_s < deadline_s):
            for number, case in enumerate(cases):
                known = [pair for pair in self._state.pairs if pair.case == case.id and pair.turn == turn]
                if {pair.setting for pair in known} >= set(settings):
                    continue
                if turn and self._watch.elapsed_s > deadline_s:
                    return
                self._watch.tell(f"confirming {case.id}")
                self._state.pairs += self._pairs(case, settings, costs, (turn, number))
                self._state.save()
            turn += 1

    def _pairs(self, case: Case, settings: Sequence[Setting], costs: Costs, place: tuple[int, int]) -> list[Pair]:
        """place: turn, and number of the case in it."""
        order = [PLAIN, *settings]
        shift = sum(place) % len(order)
        figures: dict[Setting, tuple[float, float] | None] = {}
        run_case(self._session, shortened(case, 1), PLAIN, fresh=False)  # brings the prompt into the cache
        for setting in order[shift:] + order[:shift]:
            run = run_case(self._session, case, setting, fresh=False, costs=costs)
            figures[setting] = _figures(run.finished.record)
        plain = figures[PLAIN]
        found = []
        for setting in settings:
            mine = figures[setting]
            ratios = None if plain is None or mine is None else (plain[0] / mine[0], plain[1] / mine[1])
            found.append(Pair(case.id, case.kind, setting, place[0], ratios))
        return found

    def _ratios(self, cases: Sequence[Case], setting: Setting) -> dict[str, list[float]]:
        ids = {case.id for case in cases}
        found: dict[str, list[float]] = {}
        for pair in self._state.pairs:
            if pair.case in ids and pair.setting == setting and pair.ratios is not None:
                ratio = pair.ratios[0 if self._options.objective == "tok/s" else 1]
                found.setdefault(pair.kind, []).append(ratio)
        return found


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that predictions rest on."""

    costs: Costs
    tok_s: Mapping[str, float]  # of the plain answer, by case, where it was long enough to tell
    traces: Mapping[str, Mapping[str, Trace]]  # by what drafts (`ngram` for what needs no model), then by case

    def ms_per_token(self, cases: Sequence[Case]) -> float:
        """Of plain decoding; as calibrated where all answers were too short."""
        speeds = [self.tok_s[case.id] for case in cases if case.id in self.tok_s]
        return 1e3 / median(speeds) if speeds else self.costs.step_ms(1, len(cases[0].prompt.ids))

    def by_kind(self, cases: Sequence[Case], setting: Setting) -> dict[str, list[Trace]]:
        """The traces of `cases` on which `setting` can be replayed, as far as the cases go."""
        traces = self.traces[_DRAFTERS.get(setting.proposer, "ngram")]
        found: dict[str, list[Trace]] = {}
        for case in cases:
            found.setdefault(case.kind, []).append(_cut(traces[case.id], case.options.max_tokens))
        return found


def _cut(trace: Trace, tokens: int | None) -> Trace:
    """As if the answer had been allowed so many tokens."""
    if tokens is None or tokens >= len(trace.answer):
        return trace
    return replace(trace, answer=trace.answer[:tokens], max_tokens=tokens)


def _figures(record: RunRecord) -> tuple[float, float] | None:
    """(milliseconds per token, 95th percentile of the gaps); None for an answer that is too short to tell. The first
    cycle counts: in it a draft model reads the prompt."""
    gap = record.gap_percentile_ms(95)
    if record.decode_tok_s is None or not gap:
        return None
    first = record.cycles[0]
    ms = first.propose_ms + first.verify_ms + first.reconcile_ms + record.decode_ms
    return ms / record.completion_tokens, gap


def plans_of(result: TuneResult, session: Session) -> list[Plan]:
    """What there is to store, one plan for each class of text."""
    draft = session.speculation.draft
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
            draft=None if draft is None else draft.name,
        )
        for one in result.tuned
    ]


def _finite(choice: Choice) -> tuple[float, float, float]:
    found = choice.speedup
    return found.low, found.middle, min(found.high, 1e6)
