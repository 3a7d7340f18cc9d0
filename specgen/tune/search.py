"""From traces and costs to a choice: predict every setting, keep the best few, choose among what was measured.

Knows: predicted and measured speeds of settings by kind of text. Does not know: models, clocks, terminals.
A speedup is a setting's speed over plain decoding's on the same text; over kinds it is the geometric mean.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp, log, sqrt
from statistics import fmean, median
from typing import Literal

from specgen.options import MAX_GAMMA, NgramOptions, ProposerName
from specgen.propose.base import Proposer
from specgen.propose.ngram import NgramProposer
from specgen.propose.none import NoProposer
from specgen.records import RunRecord
from specgen.tune.controller import AutoGamma, FixedGamma
from specgen.tune.predict import Costs, ProposeMs
from specgen.tune.replay import GuessProposer, PlayedLookup, PlayedMix, Policy, RecalledLookup, Trace, replay
from specgen.tune.setting import PLAIN, Setting

Objective = Literal["tok/s", "p95"]

GAMMAS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
NGRAMS = ((2, 4), (1, 3), (2, 6), (3, 6), (4, 8))
"""Smallest and largest n-gram that are tried."""
TREES = (2, 3)
"""Continuations at each place that are tried, for the best chains."""
TREE_CHAINS = 3
"""How many chains are tried as trees."""
DRAFTERS: tuple[ProposerName, ...] = ("model", "skip")
"""Proposers that are a model of their own."""
MIXED_NGRAMS = 2
"""How many sizes of n-gram are tried together with a draft model."""
FLOOR = 0.97
"""A setting that makes any kind of text slower than this share of plain decoding is not chosen."""
STUDENT = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833)
"""Student's t by degrees of freedom from 1 on: so many standard errors below the estimate must still beat plain. One in
twenty lucky settings gets through."""


def certainty(freedom: int) -> float:
    """The 95 % quantile of Student's t; beyond the table to three digits."""
    assert freedom >= 1
    return STUDENT[freedom - 1] if freedom <= len(STUDENT) else 1.645 + 1.6 / freedom


def candidates(gammas: Sequence[int] = GAMMAS, ngrams: Sequence[tuple[int, int]] = NGRAMS) -> list[Setting]:
    """Every setting that needs no model beside the target, but trees; plain is the first."""
    found = [PLAIN]
    for n_min, n_max in ngrams:
        found += [Setting("ngram", gamma, n_max, n_min) for gamma in (None, *gammas)]
    return found


def drafted_candidates(drafters: Collection[str], gammas: Sequence[int] = GAMMAS) -> list[Setting]:
    """Every setting in which a model drafts at every place; drafters: `model`, `skip`."""
    return [Setting(name, gamma) for name in DRAFTERS if name in drafters for gamma in (None, *gammas)]


def mixed_candidates(
    predictions: Sequence[Prediction], objective: Objective = "tok/s", gammas: Sequence[int] = GAMMAS
) -> list[Setting]:
    """`mix`, with the sizes of n-gram that look up best by themselves."""
    lookups = [p.setting for p in ranked(predictions, objective) if p.setting.proposer == "ngram"]
    sizes = list(dict.fromkeys((setting.n_min, setting.n_max) for setting in lookups))[:MIXED_NGRAMS]
    return [Setting("mix", gamma, n_max, n_min) for n_min, n_max in sizes for gamma in (None, *gammas)]


def tree_candidates(predictions: Sequence[Prediction], objective: Objective = "tok/s") -> list[Setting]:
    """The best lookups of a fixed γ as trees, where all rows of such a step are calibrated."""
    order = [p.setting for p in ranked(predictions, objective)]
    chains = [setting for setting in order if setting.proposer == "ngram" and _fits(setting, min(TREES))]
    return [replace(chain, tree=width) for chain in chains[:TREE_CHAINS] for width in TREES if _fits(chain, width)]


def _fits(chain: Setting, width: int) -> bool:
    """Whether a tree of the chain's levels has no more rows than are calibrated."""
    return chain.gamma is not None and chain.gamma * width <= MAX_GAMMA


def played_proposer(setting: Setting, trace: Trace, policy: Policy, costs: Costs) -> Proposer:
    """The proposer of `setting` on a trace; models are played back from what they said along it."""
    if setting.is_plain:
        return NoProposer()
    sizes = NgramOptions(setting.n_max, setting.n_min)
    recalled = RecalledLookup(trace, sizes) if setting.tree == 1 else NgramProposer(sizes, setting.tree)
    lookup = PlayedLookup(recalled, costs.propose.get("ngram", ProposeMs()))
    if setting.proposer == "ngram":
        return lookup
    assert setting.tree == 1, "what a model would put beside its best token is not recorded"
    name = "skip" if setting.proposer == "skip" else "model"
    model = GuessProposer(name, len(trace.prompt), trace.drafters[name], costs.propose.get(name))
    return PlayedMix(lookup, model, policy) if setting.proposer == "mix" else model


