"""How close decoding comes to the speed at which memory can be read.

Knows: the bytes that a step must read, and how to measure the bandwidth in the same run. Does not know: text.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch
from torch import Tensor

from specgen.kernels.cpu.ops import CpuKernels
from specgen.measure.timer import Timer, timer_for
from specgen.model.decoder import Decoder
from specgen.model.weights import MlpWeights

READ_BYTES = 256 << 20  # far larger than any cache


def weight_bytes(model: Decoder) -> int | None:
    """Bytes that one row's step reads: every linear once (the embedding only as the head). None where a step does not
    read all weights (experts), or the backend does not say how it keeps them."""
    total = 0
    parts: list[Any] = [model.weights.head]
    for layer in model.weights.layers:
        if not isinstance(layer.mlp, MlpWeights):
            return None
        parts += [layer.q, layer.k, layer.v, layer.o, layer.mlp.gate, layer.mlp.up, layer.mlp.down]
    for part in parts:
        size = getattr(part, "nbytes", None)
        if not isinstance(size, int):
            return None
        total += size
    return total


class Bandwidth(Protocol):
    """Measures what the memory can do at best."""

    what: str  # "read" or "copy"

    def gbps(self) -> float:
        """One reading, in GB/s."""
        ...


def bandwidth_of(kernels: object) -> Bandwidth:
    """Of the memory that `kernels` work in."""
    device = device_of(kernels)
    return ReadSpeed(kernels) if device.type == "cpu" else CopySpeed(device, timer_for(device))


def device_of(kernels: object) -> torch.device:
    """Kernels of a card say which."""
    device = getattr(kernels, "device", None)
    return device if isinstance(device, torch.device) else torch.device("cpu")


class CopySpeed:
    """Measures a copy within a device's memory: every byte is read once and written once."""

    what = "copy"

    def __init__(self, device: torch.device, timer: Timer, size_bytes: int = READ_BYTES) -> None:
        source = torch.ones(size_bytes, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        self._moved = 2 * size_bytes
        self._task = timer.task(lambda: target.copy_(source))

    def gbps(self) -> float:
        return self._moved / (self._task() * 1e6)


class ReadSpeed:
    """Measures the read bandwidth of the memory, with the threads that the kernels use."""

    what = "read"

    def __init__(self, kernels: object, size_bytes: int = READ_BYTES) -> None:
        self._kernels = kernels
        self._data = torch.ones(size_bytes, dtype=torch.uint8)

    def gbps(self) -> float:
        begin = time.perf_counter()
        self._read(self._data)
        return self._data.numel() / (time.perf_counter() - begin) / 1e9

    def _read(self, data: Tensor) -> None:
        if isinstance(self._kernels, CpuKernels):
            self._kernels.read(data)
        else:
            data.view(torch.int64).sum()
