"""The ops of a decoding step, as an interface: one op = one name, in every backend.

Knows: shapes and meaning of each op. Does not know: models. `reference.py` is the definition; another backend may use
other arithmetic (int8 activations, fused passes) within a stated tolerance, but every backend is row-invariant: the
bits of a row of the result depend neither on how many rows are in the call nor on where the row stands.

Letters: R rows, K inputs, N outputs, V vocabulary, D head dim, S cached rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from specgen.weights.packed import QuantLinear

KV_BLOCK = 64
"""Cached rows that attention folds in at once: blocks start at multiples of it, whatever the step."""


@dataclass(frozen=True, slots=True)
class KVLayer:
    """One layer's static cache. int8 caches carry a scale per cached row and head."""

    k: Tensor  # (kv_heads, S, D) float32, bfloat16 or int8
    v: Tensor  # (kv_heads, S, D)
    k_scale: Tensor | None = None  # (kv_heads, S) float32
    v_scale: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Attend:
    """How the rows of one step see the cache.

    Row r stands in slot `start + r`. It sees every slot < start, itself, and its ancestors among the step's rows.
    `parents[r]` is the row before it (-1: the last committed slot); a chain has parents[r] == r - 1. A row's position
    is `start + depth`. With a window, keys at a distance ≥ window (in positions) are not seen.
    """

    start: int
    parents: tuple[int, ...]  # R
    positions: tuple[int, ...]  # R

    @classmethod
    def chain(cls, start: int, rows: int) -> Attend:
        return cls(start, tuple(range(-1, rows - 1)), tuple(range(start, start + rows)))

    @classmethod
    def tree(cls, start: int, parents: tuple[int, ...]) -> Attend:
        """Rows with the given parent rows; row 0 is the pending token (parent -1)."""
        positions: list[int] = []
        for row, parent in enumerate(parents):
            assert -1 <= parent < row
            positions.append(start if parent < 0 else positions[parent] + 1)
        return cls(start, parents, tuple(positions))

    @property
    def is_chain(self) -> bool:
        return all(parent == row - 1 for row, parent in enumerate(self.parents))


@lru_cache(maxsize=64)
def _chain_path(width: int) -> Tensor:
    return torch.arange(width, dtype=torch.int32).repeat(width, 1)


@lru_cache(maxsize=64)
def _tree_path(parents: tuple[int, ...], width: int) -> Tensor:
    path = torch.zeros(width, width, dtype=torch.int32)
    found: list[list[int]] = []
    for row, parent in enumerate(parents):
        found.append([*(found[parent] if parent >= 0 else ()), row])
        path[row, : len(found[row])] = torch.tensor(found[row], dtype=torch.int32)
    return path


def pack_attend(attend: Attend, width: int) -> Tensor:
    """`attend`, padded to `width` rows, as one int32 vector on the host: start, rows, positions (W,), path (W, W)."""
    rows = len(attend.positions)
    assert 0 < rows <= width
    head = torch.tensor([attend.start, rows, *attend.positions, *[attend.start] * (width - rows)], dtype=torch.int32)
    path = _chain_path(width) if attend.is_chain else _tree_path(attend.parents, width)
    return torch.cat((head, path.view(-1)))


@dataclass(frozen=True, slots=True)
class DeviceAttend:
    """`Attend` as tensors on the device, so that a captured graph takes the step's place from memory.

    W is the width of the step. Only the first `rows` rows are real: the others write no K, V and nobody reads their
    results. The fields are views of one vector, so a new step costs one copy.
    """

    start: Tensor  # (1,) int32: slot and position of row 0
    rows: Tensor  # (1,) int32
    positions: Tensor  # (W,) int32; padding rows stand at `start`
    path: Tensor  # (W, W) int32: path[r, i] = r's ancestor (or r itself) at position start + i ≤ positions[r]
    packed: Tensor  # (2 + W + W²,) int32: all of the above

    @classmethod
    def over(cls, packed: Tensor, width: int) -> DeviceAttend:
        """Views of a vector laid out by `pack_attend`."""
        assert packed.shape == (2 + width + width * width,)
        path = packed[2 + width :].view(width, width)
        return cls(packed[:1], packed[1:2], packed[2 : 2 + width], path, packed)

    @property
    def width(self) -> int:
        return len(self.positions)

    def write(self, attend: Attend) -> None:
        """Put another step, of at most W rows, into the same memory."""
        self.packed.copy_(pack_attend(attend, self.width), non_blocking=True)


