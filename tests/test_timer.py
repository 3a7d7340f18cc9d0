"""Timing in turns, spreads, and energy counters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from specgen.kernels.reference import ReferenceKernels
from specgen.machine import processor_name
from specgen.measure.energy import energy_meter
from specgen.measure.roofline import CopySpeed, bandwidth_of
from specgen.measure.timer import WARM_UPS, CudaTimer, HostTimer, Spread, in_turns, interleaved, timer_for


def test_tasks_take_turns_and_every_second_round_goes_backwards() -> None:
    order: list[str] = []

    def task(name: str) -> float:
        order.append(name)
        return float(len(order))

    found = in_turns({name: lambda name=name: task(name) for name in "abc"}, 3)  # type: ignore[misc]
    assert "".join(order) == "abccbaabc"
    assert found == {"a": [1.0, 6.0, 7.0], "b": [2.0, 5.0, 8.0], "c": [3.0, 4.0, 9.0]}


def test_a_pause_does_not_move_the_median() -> None:
    times = iter([1.0, 100.0, 1.0])
    assert interleaved({"x": lambda: next(times)}, 3) == {"x": 1.0}


def test_spread() -> None:
    assert Spread.of([]) is None
    assert Spread.of([2.0]) == Spread(2.0, 2.0, 2.0, 1)
    assert Spread.of([1.0, 2.0, 3.0, 4.0, 5.0]) == Spread(2.0, 3.0, 4.0, 5)


class FakeCuda:
    """torch.cuda as far as a timer needs it: a clock that work advances, and a graph that plays back."""

    def __init__(self, capture_error: Exception | None = None) -> None:
        self.now_ms = 0.0
        self.capture_error = capture_error
        self.capturing: list[float] | None = None
        self.devices: list[torch.device] = []

    def work(self) -> None:
        """3 ms on the card, behind 20 of starting it."""
        if self.capturing is not None:
            self.capturing.append(3.0)
        else:
            self.now_ms += 20.0 + 3.0

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        self.devices.append(device)
        yield

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        yield

    @contextmanager
    def graph(self, graph: Any) -> Iterator[None]:
        self.capturing = graph.played = []
        try:
            if self.capture_error is not None:
                raise self.capture_error
            yield
        finally:
            self.capturing = None

    def CUDAGraph(self) -> Any:  # noqa: N802
        cuda = self

        class Graph:
            played: list[float]

            def replay(self) -> None:
                cuda.now_ms += sum(self.played)

        return Graph()

    def Stream(self) -> Any:  # noqa: N802
        return self.current_stream()

    def current_stream(self) -> Any:
        class Stream:
            def wait_stream(self, other: Any) -> None:
                pass

        return Stream()

    def Event(self, enable_timing: bool) -> Any:  # noqa: N802
        cuda = self
        assert enable_timing

        class Event:
            at = -1.0

            def record(self) -> None:
                self.at = cuda.now_ms

            def synchronize(self) -> None:
                assert self.at >= 0

            def elapsed_time(self, end: Any) -> float:
                return float(end.at - self.at)

        return Event()


def test_work_on_a_card_is_timed_without_its_launches() -> None:
    cuda = FakeCuda()
    task = CudaTimer(torch.device("cuda:1"), cuda).task(cuda.work)
    assert cuda.now_ms == WARM_UPS * 23.0
    assert [task(), task()] == [3.0, 3.0]
    assert CudaTimer(torch.device("cuda:1"), cuda).span(cuda.work, 4) == 23.0
    assert set(cuda.devices) == {torch.device("cuda:1")}


def test_work_that_cannot_be_captured_is_timed_with_them() -> None:
    cuda = FakeCuda(RuntimeError("operation not permitted when stream is capturing\nmore"))
    timer = CudaTimer(torch.device("cuda:0"), cuda)
    assert timer.task(cuda.work)() == 23.0
    assert timer.refused == "operation not permitted when stream is capturing"


def test_a_capture_without_memory_is_no_other_way_of_timing() -> None:
    cuda = FakeCuda(torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(torch.OutOfMemoryError):
        CudaTimer(torch.device("cuda:0"), cuda).task(cuda.work)


def test_the_processor_is_timed_by_the_clock() -> None:
    calls: list[int] = []
    timer = timer_for(torch.device("cpu"))
    assert isinstance(timer, HostTimer)
    assert timer.task(lambda: calls.append(1))() >= 0
    assert calls == [1]
    assert timer.span(lambda: calls.append(1), 3) >= 0
    assert len(calls) == 4
    assert isinstance(timer_for(torch.device("cuda:0")), CudaTimer)


def test_a_copy_moves_every_byte_twice() -> None:
    class Two:
        def task(self, work: Any) -> Any:
            work()
            return lambda: 2.0

        def span(self, work: Any, count: int) -> float:
            raise AssertionError

    speed = CopySpeed(torch.device("cpu"), Two(), size_bytes=1 << 20)
    assert speed.gbps() == pytest.approx(2 * (1 << 20) / 2e-3 / 1e9)
    assert bandwidth_of(ReferenceKernels()).what == "read"


def zone(folder: Path, name: str, microjoules: int, span: int = 1_000_000) -> Path:
    path = folder / name
    path.mkdir()
    (path / "energy_uj").write_text(f"{microjoules}\n")
    (path / "max_energy_range_uj").write_text(f"{span}\n")
    return path


def test_energy_counters_are_summed_and_may_begin_again(tmp_path: Path) -> None:
    one, two = zone(tmp_path, "intel-rapl:0", 900_000), zone(tmp_path, "intel-rapl:1", 0)
    zone(tmp_path, "intel-rapl:0:0", 5)  # a part of the first: not counted twice
    meter = energy_meter("cpu", tmp_path)
    assert meter is not None
    assert meter() == 0.0
    (one / "energy_uj").write_text("100000")  # 200,000 µJ later, past the end of the counter
    (two / "energy_uj").write_text("300000")
    assert meter() == pytest.approx(0.5)


def test_no_counter_no_meter(tmp_path: Path) -> None:
    assert energy_meter("cpu", tmp_path / "nowhere") is None
    (tmp_path / "intel-rapl:0").mkdir()  # readable by root alone, or broken
    assert energy_meter("cpu", tmp_path) is None


def test_processor_name(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nmodel name\t: Some  CPU @ 3 GHz\n")
    assert processor_name(file) == "Some CPU @ 3 GHz"
    assert processor_name(tmp_path / "nowhere")
