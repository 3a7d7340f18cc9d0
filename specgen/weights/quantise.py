"""Quantising dense weights when a model is loaded: `--quant int4 | int8 | fp8 | nf4`.

Knows: one small class per kind, which quantises a matrix and reads back what it has stored. Does not know: which
modules of a model are quantised, or where the result is kept (quantised).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from specgen.errors import ModelError, UsageError, nearest
from specgen.weights.base import Checkpoint
from specgen.weights.bits import pack_nibbles
from specgen.weights.bnb import codebook
from specgen.weights.module import FLOATS, Module
from specgen.weights.packed import Codebook4, Fp8, GroupedInt4, GroupedInt8, QuantLinear, to_device

INT4_GROUP, INT8_GROUP, NF4_BLOCK = 32, 32, 64
INT4_CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)
"""Parts of a group's range that are tried: cutting off an outlier may bring the others closer."""

FP8_MAX = 448.0  # the largest e4m3
HALF_RANGE = (2.0**-8, 2.0**15)
"""Largest weights of a matrix for which float16 scales neither overflow nor lose bits that matter."""

ELEMENTS_AT_ONCE = 1 << 17
ROWS_MULTIPLE = 64
"""Rows are quantised in multiples of this many at a time, so that no block of a flat weight is cut."""


class Quantiser(Protocol):
    """One kind. It is a WeightFormat too: of modules whose tensors have the names that `store` gave them."""

    @property
    def name(self) -> str: ...

    def quantise(self, weight: Tensor) -> QuantLinear:
        """weight (N, K) of finite floats → packed."""
        ...

    def store(self, weight: QuantLinear) -> dict[str, Tensor]:
        """Suffix → tensor, what `linear` needs to read."""
        ...

    def claims(self, checkpoint: Checkpoint, key: str) -> bool: ...

    def linear(self, checkpoint: Checkpoint, key: str, shape: tuple[int, int], device: torch.device) -> QuantLinear: ...


def quantise(weight: Tensor, kind: str) -> QuantLinear:
    """weight (N, K) of finite floats → packed as `kind` says. UsageError for a kind that is not known."""
    return quantiser(kind).quantise(weight)


def quantiser(kind: str) -> Quantiser:
    """The class of a kind: int4, int8, fp8 or nf4."""
    if kind not in QUANTISERS:
        known = nearest(kind, QUANTISERS) or "the kinds are " + ", ".join(QUANTISERS)
        raise UsageError(f"weights cannot be quantised to {kind!r}", hint=known)
    return QUANTISERS[kind]


class _Stored:
    """A kind's name, and how its stored tensors are known."""

    kind: str

    @property
    def name(self) -> str:
        return f"{self.kind} (on load)"

    def claims(self, checkpoint: Checkpoint, key: str) -> bool:
        return Module(checkpoint, key).has(f"{self.kind}_q")


