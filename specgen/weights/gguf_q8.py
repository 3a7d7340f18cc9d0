"""GGUF Q8_0: blocks of 32 signed bytes with a float16 scale → GroupedInt8.

Source: ggml-quants.c, dequantize_row_q8_0. Knows: the block layout. Does not know: files.
"""

from __future__ import annotations

import torch

from specgen.weights.base import Checkpoint
from specgen.weights.gguf_packed import Blocks, has_type
from specgen.weights.module import Module
from specgen.weights.packed import GroupedInt8, to_device

BLOCK = 32


class GgufQ8_0:  # noqa: N801 - the type's own name
    """d · q: 2 bytes d, 32 bytes q."""

    name = "gguf Q8_0"

    def claims(self, checkpoint: Checkpoint, key: str) -> bool:
        return has_type(checkpoint, key, ("Q8_0",))

    def linear(self, checkpoint: Checkpoint, key: str, shape: tuple[int, int], device: torch.device) -> GroupedInt8:
        module = Module(checkpoint, key)
        blocks = Blocks.of(module, shape, BLOCK)
        scale = module.finite("weight", blocks.field(0, 2, torch.float16).squeeze(-1))
        q = blocks.field(2, 32, torch.int8).reshape(shape)
        return to_device(GroupedInt8(q, scale, BLOCK, bias=module.bias(shape[0])), device)
