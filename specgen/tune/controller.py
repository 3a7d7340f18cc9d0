"""γ, cycle by cycle: from the cost table and the observed survival, with γ = 0 always a candidate.

Knows: t(R), s_k, and the records of past cycles. Does not know: tokens, models, clocks. DESIGN promise 4.
"""

from __future__ import annotations

from collections.abc import Sequence

from specgen.draft import Draft
from specgen.options import MAX_GAMMA
from specgen.records import CycleRecord
from specgen.tune.cost import CostTable
from specgen.tune.survival import Kind, SurvivalEstimate, kind_of

MARGIN = 1.03
"""A draft must be expected to beat plain decoding by this factor."""
PROBE_SOON, PROBE_FIRST, PROBE_MOST = 3, 12, 192
"""A kind of draft that was found worthless is tried again after PROBE_FIRST refusals, then twice as many, …; soon after
a probe that was accepted, if good drafts could pay at all."""
PLAIN_EVERY = 128
"""t(1) is measured at least once in so many cycles: without it nothing can be compared."""


class FixedGamma:
    """`--gamma N`: always N (0: plain decoding)."""

    def __init__(self, gamma: int) -> None:
        self.gamma = gamma
        self.reason: str | None = "gamma is 0" if gamma == 0 else None

    def limit(self) -> int:
        return self.gamma

    def trim(self, draft: Draft) -> Draft | None:
        return draft

    def observe(self, record: CycleRecord) -> None:
        pass


class AutoGamma:
    """`--gamma auto`: the γ with the highest expected tokens per millisecond."""

    def __init__(self, costs: CostTable | None = None, most: int = MAX_GAMMA) -> None:
        self.costs = costs or CostTable()
        self.survival = SurvivalEstimate()
        self.most = most
        self.reason: str | None = None
        self._propose_ms = 0.0  # decayed mean of a cycle's proposing time
        self._refused: dict[Kind, int] = {}  # since the last probe
        self._patience: dict[Kind, int] = {}  # refusals before the next probe
        self._since_plain = 0 if 1 in self.costs.known else PLAIN_EVERY

    def limit(self) -> int:
        if self._since_plain >= PLAIN_EVERY:
            self.reason = "plain decoding is being measured"
            return 0
        return self.most

    def trim(self, draft: Draft) -> Draft | None:
        kind = kind_of(draft.source, draft.match)
        gamma = self.best_gamma(kind, len(draft))
        if gamma > 0:
            self._refused.pop(kind, None)
            return draft.first(gamma)
        if self._probe_is_due(kind):
            return draft.first(1)
        self.reason = f"{draft.source}: drafts are not worth their cost here"
        return None

    def best_gamma(self, kind: Kind, most: int) -> int:
        """The γ in 0 … most with the highest expected speed, 0 unless it beats plain by MARGIN."""
        return self._fastest(self.survival.survival(kind, most))

    def _fastest(self, survival: Sequence[float]) -> int:
        best, best_speed = 0, MARGIN / self.costs.step_ms(1)
        expected = 1.0
        for gamma, share in enumerate(survival, start=1):
            expected += share
            # The time to propose is spent before γ is known for a lookup, so it weighs on every γ alike.
            speed = expected / (self.costs.step_ms(1 + gamma) + self._propose_ms)
            if speed > best_speed:
                best, best_speed = gamma, speed
        return best

    def _probe_is_due(self, kind: Kind) -> bool:
        patience = self._patience.setdefault(kind, PROBE_FIRST)
        self._refused[kind] = self._refused.get(kind, 0) + 1
        if self._refused[kind] < patience:
            return False
        self._refused[kind] = 0
        self._patience[kind] = min(PROBE_MOST, 2 * patience)
        return True

    def observe(self, record: CycleRecord) -> None:
        self.costs.observe(1 + record.proposed, record.verify_ms + record.reconcile_ms)
        self._propose_ms += 0.1 * (record.propose_ms - self._propose_ms)
        self._since_plain = self._since_plain + 1 if record.proposed else 0
        if not record.proposed:
            return
        kind = kind_of(record.source, record.match)
        self.survival.observe(kind, record.depth, record.accepted, cut=record.ending == "cut")
        could_pay = self._fastest([1.0] * self.most) > 0
        if record.accepted and could_pay and kind in self._patience:
            self._patience[kind] = PROBE_SOON
