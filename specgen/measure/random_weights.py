"""Random weights at the shapes of a real model, made packed, layer by layer, on the device that they are for.

Knows: what each way of packing looks like once it is loaded (which tensors, of which types), so that a kernel meets
what a checkpoint would give it. Does not know: files. No dense matrix is ever made but those that a format keeps dense.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, overload

import torch
from torch import Tensor

from specgen.errors import ModelError, UsageError, nearest
from specgen.model.spec import ModelSpec
from specgen.model.weights import LayerWeights, MlpWeights, ModelWeights
from specgen.weights.bits import int4
from specgen.weights.packed import Codebook4, Dense, Fp8, GroupedInt4, GroupedInt8, Nested, QuantLinear

Role = Literal["q", "k", "v", "o", "gate", "up", "down", "embedding", "head"]
ENDS = ("embedding", "head")

# Standard deviations of uniformly random codes, by which a scale is divided.
INT4_STD = 4.61
INT8_STD = 73.6
INT6_STD = 18.5
E4M3_STD = 0.61  # of random e4m3 bits below 2
SUPER = 256
"""Weights of a K-quant's super-block."""
NF4_CODE = (
    *(-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0),
    *(0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.723, 1.0),
)
NF4_STD = 0.55


@dataclass(frozen=True, slots=True)
class Place:
    """Which weight of a model."""

    role: Role
    layer: int = 0
    layers: int = 1

    @property
    def more_bits(self) -> bool:
        """Whether a Q4_K_M file has this one in Q6_K: llama.cpp's rule for v and down, and the ends of the model."""
        if self.role in ENDS:
            return True
        eighth = self.layers // 8
        sensitive = self.layer < eighth or self.layer >= 7 * self.layers // 8 or (self.layer - eighth) % 3 == 2
        return self.role in ("v", "down") and sensitive


