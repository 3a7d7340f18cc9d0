"""What a step costs: the table t(R).

Knows: milliseconds seen for steps of R rows. Does not know: what ran them.

Machines are shared: a single step may take three times as long as the next, and minutes may be slower than others. So
t(1) is the median of its latest measurements, and t(R) that of its latest ratios to the t(1) of the moment: a row count
that was not tried for long follows the machine's pace all the same.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from operator import le
from statistics import median

RECENT = 9
"""Latest measurements that a row count remembers."""
TRUST = 4
"""Of those, as many are taken to be what a calibrated table says."""
OUTLIER = 2.0
"""A first measurement counts as at most so many times what its neighbours let expect: there is no median of one."""


class CostTable:
    """t(R) in milliseconds, measured where it can be and interpolated elsewhere; never falling with R."""

    def __init__(self, slope: float = 0.12, known_ms: Mapping[int, float | Sequence[float]] | None = None) -> None:
        """slope: assumed (t(R + 1) - t(R)) / t(1) before anything is known; known_ms: by rows, what a calibrated table
        says, or measurements from before (`latest` of another table)."""
        self.slope = slope
        seen = {rows: [ms] * TRUST if isinstance(ms, int | float) else ms for rows, ms in (known_ms or {}).items()}
        self._plain = deque(seen.get(1, ()), RECENT)  # milliseconds
        self._base = median(self._plain) if self._plain else 1.0  # t(1); 1 ms until it was measured
        # Over the t(1) of their moment, and the medians of that, by ascending rows.
        self._seen = {rows: deque((ms / self._base for ms in seen[rows]), RECENT) for rows in sorted(seen) if rows > 1}
        self._ratio = {rows: median(ratios) for rows, ratios in self._seen.items()}
        # What is known, made non-decreasing: rows, and their times over t(1). Until one of them changes, like what was
        # asked for of others.
        self._rows: list[int] = []
        self._levels: list[float] = []
        self._asked: dict[int, float] = {}

    def observe(self, rows: int, ms: float) -> None:
        """A step of `rows` rows took `ms`."""
        known = rows in self._seen or (rows == 1 and self._plain)
        if not known and not self.is_empty:
            ms = min(ms, OUTLIER * self.step_ms(rows))
        if rows == 1:
            self._observe_plain(ms)
        else:
            self._observe_wide(rows, ms / self._base)

    def _observe_plain(self, ms: float) -> None:
        first = not self._plain
        self._plain.append(ms)
        self._base = max(1e-9, median(self._plain))
        if first:  # until now the ratios were milliseconds
            self._seen = {rows: deque((r / self._base for r in seen), RECENT) for rows, seen in self._seen.items()}
            self._ratio = {rows: median(seen) for rows, seen in self._seen.items()}
            self._asked.clear()

    def _observe_wide(self, rows: int, ratio: float) -> None:
        seen = self._seen.setdefault(rows, deque(maxlen=RECENT))
        seen.append(ratio)
        found = median(seen)
        if self._ratio.get(rows) != found:
            self._ratio = dict(sorted((self._ratio | {rows: found}).items()))
            self._asked.clear()

    @property
    def is_empty(self) -> bool:
        """Whether nothing was measured yet."""
        return not self._seen and not self._plain

    @property
    def known(self) -> dict[int, float]:
        """Milliseconds of the row counts that were measured, as of now."""
        plain = {1: self._base} if self._plain else {}
        return plain | {rows: self._base * ratio for rows, ratio in self._ratio.items()}

    @property
    def latest(self) -> dict[int, tuple[float, ...]]:
        """The measurements behind `known`, in milliseconds as of now: handed on, they are outvoted by later ones, as a
        median alone would never be by the few that one answer brings. Of one row there is t(1), which the others are
        measured by."""
        plain = {1: (self._base,) * TRUST} if self._plain else {}
        return plain | {rows: tuple(self._base * ratio for ratio in self._seen[rows]) for rows in self._ratio}

    def step_ms(self, rows: int) -> float:
        """t(rows); in units of t(1) = 1 while nothing is known."""
        return self._base * self._relative(rows)

    def ratio(self, rows: int) -> float:
        """t(rows) / t(1) ≥ 1."""
        return self._relative(rows) / self._relative(1)

    def _relative(self, rows: int) -> float:
        """t(rows) over the base, which is t(1) unless some wider step was faster."""
        if not self._asked:
            self._rows, self._levels = self._monotone()
        found = self._asked.get(rows)
        if found is None:
            found = self._asked[rows] = self._estimate(rows)
        return found

    def _estimate(self, rows: int) -> float:
        known, levels = self._rows, self._levels
        if not known:
            return self._line(rows)
        index = bisect_left(known, rows)  # the first that is as wide
        if index == len(known):
            return self._beyond(rows)
        if known[index] == rows:
            return levels[index]
        if index == 0:
            # Only wider steps are known: assume the slope between.
            return levels[0] * self._line(rows) / self._line(known[0])
        share = (rows - known[index - 1]) / (known[index] - known[index - 1])
        return levels[index - 1] + share * (levels[index] - levels[index - 1])

    def _line(self, rows: int) -> float:
        """What is assumed of t(rows) / t(1)."""
        return 1.0 + self.slope * (rows - 1)

    def _beyond(self, rows: int) -> float:
        """Extrapolation by the measured slope: hopeful, so that wider steps get tried, and then known."""
        (r0, m0), (r1, m1) = (self._rows[0], self._levels[0]), (self._rows[-1], self._levels[-1])
        if r0 == r1:
            return m1 * self._line(rows) / self._line(r1)
        return m1 + (m1 - m0) / (r1 - r0) * (rows - r1)

    def _monotone(self) -> tuple[list[int], list[float]]:
        """What was measured, made non-decreasing (pool adjacent violators, weighted): (rows, times over the base)."""
        weights = {1: len(self._plain)} if self._plain else {}
        weights |= {rows: len(self._seen[rows]) for rows in self._ratio}
        rows, levels = list(weights), [1.0] * (1 if self._plain else 0) + list(self._ratio.values())
        if all(map(le, levels, levels[1:])):
            return rows, levels
        pools: list[list[float]] = []  # [weighted mean, weight, count of points]
        for level, weight in zip(levels, weights.values(), strict=True):
            pools.append([level, weight, 1])
            while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
                mean, more, merged = pools.pop()
                last = pools[-1]
                last[0] = (last[0] * last[1] + mean * more) / (last[1] + more)
                last[1] += more
                last[2] += merged
        return rows, [mean for mean, _, merged in pools for _ in range(int(merged))]
