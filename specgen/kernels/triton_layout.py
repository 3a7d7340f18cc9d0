"""Packed weights laid out for the matrix kernels of a graphics card.

Knows: the order of the bytes in memory, and how a shape is cut into programs. Does not know: Triton; `triton_linear`
reads what is laid out here.

The order. Outputs are padded to N' (a multiple of 64), inputs to K' (a multiple of a step). K' is cut into blocks of
PER · SUB inputs, PER being the values in 16 bits (4 nibbles, 2 bytes, or 1 float), and 16-bit element j of a block
holds inputs j, SUB + j, 2 SUB + j, …, lowest bits first:

    words[block, n, j]   (K' / (PER · SUB), N', SUB), 16 bits each

So one shift and one mask over 32 bits give a pair of neighbouring inputs, which is how matrix instructions want them;
SUB is at most a group, so that a group's scale multiplies a whole dot product; and the tile that a program reads at
once, 64 outputs of one block, is 64 · SUB · 2 contiguous bytes (4 KiB of int4 in groups of 32 or more), which its 64
threads fetch 16 bytes each. Along K, what a program reads next is N' · SUB · 2 bytes further on: whole DRAM bursts.

Scales and mins are (G, N'): the values of a tile's outputs are neighbours. A `Nested` one stays nested (an AWQ min is
-zero · scale, a K-quant's scale 6 bits · float16), since a float32 in its place would add a sixth to the bytes of int4
in groups of 32; plain ones stay float16 or float32 as they came. int4 whose mins are all -8 · scale keeps none.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from math import gcd

import torch
from torch import Tensor

from specgen.errors import ModelError
from specgen.weights.packed import (
    Codebook4,
    Dense,
    Fp8,
    GroupedInt4,
    GroupedInt8,
    GroupValues,
    Nested,
    QuantLinear,
    unpack_nibbles,
)

STEP = 128
"""Inputs of a quantised weight that one iteration of a program takes."""

BLOCK_N = 64
"""Outputs of a program: two warps of two matrix instructions each. Fewer would read the activations more often (each
program reads its share of them once), more would leave small weights with too few programs."""

PROGRAMS = 512
"""Programs wanted for a weight: enough for four on each of 128 processors, whatever the card: a count that followed
the card would make a model's logits follow it too. With four stages each keeps 12 KiB of int4 in flight; 0.5 µs of
latency at 1 TB/s needs 500 KiB on the whole card."""

LEAST_STEPS = 4
"""Iterations that a program is worth starting for: as many as the stages of its pipeline."""

MOST_SPLITS = 16

PARTED_ROWS = 64
"""Rows for which the parts of K are programs of their own; with more there are programs enough."""

LEAST_ROWS = 8
"""Rows of the smallest program."""

LEAST_GROUP = 16
"""A matrix instruction takes 16 inputs at once."""

CHUNK_OUTPUTS = 8192
"""Outputs that are laid out at once: bounds the memory that unpacked values take meanwhile."""

E4M3_SCALE = 2.0**8
"""What e4m3 bits moved into a float16 fall short of: the exponents' biases are 7 and 15."""


class Kind(IntEnum):
    """How 16 bits decode."""

    DENSE = 0
    INT4 = 1
    INT8 = 2
    FP8 = 3
    CODE4 = 4


VALUES_PER_WORD = {Kind.DENSE: 1, Kind.INT4: 4, Kind.INT8: 2, Kind.FP8: 2, Kind.CODE4: 4}


