"""The few in-memory kinds of packed weight that every file format is turned into.

Knows: how packed bits decode to numbers (`dequantize` is the oracle of every kernel). Does not know: files, models,
devices' own layouts (a kernel backend lays a weight out for itself, see `kernels.Kernels.prepare`).

Letters: N outputs, K inputs, G groups along K (G = K / group).

Two things that a kernel's `prepare` must heed: a scale or min may be `Nested` (`.float()` gives its numbers), and
`perm`, where it is not None, says which input each stored column multiplies: y = x[:, perm] @ stored.T.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor


class QuantLinear(Protocol):
    """A linear layer's weight, W (N, K), kept packed. `y = x @ W.T + bias`."""

    @property
    def bias(self) -> Tensor | None:
        """(N,) float32"""
        ...

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


@dataclass(frozen=True, slots=True)
class Nested:
    """Numbers (N, G) kept as small integers times coarser scales: value[n, g] = inner[n, g] · outer[n, g // (G / O)].

    The scales of K-quants are stored this way, and a zero point z is the min -z · scale (O = G). The product is exact
    in float32, which float16 would not hold, at fewer bytes than float32. `.float()`, `.shape` and slices of rows mean
    what they mean for a tensor, so that code can take either.
    """

    inner: Tensor  # (N, G) int8, uint8 or int16
    outer: Tensor  # (N, O) float16 or float32, O divides G

    def __post_init__(self) -> None:
        assert not self.inner.is_floating_point()
        assert self.inner.shape[0] == self.outer.shape[0]
        assert self.inner.shape[1] % self.outer.shape[1] == 0

    @property
    def shape(self) -> torch.Size:
        return self.inner.shape

    def float(self) -> Tensor:
        """(N, G) float32"""
        ratio = self.inner.shape[1] // self.outer.shape[1]
        return self.inner.float() * self.outer.float().repeat_interleave(ratio, dim=1)

    def __getitem__(self, rows: slice) -> Nested:
        return Nested(self.inner[rows], self.outer[rows])


GroupValues = Tensor | Nested
"""One number per output and group, (N, G)."""


def _nbytes(*parts: GroupValues | None) -> int:
    """Bytes of all tensors; one that is used twice (a scale inside a Nested min) counts once."""
    return sum(nbytes for _, nbytes in {(tensor.data_ptr(), tensor.nbytes) for tensor in _tensors(parts)})


def _tensors(parts: tuple[GroupValues | None, ...]) -> Iterator[Tensor]:
    for part in parts:
        if isinstance(part, Nested):
            yield from (part.inner, part.outer)
        elif part is not None:
            yield part


def _slice(tensor: Tensor | None, start: int, stop: int) -> Tensor | None:
    return None if tensor is None else tensor[start:stop]


def _undo(weight: Tensor, perm: Tensor | None) -> Tensor:
    """Columns (N, K) back in the order of the inputs: column j goes to perm[j]."""
    if perm is None:
        return weight
    result = torch.empty_like(weight)
    result[:, perm.long()] = weight
    return result


def unpack_nibbles(nibbles: Tensor) -> Tensor:
    """Bytes (…, K / 2) → values 0…15 (…, K) uint8, the low nibble first."""
    return torch.stack((nibbles & 0x0F, nibbles >> 4), dim=-1).flatten(-2)


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
    scale: GroupValues  # (N, G) float16 or float32, or Nested
    min: GroupValues  # (N, G) the same dtype, or Nested
    group: int
    bias: Tensor | None = None
    perm: Tensor | None = None  # (K,) int32: stored column j multiplies input perm[j]

    def __post_init__(self) -> None:
        n, half = self.nibbles.shape
        assert self.nibbles.dtype == torch.uint8
        assert half * 2 % self.group == 0
        assert self.scale.shape == self.min.shape == (n, half * 2 // self.group)
        assert self.perm is None or self.perm.shape == (half * 2,)

    @property
    def shape(self) -> tuple[int, int]:
        return (self.nibbles.shape[0], self.nibbles.shape[1] * 2)

    @property
    def nbytes(self) -> int:
        return _nbytes(self.nibbles, self.scale, self.min, self.bias, self.perm)

    def dequantize(self) -> Tensor:
        q = unpack_nibbles(self.nibbles).float()
        scale = self.scale.float().repeat_interleave(self.group, dim=1)
        low = self.min.float().repeat_interleave(self.group, dim=1)
        return _undo(q * scale + low, self.perm)

    def rows(self, start: int, stop: int) -> GroupedInt4:
        return GroupedInt4(
            self.nibbles[start:stop],
            self.scale[start:stop],
            self.min[start:stop],
            self.group,
            _slice(self.bias, start, stop),
            self.perm,
        )


@dataclass(frozen=True, slots=True)
class GroupedInt8:
    """W[n, k] = q[n, k] · scale[n, k // group] (+ min[n, k // group]), q in -128…127.

    `group` may equal K (one scale per output). Holds every width from 5 to 8 bits.
    """

    q: Tensor  # (N, K) int8
    scale: GroupValues  # (N, G) float16 or float32, or Nested
    group: int
    min: GroupValues | None = None  # (N, G) the same dtype, or Nested
    bias: Tensor | None = None
    perm: Tensor | None = None  # (K,) int32: stored column j multiplies input perm[j]

    def __post_init__(self) -> None:
        n, k = self.q.shape
        assert self.q.dtype == torch.int8
        assert k % self.group == 0
        assert self.scale.shape == (n, k // self.group)
        assert self.min is None or self.min.shape == self.scale.shape
        assert self.perm is None or self.perm.shape == (k,)

    @property
    def shape(self) -> tuple[int, int]:
        return (self.q.shape[0], self.q.shape[1])

    @property
    def nbytes(self) -> int:
        return _nbytes(self.q, self.scale, self.min, self.bias, self.perm)

    def dequantize(self) -> Tensor:
        weight = self.q.float() * self.scale.float().repeat_interleave(self.group, dim=1)
        if self.min is not None:
            weight = weight + self.min.float().repeat_interleave(self.group, dim=1)
        return _undo(weight, self.perm)

    def rows(self, start: int, stop: int) -> GroupedInt8:
        return GroupedInt8(
            self.q[start:stop],
            self.scale[start:stop],
            self.group,
            None if self.min is None else self.min[start:stop],
            _slice(self.bias, start, stop),
            self.perm,
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
    scale: GroupValues  # (N, G) float16 or float32, or Nested
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
        q = unpack_nibbles(self.nibbles)
        return self.code[q.long()] * self.scale.float().repeat_interleave(self.group, dim=1)

    def rows(self, start: int, stop: int) -> Codebook4:
        return Codebook4(
            self.nibbles[start:stop],
            self.code,
            self.scale[start:stop],
            self.group,
            _slice(self.bias, start, stop),
        )


Packed = TypeVar("Packed", bound=Dense | GroupedInt4 | GroupedInt8 | Fp8 | Codebook4)


def to_device(weight: Packed, device: torch.device) -> Packed:
    """The same weight with every tensor on `device`; a tensor used twice is copied once."""
    moved: dict[int, Tensor] = {}

    def move(tensor: Tensor) -> Tensor:
        if id(tensor) not in moved:
            moved[id(tensor)] = tensor.to(device)
        return moved[id(tensor)]

    changes: dict[str, Any] = {}
    for field in fields(weight):
        value = getattr(weight, field.name)
        if isinstance(value, Tensor):
            changes[field.name] = move(value)
        elif isinstance(value, Nested):
            changes[field.name] = Nested(move(value.inner), move(value.outer))
    return replace(weight, **changes)
