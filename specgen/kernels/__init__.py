"""The ops of a decoding step: one op = one name in every backend, and the choice of a backend.

Knows: which backend suits a device, and what it costs when the best one cannot be had. Does not know: models.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specgen.errors import DeviceError, SpecgenError

if TYPE_CHECKING:
    from specgen.kernels.base import Kernels
    from specgen.kernels.cuda import Card


def select_kernels(card: Card | None = None, threads: int | None = None) -> tuple[Kernels, str | None]:
    """The fastest backend that works on `card` (None: on the processor), and one line for the user when that is not the
    intended one.

    `threads`: None means all that the process may use. DeviceError when the card has no kernels after all.
    """
    if card is not None:
        return _card_kernels(card), None
    try:
        from specgen.kernels.cpu import load_cpu_kernels

        return load_cpu_kernels(threads), None
    except SpecgenError as error:
        from specgen.kernels.torch_cpu import TorchKernels

        return TorchKernels(threads), f"running on torch's own ops, several times slower: {error.message}"


def _card_kernels(card: Card) -> Kernels:
    import torch

    try:
        from specgen.kernels.triton_ops import TritonKernels
    except ImportError as error:
        raise DeviceError(f"Triton cannot be imported: {error}", "install the Triton that torch asks for") from error
    return TritonKernels(torch.device(card.device))
