"""Which sublayers of a target to leave out for drafting (Draft & Verify, 2309.08168), from how well the rest agrees.

Knows: `agreement(skipped) -> float`, what a draft step costs, t(R). Does not know: models, text, clocks. The paper
searches by Bayesian optimisation; here every sublayer is tried alone, and the harmless ones are left out one after
another while the expected speed rises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specgen.model.spec import Skipped, Sublayer
from specgen.options import MAX_GAMMA

PATIENCE = 6
"""Growing stops when so many sets in a row were no faster."""


@dataclass(frozen=True, slots=True)
class SkipChoice:
    skipped: Skipped
    agreement: float  # share of tokens that the draft would have right
    speedup: float  # expected over plain decoding at the best γ
    gamma: int  # that γ; 0 when no γ pays

    @property
    def tries(self) -> int:
        """Tokens that such a draft has until one is wrong, about."""
        return round(sum(self.agreement**k for k in range(MAX_GAMMA)))


def expected_speed(
    agreement: float, draft_share: float, step_ratio: Callable[[int], float], most: int = MAX_GAMMA
) -> tuple[float, int]:
    """(speed over plain decoding, γ) at the best γ, each draft token being right with probability `agreement`."""
    best, best_gamma, expected, survived = 1.0, 0, 1.0, 1.0
    for gamma in range(1, most + 1):
        survived *= agreement
        expected += survived
        speed = expected / (gamma * draft_share + step_ratio(1 + gamma))
        if speed > best:
            best, best_gamma = speed, gamma
    return best, best_gamma


@dataclass(frozen=True, slots=True)
class SkipSearch:
    """The inputs of a search. `agreement` is called at most `budget` times."""

    sublayers: Sequence[Sublayer]
    agreement: Callable[[Skipped], float]
    draft_share: Callable[[Skipped], float]  # a draft step as a share of t(1)
    step_ratio: Callable[[int], float]  # t(R) / t(1)
    budget: int

    def run(self) -> SkipChoice:
        """The fastest non-empty set that was tried. It may not pay: then its speedup is 1 and its γ 0."""
        assert self.sublayers
        assert self.budget > 0
        alone = [(self.agreement(frozenset((one,))), one) for one in self.sublayers[: self.budget]]
        # Of sublayers that do equal harm the one that saves more comes first.
        order = sorted(alone, key=lambda pair: (-pair[0], self.draft_share(frozenset((pair[1],)))))
        tried = [self._judge(frozenset((one,)), agreement) for agreement, one in alone]
        best = max(tried, key=_rank)
        skipped: Skipped = frozenset()
        since_best = 0
        for count, (_, one) in enumerate(order, start=1):
            skipped |= {one}
            if count == 1:
                continue  # tried alone
            if len(tried) >= self.budget or since_best >= PATIENCE:
                break
            tried.append(self._judge(skipped, self.agreement(skipped)))
            since_best = 0 if _rank(tried[-1]) > _rank(best) else since_best + 1
            best = max(best, tried[-1], key=_rank)
        return best

    def _judge(self, skipped: Skipped, agreement: float) -> SkipChoice:
        speedup, gamma = expected_speed(agreement, self.draft_share(skipped), self.step_ratio)
        return SkipChoice(skipped, agreement, speedup, gamma)


def _rank(choice: SkipChoice) -> tuple[float, float]:
    """Faster is better; of sets that do not pay, the one that agrees most."""
    return choice.speedup, choice.agreement