def policy_of(setting: Setting, costs: Costs, context_tokens: int) -> Policy:
    """The γ policy that the session would use, with the calibrated tables."""
    if setting.gamma is not None:
        return FixedGamma(setting.gamma, setting.tree)
    policy = AutoGamma(costs.at(context_tokens), width=setting.tree, drafting=costs.drafting(context_tokens))
    policy.new_text(context_tokens)
    return policy


@dataclass(frozen=True, slots=True)
class Prediction:
    """One setting on all traces."""

    setting: Setting
    ms_per_token: Mapping[str, float]  # by kind
    gap_p95_ms: Mapping[str, float]  # by kind
    yields: Mapping[str, float]  # E[Y], by kind
    records: Mapping[str, Sequence[RunRecord]] = field(repr=False, default_factory=dict)

    def speedups(self, plain: Prediction, objective: Objective = "tok/s") -> dict[str, float]:
        """By kind; > 1 is better than plain."""
        mine, theirs = (self._figures(objective), plain._figures(objective))
        return {kind: theirs[kind] / mine[kind] for kind in mine if mine[kind] > 0}

    def _figures(self, objective: Objective) -> Mapping[str, float]:
        return self.ms_per_token if objective == "tok/s" else self.gap_p95_ms


def predict(setting: Setting, traces: Mapping[str, Sequence[Trace]], costs: Costs) -> Prediction:
    """Replay `setting` on the traces of every kind."""
    ms: dict[str, float] = {}
    gaps: dict[str, float] = {}
    yields: dict[str, float] = {}
    records: dict[str, list[RunRecord]] = {}
    for kind, known in traces.items():
        runs = [_played(setting, trace, costs) for trace in known]
        tokens = sum(run.completion_tokens for run in runs)
        ms[kind] = sum(run.ttft_ms + run.decode_ms for run in runs) / max(1, tokens)
        gaps[kind] = fmean(run.gap_percentile_ms(95) or 0.0 for run in runs)
        yields[kind] = tokens / max(1, sum(len(run.cycles) for run in runs))
        records[kind] = runs
    return Prediction(setting, ms, gaps, yields, records)


def _played(setting: Setting, trace: Trace, costs: Costs) -> RunRecord:
    policy = policy_of(setting, costs, len(trace.prompt))
    return replay(trace, played_proposer(setting, trace, policy, costs), policy, costs)


def search(settings: Sequence[Setting], traces: Mapping[str, Sequence[Trace]], costs: Costs) -> Iterator[Prediction]:
    """One prediction for each setting, as they are made."""
    for setting in settings:
        yield predict(setting, traces, costs)


def overall(speedups: Mapping[str, float]) -> float:
    """Geometric mean over kinds; 1 when there are none."""
    return exp(fmean(log(value) for value in speedups.values())) if speedups else 1.0


def ranked(predictions: Sequence[Prediction], objective: Objective = "tok/s") -> list[Prediction]:
    """Best first: those that no kind of text suffers from, then by overall speedup."""
    plain = next(p for p in predictions if p.setting.is_plain)

    def worth(prediction: Prediction) -> tuple[bool, float]:
        speedups = prediction.speedups(plain, objective)
        return min(speedups.values(), default=1.0) >= FLOOR, overall(speedups)

    return sorted(predictions, key=worth, reverse=True)


