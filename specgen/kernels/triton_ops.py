"""The Triton kernels as a backend.

Knows: which function implements which op, and what a card computes in. Does not know: models, graphs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specgen.kernels import triton_attention, triton_layout, triton_linear, triton_rows, triton_sample
from specgen.kernels.base import DeviceAttend, KVLayer
from specgen.kernels.cuda import BFLOAT16_CAPABILITY
from specgen.kernels.device import DeviceKernels
from specgen.kernels.device_sampling import DeviceCut, DeviceNoise
from specgen.weights.packed import QuantLinear


def compute_dtype(device: torch.device) -> torch.dtype:
    """What products are computed in; Triton's interpreter, on the CPU, takes float16."""
    if device.type != "cuda":
        return torch.float16
    return torch.bfloat16 if torch.cuda.get_device_capability(device) >= BFLOAT16_CAPABILITY else torch.float16


class TritonOps:
    """Implements `kernels.device.DeviceOps`."""

    def __init__(self, compute: torch.dtype) -> None:
        self.name = f"triton {str(compute).removeprefix('torch.')}"
        self.compute = compute

    def prepare(self, weight: QuantLinear, device: torch.device) -> Any:
        return triton_layout.prepare(weight, self.compute, device)

    def embedding(self, ids: Tensor, weight: Any) -> Tensor:
        return triton_linear.embedding(ids, weight)

    def linear(self, x: Tensor, weight: Any) -> Tensor:
        return triton_linear.linear(x, weight)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out_dtype: torch.dtype) -> Tensor:
        return triton_rows.rms_norm(x, weight, eps, out_dtype)

    def add_rms_norm(
        self, x: Tensor, y: Tensor, residual_scale: float, weight: Tensor, eps: float, out_dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        return triton_rows.add_rms_norm(x, y, residual_scale, weight, eps, out_dtype)

    def rope_write(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos_sin: tuple[Tensor, Tensor] | None,
        layer: KVLayer,
        attend: DeviceAttend,
    ) -> Tensor:
        return triton_rows.rope_write(q, k, v, cos_sin, layer, attend)

    def attention(
        self,
        q: Tensor,
        layer: KVLayer,
        attend: DeviceAttend,
        scale: float,
        window: int | None,
        softcap: float | None,
        out_dtype: torch.dtype,
    ) -> Tensor:
        return triton_attention.attention(q, layer, attend, scale, window, softcap, out_dtype)

    def gated(self, gate: Tensor, up: Tensor, activation: str, out_dtype: torch.dtype) -> Tensor:
        return triton_rows.gated(gate, up, activation, out_dtype)

    def argmax(self, logits: Tensor) -> Tensor:
        return triton_sample.argmax(logits)

    def gumbel_argmax(self, logits: Tensor, cut: DeviceCut, noise: DeviceNoise, vocab: int) -> Tensor:
        return triton_sample.gumbel_argmax(logits, cut, noise, vocab)


class TritonKernels(DeviceKernels):
    """`kernels.base.Kernels` on a card, or under Triton's interpreter on the CPU."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(TritonOps(compute_dtype(device)), device)
