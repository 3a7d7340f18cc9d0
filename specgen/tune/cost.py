"""What a step costs: the table t(R).

Knows: milliseconds seen for steps of R rows. Does not know: what ran them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping

WEIGHT_LIMIT = 8.0
"""Old measurements fade: a row count remembers about this many of its latest steps."""


class CostTable:
    """t(R) in milliseconds, measured where it can be and interpolated elsewhere; never falling with R."""

    def __init__(self, slope: float = 0.12, known_ms: Mapping[int, float] | None = None) -> None:
        """slope: assumed (t(R + 1) - t(R)) / t(1) before anything is known; known_ms: a calibrated table."""
        self.slope = slope
        self._ms: dict[int, float] = dict(known_ms or {})
        self._weight: dict[int, float] = dict.fromkeys(self._ms, WEIGHT_LIMIT)
        self._points: list[tuple[int, float]] | None = None  # of `_monotone`, until the next measurement

    def observe(self, rows: int, ms: float) -> None:
        """A step of `rows` rows took `ms`. An outlier (a pause of the machine) moves the mean by a bounded amount."""
        self._points = None
        weight = self._weight.get(rows, 0.0)
        if weight:
            ms = min(ms, 3.0 * self._ms[rows])
        self._weight[rows] = min(WEIGHT_LIMIT, weight + 1.0)
        old = self._ms.get(rows, ms)
        self._ms[rows] = old + (ms - old) / self._weight[rows]

    @property
    def is_empty(self) -> bool:
        """Whether nothing was measured yet."""
        return not self._ms

    @property
    def known(self) -> dict[int, float]:
        return dict(sorted(self._ms.items()))

    def ratio(self, rows: int) -> float:
        """t(rows) / t(1) ≥ 1."""
        return self.step_ms(rows) / self.step_ms(1)

    def step_ms(self, rows: int) -> float:
        """t(rows); in units of t(1) = 1 while nothing is known."""
        if self._points is None:
            self._points = self._monotone()
        points = self._points
        if not points:
            return 1.0 + self.slope * (rows - 1)
        index = bisect_left(points, (rows, 0.0))  # the first point that is as wide
        if index == len(points):
            return self._beyond(points, rows)
        r1, m1 = points[index]
        if r1 == rows:
            return m1
        if index == 0:
            # Only wider steps are known: assume the slope between.
            return m1 * (1.0 + self.slope * (rows - 1)) / (1.0 + self.slope * (r1 - 1))
        r0, m0 = points[index - 1]
        return m0 + (m1 - m0) * (rows - r0) / (r1 - r0)

    def _beyond(self, points: list[tuple[int, float]], rows: int) -> float:
        """Extrapolation by the measured slope: hopeful, so that wider steps get tried, and then known."""
        (r0, m0), (r1, m1) = points[0], points[-1]
        if r0 == r1:
            return m1 * (1.0 + self.slope * (rows - 1)) / (1.0 + self.slope * (r1 - 1))
        return m1 + (m1 - m0) / (r1 - r0) * (rows - r1)

    def _monotone(self) -> list[tuple[int, float]]:
        """The measured points made non-decreasing (pool adjacent violators, weighted)."""
        pools: list[list[float]] = []  # [weighted mean, weight, count of points]
        rows = sorted(self._ms)
        for r in rows:
            pools.append([self._ms[r], self._weight[r], 1])
            while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
                mean, weight, count = pools.pop()
                last = pools[-1]
                last[0] = (last[0] * last[1] + mean * weight) / (last[1] + weight)
                last[1] += weight
                last[2] += count
        levels = [mean for mean, _, count in pools for _ in range(int(count))]
        return list(zip(rows, levels, strict=True))
