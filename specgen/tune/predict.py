"""What a cycle costs, piece by piece, at any length of context.

Knows: calibrated milliseconds of steps, proposing, choosing tokens. Does not know: who measured them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from specgen.tune.controller import DraftCost
from specgen.tune.cost import CostTable

CONTEXT_STEP = 256

StepMs = Mapping[int, float]
"""t(R): rows → milliseconds"""


@dataclass(frozen=True, slots=True)
class ProposeMs:
    """Time to propose: `once` for each draft (a lookup), `each` for every token of it (a draft model's step), `read`
    for every committed token that a model has not read, beside the last."""

    once: float = 0.0
    each: float = 0.0
    read: float = 0.0

    def of(self, tokens: int, unread: int = 1) -> float:
        return self.once + self.each * tokens + self.read * (unread - 1)


@dataclass(frozen=True, slots=True)
class Costs:
    """Milliseconds, measured on one machine with one model."""

    steps: Mapping[int, StepMs]  # context tokens → t(R)
    token_ms: float = 0.0  # choosing one committed token from its logits
    cycle_ms: float = 0.0  # the rest of a cycle: text, events
    propose: Mapping[str, ProposeMs] = field(default_factory=dict)  # by proposer
    _known: dict[tuple[int, int], float] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        assert self.steps, "nothing is calibrated"
        assert all(self.steps.values())

    def at(self, context_tokens: int) -> CostTable:
        """t(R) after `context_tokens` tokens: linear between calibrated contexts, the nearest one's beyond them."""
        contexts = sorted(self.steps)
        below = max((c for c in contexts if c <= context_tokens), default=contexts[0])
        above = min((c for c in contexts if c >= context_tokens), default=contexts[-1])
        share = 0.0 if above == below else (context_tokens - below) / (above - below)
        low, high = CostTable(known_ms=self.steps[below]), CostTable(known_ms=self.steps[above])
        rows = sorted({*self.steps[below], *self.steps[above]})
        return CostTable(known_ms={r: low.step_ms(r) + share * (high.step_ms(r) - low.step_ms(r)) for r in rows})

    def step_ms(self, rows: int, context_tokens: int) -> float:
        """t(rows) after `context_tokens` tokens, looked up anew every CONTEXT_STEP tokens."""
        key = (rows, context_tokens // CONTEXT_STEP)
        if key not in self._known:
            self._known[key] = self.at(key[1] * CONTEXT_STEP).step_ms(rows)
        return self._known[key]

    def propose_ms(self, source: str) -> float:
        """Of one lookup."""
        return self.propose.get(source, ProposeMs()).once

    def drafting(self, context_tokens: int = 0) -> dict[str, DraftCost]:
        """What `--gamma auto` begins with for the proposers that pay for every token, as shares of t(1)."""
        plain = self.at(context_tokens).step_ms(1)
        paid = {name: ms for name, ms in self.propose.items() if ms.each > 0}
        return {name: DraftCost(ms.of(2) / 2 / plain, ms.read / plain) for name, ms in paid.items()}
