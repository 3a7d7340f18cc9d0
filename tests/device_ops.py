"""A device's ops without a device: the reference's arithmetic, on arguments as a device takes them.

Every call looks at its arguments when it runs, as a kernel does. Rows that are not real become NaN, so that anything
that reads one shows.
"""

from __future__ import annotations

from typing import Any

import torch
from tape import Opaque
from tiny import Quant, tiny_spec, tiny_weights
from torch import Tensor

from specgen.kernels.base import Attend, DeviceAttend, KVLayer, Noise, Truncation
from specgen.kernels.device import DeviceKernels
from specgen.kernels.device_sampling import DeviceCut, DeviceNoise
from specgen.kernels.reference import ReferenceKernels
from specgen.model.device import DeviceDecoder
from specgen.model.spec import ModelSpec
from specgen.model.weights import ModelWeights
from specgen.weights.packed import QuantLinear

CPU = torch.device("cpu")


def host_attend(attend: DeviceAttend) -> Attend:
    """The real rows of a step, as the host says it."""
    start, rows = int(attend.start), int(attend.rows)
    positions = [int(position) for position in attend.positions[:rows]]
    parents = [
        -1 if position == start else int(attend.path[row, position - start - 1])
        for row, position in enumerate(positions)
    ]
    return Attend(start, tuple(parents), tuple(positions))


def padded(rows: Tensor, width: int) -> Tensor:
    return torch.cat((rows, torch.full((width - len(rows), *rows.shape[1:]), torch.nan)))


class ReferenceOps:
    """Implements `kernels.device.DeviceOps`."""

    name = "reference ops"
    compute = torch.float32

    def __init__(self) -> None:
        self.host = ReferenceKernels()

    def prepare(self, weight: QuantLinear, device: torch.device) -> Any:
        return self.host.prepare(weight)

    def embedding(self, ids: Tensor, weight: Any) -> Tensor:
        return self.host.embedding(ids, weight)

    def linear(self, x: Tensor, weight: Any) -> Tensor:
        return self.host.linear(x, weight)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out_dtype: torch.dtype) -> Tensor:
        return self.host.rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: Tensor, y: Tensor, residual_scale: float, weight: Tensor, eps: float, out_dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        total = x + y * residual_scale
        return total, self.host.rms_norm(total, weight, eps)

    def rope_write(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos_sin: tuple[Tensor, Tensor] | None,
        layer: KVLayer,
        attend: DeviceAttend,
    ) -> Tensor:
        place, width = host_attend(attend), len(q)
        rows = len(place.positions)
        if rows == 0:
            return torch.full_like(q, torch.nan)
        index = torch.tensor(place.positions)
        angles = None if cos_sin is None else (cos_sin[0][index], cos_sin[1][index])
        return padded(self.host.rope_write(q[:rows], k[:rows], v[:rows], angles, layer, place.start), width)

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
        place, width = host_attend(attend), len(q)
        rows = len(place.positions)
        if rows == 0:
            return torch.full_like(q, torch.nan)
        return padded(self.host.attention(q[:rows], layer, place, scale, window, softcap), width)

    def gated(self, gate: Tensor, up: Tensor, activation: str, out_dtype: torch.dtype) -> Tensor:
        return self.host.gated(gate, up, activation)

    def argmax(self, logits: Tensor) -> Tensor:
        return torch.tensor(self.host.argmax(logits), dtype=torch.int32)

    def gumbel_argmax(self, logits: Tensor, cut: DeviceCut, noise: DeviceNoise, vocab: int) -> Tensor:
        temperature, top_k, top_p, min_p = (float(value) for value in cut.values)
        low, high, purpose = (int(value) for value in noise.key)
        ranking = (int(top_k), top_p) if cut.ranked else (0, 1.0)  # without the searches these are not heard
        settings = Truncation(temperature, *ranking, min_p)
        drawn = [
            self.host.gumbel_argmax(row[:vocab], settings, Noise(low | high << 32, int(position) + 1, purpose))
            for row, position in zip(logits, noise.positions, strict=True)
        ]
        return torch.tensor(drawn, dtype=torch.int32)


def device_kernels() -> DeviceKernels:
    return DeviceKernels(Opaque(ReferenceOps()), CPU)


def device_decoder(
    spec: ModelSpec | None = None,
    seed: int = 0,
    quant: Quant = "dense",
    kernels: DeviceKernels | None = None,
    weights: ModelWeights | None = None,
) -> DeviceDecoder:
    """As `tiny.tiny_decoder`."""
    spec = spec or tiny_spec()
    return DeviceDecoder(spec, weights or tiny_weights(spec, seed, quant), kernels or device_kernels())
