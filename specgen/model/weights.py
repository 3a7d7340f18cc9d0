"""The weights of a model, by what they do.

Knows: which tensors a `ModelSpec` needs and what they are called (Hugging Face names), fused and separate. Does not
know: how a linear layer is packed (weights.formats), or what becomes of it (kernels).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, overload

import torch
from torch import Tensor

from specgen.errors import ModelError
from specgen.model.spec import LayerSpec, ModelSpec, MoeSpec
from specgen.weights.base import Checkpoint
from specgen.weights.formats import find_format
from specgen.weights.packed import QuantLinear
from specgen.weights.reorder import reorder_outputs

Linear = Any
"""A QuantLinear, or what `Kernels.prepare` made of one."""


@dataclass(frozen=True, slots=True)
class MlpWeights:
    gate: Linear  # (I, H)
    up: Linear  # (I, H)
    down: Linear  # (H, I)

    def map(self, change: Callable[[Linear], Linear]) -> MlpWeights:
        return MlpWeights(change(self.gate), change(self.up), change(self.down))


@dataclass(frozen=True, slots=True)
class MoeWeights:
    router: Linear  # (E, H)
    experts: tuple[MlpWeights, ...]  # E

    def map(self, change: Callable[[Linear], Linear]) -> MoeWeights:
        return MoeWeights(change(self.router), tuple(expert.map(change) for expert in self.experts))


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Norms are float32 with the family's offset added; None where the family has none."""

    q: Linear  # (heads · D, H)
    k: Linear  # (kv_heads · D, H)
    v: Linear  # (kv_heads · D, H)
    o: Linear  # (H, heads · D)
    mlp: MlpWeights | MoeWeights
    before_attention: Tensor | None  # (H,)
    after_attention: Tensor | None  # (H,) on the attention's output, before the residual add
    before_mlp: Tensor | None  # (H,)
    after_mlp: Tensor | None  # (H,)
    q_norm: Tensor | None = None  # (D,) or (heads · D,), see spec.qk_norm
    k_norm: Tensor | None = None

    def map(self, change: Callable[[Linear], Linear]) -> LayerWeights:
        """The same layer with `change` applied to every linear."""
        return LayerWeights(
            change(self.q),
            change(self.k),
            change(self.v),
            change(self.o),
            self.mlp.map(change),
            self.before_attention,
            self.after_attention,
            self.before_mlp,
            self.after_mlp,
            self.q_norm,
            self.k_norm,
        )


@dataclass(frozen=True, slots=True)
class ModelWeights:
    embedding: Linear  # (V, H)
    layers: Sequence[LayerWeights]  # from `load_weights`: each is read when it is taken
    norm: Tensor  # (H,) float32
    head: Linear  # (V, H); the embedding itself when tied

    def map(self, change: Callable[[Linear], Linear]) -> ModelWeights:
        """The same model with `change` applied to every linear, layer by layer; a tied head stays one weight."""
        embedding = change(self.embedding)
        head = embedding if self.head is self.embedding else change(self.head)
        return ModelWeights(embedding, tuple(layer.map(change) for layer in self.layers), self.norm, head)


def load_weights(checkpoint: Checkpoint, spec: ModelSpec, device: torch.device) -> ModelWeights:
    """The weights that `spec` asks for. ModelError names a tensor that is missing or contradicts the config.

    Layers are read (and converted, where the format needs it) one at a time as they are taken from `layers`, so that
    the whole model is never in memory twice: take each once.
    """
    loader = _Loader(checkpoint, spec, device)
    embedding = loader.linear(loader.root + "embed_tokens", (spec.vocab, spec.hidden))
    head = embedding if spec.tied_head else loader.linear(loader.head, (spec.vocab, spec.hidden))
    return ModelWeights(embedding, _Layers(loader), loader.norm(loader.root + "norm", spec.hidden), head)


class _Layers(Sequence[LayerWeights]):
    """The layers of a checkpoint, read on access."""

    def __init__(self, loader: _Loader) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader.spec.layers)

    @overload
    def __getitem__(self, index: int) -> LayerWeights: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[LayerWeights, ...]: ...

    def __getitem__(self, index: int | slice) -> LayerWeights | tuple[LayerWeights, ...]:
        if isinstance(index, slice):
            return tuple(self[item] for item in range(*index.indices(len(self))))
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self._loader.layer(index % len(self))

    def __iter__(self) -> Iterator[LayerWeights]:
        return (self[index] for index in range(len(self)))


