"""The other GGUF types: Q5_0, Q5_1, the K-quants Q2_K … Q6_K, IQ4_NL and IQ4_XS.

Source: ggml-quants.c, dequantize_row_*; blocks of 32 or 256 values along a row. Knows: the blocks' fields. Does not
know: files. 2 to 4 bits become nibbles, 5 and 6 bits bytes; scales of scales stay nested. Every decoded weight equals
gguf-py's to the last bit.

Bits per weight in memory (in the file): Q2_K 5.13 (2.63), Q3_K 4.63 (3.44), Q4_K 4.63 (4.5), IQ4_NL 4.5, IQ4_XS 4.31
(4.25), Q5_0 8.5 (5.5), Q5_1 9 (6), Q5_K 8.63 (5.5), Q6_K 8.56 (6.56).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specgen.weights.base import Checkpoint
from specgen.weights.bits import pack_nibbles
from specgen.weights.gguf_packed import Blocks, has_type
from specgen.weights.gguf_q4 import neighbours
from specgen.weights.module import Module
from specgen.weights.packed import Codebook4, GroupedInt4, GroupedInt8, Nested, QuantLinear, to_device

SUPER = 256
IQ4_CODE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""kvalues_iq4nl of ggml-common.h."""

BLOCKS_AT_ONCE = 4096
"""Blocks that are unpacked at a time, so that the intermediate values stay in the processor's cache."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """A weight without its bias, and the stored float16 scales that must be finite."""

    weight: GroupedInt4 | GroupedInt8 | Codebook4
    scales: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class GgufBlocks:
    """One ggml type: how many values its block has, and what becomes of a matrix of blocks."""

    type: str
    block: int
    decode: Callable[[Blocks], Decoded]

    @property
    def name(self) -> str:
        return f"gguf {self.type}"

    def claims(self, checkpoint: Checkpoint, key: str) -> bool:
        return has_type(checkpoint, key, (self.type,))

    def linear(self, checkpoint: Checkpoint, key: str, shape: tuple[int, int], device: torch.device) -> QuantLinear:
        module = Module(checkpoint, key)
        decoded = self.decode(Blocks.of(module, shape, self.block))
        for scale in decoded.scales:
            module.finite("weight", scale)
        return to_device(replace(decoded.weight, bias=module.bias(shape[0])), device)


def unpacked(blocks: Blocks, width: int, unpack: Callable[[Blocks], Tensor]) -> Tensor:
    """`unpack` of a few rows of blocks at a time → uint8 (N, width)."""
    outputs, per_row, _ = blocks.raw.shape
    result = torch.empty(outputs, width, dtype=torch.uint8)
    step = max(1, BLOCKS_AT_ONCE // per_row)
    for start in range(0, outputs, step):
        part = unpack(Blocks(blocks.raw[start : start + step]))
        result[start : start + step] = part.reshape(-1, width)
    return result


def fields(packed: Tensor, bits: int, run: int) -> Tensor:
    """Bytes (N, G, B) → values (N, G, B · 8 / bits): of each run of `run` bytes first the lowest `bits`, then the next.

    This is how ggml splits every 2- and 4-bit field, and the single high bits of Q3_K, Q5_0, Q5_1 and Q5_K.
    """
    outputs, groups, count = packed.shape
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)[:, None]
    runs = packed.reshape(outputs, groups, count // run, 1, run) >> shifts
    return (runs & ((1 << bits) - 1)).reshape(outputs, groups, count * 8 // bits)


def scalar(blocks: Blocks, start: int) -> Tensor:
    """The float16 at byte `start` of every block, (N, G)."""
    return blocks.field(start, 2, torch.float16).squeeze(-1)


def nested(inner: Tensor, outer: Tensor) -> Nested:
    """inner (N, B, sub-blocks), outer (N, B) → the scales of all sub-blocks of a row."""
    return Nested(inner.flatten(1), outer)


def minus(values: Tensor, factor: int = 1) -> Tensor:
    """-factor · values, exact: in float16 unless that overflows."""
    product = -factor * values
    return product if bool(product.isfinite().all()) else -factor * values.float()


def five_bits(low: Tensor, high: Tensor) -> Tensor:
    """low (N, G, 16) with two halves of nibbles, high (N, G, 4) with bit i for value i → 0…31 (N, G, 32)."""
    return fields(low, 4, 16) | fields(high, 1, 1) << 4


def q5_0(blocks: Blocks) -> Decoded:
    """d · (q - 16): d, 4 bytes of high bits, 16 bytes of low nibbles."""

    def unpack(part: Blocks) -> Tensor:
        return five_bits(part.field(6, 16, torch.uint8), part.field(2, 4, torch.uint8)) - 16

    scale = scalar(blocks, 0)
    q = unpacked(blocks, scale.shape[1] * 32, unpack).view(torch.int8)
    return Decoded(GroupedInt8(q, scale, 32), (scale,))


def q5_1(blocks: Blocks) -> Decoded:
    """d · q + m: d, m, 4 bytes of high bits, 16 bytes of low nibbles."""

    def unpack(part: Blocks) -> Tensor:
        return five_bits(part.field(8, 16, torch.uint8), part.field(4, 4, torch.uint8))

    scale, low = scalar(blocks, 0), scalar(blocks, 2)
    q = unpacked(blocks, scale.shape[1] * 32, unpack).view(torch.int8)
    return Decoded(GroupedInt8(q, scale, 32, low), (scale, low))


def q2_k(blocks: Blocks) -> Decoded:
    """d · sc · q - dmin · m per 16 values: 16 bytes sc and m, 64 bytes q, d, dmin."""

    def unpack(part: Blocks) -> Tensor:
        return pack_nibbles(fields(part.field(16, 64, torch.uint8), 2, 32))

    d, dmin = scalar(blocks, 80), scalar(blocks, 82)
    scales = blocks.field(0, 16, torch.uint8)
    nibbles = unpacked(blocks, d.shape[1] * 128, unpack)
    weight = GroupedInt4(nibbles, nested(scales & 0x0F, d), nested(scales >> 4, minus(dmin)), 16)
    return Decoded(weight, (d, dmin))


def q3_k(blocks: Blocks) -> Decoded:
    """d · (sc - 32) · (q - 4) per 16 values: 32 bytes of high bits, 64 bytes of low ones, 12 bytes sc, d."""

    def unpack(part: Blocks) -> Tensor:
        high = fields(part.field(0, 32, torch.uint8), 1, 32)
        return pack_nibbles(fields(part.field(32, 64, torch.uint8), 2, 32) | high << 2)

    d = scalar(blocks, 108)
    low, high = blocks.field(96, 8, torch.uint8), blocks.field(104, 4, torch.uint8)
    inner = (fields(low, 4, 8) | fields(high, 2, 4) << 4).view(torch.int8) - 32
    nibbles = unpacked(blocks, d.shape[1] * 128, unpack)
    return Decoded(GroupedInt4(nibbles, nested(inner, d), nested(inner, minus(d, 4)), 16), (d,))


def six_bit_scales(blocks: Blocks) -> tuple[Tensor, Tensor]:
    """The 8 scales and 8 mins in the 12 bytes from byte 4, (N, B, 8) each.

    The first four of each lie in the low 6 bits of bytes 0…3 and 4…7; of the others bytes 8…11 hold 4 bits, and the top
    bits of bytes 0…7 the rest.
    """
    scale, low, rest = (blocks.field(start, 4, torch.uint8) for start in (4, 8, 12))
    last_scale = rest & 0x0F | (scale >> 2) & 0x30
    last_low = rest >> 4 | (low >> 2) & 0x30
    return torch.cat((scale & 0x3F, last_scale), dim=-1), torch.cat((low & 0x3F, last_low), dim=-1)


def q4_k(blocks: Blocks) -> Decoded:
    """d · sc · q - dmin · m per 32 values: d, dmin, 12 bytes sc and m, 128 bytes q."""

    def unpack(part: Blocks) -> Tensor:
        return neighbours(part.field(16, 128, torch.uint8).reshape(len(part.raw), -1, 32))

    d, dmin = scalar(blocks, 0), scalar(blocks, 2)
    scale, low = six_bit_scales(blocks)
    nibbles = unpacked(blocks, d.shape[1] * 128, unpack)
    return Decoded(GroupedInt4(nibbles, nested(scale, d), nested(low, minus(dmin)), 32), (d, dmin))


def q5_k(blocks: Blocks) -> Decoded:
    """d · sc · q - dmin · m per 32 values: d, dmin, 12 bytes sc and m, 32 bytes of high bits, 128 of low nibbles."""

    def unpack(part: Blocks) -> Tensor:
        high = fields(part.field(16, 32, torch.uint8), 1, 32)
        return fields(part.field(48, 128, torch.uint8), 4, 32) | high << 4

    d, dmin = scalar(blocks, 0), scalar(blocks, 2)
    scale, low = six_bit_scales(blocks)
    q = unpacked(blocks, d.shape[1] * SUPER, unpack).view(torch.int8)
    return Decoded(GroupedInt8(q, nested(scale, d), 32, nested(low, minus(dmin))), (d, dmin))


def q6_k(blocks: Blocks) -> Decoded:
    """d · sc · (q - 32) per 16 values: 128 bytes of low nibbles, 64 bytes of high pairs, 16 bytes sc, d."""

    def unpack(part: Blocks) -> Tensor:
        high = fields(part.field(128, 64, torch.uint8), 2, 32)
        return (fields(part.field(0, 128, torch.uint8), 4, 64) | high << 4) - 32

    d = scalar(blocks, 208)
    q = unpacked(blocks, d.shape[1] * SUPER, unpack).view(torch.int8)
    return Decoded(GroupedInt8(q, nested(blocks.field(192, 16, torch.int8), d), 16), (d,))


def iq4_nl(blocks: Blocks) -> Decoded:
    """d · code[q] per 32 values: d, 16 bytes q."""
    d = scalar(blocks, 0)
    nibbles = unpacked(blocks, d.shape[1] * 16, lambda part: neighbours(part.field(2, 16, torch.uint8)))
    return Decoded(Codebook4(nibbles, torch.tensor(IQ4_CODE, dtype=torch.float32), d, 32), (d,))


def iq4_xs(blocks: Blocks) -> Decoded:
    """d · (sc - 32) · code[q] per 32 values: d, 2 bytes of sc's high pairs, 4 bytes of its low nibbles, 128 bytes q."""

    def unpack(part: Blocks) -> Tensor:
        return neighbours(part.field(8, 128, torch.uint8).reshape(len(part.raw), -1, 16))

    d = scalar(blocks, 0)
    inner = fields(blocks.field(4, 4, torch.uint8), 4, 1) | fields(blocks.field(2, 2, torch.uint8), 2, 1) << 4
    nibbles = unpacked(blocks, d.shape[1] * 128, unpack)
    code = torch.tensor(IQ4_CODE, dtype=torch.float32)
    return Decoded(Codebook4(nibbles, code, nested(inner.view(torch.int8) - 32, d), 32), (d,))


GGUF_BLOCKS = (
    GgufBlocks("Q5_0", 32, q5_0),
    GgufBlocks("Q5_1", 32, q5_1),
    GgufBlocks("Q2_K", SUPER, q2_k),
    GgufBlocks("Q3_K", SUPER, q3_k),
    GgufBlocks("Q4_K", SUPER, q4_k),
    GgufBlocks("Q5_K", SUPER, q5_k),
    GgufBlocks("Q6_K", SUPER, q6_k),
    GgufBlocks("IQ4_NL", 32, iq4_nl),
    GgufBlocks("IQ4_XS", SUPER, iq4_xs),
)
