"""How to time on a machine that does other things too: in turns, many times, with the spread.

Knows: tasks that return a figure. Does not know: what they measure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of some measurements, and the quartiles around it."""

    low: float
    middle: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """None when there is nothing to sum up."""
        if not values:
            return None
        if len(values) == 1:
            return cls(values[0], values[0], values[0], 1)
        low, _, high = quantiles(values, n=4, method="inclusive")
        return cls(low, median(values), high, len(values))


def in_turns(tasks: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """`repeats` figures of each task. The tasks take turns, and every second round goes backwards, so that the
    machine's drift touches all of them alike."""
    found: dict[str, list[float]] = {name: [] for name in tasks}
    for turn in range(repeats):
        names = list(tasks)
        for name in names if turn % 2 == 0 else reversed(names):
            found[name].append(tasks[name]())
    return found


def interleaved(tasks: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, float]:
    """The median of each task, taken in turns."""
    return {name: median(values) for name, values in in_turns(tasks, repeats).items()}