def device_attend(attend: Attend, width: int, device: torch.device | str) -> DeviceAttend:
    """`attend`, padded to `width` rows, on `device`."""
    return DeviceAttend.over(pack_attend(attend, width).to(device), width)


NON_FINITE = -1
"""What the sampling ops return in place of a token for a row that holds NaN or +inf, or no finite value at all."""


@dataclass(frozen=True, slots=True)
class Truncation:
    """Temperature and truncation, applied in this order. Tokens are ranked by (logit descending, id ascending).

    temperature: divides the logits; 0 keeps the first largest alone. top_k: keep the first k (0 = all). top_p: of what
    is left, renormalised, keep the shortest ranked prefix whose mass is ≥ top_p. min_p: keep tokens with
    p ≥ min_p · max p.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


@dataclass(frozen=True, slots=True)
class Noise:
    """The key of a draw: randomness is a pure function of (seed, position, token id, purpose), see `philox`."""

    seed: int  # 0 … 2**64 - 1
    position: int  # absolute position of the token being chosen
    purpose: int = 0  # sampling.Purpose: 0 = the token itself (shared by target and coupled draft)


class Kernels(Protocol):
    """A backend. All activations are float32 on the CPU; outputs are new tensors unless an argument says `out`."""

    name: str  # "reference", "torch", "cpu avx2", …
    device: torch.device  # where weights, caches and activations live

    def prepare(self, weight: QuantLinear) -> Any:
        """`weight` laid out for this backend's `linear` and `embedding` (the packed original may then be dropped)."""
        ...

    def embedding(self, ids: Tensor, weight: Any) -> Tensor:
        """Rows `ids` (R,) of a prepared (V, H) weight → (R, H)."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x (R, H) · weight (H,) / rms(x). Also per head: x (R, heads, D), weight (D,)."""
        ...

    def linear(self, x: Tensor, weight: Any) -> Tensor:
        """x (R, K) → (R, N), bias included."""
        ...

    def rope_write(
        self, q: Tensor, k: Tensor, v: Tensor, cos_sin: tuple[Tensor, Tensor] | None, layer: KVLayer, start: int
    ) -> Tensor:
        """Rotate q (R, heads, D) and k (R, kv_heads, D) by cos, sin (R, dims / 2; None = NoPE), write k and v
        (R, kv_heads, D) into slots start…start + R - 1, and return the rotated q."""
        ...

    def attention(
        self, q: Tensor, layer: KVLayer, attend: Attend, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """softmax(scale · q kᵀ, capped, masked) v over the cache → (R, heads, D). q (R, heads, D) is rotated."""
        ...

    def gated(self, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        """activation(gate) · up, both (R, I): SwiGLU for "silu", GeGLU for "gelu_tanh"."""
        ...

    def gumbel_argmax(self, logits: Tensor, cut: Truncation, noise: Noise) -> int:
        """A sample of softmax(logits (V,) / temperature) after truncation: argmax(log p + G(noise)). Temperature 0:
        the first largest logit. Returns NON_FINITE when a logit is NaN or +inf, or when all are -inf."""
        ...

    def argmax(self, logits: Tensor) -> list[int]:
        """The first largest of each row of (R, V), NON_FINITE where a row has NaN or +inf or is all -inf."""
        ...


@runtime_checkable
class SamplesRows(Protocol):
    """A backend to which one call for many rows costs little more than one for a single row."""

    def gumbel_argmax_rows(self, logits: Tensor, cut: Truncation, seed: int, positions: Sequence[int]) -> list[int]:
        """`gumbel_argmax` of every row of logits (R, V), row r with the noise of positions[r]: the same bits."""
        ...
