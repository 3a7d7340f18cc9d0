"""AWQ checkpoints (Lin et al., 2306.00978) as AutoAWQ and gptqmodel write them: 4 bits, three layouts.

Knows: the layouts `gemm`, `gemv` and `gemv_fast`. Does not know: how the scales were found. The zero points in the file
are used whether or not the config says `zero_point`: where it says no, they are all 8.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from specgen.weights.base import Checkpoint
from specgen.weights.bits import int4, pack_nibbles, unpack_words
from specgen.weights.module import Module, compact, quant_config, quant_method
from specgen.weights.packed import GroupedInt4, QuantLinear, to_device, unpack_nibbles

WORD_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which nibble of a `gemm` word holds column j: the inverse of the stored order 0, 2, 4, 6, 1, 3, 5, 7."""

VERSIONS = ("gemm", "gemv", "gemv_fast")
DEFAULT_ZERO = 8


def awq_version(checkpoint: Checkpoint) -> str | None:
    """The layout that config.json names, in lower case; `gemm` where it names none; None when it is no AWQ model."""
    method, config = quant_method(checkpoint), quant_config(checkpoint)
    if method != "awq":
        return None
    version = config.get("version", config.get("checkpoint_format", "gemm"))
    return str(version).lower().replace("-", "_")


class _Awq(ABC):
    """What the layouts share: the claim, the checks of the config."""

    version: str

    @property
    def name(self) -> str:
        return f"awq {self.version}"

    def claims(self, checkpoint: Checkpoint, key: str) -> bool:
        module = Module(checkpoint, key)
        return module.packed_as("qweight") and awq_version(checkpoint) == self.version

    def linear(self, checkpoint: Checkpoint, key: str, shape: tuple[int, int], device: torch.device) -> QuantLinear:
        module = Module(checkpoint, key)
        config = quant_config(checkpoint)
        bits = config.get("bits", config.get("w_bit", 4))
        if bits != 4:
            raise module.error("qweight", f"is AWQ of {bits!r} bits", "AWQ is read with 4 bits only")
        group = module.group(shape[1], config.get("group_size", config.get("q_group_size", 128)), "qweight")
        if shape[0] % 8 or shape[1] % 8:
            raise module.error("qweight", f"is for the shape {shape}, which words of 8 values do not divide")
        return to_device(self.decode(module, shape, group), device)

    @abstractmethod
    def decode(self, module: Module, shape: tuple[int, int], group: int) -> GroupedInt4:
        """The module's tensors, whose layout is this version's own, as a packed weight (N, K)."""


class AwqGemm(_Awq):
    """qweight I32 (K, N / 8), qzeros I32 (G, N / 8), scales (G, N): W.T = (q - z) · s."""

    version = "gemm"

    def claims(self, checkpoint: Checkpoint, key: str) -> bool:
        if super().claims(checkpoint, key):
            return True
        module = Module(checkpoint, key)
        # Without a quantisation config, `g_idx` is what tells GPTQ's qweight from AWQ's.
        return module.packed_as("qweight") and not module.has("g_idx") and quant_method(checkpoint) is None

    def decode(self, module: Module, shape: tuple[int, int], group: int) -> GroupedInt4:
        n, k = shape
        groups = k // group
        words = module.tensor("qweight", (k, n // 8), torch.int32)
        scale = compact(module.floats("scales", (groups, n)).t().contiguous())
        if module.has("qzeros"):
            zero = unordered(module.tensor("qzeros", (groups, n // 8), torch.int32)).t()
        else:
            zero = torch.full((n, groups), DEFAULT_ZERO, dtype=torch.uint8)
        nibbles = pack_nibbles(unordered(words).t().contiguous())
        return int4(nibbles, scale, zero, module.bias(n))


def unordered(words: Tensor) -> Tensor:
    """int32 (…, N / 8) in AWQ's order within a word → uint8 0…15 (…, N)."""
    fields = unpack_words(words, 4).reshape(*words.shape, 8)
    return fields[..., torch.tensor(WORD_ORDER)].flatten(-2)


class AwqGemv(_Awq):
    """qweight I32 (N, K / 8), qzeros I32 (N, Z), scales (N, 8 Z), plain order along K, padded behind the first G."""

    version = "gemv"

    def decode(self, module: Module, shape: tuple[int, int], group: int) -> GroupedInt4:
        n, k = shape
        groups, width = k // group, zeros_width(k, group)
        nibbles = module.tensor("qweight", (n, k // 8), torch.int32).contiguous().view(torch.uint8)
        zero = unpack_words(module.tensor("qzeros", (n, width), torch.int32), 4)[:, :groups]
        scale = module.floats("scales", (n, 8 * width))[:, :groups].contiguous()
        return int4(nibbles, compact(scale), zero, module.bias(n))


def zeros_width(inputs: int, group: int) -> int:
    """Words of zero points per output in the gemv layouts: 8 to a word, rounded up so that short groups align."""
    align = 1 if group >= 128 else 2 if group == 64 else 4
    words = -(-(inputs // group) // 8)
    return -(-words // align) * align


class AwqGemvFast(_Awq):
    """qweight I16 (N / 4, K), scales F16 (8 Z, N), qzeros F16 (8 Z, N) = -(s · z): W = q · s + qzeros."""

    version = "gemv_fast"

    def decode(self, module: Module, shape: tuple[int, int], group: int) -> GroupedInt4:
        n, k = shape
        groups, rows = k // group, 8 * zeros_width(k, group)
        if k % 64:
            raise module.error("qweight", f"has {k} inputs, not a multiple of 64 as this layout needs")
        words = module.tensor("qweight", (n // 4, k), torch.int16)
        scale = module.floats("scales", (rows, n))[:groups].t().contiguous()
        low = module.floats("qzeros", (rows, n))[:groups].t().contiguous()
        return GroupedInt4(pack_nibbles(deinterleaved(words)), compact(scale), compact(low), group, module.bias(n))


def deinterleaved(words: Tensor) -> Tensor:
    """int16 (N / 4, K) → uint8 0…15 (N, K).

    A run of 64 words holds 64 columns of 4 rows, one row's 64 values after the other's, 4 to a word. Within 32 columns
    the value of column 8a + 2b + c (a, b in 0…3, c in 0…1) stands at 8b + 4c + a.
    """
    quarter, k = words.shape
    fields = unpack_nibbles(words.contiguous().view(torch.uint8))  # (N / 4, 4 K)
    rows = fields.reshape(quarter, k // 64, 4, 64).transpose(1, 2).reshape(quarter * 4, k // 32, 4, 2, 4)  # b, c, a
    return rows.permute(0, 1, 4, 2, 3).reshape(quarter * 4, k)
