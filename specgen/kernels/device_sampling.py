"""How to choose tokens, as tensors on the device: one captured graph serves every setting, seed and position.

Knows: where each number stands. Does not know: kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specgen.kernels.base import Truncation

_WORD = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class DeviceCut:
    """`Truncation` on the device."""

    values: Tensor  # (4,) float64: temperature, top_k, top_p, min_p
    ranked: bool  # False: neither top_k nor top_p is used, nor ever will be, so a graph leaves out their passes

    def write(self, cut: Truncation) -> None:
        """Put other settings into the same memory."""
        assert self.ranked or not is_ranked(cut)
        self.values.copy_(_cut_values(cut))


@dataclass(frozen=True, slots=True)
class DeviceNoise:
    """`Noise` of R rows on the device. A row at position p chooses the token at p + 1, and draws with that position."""

    key: Tensor  # (3,) int64: the seed's low and high 32 bits, purpose
    positions: Tensor  # (R,) int32: the rows' own, as in DeviceAttend

    def write(self, seed: int, purpose: int = 0) -> None:
        """Put another seed and purpose into the same memory."""
        self.key.copy_(_key(seed, purpose))


def _cut_values(cut: Truncation) -> Tensor:
    return torch.tensor([cut.temperature, float(cut.top_k), cut.top_p, cut.min_p], dtype=torch.float64)


def _key(seed: int, purpose: int) -> Tensor:
    assert 0 <= seed < 1 << 64
    return torch.tensor([seed & _WORD, seed >> 32, purpose], dtype=torch.int64)


def is_ranked(cut: Truncation) -> bool:
    """Whether `cut` keeps a part of the ranking."""
    return cut.top_k > 0 or cut.top_p < 1.0


def device_cut(cut: Truncation, device: torch.device | str, ranked: bool | None = None) -> DeviceCut:
    """`cut` on `device`. ranked: whether top_k or top_p may be used in what is written later (None: as in `cut`)."""
    return DeviceCut(_cut_values(cut).to(device), is_ranked(cut) if ranked is None else ranked)


def device_noise(seed: int, positions: Tensor, purpose: int = 0) -> DeviceNoise:
    """The noise of rows at `positions` (R,) int32, on their device."""
    return DeviceNoise(_key(seed, purpose).to(positions.device), positions)