class Source:
    """Random tensors on one device."""

    def __init__(self, device: torch.device, seed: int = 0) -> None:
        self.device = device
        self._generator = torch.Generator(device).manual_seed(seed)

    def integers(self, low: int, high: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """low … high - 1"""
        return torch.randint(low, high, tuple(shape), generator=self._generator, device=self.device, dtype=dtype)

    def octets(self, *shape: int) -> Tensor:
        return self.integers(0, 256, shape, torch.uint8)

    def scales(self, shape: Sequence[int], middle: float, dtype: torch.dtype) -> Tensor:
        """Around `middle`, by up to a fifth."""
        wobble = torch.rand(tuple(shape), generator=self._generator, device=self.device)
        return (middle * (0.8 + 0.4 * wobble)).to(dtype)

    def normal(self, shape: Sequence[int], std: float, dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=self.device).normal_(0.0, std, generator=self._generator)


class Packing(Protocol):
    """One way of packing a whole model."""

    name: str

    def linear(self, source: Source, n: int, k: int, place: Place) -> QuantLinear:
        """(n, k), whose products with inputs of unit variance have about unit variance."""
        ...


def _dense(source: Source, n: int, k: int) -> Dense:
    return Dense(source.normal((n, k), k**-0.5, torch.float16))


class Bf16:
    """As it was trained."""

    name = "bf16"

    def linear(self, source: Source, n: int, k: int, place: Place) -> QuantLinear:
        return Dense(source.normal((n, k), k**-0.5, torch.bfloat16))


class Awq:
    """4 bits in groups of 128 with zero points; embedding and head in 16 bits."""

    name = "awq"

    def linear(self, source: Source, n: int, k: int, place: Place) -> QuantLinear:
        if place.role in ENDS:
            return _dense(source, n, k)
        groups = (n, k // group_of(k, 128))
        scale = source.scales(groups, k**-0.5 / INT4_STD, torch.float16)
        return int4(source.octets(n, k // 2), scale, self._zeros(source, groups), None)

    def _zeros(self, source: Source, groups: tuple[int, int]) -> Tensor:
        return source.integers(6, 10, groups, torch.uint8)


class GptqSymmetric(Awq):
    """The same with the zero point 8 everywhere."""

    name = "gptq"

    def _zeros(self, source: Source, groups: tuple[int, int]) -> Tensor:
        return torch.full(groups, 8, dtype=torch.uint8, device=source.device)


class Int8Channel:
    """8 bits with a scale for each output; embedding and head in 16 bits."""

    name = "int8"

    def linear(self, source: Source, n: int, k: int, place: Place) -> QuantLinear:
        if place.role in ENDS:
            return _dense(source, n, k)
        scale = source.scales((n, 1), k**-0.5 / INT8_STD, torch.float16)
        return GroupedInt8(source.integers(-127, 128, (n, k), torch.int8), scale, k)


class Fp8Channel:
    """e4m3 with a scale for each output; embedding and head in 16 bits."""

    name = "fp8"

    def linear(self, source: Source, n: int, k: int, place: Place) -> QuantLinear:
        if place.role in ENDS:
            return _dense(source, n, k)
        bits = source.octets(n, k) & 0xBF  # without the top bit of the exponent nothing is NaN
        scale = source.scales((n, 1), k**-0.5 / E4M3_STD, torch.float32)
        return Fp8(bits.view(torch.float8_e4m3fn), scale, (1, k))


class Nf4:
    """The 4-bit normal float of bitsandbytes in blocks of 64; embedding and head in 16 bits."""

    name = "nf4"

    def linear(self, source: Source, n: int, k: int, place: Place) -> QuantLinear:
        if place.role in ENDS:
            return _dense(source, n, k)
        group = group_of(k, 64)
        code = torch.tensor(NF4_CODE, device=source.device)
        scale = source.scales((n, k // group), k**-0.5 / NF4_STD, torch.float32)
        return Codebook4(source.octets(n, k // 2), code, scale, group)


class Q4KM:
    """A Q4_K_M file of llama.cpp: Q4_K, with Q6_K where its rule wants more bits. Where super-blocks of 256 do not
    divide the inputs it takes other types; here that is Q8_0."""

    name = "q4_k_m"

    def linear(self, source: Source, n: int, k: int, place: Place) -> QuantLinear:
        if k % SUPER:
            group = group_of(k, 32)
            scale = source.scales((n, k // group), k**-0.5 / INT8_STD, torch.float16)
            return GroupedInt8(source.integers(-127, 128, (n, k), torch.int8), scale, group)
        return self._q6(source, n, k) if place.more_bits else self._q4(source, n, k)

    def _q4(self, source: Source, n: int, k: int) -> GroupedInt4:
        step = k**-0.5 / INT4_STD
        scale = Nested(source.integers(40, 64, (n, k // 32), torch.uint8), self._outer(source, n, k, step / 52))
        low = Nested(source.integers(40, 64, (n, k // 32), torch.uint8), self._outer(source, n, k, -7.5 * step / 52))
        return GroupedInt4(source.octets(n, k // 2), scale, low, 32)

    def _q6(self, source: Source, n: int, k: int) -> GroupedInt8:
        inner = source.integers(64, 127, (n, k // 16), torch.int8)
        scale = Nested(inner, self._outer(source, n, k, k**-0.5 / INT6_STD / 95))
        return GroupedInt8(source.integers(-32, 32, (n, k), torch.int8), scale, 16)

    def _outer(self, source: Source, n: int, k: int, middle: float) -> Tensor:
        return source.scales((n, k // SUPER), middle, torch.float16)


PACKINGS: dict[str, Packing] = {
    packing.name: packing for packing in (Awq(), GptqSymmetric(), Fp8Channel(), Int8Channel(), Nf4(), Q4KM(), Bf16())
}


def find_packing(name: str) -> Packing:
    """UsageError for a name that is not in PACKINGS."""
    found = PACKINGS.get(name)
    if found is None:
        hint = nearest(name, PACKINGS) or f"known: {', '.join(PACKINGS)}"
        raise UsageError(f"--quant {name!r} is no packing of --shape", hint)
    return found


def group_of(inputs: int, size: int) -> int:
    """`size`, or its largest half, quarter … that divides the inputs."""
    while inputs % size:
        size //= 2
    return size


def random_weights(
    spec: ModelSpec, packing: Packing, device: torch.device, *, biased: bool = False, seed: int = 0
) -> ModelWeights:
    """A whole model. `layers` makes each layer when it is taken: take each once. ModelError for experts."""
    if any(layer.moe is not None for layer in spec.layers):
        raise ModelError("a mixture of experts has no random weights", hint="choose a dense shape")
    source = Source(device, seed)
    embedding = packing.linear(source, spec.vocab, spec.hidden, Place("embedding"))
    head = embedding if spec.tied_head else packing.linear(source, spec.vocab, spec.hidden, Place("head"))
    norm = torch.ones(spec.hidden, device=device)
    return ModelWeights(embedding, _Layers(spec, packing, source, biased), norm, head)


class _Layers(Sequence[LayerWeights]):
    """Made on access."""

    def __init__(self, spec: ModelSpec, packing: Packing, source: Source, biased: bool) -> None:
        self._spec = spec
        self._packing = packing
        self._source = source
        self._biased = biased

    def __len__(self) -> int:
        return len(self._spec.layers)

    @overload
    def __getitem__(self, index: int) -> LayerWeights: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[LayerWeights, ...]: ...

    def __getitem__(self, index: int | slice) -> LayerWeights | tuple[LayerWeights, ...]:
        if isinstance(index, slice):
            return tuple(self[item] for item in range(*index.indices(len(self))))
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._layer(index)

    def __iter__(self) -> Iterator[LayerWeights]:
        return (self[index] for index in range(len(self)))

    def _layer(self, index: int) -> LayerWeights:
        spec, norms = self._spec, self._spec.norms
        q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        wide, narrow = (spec.intermediate, spec.hidden), (spec.hidden, spec.intermediate)
        return LayerWeights(
            self._linear("q", (q, spec.hidden), index),
            self._linear("k", (kv, spec.hidden), index),
            self._linear("v", (kv, spec.hidden), index),
            self._linear("o", (spec.hidden, q), index),
            MlpWeights(
                self._linear("gate", wide, index), self._linear("up", wide, index), self._linear("down", narrow, index)
            ),
            self._norm_for(norms.before_attention),
            self._norm_for(norms.after_attention),
            self._norm_for(norms.before_mlp),
            self._norm_for(norms.after_mlp),
            self._qk_norm(spec.heads),
            self._qk_norm(spec.kv_heads),
        )

    def _linear(self, role: Role, shape: tuple[int, int], layer: int) -> QuantLinear:
        made: Any = self._packing.linear(self._source, *shape, Place(role, layer, len(self)))
        if self._biased and role in ("q", "k", "v"):
            made = replace(made, bias=self._source.normal((shape[0],), 0.1, torch.float32))
        found: QuantLinear = made
        return found

    def _norm_for(self, name: str | None) -> Tensor | None:
        return None if name is None else self._norm(self._spec.hidden)

    def _norm(self, size: int) -> Tensor:
        return torch.ones(size, device=self._source.device)

    def _qk_norm(self, heads: int) -> Tensor | None:
        if self._spec.qk_norm is None:
            return None
        return self._norm(self._spec.head_dim * (heads if self._spec.qk_norm == "projection" else 1))
