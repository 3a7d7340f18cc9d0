"""The ops of a decoding step: one op = one name in every backend, and the choice of a backend.

Knows: which backend suits a device, and what it costs when the best one cannot be had. Does not know: models.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specgen.errors import SpecgenError, UsageError, nearest

if TYPE_CHECKING:
    from specgen.kernels.base import Kernels

DEVICES = ("auto", "cpu")


def select_kernels(device: str = "auto", threads: int | None = None) -> tuple[Kernels, str | None]:
    """The fastest backend that works here, and one line for the user when that is not the intended one.

    `threads`: None means all that the process may use. UsageError for a device that is not known.
    """
    if device not in DEVICES:
        raise UsageError(f"the device {device!r} is not known", hint=nearest(device, DEVICES) or "known: auto, cpu")
    try:
        from specgen.kernels.cpu import load_cpu_kernels

        return load_cpu_kernels(threads), None
    except SpecgenError as error:
        from specgen.kernels.torch_cpu import TorchKernels

        return TorchKernels(threads), f"running on torch's own ops, several times slower: {error.message}"
