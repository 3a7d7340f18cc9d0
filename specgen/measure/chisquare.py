"""Pearson's chi-square test, for the one question whether counts are consistent with a distribution.

Knows: the statistic and its critical value, by Wilson and Hilferty's approximation (1931). Does not know: what is
counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import log
from statistics import NormalDist

FALSE_ALARM = 1e-5
"""A correct sampler fails about this often, over all seeds; with fixed seeds it either does or never does."""
FEWEST_EXPECTED = 5.0
"""Cells that are expected less often are taken together."""


def critical_value(freedom: int, false_alarm: float = FALSE_ALARM) -> float:
    """The chi-square that is exceeded with probability `false_alarm`; exact for 1 and 2 degrees of freedom."""
    if freedom == 1:
        return NormalDist().inv_cdf(1.0 - false_alarm / 2.0) ** 2
    if freedom == 2:
        return -2.0 * log(false_alarm)
    z = NormalDist().inv_cdf(1.0 - false_alarm)
    spread = 2.0 / (9.0 * freedom)
    return float(freedom * (1.0 - spread + z * spread**0.5) ** 3)


def consistent(tokens: Sequence[int], probs: Sequence[float]) -> bool:
    """Whether `tokens` look drawn from `probs`; a token of probability 0 never may occur."""
    counts = Counter(tokens)
    if any(token >= len(probs) or probs[token] <= 0.0 for token in counts):
        return False
    total = sum(probs)
    expected = [len(tokens) * share / total for share in probs]
    cells = [(e, counts.get(token, 0)) for token, e in enumerate(expected) if e >= FEWEST_EXPECTED]
    rare = [(e, counts.get(token, 0)) for token, e in enumerate(expected) if 0.0 < e < FEWEST_EXPECTED]
    if rare:
        cells.append((sum(e for e, _ in rare), sum(seen for _, seen in rare)))
    if len(cells) < 2:
        return True
    statistic = sum((seen - e) ** 2 / e for e, seen in cells)
    return statistic <= critical_value(len(cells) - 1)
