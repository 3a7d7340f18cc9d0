"""γ, cycle by cycle: from the cost tables and the observed survival, with γ = 0 always a candidate.

Knows: t(R), t_propose(γ), s_k, and the records of past cycles. Does not know: tokens, models, clocks. DESIGN promise 4.

A lookup costs next to nothing, so it is asked for a whole draft, which is then trimmed by what it says of itself. A
model pays for every level: how deep it may go is decided before it begins, by how its drafts fared lately.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from specgen.draft import Draft
from specgen.options import MAX_GAMMA
from specgen.records import CycleRecord
from specgen.tune.cost import CostTable
from specgen.tune.probes import ProbeSchedule
from specgen.tune.survival import Kind, SurvivalEstimate, all_of, kind_of

MARGIN = 1.03
"""A draft must be expected to beat plain decoding by this factor."""
NEGLIGIBLE = 1e-3
"""A level that is reached more rarely is not worth the arithmetic."""
PROBE_LEVELS = 2
"""How deep a model drafts when it is only tried, and at first."""
REST_CYCLES = 8
"""A refused model is thought about once in so many cycles, and whenever a probe was accepted."""
PLAIN_EVERY = 128
"""t(1) is measured at least once in so many cycles: without it nothing can be compared."""
DECAY = 0.1
"""Weight of the latest measurement in a mean time."""


@dataclass(frozen=True, slots=True)
class DraftCost:
    """What a model that drafts is thought to cost until it has been measured, as shares of t(1)."""

    level: float  # one level of a draft
    read: float = 0.0  # one token that it missed; 0: it never has to catch up
    agreement: float | None = None  # how often it was right where that was measured, 0 … 1


class FixedGamma:
    """`--gamma N`: always N (0: plain decoding); for a tree N levels."""

    def __init__(self, gamma: int, width: int = 1) -> None:
        self.gamma = gamma
        self.width = width
        self.reason: str | None = "gamma is 0" if gamma == 0 else None

    def limit(self, source: str = "") -> int:
        return self.gamma * self.width

    def worth(self, draft: Draft) -> bool:
        return True

    def trim(self, draft: Draft) -> Draft | None:
        return draft

    def observe(self, record: CycleRecord) -> None:
        pass


class AutoGamma:
    """`--gamma auto`: the γ with the highest expected tokens per millisecond.

    `drafting` names the proposers that pay for every level. Estimates outlive an answer: `new_text` tells of the next.
    """

    def __init__(
        self,
        costs: CostTable | None = None,
        most: int = MAX_GAMMA,  # levels
        width: int = 1,  # nodes on a level, at most
        drafting: Mapping[str, DraftCost] | None = None,
    ) -> None:
        self.costs = costs or CostTable()
        self.survival = SurvivalEstimate()
        self.most = most
        self.width = width
        self.reason: str | None = None
        self._drafting = dict(drafting or {})
        self._propose = {source: CostTable(slope=1.0) for source in self._drafting}  # t_propose by levels asked for
        self._lookup_ms = 0.0  # decayed mean of what proposing takes where it is no matter of levels
        for source, cost in self._drafting.items():
            if cost.agreement is not None:
                self.survival.expect(all_of(source), cost.agreement)
        self._resting: dict[str, int] = {}  # cycles in which a refused model is not thought about
        self._loss_ms: dict[str, float] = {}  # of trying a refused draft that cannot be cut, by proposer
        self._probes = ProbeSchedule()
        self._probing = False
        self._asked = 0  # levels asked of a model in this cycle
        self._asked_source = ""
        self._drafted = False  # whether the model that was asked had a draft
        self._unread = dict.fromkeys(self._drafting, 0)  # tokens that a model has not read, since it last drafted
        self._following: set[str] = set()  # models that drafted in the last cycle
        self._read_ms: dict[str, float] = {}  # decayed mean time of reading one of them
        self._since_plain = 0 if 1 in self.costs.known else PLAIN_EVERY

    def new_text(self, unread_tokens: int = 0) -> None:
        """Another answer begins, with so many tokens that the draft model has not read."""
        self._probes.new_text()
        self._unread = dict.fromkeys(self._drafting, unread_tokens)
        self._following = set()
        self._resting = {}

    def agreement(self) -> dict[str, float]:
        """How often each model that has drafted was right at its first place."""
        drafted = [source for source in self._drafting if self.survival.drafts(all_of(source))]
        return {source: self.survival.survival(all_of(source), 1)[0] for source in drafted}

    def limit(self, source: str = "") -> int:
        self._begin_cycle()
        if self._since_plain >= PLAIN_EVERY:
            self.reason = "plain decoding is being measured"
            return 0
        if source not in self._drafting:
            return self.most * self.width if self._may_ask(source) else 0
        kind = all_of(source)
        levels = 0 if self._is_resting(source) else self.best_depth(source)
        if levels:
            self._probes.take_up(kind)
        elif self._probes.is_due(kind, lambda: self._probe_loss_ms(source)):
            levels, self._probing = PROBE_LEVELS, True
        else:
            self._resting.setdefault(source, REST_CYCLES)
            self.reason = _not_worth(source)
        self._asked, self._asked_source = levels, source
        return levels * self.width

    def _is_resting(self, source: str) -> bool:
        """Whether a refused model need not be thought about: what speaks against it changes slowly."""
        left = self._resting.pop(source, 0)
        if left > 1:
            self._resting[source] = left - 1
        return left > 0

    def _probe_loss_ms(self, source: str) -> float:
        """What trying a refused model is expected to cost against decoding plainly."""
        expected = 1.0 + sum(self.survival.survival(all_of(source), PROBE_LEVELS))
        step_ms = self.costs.step_ms(1 + self.width * PROBE_LEVELS)
        spent_ms = self._propose_ms(source, PROBE_LEVELS) + step_ms - expected * self.costs.step_ms(1)
        return self._unread[source] * self._reading_ms(source) + max(0.0, spent_ms)

    def _may_ask(self, source: str) -> bool:
        """Whether a lookup is asked. One whose last draft was refused whole is not, until it is due to be tried."""
        if source not in self._loss_ms or self._probes.is_due(kind_of(source, 0), lambda: self._loss_ms[source]):
            self._probing = source in self._loss_ms
            return True
        self.reason = _not_worth(source)
        return False

    def best_gamma(self, kind: Kind, most: int) -> int:
        """The γ in 0 … most of a chain that costs nothing more to propose; 0 unless it beats plain by MARGIN."""
        return self._fastest(self.survival.levels(kind), range(1, most + 1), self._lookup_ms)

    def best_depth(self, source: str) -> int:
        """How many levels are worth asking a model for, 0 when none."""
        # A model that has not shown what it is worth goes one level deeper with every draft.
        most = min(self.most, PROBE_LEVELS + self.survival.drafts(all_of(source)))
        sizes = [self.width * level for level in range(1, most + 1)]
        survival = self.survival.levels(all_of(source))
        return self._fastest(survival, sizes, 0.0, lambda levels: self._propose_ms(source, levels))

    def worth(self, draft: Draft) -> bool:
        """Whether a draft that is there would be checked; asking changes nothing."""
        return self._best_level(draft, kind_of(draft.source, draft.match, draft.confidence)) > 0

    def trim(self, draft: Draft) -> Draft | None:
        if self._asked and draft.source == self._asked_source:
            self._drafted = True
            if self._probing:
                return draft
        kind = kind_of(draft.source, draft.match, draft.confidence)
        if level := self._best_level(draft, kind):
            self._probes.take_up(kind)
            self._loss_ms.pop(draft.source, None)
            self._probing = False
            return self._cut(draft, level)
        if draft.indivisible:
            if not self._probing:
                self._loss_ms[draft.source] = self.costs.step_ms(1 + len(draft)) - self.costs.step_ms(1)
                self.reason = _not_worth(draft.source)
                return None
            return draft
        if self._probes.is_due(kind):
            self._probing = True
            return self._cut(draft, 1)
        self.reason = _not_worth(draft.source)
        return None

    @staticmethod
    def _cut(draft: Draft, levels: int) -> Draft:
        return draft if draft.indivisible else draft.first(draft.level_sizes[levels - 1])

    def _best_level(self, draft: Draft, kind: Kind) -> int:
        """Levels of the draft worth checking. The time to propose is spent, so it weighs on every choice alike."""
        model = draft.source in self._drafting
        spent = self._propose_ms(draft.source, self._asked or 1) if model else self._lookup_ms
        sizes = draft.level_sizes
        if draft.indivisible:
            sizes = [len(draft)] * len(sizes)
        return self._fastest(self.survival.levels(kind), sizes, spent)

    def _fastest(
        self,
        survival: Iterable[float],  # s_1, s_2, … for as long as it is asked
        sizes: Sequence[int],  # nodes of a draft of 1 … L levels
        spent_ms: float,  # whatever is chosen
        propose_ms: Callable[[int], float] | None = None,  # of that many levels
    ) -> int:
        """The number of levels 0 … L with the highest expected speed, 0 unless it beats plain by MARGIN."""
        step_ms = self.costs.step_ms
        best, best_speed = 0, MARGIN / (step_ms(1) + spent_ms)
        expected = 1.0
        for level, (share, size) in enumerate(zip(survival, sizes, strict=False), start=1):
            if share < NEGLIGIBLE:
                break
            expected += share
            ms = step_ms(1 + size) + spent_ms
            if propose_ms is not None:
                ms += propose_ms(level)
            if expected > best_speed * ms:
                best, best_speed = level, expected / ms
            # Deeper levels take at least as long, and at most all that came so far comes through them.
            elif expected + share * (len(sizes) - level) < best_speed * ms:
                break
        return best

    def _propose_ms(self, source: str, levels: int) -> float:
        table = self._propose[source]
        guess = self._drafting[source].level * levels * self.costs.step_ms(1)
        return guess if table.is_empty else table.step_ms(levels)

    def _reading_ms(self, source: str) -> float:
        """Of one token that a model missed."""
        return self._read_ms.get(source, self._drafting[source].read * self.costs.step_ms(1))

    def observe(self, record: CycleRecord) -> None:
        # Choosing a token takes as long however it was decoded: counted in, it would make drafts look dear that are
        # accepted often. A calibrated table has the steps alone too.
        self.costs.observe(1 + record.proposed, record.verify_ms)
        self._observe_time(record)
        self._since_plain = self._since_plain + 1 if record.proposed else 0
        if self._drafted:
            self._observe_model(record)
        if record.proposed:
            kind = kind_of(record.source, record.match, record.confidence)
            self.survival.observe(kind, record.depth, record.accepted, cut=record.ending == "cut")
            self._encourage(kind, record.accepted)
        self._begin_cycle()

    def _begin_cycle(self) -> None:
        self._asked, self._probing, self._drafted = 0, False, False

    def _observe_time(self, record: CycleRecord) -> None:
        spent = record.propose_ms + record.verify_ms
        lost = max(0.0, spent - record.committed * self.costs.step_ms(1)) if self._probing else 0.0
        self._probes.spent(spent + record.reconcile_ms, lost_ms=lost)
        if self._drafted:
            self._observe_proposing(self._asked_source, record.propose_ms)
        elif not self._asked:
            self._lookup_ms += DECAY * (record.propose_ms - self._lookup_ms)
        self._following = {self._asked_source} if self._drafted else set()
        for source in self._drafting:
            before = 0 if source in self._following else self._unread[source]
            self._unread[source] = before + record.committed

    def _observe_proposing(self, source: str, ms: float) -> None:
        """A model took `ms` for a draft; when it missed cycles before, a part of that for reading them."""
        table, unread = self._propose[source], self._unread[source]
        if source in self._following or (table.is_empty and unread <= self.most):
            table.observe(self._asked, ms)
            return
        reading = max(0.0, ms - self._propose_ms(source, self._asked)) / unread
        old = self._read_ms.get(source, reading)
        self._read_ms[source] = old + DECAY * (reading - old)

    def _observe_model(self, record: CycleRecord) -> None:
        """What came of asking a model. A draft that ended early of its own accord brought nothing behind its end."""
        kind = all_of(self._asked_source)
        used = record.source == self._asked_source
        accepted = record.accepted if used else 0
        self.survival.observe(kind, self._asked, accepted, cut=used and record.ending == "cut")
        self._encourage(kind, accepted)

    def _encourage(self, kind: Kind, accepted: int) -> None:
        """A parked kind is tried again soon after a success, if its drafts would pay were they always right."""
        if not accepted or not self._probes.is_parked(kind):
            return
        source = kind.source
        sizes = [self.width * level for level in range(1, self.most + 1)]
        cost = (lambda levels: self._propose_ms(source, levels)) if source in self._drafting else None
        if self._fastest([1.0] * self.most, sizes, 0.0, cost):
            self._probes.encourage(kind)
            self._resting.pop(source, None)


def _not_worth(source: str) -> str:
    return f"{source}: drafts are not worth their cost here"
