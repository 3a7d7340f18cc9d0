"""How close decoding comes to the speed at which memory can be read.

Knows: the bytes that a step must read, and how to measure the bandwidth in the same run. Does not know: text.
"""

from __future__ import annotations

import time
from typing import Protocol

import torch
from torch import Tensor

from specgen.kernels.base import Kernels
from specgen.kernels.cpu.ops import CpuKernels
from specgen.measure.timer import Timer, timer_for
from specgen.model.decoder import Decoder

READ_BYTES = 256 << 20  # far larger than any cache


def weight_bytes(model: Decoder) -> int | None:
    """Bytes that one row's step reads: every linear once (the embedding only as the head). None where a step does not
    read all weights (experts), or the backend does not say how it keeps them."""
    if any(layer.moe is not None for layer in model.spec.layers):
        return None
    sizes = [getattr(linear, "nbytes", None) for _, linear in model.linears()]
    known = [size for size in sizes if isinstance(size, int)]
    return sum(known) if len(known) == len(sizes) else None


class Bandwidth(Protocol):
    """Measures what the memory can do at best."""

    what: str  # "read" or "copy"

    def gbps(self) -> float:
        """One reading, in GB/s."""
        ...


def bandwidth_of(kernels: Kernels) -> Bandwidth:
    """Of the memory that `kernels` work in."""
    device = kernels.device
    return ReadSpeed(kernels) if device.type == "cpu" else CopySpeed(device, timer_for(device))


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
