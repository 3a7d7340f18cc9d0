"""Tiny seeded models for tests: a few thousand weights, logits spread enough to make tokens clearly likely or not."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from specgen.kernels.base import Kernels
from specgen.kernels.reference import ReferenceKernels
from specgen.model.decoder import Decoder
from specgen.model.rope import RopeSettings, rope_spec
from specgen.model.spec import LayerSpec, ModelSpec, MoeSpec
from specgen.model.weights import LayerWeights, MlpWeights, ModelWeights, MoeWeights
from specgen.weights.packed import Dense, GroupedInt4, GroupedInt8, QuantLinear

Quant = Literal["dense", "int4", "int8"]

LOGIT_SPREAD = 3.0
GROUP = 32


def tiny_spec(**changes: Any) -> ModelSpec:
    """A Llama of two layers with GQA: H 64, 4 heads over 2 KV heads of 16, V 97, 512 tokens."""
    rope = rope_spec(RopeSettings(10_000.0, 16, 512, 512, 512, {}))
    spec = ModelSpec(
        family="llama",
        vocab=97,
        hidden=64,
        intermediate=96,
        heads=4,
        kv_heads=2,
        head_dim=16,
        context=512,
        norm_eps=1e-5,
        layers=(LayerSpec(rope=rope),) * 2,
        tied_head=False,
        attention_scale=0.25,
        bos=1,
        eos=(2,),
    )
    return replace(spec, **changes)


class _Maker:
    """Random weights from one generator, in a fixed order."""

    def __init__(self, seed: int, quant: Quant) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.quant = quant

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def linear(self, outputs: int, inputs: int, spread: float = 1.0, quant: Quant | None = None) -> QuantLinear:
        """(outputs, inputs) whose products with unit-variance inputs have a standard deviation of about `spread`."""
        std = spread / inputs**0.5
        quant = quant or self.quant
        if quant == "dense":
            return Dense(self.normal(outputs, inputs) * std)
        groups = (outputs, inputs // GROUP)
        wobble = 1.0 + 0.2 * torch.rand(groups, generator=self.generator)
        if quant == "int4":
            scale = (wobble * std / 4.6).half()  # 4.6: the standard deviation of 0 … 15
            nibbles = torch.randint(0, 256, (outputs, inputs // 2), generator=self.generator).to(torch.uint8)
            return GroupedInt4(nibbles, scale, (scale.float() * -7.5).half(), GROUP)
        scale = (wobble * std / 73.3).half()  # 73.3: the standard deviation of -127 … 127
        q = torch.randint(-127, 128, (outputs, inputs), generator=self.generator).to(torch.int8)
        return GroupedInt8(q, scale, GROUP)

    def norm(self, size: int) -> Tensor:
        return 1.0 + 0.1 * self.normal(size)

    def mlp(self, hidden: int, intermediate: int) -> MlpWeights:
        wide = (self.linear(intermediate, hidden), self.linear(intermediate, hidden))
        return MlpWeights(*wide, self.linear(hidden, intermediate))

    def moe(self, hidden: int, moe: MoeSpec) -> MoeWeights:
        router = self.linear(moe.experts, hidden, quant="dense")
        return MoeWeights(router, tuple(self.mlp(hidden, moe.intermediate) for _ in range(moe.experts)))

    def layer(self, spec: ModelSpec, index: int) -> LayerWeights:
        q_size, kv_size = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        norms, moe = spec.norms, spec.layers[index].moe
        names = (norms.before_attention, norms.after_attention, norms.before_mlp, norms.after_mlp)
        projection = spec.qk_norm == "projection"
        return LayerWeights(
            self.linear(q_size, spec.hidden, spread=2.0),
            self.linear(kv_size, spec.hidden, spread=2.0),
            self.linear(kv_size, spec.hidden),
            self.linear(spec.hidden, q_size),
            self.mlp(spec.hidden, spec.intermediate) if moe is None else self.moe(spec.hidden, moe),
            *(None if name is None else self.norm(spec.hidden) for name in names),
            None if spec.qk_norm is None else self.norm(q_size if projection else spec.head_dim),
            None if spec.qk_norm is None else self.norm(kv_size if projection else spec.head_dim),
        )


def tiny_weights(spec: ModelSpec, seed: int = 0, quant: Quant = "dense") -> ModelWeights:
    """Random weights of `spec`. With "int4" the embedding and the head are int8, as in the default model's file."""
    maker = _Maker(seed, quant)
    ends: Quant = "dense" if quant == "dense" else "int8"
    embedding = maker.linear(spec.vocab, spec.hidden, spread=LOGIT_SPREAD, quant=ends)
    head = embedding if spec.tied_head else maker.linear(spec.vocab, spec.hidden, spread=LOGIT_SPREAD, quant=ends)
    layers = tuple(maker.layer(spec, index) for index in range(len(spec.layers)))
    return ModelWeights(embedding, layers, maker.norm(spec.hidden), head)


def tiny_decoder(
    spec: ModelSpec | None = None, seed: int = 0, quant: Quant = "dense", kernels: Kernels | None = None
) -> Decoder:
    """A ready model; `tiny_decoder(tiny_spec(vocab=8))` has a vocabulary that can be enumerated."""
    spec = spec or tiny_spec()
    return Decoder(spec, tiny_weights(spec, seed, quant), kernels or ReferenceKernels())


@dataclass
class MemoryCheckpoint:
    """A checkpoint of tensors by name that was never a file."""

    tensors: dict[str, Tensor]
    config: Mapping[str, Any] = field(default_factory=dict)
    path: Path = Path("memory.safetensors")
    released: int = 0

    def names(self) -> Collection[str]:
        return self.tensors

    def tensor(self, name: str) -> Tensor:
        return self.tensors[name]

    def release(self) -> None:
        self.released += 1

    def digest(self) -> str:
        return "memory"