def shortlist(predictions: Sequence[Prediction], count: int, objective: Objective = "tok/s") -> list[Setting]:
    """At most `count` settings to confirm by running: the best that differ, one that adapts γ among them."""
    order = [p.setting for p in ranked(predictions, objective) if not p.setting.is_plain]
    chosen = order[:count]
    adaptive = next((setting for setting in order if setting.gamma is None), None)
    if adaptive is not None and chosen and adaptive not in chosen:
        chosen[-1] = adaptive
    return chosen


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with the range that noise leaves it."""

    low: float
    middle: float
    high: float
    count: int

    @classmethod
    def of_ratios(cls, ratios: Mapping[str, Sequence[float]], expected: Mapping[str, float] | None = None) -> Interval:
        """The geometric mean over kinds of each kind's median ratio, with its error from how ratios scatter.

        expected: what was predicted for each kind; the scatter is then that of measured over predicted, so that one
        ratio of every kind is enough. Without it, kinds need several ratios: they scatter around their own median.
        """
        logs = {kind: [log(ratio) for ratio in values] for kind, values in ratios.items() if values}
        if not logs:
            return cls(0.0, 1.0, float("inf"), 0)
        middles = {kind: median(values) for kind, values in logs.items()}
        middle, count = fmean(middles.values()), sum(map(len, logs.values()))
        around = middles if expected is None else {kind: log(expected[kind]) for kind in logs}
        residuals = [value - around[kind] for kind, values in logs.items() for value in values]
        offset = 0.0 if expected is None else fmean(residuals)
        freedom = count - (len(logs) if expected is None else 1)
        if freedom < 1:
            return cls(0.0, exp(middle), float("inf"), count)
        spread = sqrt(sum((r - offset) ** 2 for r in residuals) / freedom)
        # A median of three or more is a little less certain than a mean (√(π/2) at most).
        loss = 1.2533 if max(map(len, logs.values())) > 2 else 1.0
        error = loss * spread * sqrt(sum(1 / len(values) for values in logs.values())) / len(logs)
        reach = certainty(freedom) * error
        return cls(exp(middle - reach), exp(middle), exp(middle + reach), count)


@dataclass(frozen=True, slots=True)
class Confirmed:
    """One setting, run in turns with plain decoding: ratios of plain's figure to its own, by kind."""

    setting: Setting
    ratios: Mapping[str, Sequence[float]]
    expected: Mapping[str, float] | None = None  # the predicted ratio, by kind

    @property
    def speedup(self) -> Interval:
        return Interval.of_ratios(self.ratios, self.expected)

    @property
    def predicted(self) -> float:
        """Of the kinds that were measured; 1 when nothing was predicted."""
        return overall({kind: (self.expected or {}).get(kind, 1.0) for kind in self.by_kind})

    @property
    def by_kind(self) -> dict[str, float]:
        """The measured ratio of each kind."""
        return {kind: median(values) for kind, values in self.ratios.items() if values}

    @property
    def slowed(self) -> dict[str, float]:
        """Kinds that fall below FLOOR, and how far: as predicted (scaled by how the prediction fared on the whole), or
        as measured by more than the noise."""
        measured = self.by_kind
        if self.expected is None:
            return {kind: ratio for kind, ratio in measured.items() if ratio < FLOOR}
        interval, predicted = self.speedup, overall({kind: self.expected[kind] for kind in measured})
        # How much of the predicted gain was there on the whole; it shrinks gains, not losses.
        share = max(0.0, log(interval.middle) / log(predicted)) if predicted > 1.0 else 1.0
        noise = (interval.high / interval.middle) ** sqrt(max(1, len(measured)))  # of one kind alone
        slowed: dict[str, float] = {}
        for kind, ratio in measured.items():
            foreseen = min(self.expected[kind], self.expected[kind] ** share)
            if (foreseen < FLOOR and ratio < FLOOR) or ratio * noise < FLOOR:
                slowed[kind] = ratio
        return slowed


@dataclass(frozen=True, slots=True)
class Choice:
    setting: Setting
    speedup: Interval
    why: str


def choose(confirmed: Sequence[Confirmed]) -> Choice:
    """The fastest setting that beats plain by more than the noise and slows no kind of text; plain otherwise."""
    even = Interval(1.0, 1.0, 1.0, 0)
    if not confirmed:
        return Choice(PLAIN, even, "no setting is predicted to beat plain decoding")
    best = max(confirmed, key=lambda one: one.speedup.middle)
    sure = [one for one in confirmed if one.speedup.low > 1.0]
    if not sure:
        reason = f"nothing beats plain decoding by more than this machine's noise ({_range(best)})"
        return Choice(PLAIN, even, reason)
    fair = [one for one in sure if not one.slowed]
    if not fair:
        kind, ratio = min(best.slowed.items() or sure[0].slowed.items(), key=lambda item: item[1])
        return Choice(PLAIN, even, f"every setting slows some kind of text ({best.setting.label}: {kind} {ratio:.2f}x)")
    chosen = max(fair, key=lambda one: one.speedup.middle)
    return Choice(chosen.setting, chosen.speedup, f"measured against plain decoding in turns ({_range(chosen)})")


def _range(one: Confirmed) -> str:
    found = one.speedup
    high = "∞" if found.high == float("inf") else f"{found.high:.2f}"
    return f"{one.setting.label}: {found.middle:.2f}x, {found.low:.2f} to {high} with the noise"


assert max(GAMMAS) <= MAX_GAMMA
