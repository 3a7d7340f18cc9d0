"""γ, cycle by cycle: from the cost table and the observed survival, with γ = 0 always a candidate.

Knows: t(R), s_k, and the records of past cycles. Does not know: tokens, models, clocks. DESIGN promise 4.
"""

from __future__ import annotations

from specgen.draft import Draft
from specgen.options import MAX_GAMMA
from specgen.records import CycleRecord
from specgen.tune.cost import CostTable
from specgen.tune.survival import Kind, SurvivalEstimate, kind_of

MARGIN = 1.03
"""A draft must be expected to beat plain decoding by this factor."""
PROBE_FIRST, PROBE_MOST = 12, 192
"""A kind of draft that was found worthless is tried again after so many refusals, then twice as many, …"""


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

    def limit(self) -> int:
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
        """The γ in 0 … most with the highest speed, 0 unless it beats plain by MARGIN."""
        best, best_speed = 0, MARGIN / self.costs.step_ms(1)
        expected = 1.0
        for gamma, share in enumerate(self.survival.survival(kind, most), start=1):
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
        if not record.proposed:
            return
        kind = kind_of(record.source, record.match)
        self.survival.observe(kind, record.depth, record.accepted, cut=record.ending == "cut")
        if record.accepted:
            self._patience.pop(kind, None)
