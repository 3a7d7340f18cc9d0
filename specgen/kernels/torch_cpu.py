"""The ops on torch's own CPU routines: what runs where there is no C++ compiler.

Knows: torch's packed int4 product, and how to keep every other kind of weight packed by decoding a cache-sized block
at a time. Does not know: models.

Against the reference: int4 products round activations, scales and results to bfloat16 (8 bits), which moves a result
by up to 1 % of the largest one in its row; everything else is the reference's own arithmetic. Row-invariant: torch's
int4 product was bitwise so for up to 16 rows at a time on every instruction set tried, and is never given more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specgen.kernels.reference import ReferenceKernels
from specgen.weights.packed import GroupedInt4, GroupedInt8, QuantLinear, unpack_nibbles

INT4_GROUPS = (32, 64, 128)
INT4_OUTPUTS = 16
"""torch's int4 product takes a number of outputs divisible by this."""

INT4_ROWS = 16


@dataclass(frozen=True, slots=True)
class Int4Layout:
    """A GroupedInt4 as `_weight_int4pack_mm_for_cpu` wants it: W = (q - 8) · scale + zero."""

    nibbles: Tensor  # (N, K / 2) uint8 in torch's own order
    scale_zero: Tensor  # (G, N, 2) bfloat16
    group: int
    bias: Tensor | None
    perm: Tensor | None  # (K,)

    @classmethod
    def of(cls, weight: GroupedInt4) -> Int4Layout:
        scale = weight.scale.float()
        zero = weight.min.float() + 8.0 * scale
        q = unpack_nibbles(weight.nibbles).to(torch.int32)
        return cls(
            torch.ops.aten._convert_weight_to_int4pack_for_cpu(q, 1),
            torch.stack((scale, zero), dim=-1).transpose(0, 1).contiguous().bfloat16(),
            weight.group,
            weight.bias,
            None if weight.perm is None else weight.perm.long(),
        )

    def product(self, x: Tensor) -> Tensor:
        """x (R, K) → (R, N)"""
        x = (x if self.perm is None else x[:, self.perm]).bfloat16()
        parts = [
            torch.ops.aten._weight_int4pack_mm_for_cpu(
                x[start : start + INT4_ROWS].contiguous(), self.nibbles, self.group, self.scale_zero
            )
            for start in range(0, len(x), INT4_ROWS)
        ]
        result = torch.cat(parts).float()
        return result if self.bias is None else result + self.bias


class Int4Weight:
    """A GroupedInt4 that keeps only what it is used for: an embedding's rows are read from the file's own nibbles, a
    linear is laid out for torch when it is first multiplied, and the nibbles are let go."""

    def __init__(self, source: GroupedInt4) -> None:
        self._source: GroupedInt4 | None = source
        self._layout: Int4Layout | None = None
        self._rows_read = False

    def rows(self, start: int, stop: int) -> QuantLinear:
        assert self._source is not None, "an embedding is read before it is multiplied"
        self._rows_read = True
        return self._source.rows(start, stop)

    def layout(self) -> Int4Layout:
        if self._layout is None:
            assert self._source is not None
            self._layout = Int4Layout.of(self._source)
            if not self._rows_read:
                self._source = None
        return self._layout


class TorchKernels(ReferenceKernels):
    """The reference's ops, with weights left packed and torch's int4 product."""

    name = "torch"

    def __init__(self, threads: int | None = None) -> None:
        if threads is not None:
            torch.set_num_threads(threads)

    def prepare(self, weight: QuantLinear) -> Any:
        if isinstance(weight, GroupedInt4) and weight.group in INT4_GROUPS and weight.shape[0] % INT4_OUTPUTS == 0:
            return Int4Weight(weight)
        return weight

    def linear(self, x: Tensor, weight: Any) -> Tensor:
        return weight.layout().product(x) if isinstance(weight, Int4Weight) else super().linear(x, weight)

    def decode(self, weight: QuantLinear) -> Tensor:
        if not isinstance(weight, GroupedInt8) or weight.perm is not None:
            return weight.dequantize()
        # The same numbers as dequantize() without spreading the scales out: the head is decoded for every token.
        groups = weight.q.float().view(len(weight.q), -1, weight.group)
        groups *= weight.scale.float()[..., None]
        if weight.min is not None:
            groups += weight.min.float()[..., None]
        return groups.view(weight.shape)
