"""A device's ops, and every other part's view of them.

Knows: the ops of a step whose place and settings are tensors on the device (`DeviceOps`), so that a graph can capture
a step; and how the host's ops (`kernels.base.Kernels`) are made of them. Does not know: who implements them
(triton_ops), models, graphs.

Beside the letters of `kernels.base`: W width of a step, of which the first `attend.rows` rows are real.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from specgen.kernels.base import (
    Attend,
    DeviceAttend,
    KVLayer,
    Noise,
    Truncation,
    device_attend,
)
from specgen.kernels.device_sampling import DeviceCut, DeviceNoise, device_cut, device_noise
from specgen.weights.packed import QuantLinear


class DeviceOps(Protocol):
    """No op reads a tensor back to the host. Inputs may be float32 or `compute`, with dense last dimensions; sums are
    float32. Outputs are new tensors. A row's bits depend on neither W nor its place."""

    name: str
    compute: torch.dtype  # of what a linear reads

    def prepare(self, weight: QuantLinear, device: torch.device) -> Any:
        """`weight` laid out on `device`."""
        ...

    def embedding(self, ids: Tensor, weight: Any) -> Tensor:
        """Rows `ids` (W,) int32 or int64 of a prepared (V, H) weight → (W, H) float32."""
        ...

    def linear(self, x: Tensor, weight: Any) -> Tensor:
        """x (W, K) → (W, N) float32, bias included."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out_dtype: torch.dtype) -> Tensor:
        """x (W, H) with weight (H,), or per head (W, heads, D) with (D,)."""
        ...

    def add_rms_norm(
        self, x: Tensor, y: Tensor, residual_scale: float, weight: Tensor, eps: float, out_dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """x + residual_scale · y (W, H) float32, and its norm."""
        ...

    def rope_write(
        self,
        q: Tensor,  # (W, heads, D)
        k: Tensor,  # (W, kv_heads, D)
        v: Tensor,  # (W, kv_heads, D)
        cos_sin: tuple[Tensor, Tensor] | None,  # tables by position, (≥ context, dims / 2); None: NoPE
        layer: KVLayer,
        attend: DeviceAttend,
    ) -> Tensor:
        """Write the real rows' k and v into their slots, return q; both rotated by their positions."""
        ...

    def attention(
        self,
        q: Tensor,  # (W, heads, D), rotated
        layer: KVLayer,
        attend: DeviceAttend,
        scale: float,
        window: int | None,
        softcap: float | None,
        out_dtype: torch.dtype,
    ) -> Tensor:
        """(W, heads, D); rows that are not real hold anything."""
        ...

    def gated(self, gate: Tensor, up: Tensor, activation: str, out_dtype: torch.dtype) -> Tensor:
        """activation(gate) · up, both (W, I)."""
        ...

    def argmax(self, logits: Tensor) -> Tensor:
        """(W,) int32: the first largest of each row of (W, V), or NON_FINITE."""
        ...

    def gumbel_argmax(self, logits: Tensor, cut: DeviceCut, noise: DeviceNoise, vocab: int) -> Tensor:
        """(W,) int32: `kernels.base.Kernels.gumbel_argmax` of the first `vocab` logits of each row of (W, V)."""
        ...


def use_device(device: torch.device) -> None:
    """Triton launches on the thread's current card, wherever the tensors are: whoever begins work says which it is."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


class DeviceKernels:
    """`kernels.base.Kernels` over a device's ops. What the host needs is read back: once a call."""

    def __init__(self, ops: DeviceOps, device: torch.device) -> None:
        use_device(device)
        self.ops = ops
        self.device = device
        self.name = ops.name
        self._attend: tuple[Attend, DeviceAttend] | None = None  # the last one: all layers of a step share it
        self._cut: tuple[Truncation, DeviceCut] | None = None

    def prepare(self, weight: QuantLinear) -> Any:
        return self.ops.prepare(weight, self.device)

    def embedding(self, ids: Tensor, weight: Any) -> Tensor:
        return self.ops.embedding(ids, weight)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self.ops.rms_norm(x, weight, eps, torch.float32)

    def linear(self, x: Tensor, weight: Any) -> Tensor:
        return self.ops.linear(x, weight)

    def rope_write(
        self, q: Tensor, k: Tensor, v: Tensor, cos_sin: tuple[Tensor, Tensor] | None, layer: KVLayer, start: int
    ) -> Tensor:
        # The rows' own cos and sin are a table whose positions are their numbers.
        rows = len(q)
        place = Attend(start, tuple(range(-1, rows - 1)), tuple(range(rows)))
        return self.ops.rope_write(q, k, v, cos_sin, layer, device_attend(place, rows, self.device))

    def attention(
        self, q: Tensor, layer: KVLayer, attend: Attend, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        return self.ops.attention(q, layer, self._placed(attend), scale, window, softcap, torch.float32)

    def _placed(self, attend: Attend) -> DeviceAttend:
        if self._attend is None or self._attend[0] is not attend:
            self._attend = attend, device_attend(attend, len(attend.positions), self.device)
        return self._attend[1]

    def gated(self, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        return self.ops.gated(gate, up, activation, torch.float32)

    def gumbel_argmax(self, logits: Tensor, cut: Truncation, noise: Noise) -> int:
        return self._drawn(logits[None], cut, noise.seed, [noise.position], noise.purpose)[0]

    def gumbel_argmax_rows(self, logits: Tensor, cut: Truncation, seed: int, positions: Sequence[int]) -> list[int]:
        return self._drawn(logits, cut, seed, positions, 0)

    def _drawn(self, logits: Tensor, cut: Truncation, seed: int, positions: Sequence[int], purpose: int) -> list[int]:
        if self._cut is None or self._cut[0] != cut:
            self._cut = cut, device_cut(cut, self.device)
        # A row chooses the token behind itself.
        rows = torch.tensor([position - 1 for position in positions], dtype=torch.int32).to(self.device)
        noise = device_noise(seed, rows, purpose)
        return self._read(self.ops.gumbel_argmax(logits, self._cut[1], noise, logits.shape[1]))

    def argmax(self, logits: Tensor) -> list[int]:
        return self._read(self.ops.argmax(logits))

    @staticmethod
    def _read(tokens: Tensor) -> list[int]:
        return [int(token) for token in tokens.tolist()]
