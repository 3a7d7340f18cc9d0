"""bitsandbytes checkpoints (QLoRA, 2305.14314; LLM.int8, 2208.07339), read from their tensors alone.

Knows: the serialised forms of NF4, FP4 (with and without double quantisation) and LLM.int8. Does not know: the
bitsandbytes package, which is not needed here, nor its treatment of outlier activations (weights are read as weights
only).
"""

from __future__ import annotations

import json
import math
from typing import Any

import torch
from torch import Tensor

from specgen.weights.base import Checkpoint
from specgen.weights.bits import swap_nibbles
from specgen.weights.module import CONTRADICTION, Module, compact
from specgen.weights.packed import Codebook4, GroupedInt8, QuantLinear, to_device

STATE = "weight.quant_state.bitsandbytes__"
MAX_STATE_BYTES = 1 << 16
ROW_MAJOR = 0
"""`weight_format`: the other orders are those of old graphics cards."""


class Bnb4:
    """weight U8 (N · K / 2, 1), flat, high nibble first: W = quant_map[q] · absmax[i / blocksize]."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.name = f"bitsandbytes {kind}"

    def claims(self, checkpoint: Checkpoint, key: str) -> bool:
        return Module(checkpoint, key).has(STATE + self.kind)

    def linear(self, checkpoint: Checkpoint, key: str, shape: tuple[int, int], device: torch.device) -> QuantLinear:
        module = Module(checkpoint, key)
        n, k = shape
        state = _read_state(module, STATE + self.kind)
        if state.get("shape") != [n, k]:
            raise module.error("weight", f"is of the shape {state.get('shape')}, not {shape}", CONTRADICTION)
        block = _count(module, state, "blocksize")
        if k % 2:
            raise module.error("weight", f"has {k} inputs, an odd number")
        code = module.floats("weight.quant_map", (16,)).float()
        absmax = _absmax(module, state, -(-n * k // block))
        weight = codebook(_flat_bytes(module, n * k // 2).reshape(n, k // 2), code, absmax, block)
        return to_device(Codebook4(weight.nibbles, code, weight.scale, weight.group, module.bias(n)), device)


def codebook(packed: Tensor, code: Tensor, absmax: Tensor, block: int) -> Codebook4:
    """packed (N, K / 2) with the high nibble first, absmax one per `block` values of the flat weight → Codebook4.

    Where a row is no multiple of a block, blocks run over its end: then groups are shorter, so that none does.
    """
    n, k = packed.shape[0], packed.shape[1] * 2
    group = math.gcd(block, k)
    scale = compact(absmax.repeat_interleave(block // group)[: n * k // group])
    return Codebook4(swap_nibbles(packed), code, scale.reshape(n, k // group), group)


class BnbInt8:
    """weight I8 (N, K), SCB F32 (N,): W = w · SCB / 127."""

    name = "bitsandbytes int8"

    def claims(self, checkpoint: Checkpoint, key: str) -> bool:
        return Module(checkpoint, key).has("SCB")

    def linear(self, checkpoint: Checkpoint, key: str, shape: tuple[int, int], device: torch.device) -> QuantLinear:
        module = Module(checkpoint, key)
        n, k = shape
        if module.has("weight_format") and (order := int(module.tensor("weight_format", (), torch.uint8))) != ROW_MAJOR:
            raise module.error("weight_format", f"is {order}", "only row-major int8 weights (0) are read")
        scale = module.floats("SCB", (n,)).float().reshape(n, 1) * (1 / 127)
        q = module.tensor("weight", shape, torch.int8)
        return to_device(GroupedInt8(q, scale, k, bias=module.bias(n)), device)


def _flat_bytes(module: Module, nbytes: int) -> Tensor:
    """The packed weight as bytes; `bnb_4bit_quant_storage` may have stored them as another dtype."""
    stored = module.raw("weight").contiguous()
    if stored.nbytes != nbytes:
        raise module.error("weight", f"has {stored.nbytes} bytes, not {nbytes}", CONTRADICTION)
    return stored.flatten().view(torch.uint8)


def _read_state(module: Module, suffix: str) -> dict[str, Any]:
    raw = module.raw(suffix)
    if raw.dtype != torch.uint8 or raw.numel() > MAX_STATE_BYTES:
        raise module.error(suffix, f"is {raw.numel()} values of {raw.dtype}, not a short JSON text")
    try:
        state = json.loads(bytes(raw.flatten().tolist()))
    except (ValueError, RecursionError):
        raise module.error(suffix, "holds no valid JSON", "the file is corrupted; fetch it again") from None
    if not isinstance(state, dict):
        raise module.error(suffix, "holds no JSON object")
    return state


def _count(module: Module, state: dict[str, Any], name: str) -> int:
    value = state.get(name)
    if type(value) is not int or not 0 < value <= 1 << 16:
        raise module.error("weight", f"has the {name} {value!r} in its quantisation state")
    return value


def _absmax(module: Module, state: dict[str, Any], blocks: int) -> Tensor:
    """(blocks,) float32; doubly quantised: nested_quant_map[a] · nested_absmax[i / nested_blocksize] + offset."""
    if not module.has("weight.nested_absmax"):
        return module.floats("weight.absmax", (blocks,), torch.float32)
    size = _count(module, state, "nested_blocksize")
    codes = module.tensor("weight.absmax", (blocks,), torch.uint8)
    code = module.floats("weight.nested_quant_map", (256,)).float()
    outer = module.floats("weight.nested_absmax", (-(-blocks // size),)).float().repeat_interleave(size)[:blocks]
    offset = state.get("nested_offset")
    if not isinstance(offset, int | float) or not math.isfinite(offset):
        raise module.error("weight", f"has the nested_offset {offset!r} in its quantisation state")
    return code[codes.long()] * outer + offset
