"""Checkpoints with float8 e4m3 weights and scales, per tensor, per output channel or per block of 128 × 128.

Knows: `weight` F8_E4M3 (N, K) with `weight_scale_inv` (fine-grained, as DeepSeek-V3, Qwen3-FP8 and transformers write
it: a factor, in spite of its name) or `weight_scale` (compressed-tensors and others). Does not know: activation scales;
weights are read as weights only, so `input_scale` is not needed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specgen.weights.base import Checkpoint
from specgen.weights.module import CONTRADICTION, FLOATS, Module, quant_config
from specgen.weights.packed import Fp8, QuantLinear, to_device

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
DEFAULT_BLOCK = (128, 128)
NAN = 0x7F
"""e4m3fn has no infinity; all bits but the sign set is NaN."""


class FineGrainedFp8:
    """W = w · weight_scale_inv[n / 128, k / 128], scales F32, F16, BF16 or powers of two (ue8m0, F8_E8M0)."""

    name = "fp8 blocks"

    def claims(self, checkpoint: Checkpoint, key: str) -> bool:
        module = Module(checkpoint, key)
        return module.has("weight_scale_inv") and module.has("weight") and module.raw("weight").dtype in FLOAT8

    def linear(self, checkpoint: Checkpoint, key: str, shape: tuple[int, int], device: torch.device) -> QuantLinear:
        module = Module(checkpoint, key)
        # The config's size counts, not the ratio of the shapes: a ragged edge makes the two differ.
        block = quant_config(checkpoint).get("weight_block_size") or DEFAULT_BLOCK
        block_n, block_k = block_size(module, block, "weight_scale_inv")
        blocks = (-(-shape[0] // block_n), -(-shape[1] // block_k))
        scale = fp8_scale(module, "weight_scale_inv", blocks)
        weight = Fp8(fp8_weight(module, shape), scale, (block_n, block_k), module.bias(shape[0]))
        return to_device(weight, device)


def block_size(module: Module, block: object, suffix: str) -> tuple[int, int]:
    """(rows, columns) of a block as the config has it. ModelError when it makes no sense."""
    if not isinstance(block, list | tuple) or len(block) != 2 or not all(type(x) is int and x > 0 for x in block):
        raise module.error(suffix, f"is said to have blocks of {block!r}, not two positive numbers", CONTRADICTION)
    return block[0], block[1]


def fp8_weight(module: Module, shape: tuple[int, int]) -> Tensor:
    """(N, K) e4m3 without NaN. ModelError names other float8 kinds."""
    weight = module.raw("weight")
    if weight.dtype == torch.float8_e5m2:
        raise module.error("weight", "is float8 e5m2", "of the float8 kinds, e4m3 is read")
    weight = module.tensor("weight", shape, torch.float8_e4m3fn)
    if bool((weight.view(torch.uint8) & 0x7F == NAN).any()):
        raise module.error("weight", "holds values that are not numbers", "the file is corrupted; fetch it again")
    return weight


def fp8_scale(module: Module, suffix: str, shape: tuple[int, ...]) -> Tensor:
    """Finite scales (…) as float32."""
    scale = module.tensor(suffix, shape, *FLOATS, torch.float8_e8m0fnu).float()
    return module.finite(suffix, scale)
