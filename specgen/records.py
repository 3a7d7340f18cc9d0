"""Counts and times of one run. Only committed tokens count as tokens.

Knows: cycles as they happened and the figures that follow from them. Does not know: how they are shown.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

Ending = Literal["plain", "corrected", "bonus", "cut"]
"""The last token of a cycle: decoded plainly, after a mismatch, after a full draft; `cut`: the answer ended inside."""


@dataclass(frozen=True, slots=True)
class CycleRecord:
    """One cycle, after cutting at EOS, stop string or budget."""

    proposed: int  # draft nodes checked
    depth: int  # longest path of the draft (γ of a chain)
    accepted: int  # draft tokens committed
    committed: int  # tokens committed, the target's own included
    ending: Ending
    propose_ms: float
    verify_ms: float  # the target step
    reconcile_ms: float  # acceptance, cut, commit, report
    source: str = "none"  # the proposer that made the draft
    match: int = 0  # tokens of context that the draft rested on
    width: int = 1  # continuations of the pending token in the draft
    confidence: float | None = None  # of the draft's first level, where the proposer says
    fallback: str | None = None  # why there was no draft, when one was wanted


@dataclass(slots=True)
class RunRecord:
    """One answer. Times in milliseconds."""

    prompt_tokens: int = 0
    reused_tokens: int = 0
    prefill_ms: float = 0.0
    ttft_ms: float = 0.0  # from the request to the first committed token
    decode_ms: float = 0.0  # from the first committed token to the last
    cycles: list[CycleRecord] = field(default_factory=list)
    gaps_ms: list[float] = field(default_factory=list)  # between commits, one per committed token after the first
    kv_tokens: int = 0  # high-water mark of cached slots
    kv_bytes: int = 0

    @property
    def completion_tokens(self) -> int:
        return sum(cycle.committed for cycle in self.cycles)

    @property
    def proposed(self) -> int:
        return sum(cycle.proposed for cycle in self.cycles)

    @property
    def accepted(self) -> int:
        return sum(cycle.accepted for cycle in self.cycles)

    @property
    def decode_tok_s(self) -> float | None:
        """Tokens per second after the first token; None when there was only one."""
        count = self.completion_tokens - self._first_commit
        return 1e3 * count / self.decode_ms if count > 0 and self.decode_ms > 0 else None

    @property
    def prefill_tok_s(self) -> float | None:
        return 1e3 * self.prefilled_tokens / self.prefill_ms if self.prefilled_tokens and self.prefill_ms > 0 else None

    @property
    def prefilled_tokens(self) -> int:
        """Prompt tokens computed by prefill; the last one of the prompt is pending, and the first cycle's."""
        return max(0, self.prompt_tokens - self.reused_tokens - 1)

    @property
    def _first_commit(self) -> int:
        return self.cycles[0].committed if self.cycles else 0

    @property
    def yield_tokens(self) -> float | None:
        """E[Y]: committed tokens per cycle."""
        return self.completion_tokens / len(self.cycles) if self.cycles else None

    def survival(self) -> list[float]:
        """s_k for k = 1, 2, …: the share of cycles whose draft had ≥ k levels in which k of them were accepted."""
        deepest = max((cycle.depth for cycle in self.cycles), default=0)
        shares = []
        for k in range(1, deepest + 1):
            # A cycle that the answer's end cut short says nothing about the levels behind the cut.
            tried = [c for c in self.cycles if c.depth >= k and not (c.ending == "cut" and c.accepted < k)]
            if not tried:
                break
            shares.append(sum(c.accepted >= k for c in tried) / len(tried))
        return shares

    def gap_percentile_ms(self, percent: float) -> float | None:
        """Inter-token latency at a percentile (nearest rank): tokens committed together have gaps of 0."""
        if not self.gaps_ms:
            return None
        if percent == 50:
            return median(self.gaps_ms)
        ranked = sorted(self.gaps_ms)
        return ranked[max(1, math.ceil(percent / 100 * len(ranked))) - 1]

    def fallbacks(self) -> dict[str, int]:
        """Why cycles went without a draft, and how many."""
        reasons: dict[str, int] = {}
        for cycle in self.cycles:
            if cycle.fallback:
                reasons[cycle.fallback] = reasons.get(cycle.fallback, 0) + 1
        return reasons
