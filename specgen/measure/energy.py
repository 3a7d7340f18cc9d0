"""Energy, where the platform counts it: RAPL's counters on Linux, NVML's on NVIDIA cards.

Knows: how to read a growing number of joules. Does not know: what used them; everything else that runs is in them too.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")

Meter = Callable[[], float]
"""Joules since some moment, growing."""


class RaplMeter:
    """The packages' counters, which begin again at zero from time to time (kernel documentation: power capping)."""

    def __init__(self, zones: list[Path]) -> None:
        self._zones = zones
        self._spans = [_number(zone / "max_energy_range_uj") for zone in zones]
        self._last = [self._read(zone) for zone in zones]
        self._total_uj = 0

    def __call__(self) -> float:
        for index, zone in enumerate(self._zones):
            now = self._read(zone)
            grown = now - self._last[index]
            self._total_uj += grown if grown >= 0 else grown + self._spans[index]
            self._last[index] = now
        return self._total_uj / 1e6

    @staticmethod
    def _read(zone: Path) -> int:
        return _number(zone / "energy_uj")


def _number(path: Path) -> int:
    return int(path.read_text())


def energy_meter(device: str, powercap: Path = POWERCAP) -> Meter | None:
    """A meter for the device that works, or None where nothing is counted (or only root may read it)."""
    return _nvml(device) if device.startswith("cuda") else _rapl(powercap)


def _rapl(folder: Path) -> Meter | None:
    # One colon: a whole package. Two: a part of it, which would count twice.
    zones = [zone for zone in sorted(folder.glob("*-rapl:*")) if zone.name.count(":") == 1]
    try:
        return RaplMeter(zones) if zones else None
    except (OSError, ValueError):
        return None


def _nvml(device: str) -> Meter | None:
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(int(device.partition(":")[2] or 0))
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except pynvml.NVMLError:
        return None
    return lambda: float(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3
