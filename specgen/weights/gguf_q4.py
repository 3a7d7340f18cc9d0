"""GGUF Q4_0 and Q4_1: blocks of 32 four-bit values with a float16 scale (and a float16 minimum) → GroupedInt4.

Source: ggml-quants.c, dequantize_row_q4_0 and _q4_1. Knows: the two block layouts. Does not know: files.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specgen.weights.base import Checkpoint
from specgen.weights.gguf_packed import Blocks, has_type
from specgen.weights.module import Module
from specgen.weights.packed import GroupedInt4, to_device

BLOCK = 32


def neighbours(nibbles: Tensor) -> Tensor:
    """Nibbles (N, G, 16) uint8, byte j holding values j and j + 16 → (N, G · 16), byte j holding 2j and 2j + 1.

    Two bytes at a time, as int16: values 2j and 2j + 1 are the low halves of one pair of bytes, 2j + 16 and 2j + 17 the
    high halves of the same pair.
    """
    outputs, groups, half = nibbles.shape
    pairs = nibbles.view(torch.int16)
    out = torch.empty_like(nibbles)
    out[..., : half // 2] = (pairs & 0x0F) | ((pairs >> 4) & 0xF0)
    out[..., half // 2 :] = ((pairs >> 4) & 0x0F) | ((pairs >> 8) & 0xF0)
    return out.reshape(outputs, groups * half)


class GgufQ4_0:  # noqa: N801 - the type's own name
    """d · (q - 8): 2 bytes d, 16 bytes q."""

    name = "gguf Q4_0"

    def claims(self, checkpoint: Checkpoint, key: str) -> bool:
        return has_type(checkpoint, key, ("Q4_0",))

    def linear(self, checkpoint: Checkpoint, key: str, shape: tuple[int, int], device: torch.device) -> GroupedInt4:
        module = Module(checkpoint, key)
        blocks = Blocks.of(module, shape, BLOCK)
        scale = module.finite("weight", blocks.field(0, 2, torch.float16).squeeze(-1))
        low = -8 * scale
        if not torch.isfinite(low).all():  # beyond float16's range: keep both exact in float32
            scale = scale.float()
            low = -8 * scale
        nibbles = neighbours(blocks.field(2, 16, torch.uint8))
        return to_device(GroupedInt4(nibbles, scale, low, BLOCK, module.bias(shape[0])), device)


class GgufQ4_1:  # noqa: N801 - the type's own name
    """d · q + m: 2 bytes d, 2 bytes m, 16 bytes q."""

    name = "gguf Q4_1"

    def claims(self, checkpoint: Checkpoint, key: str) -> bool:
        return has_type(checkpoint, key, ("Q4_1",))

    def linear(self, checkpoint: Checkpoint, key: str, shape: tuple[int, int], device: torch.device) -> GroupedInt4:
        module = Module(checkpoint, key)
        blocks = Blocks.of(module, shape, BLOCK)
        scale = module.finite("weight", blocks.field(0, 2, torch.float16).squeeze(-1))
        low = module.finite("weight", blocks.field(2, 2, torch.float16).squeeze(-1))
        nibbles = neighbours(blocks.field(4, 16, torch.uint8))
        return to_device(GroupedInt4(nibbles, scale, low, BLOCK, module.bias(shape[0])), device)
