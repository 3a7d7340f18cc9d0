"""compressed-tensors checkpoints, as llm-compressor writes them for vLLM.

Knows: `pack-quantized` (4 and 8 bits, with zero points, old-style act-order), `float-quantized` (float8 e4m3 per
tensor, channel or block) and `int-quantized` (8 bits). A mixed-precision checkpoint has several of these: each module's
own tensors say which. Does not know: activation quantisation; weights are read as weights only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from specgen.weights.base import Checkpoint
from specgen.weights.bits import input_order, int4, int8, signed, unpack_words
from specgen.weights.fp8 import FLOAT8, block_size, fp8_scale, fp8_weight
from specgen.weights.module import CONTRADICTION, FLOATS, Module, compact, quant_config, quant_method
from specgen.weights.packed import Fp8, GroupedInt4, GroupedInt8, QuantLinear, to_device

METHODS = (None, "compressed-tensors", "fp8")
"""Values of quant_method whose `weight_scale` is a factor; `fp8` is AutoFP8, which writes whole bytes in this way."""

READ = ("dense", "pack-quantized", "float-quantized", "int-quantized", "naive-quantized", "mixed-precision")
HINT = "of compressed-tensors, " + ", ".join(READ[1:4]) + " without sparsity or transforms are read"


class PackQuantized:
    """weight_packed I32 (N, K · bits / 32), weight_scale (N, G), weight_shape I64 (2,).

    Integers are stored with 2 ** (bits - 1) added, zero points (weight_zero_point I32 (N · bits / 32, G)) likewise.
    Old act-order: weight_g_idx I32 (K,) gives each input's group, the columns stay in the order of the inputs.
    """

    name = "compressed-tensors pack-quantized"

    def claims(self, checkpoint: Checkpoint, key: str) -> bool:
        return Module(checkpoint, key).packed_as("weight_packed") and quant_method(checkpoint) in METHODS

    def linear(self, checkpoint: Checkpoint, key: str, shape: tuple[int, int], device: torch.device) -> QuantLinear:
        module = Module(checkpoint, key)
        refuse_unread(module, "weight_packed")
        return to_device(self._decode(module, shape), device)

    def _decode(self, module: Module, shape: tuple[int, int]) -> GroupedInt4 | GroupedInt8:
        n, k = shape
        bits = _bits(module, shape)
        words = module.tensor("weight_packed", (n, -(-k * bits // 32)), torch.int32)
        scale, zero = grouped_scale(module, shape), _zero(module, shape, bits)
        perm = _order(module, k, k // scale.shape[1])
        if bits == 8:
            return int8(signed(unpack_words(words, 8)[:, :k]), scale, zero, module.bias(n), perm)
        if k % 2:
            raise module.error("weight_packed", f"has {k} inputs, an odd number")
        nibbles = words.contiguous().view(torch.uint8)[:, : k // 2]
        # Stored nibbles are 8 too large, so zero points are counted from 8.
        unsigned = torch.full(scale.shape, 8) if zero is None else zero + 8
        return int4(nibbles, scale, unsigned, module.bias(n), perm)


class WholeBytes:
    """weight F8_E4M3 or I8 (N, K) with weight_scale: (1,) or () per tensor, (N, 1) per channel, or per block or group.

    The scale's own shape says which; a block's size is the one of the config's groups that fits it.
    """

    name = "compressed-tensors 8-bit"

    def claims(self, checkpoint: Checkpoint, key: str) -> bool:
        module = Module(checkpoint, key)
        if not (module.has("weight") and module.has("weight_scale")):
            return False
        return module.raw("weight").dtype in (*FLOAT8, torch.int8) and quant_method(checkpoint) in METHODS

    def linear(self, checkpoint: Checkpoint, key: str, shape: tuple[int, int], device: torch.device) -> QuantLinear:
        module = Module(checkpoint, key)
        refuse_unread(module, "weight")
        if module.raw("weight").dtype != torch.int8:
            return to_device(_float8(module, shape), device)
        q = module.tensor("weight", shape, torch.int8)
        scale = grouped_scale(module, shape)
        return to_device(int8(q, scale, _zero(module, shape, 8), module.bias(shape[0])), device)


def refuse_unread(module: Module, suffix: str) -> None:
    """ModelError naming a format, a sparsity or a transform of the config that is not read."""
    config = quant_config(module.checkpoint)
    formats = [config.get("format"), *(group.get("format") for group in _groups(config))]
    unread = [name for name in formats if name is not None and name not in READ]
    if unread:
        raise module.error(suffix, f"may be in the compressed-tensors format {unread[0]!r}", HINT)
    sparsity = config.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
        raise module.error(suffix, f"may be in the sparse format {sparsity['format']!r}", HINT)
    transforms = config.get("transform_config")
    if isinstance(transforms, Mapping) and transforms.get("config_groups"):
        raise module.error(suffix, "may need a transform of the activations (transform_config)", HINT)


def grouped_scale(module: Module, shape: tuple[int, int]) -> Tensor:
    """weight_scale as (N, G) float16 or float32, whether it is per group, per channel or per tensor."""
    n, k = shape
    stored = module.raw("weight_scale")
    if stored.dtype not in FLOATS:
        raise module.error("weight_scale", f"is {stored.dtype}, no float", CONTRADICTION)
    if stored.numel() == 1:
        stored = stored.reshape(1, 1).expand(n, 1)
    groups = stored.shape[-1] if stored.dim() == 2 else 1
    if stored.dim() != 2 or groups == 0 or k % groups:
        raise module.error(
            "weight_scale", f"has the shape {tuple(stored.shape)}, no number of groups for {k} inputs", CONTRADICTION
        )
    if stored.shape[0] != n:
        raise module.error("weight_scale", f"has {stored.shape[0]} rows for {n} outputs", CONTRADICTION)
    _check_group_size(module, k, k // groups)
    return compact(module.finite("weight_scale", stored)).contiguous()


def _groups(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    groups = config.get("config_groups")
    if isinstance(groups, Mapping):
        yield from (group for group in groups.values() if isinstance(group, Mapping))


def _weight_settings(module: Module, name: str) -> list[Any]:
    """What each group of the config says about its weights' `name`, where it says something."""
    weights = [group.get("weights") for group in _groups(quant_config(module.checkpoint))]
    return [value for each in weights if isinstance(each, Mapping) and (value := each.get(name)) is not None]