@dataclass(frozen=True, slots=True)
class Values:
    """A scale or min per group and `span` outputs: inner[g, n // span] (· outer[g // ratio, n // span])."""

    inner: Tensor  # (G', N' / span): float16 or float32, or an integer type with outer
    outer: Tensor | None = None  # (ceil(G' / ratio), N' / span) float16 or float32
    ratio: int = 0
    span: int = 1

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.inner,) if self.outer is None else (self.inner, self.outer)


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a weight is cut: a function of its shape and kind alone, never of the step that it is used in."""

    sub: int  # inputs of one dot product
    per: int  # values in 16 bits
    chunks: int  # blocks of an iteration
    tiles: int  # N' / BLOCK_N
    steps: int  # iterations for all of K'
    split_steps: int  # of which one program does so many
    group: int  # inputs that share a scale, a multiple of sub; 0: all of them

    @property
    def block(self) -> int:
        return self.sub * self.per

    @property
    def step(self) -> int:
        return self.block * self.chunks

    @property
    def splits(self) -> int:
        return -(-self.steps // self.split_steps)

    @property
    def padded(self) -> tuple[int, int]:
        """(N', K')"""
        return (self.tiles * BLOCK_N, self.steps * self.step)

    @classmethod
    def of(cls, kind: Kind, shape: tuple[int, int], group: int) -> Tiles:
        per = VALUES_PER_WORD[kind]
        sub = min(128 // per, 64, group or STEP)
        chunks = 1 if kind == Kind.DENSE else STEP // (sub * per)
        tiles, steps = -(-shape[0] // BLOCK_N), -(-shape[1] // (sub * per * chunks))
        return cls(sub, per, chunks, tiles, steps, -(-steps // _splits(tiles, steps)), group)


def _splits(tiles: int, steps: int) -> int:
    """Parts of K, a power of two."""
    splits = 1
    while splits < MOST_SPLITS and tiles * splits * 2 <= PROGRAMS and splits * 2 * LEAST_STEPS <= steps:
        splits *= 2
    return splits


@dataclass(frozen=True, slots=True)
class TritonWeight:
    """A weight as `triton_linear` reads it."""

    kind: Kind
    shape: tuple[int, int]  # (N, K)
    compute: torch.dtype  # what is multiplied: bfloat16 or float16
    tiles: Tiles
    words: Tensor  # (K' / block, N', sub) int16, or (…) compute dtype for Kind.DENSE; in pairs, as int32
    scale: Values | None = None
    min: Values | None = None
    code: Tensor | None = None  # (2, 16) float32: as it is, and rounded to the compute dtype
    bias: Tensor | None = None  # (N,) float32
    perm: Tensor | None = None  # (K,) int32: stored column j multiplies input perm[j]
    counters: Tensor | None = None  # int32, per tile and rows: parts of K that are done; zero between calls

    @property
    def nbytes(self) -> int:
        """Bytes that one decoding step reads."""
        parts = [self.words, *(part for part in (self.code, self.bias, self.perm) if part is not None)]
        for values in (self.scale, self.min):
            parts += values.tensors if values is not None else ()
        return sum({part.data_ptr(): part.nbytes for part in parts}.values())


def prepare(weight: QuantLinear, compute: torch.dtype, device: torch.device) -> TritonWeight:
    """`weight` laid out on `device` for products in `compute` (bfloat16 or float16).

    ModelError when the weight is of a kind, or has groups, that no kernel takes.
    """
    assert compute in (torch.bfloat16, torch.float16)
    if isinstance(weight, Dense):
        return _dense(weight, compute, device)
    if isinstance(weight, GroupedInt4):
        return _int4(weight, compute, device)
    if isinstance(weight, GroupedInt8):
        return _int8(weight, compute, device)
    if isinstance(weight, Fp8):
        return _fp8(weight, compute, device)
    if isinstance(weight, Codebook4):
        return _code4(weight, compute, device)
    raise ModelError(f"weights kept as {type(weight).__name__} cannot be multiplied on a graphics card")


def _dense(weight: Dense, compute: torch.dtype, device: torch.device) -> TritonWeight:
    return _base(Kind.DENSE, weight, weight.weight, 0, compute, device)


def _int4(weight: GroupedInt4, compute: torch.dtype, device: torch.device) -> TritonWeight:
    base = _base(Kind.INT4, weight, weight.nibbles, weight.group, compute, device)
    symmetric = torch.equal(weight.min.float(), -8.0 * weight.scale.float())
    return _with_groups(base, weight.scale, None if symmetric else weight.min, weight.group)


def _int8(weight: GroupedInt8, compute: torch.dtype, device: torch.device) -> TritonWeight:
    base = _base(Kind.INT8, weight, weight.q, weight.group, compute, device)
    return _with_groups(base, weight.scale, weight.min, weight.group)


def _fp8(weight: Fp8, compute: torch.dtype, device: torch.device) -> TritonWeight:
    stored = weight.q.view(torch.uint8)
    if bool(((stored & 0x7F) == 0x7F).any()):
        raise ModelError("an fp8 weight holds NaN", hint="the checkpoint is damaged or was quantised from NaN")
    base = _base(Kind.FP8, weight, stored, weight.block[1], compute, device)
    outputs = base.tiles.padded[0]
    span = weight.block[0] if weight.block[0] < weight.shape[0] else outputs
    scale = weight.scale.to(device, torch.float32).t() * E4M3_SCALE
    return replace(base, scale=Values(_expanded(scale, weight.block[1], base.tiles, -(-outputs // span)), span=span))


def _code4(weight: Codebook4, compute: torch.dtype, device: torch.device) -> TritonWeight:
    base = _base(Kind.CODE4, weight, weight.nibbles, weight.group, compute, device)
    code = weight.code.to(device, torch.float32)
    both = torch.stack((code, code.to(compute).float()))
    return replace(_with_groups(base, weight.scale, None, weight.group), code=both)


def _base(
    kind: Kind, weight: QuantLinear, stored: Tensor, group: int, compute: torch.dtype, device: torch.device
) -> TritonWeight:
    """What every kind has."""
    tiles = Tiles.of(kind, weight.shape, _usable_group(group, weight.shape[1]) if group else 0)
    perm: Tensor | None = getattr(weight, "perm", None)
    counters = tiles.tiles * (PARTED_ROWS // LEAST_ROWS)
    return TritonWeight(
        kind,
        weight.shape,
        compute,
        tiles,
        _packed(stored, tiles, compute if kind == Kind.DENSE else torch.uint8, device),
        bias=None if weight.bias is None else weight.bias.to(device, torch.float32),
        perm=None if perm is None else perm.to(device, torch.int32),
        counters=torch.zeros(counters, dtype=torch.int32, device=device) if tiles.splits > 1 else None,
    )


def _usable_group(group: int, inputs: int) -> int:
    """The group that the kernels work in: `group`, or a divisor of it that its scale is repeated for."""
    if group >= inputs:
        return 0
    usable = group if group % STEP == 0 else gcd(group, STEP)
    if usable < LEAST_GROUP:
        raise ModelError(
            f"a weight has groups of {group} inputs, which no kernel for graphics cards takes",
            hint=f"groups divisible by {LEAST_GROUP} work, and so does --device cpu",
        )
    return usable


def _packed(stored: Tensor, tiles: Tiles, dtype: torch.dtype, device: torch.device) -> Tensor:
    """stored (N, K) numbers or bytes, or (N, K / 2) nibbles → words (K' / block, N', sub) int16 or `dtype`."""
    outputs, inputs = tiles.padded
    is_float = dtype != torch.uint8
    shape = (inputs // tiles.block, outputs, tiles.sub)
    words = torch.zeros(shape, dtype=dtype if is_float else torch.int16, device=device)
    for start in range(0, len(stored), CHUNK_OUTPUTS):
        part = stored[start : start + CHUNK_OUTPUTS].to(device)
        if part.dtype == torch.int8:
            part = part.view(torch.uint8) ^ 0x80  # q + 128, which a kernel turns into a float without a conversion
        elif tiles.per == 4:
            part = unpack_nibbles(part)
        values = torch.nn.functional.pad(part.to(dtype), (0, inputs - part.shape[1]))
        values = values.view(len(part), shape[0], tiles.per, tiles.sub)
        packed = values[:, :, 0] if is_float else _shifted(values, 16 // tiles.per)
        words[:, start : start + len(part)] = packed.transpose(0, 1)
    return words


def _shifted(values: Tensor, bits: int) -> Tensor:
    """values (n, blocks, per, sub) uint8 → (n, blocks, sub) int16, the first in the lowest bits."""
    word = torch.zeros_like(values[:, :, 0], dtype=torch.int16)
    for index in range(values.shape[2]):
        word |= values[:, :, index].to(torch.int16) << (bits * index)
    return word


def _with_groups(base: TritonWeight, scale: GroupValues, low: GroupValues | None, group: int) -> TritonWeight:
    device = base.words.device
    scales = _grouped(scale, group, base.tiles, device)
    lows = None if low is None else _grouped(low, group, base.tiles, device)
    outer = None if lows is None else lows.outer
    if (
        lows is not None
        and outer is not None
        and outer.dtype == scales.inner.dtype
        and torch.equal(outer, scales.inner)
    ):
        lows = replace(lows, outer=scales.inner)  # the min is -zero · scale: one copy of the scale is kept and read
    return replace(base, scale=scales, min=lows)


def _grouped(values: GroupValues, group: int, tiles: Tiles, device: torch.device) -> Values:
    """values (N, G) of groups of `group` inputs → (G', N') for groups of tiles.group."""
    outputs = tiles.padded[0]
    if not isinstance(values, Nested):
        return Values(_expanded(values.to(device).t(), group, tiles, outputs))
    inner = _expanded(values.inner.to(device).t(), group, tiles, outputs)
    ratio = values.inner.shape[1] // values.outer.shape[1] * _repeats(group, tiles)
    coarse = values.outer.to(device).t()
    missing = (0, outputs - coarse.shape[1], 0, -(-len(inner) // ratio) - len(coarse))
    return Values(inner, torch.nn.functional.pad(coarse, missing).contiguous(), ratio)


def _expanded(values: Tensor, group: int, tiles: Tiles, outputs: int) -> Tensor:
    """values (G, n) → (G', outputs), padded with zeros, each group repeated where it was cut."""
    groups = -(-tiles.padded[1] // tiles.group) if tiles.group else 1
    repeated = values.repeat_interleave(_repeats(group, tiles), dim=0)[:groups]
    return torch.nn.functional.pad(repeated, (0, outputs - values.shape[1], 0, groups - len(repeated))).contiguous()


def _repeats(group: int, tiles: Tiles) -> int:
    return group // tiles.group if tiles.group else 1
