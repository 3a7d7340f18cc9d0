"""Timing in turns, spreads, and energy counters."""

from __future__ import annotations

from pathlib import Path

import pytest

from specgen.machine import processor_name
from specgen.measure.energy import energy_meter
from specgen.measure.timer import Spread, in_turns, interleaved


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
