"""How to time on a machine that does other things too: in turns, many times, with the spread.

Knows: tasks that return a figure, and how work on a card is timed: by its own clock, and as one captured graph, since
starting a small kernel takes longer than running it. Does not know: what is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any, Protocol

import torch

Task = Callable[[], float]
"""One measurement: a figure."""


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


def in_turns(tasks: Mapping[str, Task], repeats: int) -> dict[str, list[float]]:
    """`repeats` figures of each task. The tasks take turns, and every second round goes backwards, so that the
    machine's drift touches all of them alike."""
    found: dict[str, list[float]] = {name: [] for name in tasks}
    for turn in range(repeats):
        names = list(tasks)
        for name in names if turn % 2 == 0 else reversed(names):
            found[name].append(tasks[name]())
    return found


def interleaved(tasks: Mapping[str, Task], repeats: int) -> dict[str, float]:
    """The median of each task, taken in turns."""
    return {name: median(values) for name, values in in_turns(tasks, repeats).items()}


class Timer(Protocol):
    """Times work on one device."""

    def task(self, work: Callable[[], object]) -> Task:
        """A task that does `work`, and returns the milliseconds that the device took."""
        ...

    def span(self, work: Callable[[], object], count: int) -> float:
        """Milliseconds of each of `count` calls, one behind the other without waiting in between: where the device is
        the slower one, its own time."""
        ...


class HostTimer:
    """Work is done when the call returns."""

    def task(self, work: Callable[[], object]) -> Task:
        def measure() -> float:
            begin = time.perf_counter()
            work()
            return 1e3 * (time.perf_counter() - begin)

        return measure

    def span(self, work: Callable[[], object], count: int) -> float:
        begin = time.perf_counter()
        for _ in range(count):
            work()
        return 1e3 * (time.perf_counter() - begin) / count


WARM_UPS = 3
"""Calls before a capture: Triton compiles in the first, and allocators settle."""


class CudaTimer:
    """Work is captured once and replayed, between two events of the card's clock. Work that cannot be captured is timed
    with its launches; `refused` then says why."""

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device = device
        self._cuda = cuda
        self.refused: str | None = None

    def task(self, work: Callable[[], object]) -> Task:
        with self._cuda.device(self._device):
            replay = self._captured(work)

        return lambda: self.span(replay, 1)

    def span(self, work: Callable[[], object], count: int) -> float:
        with self._cuda.device(self._device):
            begin, end = (self._cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(count):
                work()
            end.record()
            end.synchronize()
            return float(begin.elapsed_time(end)) / count

    def _captured(self, work: Callable[[], object]) -> Callable[[], object]:
        side = self._cuda.Stream()
        side.wait_stream(self._cuda.current_stream())
        with self._cuda.stream(side):
            for _ in range(WARM_UPS):
                work()
        self._cuda.current_stream().wait_stream(side)
        graph = self._cuda.CUDAGraph()
        try:
            with self._cuda.graph(graph):
                work()
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            self.refused = str(error).partition("\n")[0]
            return work
        replay: Callable[[], object] = graph.replay
        return replay


def timer_for(device: torch.device) -> Timer:
    return CudaTimer(device) if device.type == "cuda" else HostTimer()