class _Loader:
    """Reads modules of one checkpoint by name and checks their shapes."""

    def __init__(self, checkpoint: Checkpoint, spec: ModelSpec, device: torch.device) -> None:
        self.spec = spec
        self._checkpoint = checkpoint
        self._device = device
        self._modules = {name[:dot] for name in checkpoint.names() for dot in _dots(name)}
        self.root = self._find_root()
        # `language_model.model.` has its head beside `model.`, `model.language_model.` at the top.
        self.head = (self.root[: -len("model.")] if self.root.endswith(".model.") else "") + "lm_head"

    def _find_root(self) -> str:
        """What stands before `layers.`: `model.`, or longer in a checkpoint that also sees or hears."""
        roots = sorted(module[: -len("embed_tokens")] for module in self._modules if module.endswith(".embed_tokens"))
        if len(roots) != 1:
            found = f"{len(roots)} tensors named …embed_tokens" if roots else "no tensor model.embed_tokens.weight"
            raise ModelError(f"{self._checkpoint.path}: {found}")
        return roots[0]

    def layer(self, index: int) -> LayerWeights:
        spec, norms = self.spec, self.spec.norms
        prefix = f"{self.root}layers.{index}."
        q, k, v = self._attention(prefix + "self_attn.")
        layer = LayerWeights(
            q,
            k,
            v,
            self.linear(prefix + "self_attn.o_proj", (spec.hidden, spec.heads * spec.head_dim)),
            self._mlp(prefix, spec.layers[index]),
            self._layer_norm(prefix, norms.before_attention),
            self._layer_norm(prefix, norms.after_attention),
            self._layer_norm(prefix, norms.before_mlp),
            self._layer_norm(prefix, norms.after_mlp),
            self._qk_norm(prefix + "self_attn.q_norm", spec.heads),
            self._qk_norm(prefix + "self_attn.k_norm", spec.kv_heads),
        )
        self._checkpoint.release()
        return layer

    def _attention(self, prefix: str) -> tuple[QuantLinear, QuantLinear, QuantLinear]:
        spec = self.spec
        q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        q_part, k_part, v_part = self._parts(prefix, ("q_proj", "k_proj", "v_proj"), "qkv_proj", (q, kv, kv))
        rope = next((layer.rope for layer in spec.layers if layer.rope is not None), None)
        if spec.rope_interleaved and rope is not None:
            q_part, k_part = (_halves(part, spec.head_dim, rope.dims) for part in (q_part, k_part))
        return q_part, k_part, v_part

    def _mlp(self, prefix: str, layer: LayerSpec) -> MlpWeights | MoeWeights:
        if layer.moe is not None:
            return self._moe(f"{prefix}{layer.moe.module}.", layer.moe)
        size = self.spec.intermediate
        gate, up = self._parts(prefix + "mlp.", ("gate_proj", "up_proj"), "gate_up_proj", (size, size))
        return MlpWeights(gate, up, self.linear(prefix + "mlp.down_proj", (self.spec.hidden, size)))

    def _moe(self, prefix: str, moe: MoeSpec) -> MoeWeights:
        wide, narrow = (moe.intermediate, self.spec.hidden), (self.spec.hidden, moe.intermediate)
        gate, up, down = moe.names
        experts = []
        for expert in range(moe.experts):
            key = f"{prefix}experts.{expert}."
            experts.append(
                MlpWeights(self.linear(key + gate, wide), self.linear(key + up, wide), self.linear(key + down, narrow))
            )
        return MoeWeights(self.linear(prefix + "gate", (moe.experts, self.spec.hidden)), tuple(experts))

    def _parts(self, prefix: str, names: Sequence[str], fused: str, sizes: Sequence[int]) -> tuple[QuantLinear, ...]:
        """Separate modules (size, H), or the fused one cut into them."""
        hidden = self.spec.hidden
        if prefix + fused not in self._modules:
            return tuple(self.linear(prefix + name, (size, hidden)) for name, size in zip(names, sizes, strict=True))
        whole = self.linear(prefix + fused, (sum(sizes), hidden))
        starts = accumulate(sizes, initial=0)
        return tuple(whole.rows(start, start + size) for start, size in zip(starts, sizes, strict=False))

    def linear(self, key: str, shape: tuple[int, int]) -> QuantLinear:
        self._require(key)
        linear = find_format(self._checkpoint, key).linear(self._checkpoint, key, shape, self._device)
        if linear.shape != shape:
            raise self._contradiction(key, linear.shape, shape)
        return linear

    def _layer_norm(self, prefix: str, name: str | None) -> Tensor | None:
        return None if name is None else self.norm(prefix + name, self.spec.hidden)

    def _qk_norm(self, key: str, heads: int) -> Tensor | None:
        if self.spec.qk_norm is None:
            return None
        return self.norm(key, self.spec.head_dim * (heads if self.spec.qk_norm == "projection" else 1))

    def norm(self, key: str, size: int) -> Tensor:
        """(size,) float32, offset added; a copy, so that no page of the file stays in use."""
        self._require(key)
        stored = self._checkpoint.tensor(key + ".weight")
        if stored.shape != (size,):
            raise self._contradiction(key, tuple(stored.shape), (size,))
        weight = stored.to(self._device, torch.float32) + self.spec.norm_offset
        if not bool(weight.isfinite().all()):
            raise ModelError(f"{self._checkpoint.path}: the tensor {key}.weight holds values that are not finite")
        return weight

    def _require(self, key: str) -> None:
        if key not in self._modules:
            raise ModelError(
                f"{self._checkpoint.path}: the tensor {key}.weight is missing",
                hint=f"a model of the {self.spec.family!r} family, as the config describes it, has one",
            )

    def _contradiction(self, key: str, found: tuple[int, ...], expected: tuple[int, ...]) -> ModelError:
        return ModelError(
            f"{self._checkpoint.path}: the tensor {key}.weight is {found}, but the config asks for {expected}",
            hint="the config and the weights belong to different models",
        )


def _halves(weight: QuantLinear, head_dim: int, dims: int) -> QuantLinear:
    """Outputs (heads · D, H) whose heads begin with `dims` rotated ones in pairs (x0, y0, x1, y1, …) → (x…, y…)."""
    head = torch.arange(head_dim)
    head = torch.cat((head[:dims:2], head[1:dims:2], head[dims:]))
    heads = torch.arange(0, weight.shape[0], head_dim)
    return reorder_outputs(weight, (heads[:, None] + head).flatten())


def _dots(name: str) -> Iterator[int]:
    return (index for index, char in enumerate(name) if char == ".")
