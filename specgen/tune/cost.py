"""What a step costs: the table t(R).

Knows: milliseconds seen for steps of R rows. Does not know: what ran them.

Machines are shared: a single step may take three times as long as the next, and minutes may be slower than others. So
a row count is worth the median of its latest measurements, and what all of them have in common, the pace of the
moment, is kept apart: a row count that was not tried for long follows the pace all the same.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from statistics import median

RECENT = 9
"""Latest measurements that a row count remembers."""
TRUST = 4
"""Of those, as many are taken to be what a calibrated table says."""
OUTLIER = 2.0
"""A first measurement counts as at most so many times what its neighbours let expect: there is no median of one."""
PACE = 7
"""Latest steps that say how fast the machine is now."""


class CostTable:
    """t(R) in milliseconds, measured where it can be and interpolated elsewhere; never falling with R."""

    def __init__(self, slope: float = 0.12, known_ms: Mapping[int, float] | None = None) -> None:
        """slope: assumed (t(R + 1) - t(R)) / t(1) before anything is known; known_ms: a calibrated table."""
        self.slope = slope
        # Milliseconds at pace 1, and their medians.
        self._seen = {rows: deque([ms] * TRUST, RECENT) for rows, ms in (known_ms or {}).items()}
        self._median = dict(known_ms or {})
        self._paces: deque[float] = deque([1.0] * TRUST, PACE)
        self._pace = 1.0
        self._points: list[tuple[int, float]] | None = None  # of `_monotone`, until the next measurement

    def observe(self, rows: int, ms: float) -> None:
        """A step of `rows` rows took `ms`."""
        pace = self._pace
        if rows not in self._seen:
            if not self.is_empty:
                ms = min(ms, OUTLIER * self.step_ms(rows))
            self._seen[rows] = deque(maxlen=RECENT)
        seen = self._seen[rows]
        if len(seen) >= TRUST:
            self._paces.append(ms / max(1e-9, self._median[rows]))
            self._pace = median(self._paces)
        seen.append(ms / pace)
        self._median[rows] = median(seen)
        self._points = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing was measured yet."""
        return not self._seen

    @property
    def known(self) -> dict[int, float]:
        """Milliseconds of the row counts that were measured, as of now."""
        return {rows: self._pace * ms for rows, ms in sorted(self._median.items())}

    def ratio(self, rows: int) -> float:
        """t(rows) / t(1) ≥ 1."""
        return self.step_ms(rows) / self.step_ms(1)

    def step_ms(self, rows: int) -> float:
        """t(rows); in units of t(1) = 1 while nothing is known."""
        if self._points is None:
            self._points = self._monotone()
        points = self._points
        if not points:
            return self._line(rows)
        index = bisect_left(points, (rows, 0.0))  # the first point that is as wide
        if index == len(points):
            return self._beyond(points, rows)
        r1, m1 = points[index]
        if r1 == rows:
            return m1
        if index == 0:
            # Only wider steps are known: assume the slope between.
            return m1 * self._line(rows) / self._line(r1)
        r0, m0 = points[index - 1]
        return m0 + (m1 - m0) * (rows - r0) / (r1 - r0)

    def _line(self, rows: int) -> float:
        """What is assumed of t(rows) / t(1)."""
        return 1.0 + self.slope * (rows - 1)

    def _beyond(self, points: list[tuple[int, float]], rows: int) -> float:
        """Extrapolation by the measured slope: hopeful, so that wider steps get tried, and then known."""
        (r0, m0), (r1, m1) = points[0], points[-1]
        if r0 == r1:
            return m1 * self._line(rows) / self._line(r1)
        return m1 + (m1 - m0) / (r1 - r0) * (rows - r1)

    def _monotone(self) -> list[tuple[int, float]]:
        """The measured points made non-decreasing (pool adjacent violators, weighted)."""
        rows = sorted(self._median)
        pools: list[list[float]] = []  # [weighted mean, weight, count of points]
        for r in rows:
            pools.append([self._pace * self._median[r], len(self._seen[r]), 1])
            while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
                mean, weight, count = pools.pop()
                last = pools[-1]
                last[0] = (last[0] * last[1] + mean * weight) / (last[1] + weight)
                last[1] += weight
                last[2] += count
        levels = [mean for mean, _, count in pools for _ in range(int(count))]
        return list(zip(rows, levels, strict=True))