class Int4(_Stored):
    """q · scale + min in groups of 32, 5 bits per weight. A group is clipped where that lessens its error."""

    kind = "int4"

    def quantise(self, weight: Tensor) -> GroupedInt4:
        group = _group(weight.shape[1], INT4_GROUP, least=2)
        dtype = _scale_dtype(weight)
        nibbles, scale, low = _by_rows(weight, lambda rows: _best_clip(rows.reshape(len(rows), -1, group), dtype))
        return GroupedInt4(nibbles, scale, low, group)

    def store(self, weight: QuantLinear) -> dict[str, Tensor]:
        assert isinstance(weight, GroupedInt4)
        assert isinstance(weight.scale, Tensor)
        assert isinstance(weight.min, Tensor)
        return {"int4_q": weight.nibbles, "int4_scale": weight.scale, "int4_min": weight.min}

    def linear(self, checkpoint: Checkpoint, key: str, shape: tuple[int, int], device: torch.device) -> QuantLinear:
        module, (n, k) = Module(checkpoint, key), shape
        group = _group(k, INT4_GROUP)
        q = module.tensor("int4_q", (n, k // 2), torch.uint8)
        scale, low = (module.tensor(suffix, (n, k // group), *FLOATS) for suffix in ("int4_scale", "int4_min"))
        return to_device(GroupedInt4(q, scale, low, group, module.bias(n)), device)


class Int8(_Stored):
    """q · scale in groups of 32, scale = amax / 127: 8.5 bits per weight."""

    kind = "int8"

    def quantise(self, weight: Tensor) -> GroupedInt8:
        group = _group(weight.shape[1], INT8_GROUP)
        dtype = _scale_dtype(weight)

        def nearest_steps(rows: Tensor) -> tuple[Tensor, Tensor]:
            groups = rows.reshape(len(rows), -1, group)
            scale = (groups.abs().amax(-1) / 127).to(dtype)
            q = (groups / _divisor(scale)[..., None]).round().clamp(-127, 127).to(torch.int8)
            return q.flatten(1), scale

        q, scale = _by_rows(weight, nearest_steps)
        return GroupedInt8(q, scale, group)

    def store(self, weight: QuantLinear) -> dict[str, Tensor]:
        assert isinstance(weight, GroupedInt8)
        assert isinstance(weight.scale, Tensor)
        return {"int8_q": weight.q, "int8_scale": weight.scale}

    def linear(self, checkpoint: Checkpoint, key: str, shape: tuple[int, int], device: torch.device) -> QuantLinear:
        module, (n, k) = Module(checkpoint, key), shape
        group = _group(k, INT8_GROUP)
        q = module.tensor("int8_q", shape, torch.int8)
        scale = module.tensor("int8_scale", (n, k // group), *FLOATS)
        return to_device(GroupedInt8(q, scale, group, bias=module.bias(n)), device)


class Fp8Channel(_Stored):
    """e4m3(q) · scale, one scale per output, amax / 448: 8 bits per weight."""

    kind = "fp8"

    def quantise(self, weight: Tensor) -> Fp8:
        def nearest_values(rows: Tensor) -> tuple[Tensor, Tensor]:
            scale = rows.abs().amax(-1, keepdim=True) / FP8_MAX
            q = (rows / _divisor(scale)).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
            return q.view(torch.uint8), scale

        q, scale = _by_rows(weight, nearest_values)
        return Fp8(q.view(torch.float8_e4m3fn), scale, (1, weight.shape[1]))

    def store(self, weight: QuantLinear) -> dict[str, Tensor]:
        assert isinstance(weight, Fp8)
        return {"fp8_q": weight.q, "fp8_scale": weight.scale}

    def linear(self, checkpoint: Checkpoint, key: str, shape: tuple[int, int], device: torch.device) -> QuantLinear:
        module, (n, k) = Module(checkpoint, key), shape
        q = module.tensor("fp8_q", shape, torch.float8_e4m3fn)
        scale = module.tensor("fp8_scale", (n, 1), torch.float32)
        return to_device(Fp8(q, scale, (1, k), module.bias(n)), device)


class Nf4(_Stored):
    """code[q] · scale in blocks of 64, through bitsandbytes' own functions: 4.5 bits per weight."""

    kind = "nf4"

    def quantise(self, weight: Tensor) -> Codebook4:
        from bitsandbytes.functional import quantize_4bit

        _group(weight.shape[1], NF4_BLOCK, least=2)
        codes: list[Tensor] = []

        def blocks(rows: Tensor) -> tuple[Tensor, Tensor]:
            packed, state = quantize_4bit(rows.contiguous(), blocksize=NF4_BLOCK, quant_type="nf4")
            codes[:] = [state.code.float().cpu()]
            return packed.reshape(len(rows), -1), state.absmax.float()

        packed, absmax = _by_rows(weight, blocks)
        return codebook(packed, codes[0], absmax, NF4_BLOCK)

    def store(self, weight: QuantLinear) -> dict[str, Tensor]:
        assert isinstance(weight, Codebook4)
        assert isinstance(weight.scale, Tensor)
        return {"nf4_q": weight.nibbles, "nf4_scale": weight.scale, "nf4_code": weight.code}

    def linear(self, checkpoint: Checkpoint, key: str, shape: tuple[int, int], device: torch.device) -> QuantLinear:
        module, (n, k) = Module(checkpoint, key), shape
        group = _group(k, NF4_BLOCK)
        q = module.tensor("nf4_q", (n, k // 2), torch.uint8)
        code = module.tensor("nf4_code", (16,), torch.float32)
        scale = module.tensor("nf4_scale", (n, k // group), *FLOATS)
        return to_device(Codebook4(q, code, scale, group, module.bias(n)), device)


QUANTISERS: dict[str, Quantiser] = {"int4": Int4(), "int8": Int8(), "fp8": Fp8Channel(), "nf4": Nf4()}


def _group(inputs: int, size: int, least: int = 1) -> int:
    """`size`, or the largest part of it that divides the inputs. ModelError when that is below `least`."""
    group = math.gcd(inputs, size)
    if group < least:
        raise ModelError(f"a matrix with {inputs} inputs cannot be packed in nibbles", hint="use int8 or fp8")
    return group


def _scale_dtype(weight: Tensor) -> torch.dtype:
    smallest, largest = HALF_RANGE
    return torch.float16 if smallest <= float(weight.abs().amax()) <= largest else torch.float32


def _divisor(scale: Tensor) -> Tensor:
    """The scale as float32; 1 for groups of zeros."""
    return torch.where(scale == 0, 1.0, scale.float())


def _by_rows(weight: Tensor, convert: Callable[[Tensor], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """`convert` of a few rows of float32 at a time, its results joined again."""
    rows, inputs = weight.shape
    step = max(1, ELEMENTS_AT_ONCE // inputs // ROWS_MULTIPLE) * ROWS_MULTIPLE
    parts = [convert(weight[start : start + step].float()) for start in range(0, rows, step)]
    return tuple(torch.cat(each) for each in zip(*parts, strict=True))


def _best_clip(groups: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """groups (R, G, group) → nibbles (R, K / 2), scale and min (R, G) in `dtype`.

    The error is taken after scale and min were rounded, so the choice is the best of what will be stored.
    """
    lowest, highest = groups.amin(-1), groups.amax(-1)
    middle, half = (lowest + highest) / 2, (highest - lowest) / 2
    best_error = torch.full_like(middle, torch.inf)
    best_scale = best_low = torch.zeros_like(middle, dtype=dtype)
    for clip in INT4_CLIPS:
        scale, low = (half * (2 * clip / 15)).to(dtype), (middle - clip * half).to(dtype)
        error = (_nearest16(groups, scale, low) * scale[..., None].float() + low[..., None].float() - groups).square()
        better = error.sum(-1) < best_error
        best_error = torch.where(better, error.sum(-1), best_error)
        best_scale, best_low = torch.where(better, scale, best_scale), torch.where(better, low, best_low)
    q = _nearest16(groups, best_scale, best_low).to(torch.uint8)
    return pack_nibbles(q.flatten(1)), best_scale, best_low


def _nearest16(groups: Tensor, scale: Tensor, low: Tensor) -> Tensor:
    """The step 0…15 that is nearest to each value, as float32 (R, G, group)."""
    return ((groups - low[..., None].float()) / _divisor(scale)[..., None]).round_().clamp_(0, 15)
