"""The few in-memory kinds of packed weight that every file format is turned into.

Knows: how packed bits decode to numbers (`dequantize` is the oracle of every kernel). Does not know: files, models,
devices' own layouts (a kernel backend lays a weight out for itself, see `kernels.Kernels.prepare`).

Letters: N outputs, K inputs, G groups along K (G = K / group).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class QuantLinear(Protocol):
    """A linear layer's weight, W (N, K), kept packed. `y = x @ W.T + bias`."""

    bias: Tensor | None  # (N,) float32

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)"""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes that one decoding step reads."""
        ...

    def dequantize(self) -> Tensor:
        """W (N, K) float32: slow, obvious, the oracle."""
        ...

    def rows(self, start: int, stop: int) -> QuantLinear:
        """Outputs start…stop-1 as a weight of their own (views, no copy)."""
        ...


def _nbytes(*tensors: Tensor | None) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def _slice(tensor: Tensor | None, start: int, stop: int) -> Tensor | None:
    return None if tensor is None else tensor[start:stop]


@dataclass(frozen=True, slots=True)
class Dense:
    """Unpacked weights, float32, float16 or bfloat16."""

    weight: Tensor  # (N, K)
    bias: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return (self.weight.shape[0], self.weight.shape[1])

    @property
    def nbytes(self) -> int:
        return _nbytes(self.weight, self.bias)

    def dequantize(self) -> Tensor:
        return self.weight.float()

    def rows(self, start: int, stop: int) -> Dense:
        return Dense(self.weight[start:stop], _slice(self.bias, start, stop))


@dataclass(frozen=True, slots=True)
class GroupedInt4:
    """W[n, k] = q[n, k] · scale[n, k // group] + min[n, k // group], q in 0…15.

    Byte j of a row holds k = 2j in its low and k = 2j + 1 in its high nibble. Scales and mins are float16 where the
    file's own values are exact in it, else float32.
    """

    nibbles: Tensor  # (N, K / 2) uint8
    scale: Tensor  # (N, G) float16 or float32
    min: Tensor  # (N, G) same dtype
    group: int
    bias: Tensor | None = None

    def __post_init__(self) -> None:
        n, half = self.nibbles.shape
        assert self.nibbles.dtype == torch.uint8
        assert half * 2 % self.group == 0
        assert self.scale.shape == self.min.shape == (n, half * 2 // self.group)
        assert self.scale.dtype == self.min.dtype

    @property
    def shape(self) -> tuple[int, int]:
        return (self.nibbles.shape[0], self.nibbles.shape[1] * 2)

    @property
    def nbytes(self) -> int:
        return _nbytes(self.nibbles, self.scale, self.min, self.bias)

    def dequantize(self) -> Tensor:
        q = torch.stack((self.nibbles & 0x0F, self.nibbles >> 4), dim=-1).reshape(self.shape).float()
        scale = self.scale.float().repeat_interleave(self.group, dim=1)
        low = self.min.float().repeat_interleave(self.group, dim=1)
        return q * scale + low

    def rows(self, start: int, stop: int) -> GroupedInt4:
        return GroupedInt4(
            self.nibbles[start:stop],
            self.scale[start:stop],
            self.min[start:stop],
            self.group,
            _slice(self.bias, start, stop),
        )


@dataclass(frozen=True, slots=True)
class GroupedInt8:
    """W[n, k] = q[n, k] · scale[n, k // group] (+ min[n, k // group]), q in -128…127.

    `group` may equal K (one scale per output). Holds every width from 5 to 8 bits.
    """

    q: Tensor  # (N, K) int8
    scale: Tensor  # (N, G) float16 or float32
    group: int
    min: Tensor | None = None  # (N, G), same dtype as scale
    bias: Tensor | None = None

    def __post_init__(self) -> None:
        n, k = self.q.shape
        assert self.q.dtype == torch.int8
        assert k % self.group == 0
        assert self.scale.shape == (n, k // self.group)

    @property
    def shape(self) -> tuple[int, int]:
        return (self.q.shape[0], self.q.shape[1])

    @property
    def nbytes(self) -> int:
        return _nbytes(self.q, self.scale, self.min, self.bias)

    def dequantize(self) -> Tensor:
        weight = self.q.float() * self.scale.float().repeat_interleave(self.group, dim=1)
        if self.min is not None:
            weight = weight + self.min.float().repeat_interleave(self.group, dim=1)
        return weight

    def rows(self, start: int, stop: int) -> GroupedInt8:
        return GroupedInt8(
            self.q[start:stop],
            self.scale[start:stop],
            self.group,
            _slice(self.min, start, stop),
            _slice(self.bias, start, stop),
        )


@dataclass(frozen=True, slots=True)
class Fp8:
    """W[n, k] = e4m3(q[n, k]) · scale[n // block_n, k // block_k]; ragged edges use the last block's scale.

    Per tensor: block (N, K). Per output channel: block (1, K). Fine-grained: block (128, 128).
    """

    q: Tensor  # (N, K) float8_e4m3fn
    scale: Tensor  # (ceil(N / block_n), ceil(K / block_k)) float32
    block: tuple[int, int]
    bias: Tensor | None = None

    def __post_init__(self) -> None:
        n, k = self.q.shape
        assert self.q.dtype == torch.float8_e4m3fn
        assert self.scale.shape == (-(-n // self.block[0]), -(-k // self.block[1]))

    @property
    def shape(self) -> tuple[int, int]:
        return (self.q.shape[0], self.q.shape[1])

    @property
    def nbytes(self) -> int:
        return _nbytes(self.q, self.scale, self.bias)

    def dequantize(self) -> Tensor:
        n, k = self.shape
        scale = self.scale.repeat_interleave(self.block[0], dim=0)[:n]
        return self.q.float() * scale.repeat_interleave(self.block[1], dim=1)[:, :k]

    def rows(self, start: int, stop: int) -> Fp8:
        # A scale per output row keeps the meaning when the cut is not on a block boundary.
        scale = self.scale.repeat_interleave(self.block[0], dim=0)[start:stop]
        return Fp8(self.q[start:stop], scale, (1, self.block[1]), _slice(self.bias, start, stop))


@dataclass(frozen=True, slots=True)
class Codebook4:
    """W[n, k] = code[q[n, k]] · scale[n, k // group], q in 0…15 (NF4, FP4, IQ4_NL); nibble order as GroupedInt4."""

    nibbles: Tensor  # (N, K / 2) uint8
    code: Tensor  # (16,) float32
    scale: Tensor  # (N, G) float16 or float32
    group: int
    bias: Tensor | None = None

    def __post_init__(self) -> None:
        n, half = self.nibbles.shape
        assert self.nibbles.dtype == torch.uint8
        assert self.code.shape == (16,)
        assert self.scale.shape == (n, half * 2 // self.group)

    @property
    def shape(self) -> tuple[int, int]:
        return (self.nibbles.shape[0], self.nibbles.shape[1] * 2)

    @property
    def nbytes(self) -> int:
        return _nbytes(self.nibbles, self.code, self.scale, self.bias)

    def dequantize(self) -> Tensor:
        q = torch.stack((self.nibbles & 0x0F, self.nibbles >> 4), dim=-1).reshape(self.shape)
        return self.code[q.long()] * self.scale.float().repeat_interleave(self.group, dim=1)

    def rows(self, start: int, stop: int) -> Codebook4:
        return Codebook4(
            self.nibbles[start:stop],
            self.code,
            self.scale[start:stop],
            self.group,
            _slice(self.bias, start, stop),
        )