def _check_group_size(module: Module, inputs: int, found: int) -> None:
    sizes = [size for size in _weight_settings(module, "group_size") if size != -1]
    if found != inputs and sizes and found not in sizes:
        raise module.error("weight_scale", f"has groups of {found}, but the config says {sizes}", CONTRADICTION)


def _bits(module: Module, shape: tuple[int, int]) -> int:
    inputs = shape[1]
    declared = module.tensor("weight_shape", (2,), torch.int64, torch.int32).tolist()
    if tuple(declared) != shape:
        raise module.error("weight_shape", f"says {tuple(declared)}, but {shape} is needed", CONTRADICTION)
    words = module.raw("weight_packed").shape[-1]
    for bits in (4, 8):
        if words == -(-inputs * bits // 32):
            return bits
    raise module.error(
        "weight_packed", f"has {words} words for {inputs} inputs", "pack-quantized is read with 4 and 8 bits only"
    )


def _zero(module: Module, shape: tuple[int, int], bits: int) -> Tensor | None:
    """Zero points (N, G) int16 of the signed integers, or None for a symmetric module. Stored packed along N, or I8."""
    if not module.has("weight_zero_point"):
        return None
    n, groups = shape[0], grouped_scale(module, shape).shape[1]
    if module.raw("weight_zero_point").dtype == torch.int8:
        return module.tensor("weight_zero_point", (n, groups), torch.int8).to(torch.int16)
    words = module.tensor("weight_zero_point", (-(-n * bits // 32), groups), torch.int32)
    return unpack_words(words.t(), bits)[:, :n].t().to(torch.int16) - (1 << (bits - 1))


def _order(module: Module, inputs: int, group: int) -> Tensor | None:
    if not module.has("weight_g_idx"):
        return None
    try:
        return input_order(module.tensor("weight_g_idx", (inputs,), torch.int32, torch.int64), group)
    except ValueError as error:
        raise module.error("weight_g_idx", str(error), "the file is corrupted; fetch it again") from None


def _float8(module: Module, shape: tuple[int, int]) -> Fp8:
    n, k = shape
    stored = tuple(module.raw("weight_scale").shape)
    scale = fp8_scale(module, "weight_scale", stored)
    if scale.numel() == 1:
        scale, block = scale.reshape(1, 1), (n, k)
    elif stored in ((n,), (n, 1)):
        scale, block = scale.reshape(n, 1), (1, k)
    else:
        block = _fitting_block(module, shape, stored)
    return Fp8(fp8_weight(module, shape), scale, block, module.bias(n))


def _fitting_block(module: Module, shape: tuple[int, int], stored: tuple[int, ...]) -> tuple[int, int]:
    n, k = shape
    for declared in _weight_settings(module, "block_structure"):
        block = block_size(module, declared, "weight_scale")
        if stored == (-(-n // block[0]), -(-k // block[1])):
            return block
    raise module.error("weight_scale", f"has the shape {stored}, which fits no block of the config", CONTRADICTION)
