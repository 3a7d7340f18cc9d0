"""Tokens per second at made-up acceptance: what a model's measured steps would be worth with a draft that is right
this often.

Knows: milliseconds of steps, of drafting and of the rest of a cycle. Does not know: who measured them. Every draft
token is right with the same probability, independently: real text is burstier, so this is a scale, not a forecast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specgen.options import MAX_GAMMA

ACCEPTANCES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
GAMMAS = tuple(range(1, MAX_GAMMA + 1))


@dataclass(frozen=True, slots=True)
class CycleCost:
    """Milliseconds of one cycle with γ draft tokens."""

    step_ms: Callable[[int], float]  # t(R) of R rows
    draft_ms: float = 0.0  # for each draft token
    rest_ms: float = 0.0  # everything else

    def ms(self, gamma: int) -> float:
        return gamma * self.draft_ms + self.step_ms(1 + gamma) + self.rest_ms


@dataclass(frozen=True, slots=True)
class SyntheticRow:
    """One acceptance, with the best γ for it."""

    acceptance: float
    gamma: int  # 0: plain decoding is fastest
    yield_tokens: float  # E[Y]
    tok_s: float
    speedup: float  # over plain
    tok_s_by_gamma: tuple[float, ...]  # γ = 1, 2, …


def expected_yield(acceptance: float, gamma: int) -> float:
    """E[Y] = 1 + a + … + a^γ (Leviathan et al., 2211.17192, equation 1)."""
    return float(sum(acceptance**k for k in range(gamma + 1)))


def synthetic_table(cost: CycleCost, plain_ms: float, acceptances: Sequence[float] = ACCEPTANCES) -> list[SyntheticRow]:
    """plain_ms: a cycle without a draft."""
    plain = 1e3 / plain_ms
    rows = []
    for acceptance in acceptances:
        speeds = tuple(1e3 * expected_yield(acceptance, gamma) / cost.ms(gamma) for gamma in GAMMAS)
        best = max(plain, *speeds)
        gamma = 0 if best == plain else GAMMAS[speeds.index(best)]
        rows.append(SyntheticRow(acceptance, gamma, expected_yield(acceptance, gamma), best, best / plain, speeds))
    return rows
