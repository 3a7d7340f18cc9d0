"""What a step costs: the table t(R).

Knows: milliseconds seen for steps of R rows. Does not know: what ran them.

Machines are shared: a single step may take three times as long as the next, and minutes may be slower than others. So
t(1) is the median of its latest measurements, and t(R) that of its latest ratios to the t(1) of the moment: a row count
that was not tried for long follows the machine's pace all the same.
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


class CostTable:
    """t(R) in milliseconds, measured where it can be and interpolated elsewhere; never falling with R."""

    def __init__(self, slope: float = 0.12, known_ms: Mapping[int, float] | None = None) -> None:
        """slope: assumed (t(R + 1) - t(R)) / t(1) before anything is known; known_ms: a calibrated table."""
        self.slope = slope
        known = known_ms or {}
        self._plain = deque([known[1]] * TRUST if 1 in known else [], RECENT)  # milliseconds
        self._base = known.get(1, 1.0)  # t(1); 1 ms until it was measured
        # Over the t(1) of their moment, and the medians of that.
        self._seen = {rows: deque([ms / self._base] * TRUST, RECENT) for rows, ms in known.items() if rows > 1}
        self._ratio = {rows: ms / self._base for rows, ms in known.items() if rows > 1}
        self._points: list[tuple[int, float]] | None = None  # of `_monotone`, until the next measurement

    def observe(self, rows: int, ms: float) -> None:
        """A step of `rows` rows took `ms`."""
        known = rows in self._seen or (rows == 1 and self._plain)
        if not known and not self.is_empty:
            ms = min(ms, OUTLIER * self.step_ms(rows))
        if rows == 1:
            self._observe_plain(ms)
        else:
            seen = self._seen.setdefault(rows, deque(maxlen=RECENT))
            seen.append(ms / self._base)
            self._ratio[rows] = median(seen)
        self._points = None

    def _observe_plain(self, ms: float) -> None:
        first = not self._plain
        self._plain.append(ms)
        self._base = max(1e-9, median(self._plain))
        if first:  # until now the ratios were milliseconds
            self._seen = {rows: deque((r / self._base for r in seen), RECENT) for rows, seen in self._seen.items()}
            self._ratio = {rows: median(seen) for rows, seen in self._seen.items()}

    @property
    def is_empty(self) -> bool:
        """Whether nothing was measured yet."""
        return not self._seen and not self._plain

    @property
    def known(self) -> dict[int, float]:
        """Milliseconds of the row counts that were measured, as of now."""
        plain = {1: self._base} if self._plain else {}
        return plain | {rows: self._base * ratio for rows, ratio in sorted(self._ratio.items())}

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
        known = self.known
        pools: list[list[float]] = []  # [weighted mean, weight, count of points]
        for rows, ms in known.items():
            pools.append([ms, len(self._plain if rows == 1 else self._seen[rows]), 1])
            while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
                mean, weight, count = pools.pop()
                last = pools[-1]
                last[0] = (last[0] * last[1] + mean * weight) / (last[1] + weight)
                last[1] += weight
                last[2] += count
        levels = [mean for mean, _, count in pools for _ in range(int(count))]
        return list(zip(known, levels, strict=True))
