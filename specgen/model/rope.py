"""Rotary position embedding: inverse frequencies after the published scalings, and cos and sin by position.

Knows: the `rope_parameters` (or `rope_scaling`) of a config and what each `rope_type` does to the frequencies. Does
not know: tensors that are rotated (kernels).

The scalings that depend on the length of the sequence (dynamic, longrope) are fixed once, by the longest sequence of
the run: a cached key is never rotated again, so a logit depends on its tokens alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specgen.errors import ModelError, nearest
from specgen.model.spec import RopeSpec

TABLE_BLOCK = 256
"""Positions computed at once: always whole blocks, so that no position is ever computed with another shape."""


@dataclass(frozen=True, slots=True)
class RopeSettings:
    """One layer type's rotary settings. Lengths in tokens."""

    theta: float
    dims: int
    positions: int  # max_position_embeddings
    original_positions: int  # before the context was extended
    longest: int  # the longest sequence of this run
    values: Mapping[str, Any]  # the rope section itself

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ModelError(f"config.json: the rope setting {key!r} is {value!r}, not a number")
        return float(value)

    def factors(self, key: str) -> Tensor:
        """A list of one factor per frequency → (dims / 2,)."""
        value = self.values.get(key)
        if not isinstance(value, list) or len(value) != self.dims // 2:
            raise ModelError(f"config.json: the rope setting {key!r} must list {self.dims // 2} numbers")
        return torch.tensor(value, dtype=torch.float32)


def _inverse(theta: float, dims: int) -> Tensor:
    """theta ** (-2i / dims), (dims / 2,) float32."""
    return 1.0 / (theta ** (torch.arange(0, dims, 2).float() / dims))


def _default(rope: RopeSettings) -> tuple[Tensor, float]:
    return _inverse(rope.theta, rope.dims), 1.0


def _linear(rope: RopeSettings) -> tuple[Tensor, float]:
    """Position interpolation (2306.15595)."""
    return _inverse(rope.theta, rope.dims) / rope.number("factor"), 1.0


def _dynamic(rope: RopeSettings) -> tuple[Tensor, float]:
    """NTK-aware scaling of theta for the longest sequence; none while it is within max_position_embeddings."""
    factor = rope.number("factor")
    stretch = factor * max(rope.longest, rope.positions) / rope.positions - (factor - 1)
    return _inverse(rope.theta * stretch ** (rope.dims / (rope.dims - 2)), rope.dims), 1.0


def _llama3(rope: RopeSettings) -> tuple[Tensor, float]:
    """Llama 3.1: long wavelengths divided by `factor`, short ones kept, a smooth passage between."""
    inverse = _inverse(rope.theta, rope.dims)
    factor, low, high = (rope.number(key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    turns = rope.original_positions * inverse / (2 * math.pi)  # rotations over the original context
    smooth = (turns - low) / (high - low)
    between = (1 - smooth) * inverse / factor + smooth * inverse
    return torch.where(turns < low, inverse / factor, torch.where(turns > high, inverse, between)), 1.0


def _yarn(rope: RopeSettings) -> tuple[Tensor, float]:
    """YaRN (2309.00071): interpolate slow dimensions, keep fast ones, and sharpen the attention."""
    factor = rope.number("factor", rope.positions / rope.original_positions)
    inverse = _inverse(rope.theta, rope.dims)

    def dimension(rotations: float) -> float:
        """The dimension that turns this often over the original context."""
        return rope.dims * math.log(rope.original_positions / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.number("beta_fast", 32.0)), dimension(rope.number("beta_slow", 1.0))
    if rope.values.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dims - 1)
    width = high - low or 0.001
    interpolated = ((torch.arange(rope.dims // 2).float() - low) / width).clamp(0, 1)
    return inverse / factor * interpolated + inverse * (1 - interpolated), _yarn_attention(rope, factor)


def _yarn_attention(rope: RopeSettings, factor: float) -> float:
    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.values.get("attention_factor") is not None:
        return rope.number("attention_factor")
    if rope.values.get("mscale") and rope.values.get("mscale_all_dim"):
        return mscale(rope.number("mscale")) / mscale(rope.number("mscale_all_dim"))
    return mscale(1.0)


def _longrope(rope: RopeSettings) -> tuple[Tensor, float]:
    """LongRoPE (2402.13753): a factor per frequency, one set for sequences beyond the original context."""
    name = "long_factor" if rope.longest > rope.original_positions else "short_factor"
    inverse = 1.0 / (rope.factors(name) * rope.theta ** (torch.arange(0, rope.dims, 2).float() / rope.dims))
    if rope.values.get("attention_factor") is not None:
        return inverse, rope.number("attention_factor")
    factor = rope.number("factor", rope.positions / rope.original_positions)
    attention = math.sqrt(1 + math.log(factor) / math.log(rope.original_positions)) if factor > 1 else 1.0
    return inverse, attention


SCALINGS: dict[str, Callable[[RopeSettings], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}


def rope_type(values: Mapping[str, Any]) -> str:
    """The kind of scaling that a rope section asks for; ModelError when it is not known."""
    kind = values.get("rope_type") or values.get("type") or "default"
    kind = "longrope" if kind == "su" else kind  # Phi-3's first name for it
    if kind not in SCALINGS:
        raise ModelError(f"config.json: rope_type {kind!r} is not known", hint=nearest(str(kind), SCALINGS))
    return str(kind)


def rope_spec(settings: RopeSettings) -> RopeSpec:
    """The frequencies of one layer type."""
    inverse, attention = SCALINGS[rope_type(settings.values)](settings)
    return RopeSpec(settings.theta, settings.dims, tuple(inverse.tolist()), attention)


class RopeTable:
    """cos and sin of one RopeSpec by position, computed (on the CPU, whatever the device) when first asked for."""

    def __init__(self, rope: RopeSpec, device: torch.device | str = "cpu") -> None:
        self._inverse = torch.tensor(rope.inv_freq, dtype=torch.float32)
        self._factor = rope.attention_factor
        self._device = device
        self._cos = torch.empty(0, rope.dims // 2, device=device)
        self._sin = torch.empty(0, rope.dims // 2, device=device)

    def rows(self, positions: Sequence[int]) -> tuple[Tensor, Tensor]:
        """positions (R,) → cos, sin (R, dims / 2)."""
        index = torch.tensor(positions, device=self._device)
        cos, sin = self.table(max(positions) + 1)
        return cos[index], sin[index]

    def table(self, count: int) -> tuple[Tensor, Tensor]:
        """cos, sin (≥ count, dims / 2) of positions 0, 1, …: views of what is kept, which a longer table replaces."""
        if count > len(self._cos):
            start, stop = len(self._cos), -(-count // TABLE_BLOCK) * TABLE_BLOCK
            blocks = [self._block(begin) for begin in range(start, stop, TABLE_BLOCK)]
            self._cos = torch.cat((self._cos, *(cos for cos, _ in blocks)))
            self._sin = torch.cat((self._sin, *(sin for _, sin in blocks)))
        return self._cos, self._sin

    def _block(self, start: int) -> tuple[Tensor, Tensor]:
        angles = torch.arange(start, start + TABLE_BLOCK).float()[:, None] * self._inverse
        return (angles.cos() * self._factor).to(self._device), (angles.sin() * self._factor).to(self._device)
