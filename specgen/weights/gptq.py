"""GPTQ checkpoints (Frantar et al., 2210.17323) as AutoGPTQ and gptqmodel write them: 4 and 8 bits, v1 and v2.

Knows: qweight I32 (K · bits / 32, N), qzeros I32 (G, N · bits / 32), scales F16 (G, N), g_idx I32 (K):
W.T[k] = (q[k] - z[g_idx[k]]) · s[g_idx[k]]. Does not know: how the rounding was found. 2 and 3 bits are refused.

Act-order (`desc_act`) stores the inputs in their own order and a shuffled g_idx: columns are sorted into groups here,
and the packed weight keeps the order as its input permutation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specgen.weights.base import Checkpoint
from specgen.weights.bits import input_order, int4, int8, signed, unpack_words
from specgen.weights.module import Module, compact, quant_config, quant_method
from specgen.weights.packed import GroupedInt4, GroupedInt8, QuantLinear, to_device

BORROWED = {4: 0x11111111, 8: 0x01010101}
"""What v1 subtracted from every word of zero points. It is added to the word as a whole: a field that was 0 borrowed
from its neighbour, so adding 1 to each field by itself would decode the neighbour wrongly."""


def gptq_version(checkpoint: Checkpoint) -> str | None:
    """`gptq` (v1, also where config.json does not say), `gptq_v2`, or another name; None when it is no GPTQ model."""
    config = quant_config(checkpoint)
    if quant_method(checkpoint) not in (None, "gptq"):
        return None
    return str(config.get("checkpoint_format", config.get("format", "gptq"))).lower()


class Gptq:
    """v1: the zero points in the file are one too small."""

    name = "gptq"
    version = "gptq"

    def claims(self, checkpoint: Checkpoint, key: str) -> bool:
        module = Module(checkpoint, key)
        if not module.packed_as("qweight") or gptq_version(checkpoint) != self.version:
            return False
        return quant_method(checkpoint) == "gptq" or module.has("g_idx")

    def linear(self, checkpoint: Checkpoint, key: str, shape: tuple[int, int], device: torch.device) -> QuantLinear:
        module = Module(checkpoint, key)
        bits, group = _bits(module, shape[1]), _group(module, shape[1])
        if shape[0] * bits % 32:
            raise module.error("qzeros", f"is for {shape[0]} outputs, which words of {32 // bits} do not divide")
        return to_device(self._decode(module, shape, bits, group), device)

    def zeros(self, words: Tensor, bits: int) -> Tensor:
        """qzeros (G, N · bits / 32) int32 → (G, N) uint8"""
        return unpack_words(words + BORROWED[bits], bits)

    def _decode(self, module: Module, shape: tuple[int, int], bits: int, group: int) -> GroupedInt4 | GroupedInt8:
        n, k = shape
        groups = k // group
        words = module.tensor("qweight", (k * bits // 32, n), torch.int32).t().contiguous()
        scale = compact(module.floats("scales", (groups, n)).t().contiguous())
        zero = self.zeros(module.tensor("qzeros", (groups, n * bits // 32), torch.int32), bits).t()
        perm = _order(module, k, group)
        if bits == 4:
            return int4(words.view(torch.uint8), scale, zero, module.bias(n), perm)
        return int8(signed(unpack_words(words, 8)), scale, zero.to(torch.int16) - 128, module.bias(n), perm)


class GptqV2(Gptq):
    """v2: the zero points in the file are the zero points."""

    name = "gptq v2"
    version = "gptq_v2"

    def zeros(self, words: Tensor, bits: int) -> Tensor:
        return unpack_words(words, bits)


def _bits(module: Module, inputs: int) -> int:
    """From the shape: a checkpoint may give single modules another width than the config says."""
    words = module.raw("qweight").shape[0]
    bits, rest = divmod(words * 32, inputs)
    if rest or bits not in (2, 3, 4, 8):
        raise module.error("qweight", f"has {words} rows of words, which is no width for {inputs} inputs")
    if bits not in BORROWED:
        raise module.error("qweight", f"is GPTQ of {bits} bits", "GPTQ is read with 4 and 8 bits only")
    return bits


def _group(module: Module, inputs: int) -> int:
    config = quant_config(module.checkpoint)
    size = config.get("group_size")
    rows = module.raw("scales").shape[0]
    if size is None or config.get("dynamic"):  # single modules may differ from the config: the scales say how
        size = inputs // rows if rows and inputs % rows == 0 else rows
    return module.group(inputs, size, "scales")


def _order(module: Module, inputs: int, group: int) -> Tensor | None:
    if not module.has("g_idx"):
        return None
    try:
        return input_order(module.tensor("g_idx", (inputs,), torch.int32), group)
    except ValueError as error:
        raise module.error("g_idx", str(error), "the file is corrupted; fetch it again") from None
