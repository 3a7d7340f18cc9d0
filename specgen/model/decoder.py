"""A decoder-only transformer as a sequence of kernel calls.

Knows: the order of the ops in a layer, for every family that a `ModelSpec` can describe. Does not know: lengths (the
cache owns them), sampling, drafts, files.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specgen.cache import KVCache
from specgen.kernels.base import Attend, Kernels
from specgen.kernels.reference import each_row
from specgen.model.rope import RopeTable
from specgen.model.spec import ModelSpec, MoeSpec, RopeSpec
from specgen.model.weights import Linear, MlpWeights, ModelWeights, MoeWeights
from specgen.step import StepOut


@dataclass(frozen=True, slots=True)
class TappedOut(StepOut):
    """A step of a decoder with taps."""

    taps: tuple[Tensor, ...] = ()  # one (R, H) for each tapped layer: the hidden state that enters it


@dataclass(frozen=True, slots=True)
class _Step:
    """What all layers of one step share."""

    attend: Attend
    cache: KVCache
    angles: Mapping[RopeSpec, tuple[Tensor, Tensor]]  # cos, sin (R, dims / 2)


class Decoder:
    """Implements `step.Model`. Weights are laid out for `kernels` one layer at a time when it is built."""

    def __init__(self, spec: ModelSpec, weights: ModelWeights, kernels: Kernels, taps: Collection[int] = ()) -> None:
        self.spec = spec
        self.kernels = kernels
        self.taps = frozenset(taps)
        self.weights = self._lay_out(weights)
        self._skipped_attention: frozenset[int] = frozenset()
        self._skipped_mlp: frozenset[int] = frozenset()
        ropes = {layer.rope for layer in spec.layers if layer.rope is not None}
        self._ropes = {rope: RopeTable(rope, kernels.device) for rope in ropes}

    def _lay_out(self, weights: ModelWeights) -> ModelWeights:
        return weights.map(self.kernels.prepare)

    def new_cache(self, capacity: int, dtype: torch.dtype = torch.float32) -> KVCache:
        """An empty cache of `capacity` slots with this model's shape."""
        spec = self.spec
        return KVCache(len(spec.layers), spec.kv_heads, spec.head_dim, capacity, dtype, self.kernels.device)

    def linears(self) -> Iterator[tuple[str, Linear]]:
        """All that a step multiplies with, as `kernels` prepared it, by its role in a layer; of experts every one."""
        for layer in self.weights.layers:
            yield from (("q", layer.q), ("k", layer.k), ("v", layer.v), ("o", layer.o))
            if isinstance(layer.mlp, MoeWeights):
                yield "router", layer.mlp.router
            for mlp in layer.mlp.experts if isinstance(layer.mlp, MoeWeights) else (layer.mlp,):
                yield from (("gate", mlp.gate), ("up", mlp.up), ("down", mlp.down))
        yield "head", self.weights.head

    def skipping(self, attention: Collection[int], mlp: Collection[int]) -> Decoder:
        """The same model without these sublayers, sharing all weights. It needs a cache of its own: a layer whose
        attention is left out writes no keys."""
        view = copy.copy(self)
        view._skipped_attention = frozenset(attention)
        view._skipped_mlp = frozenset(mlp)
        return view

    def forward(self, tokens: Sequence[int], attend: Attend, cache: KVCache, last_only: bool) -> StepOut:
        step = self._begin(attend, cache)
        x = self._embed(tokens)
        taps: list[Tensor] = []
        for index in range(len(self.spec.layers)):
            if index in self.taps:
                taps.append(x)
            x = self._attention(x, index, step)
            x = self._mlp(x, index)
        if last_only:
            x = x[-1:]
        logits = self._logits(self._norm(x, self.weights.norm))
        return TappedOut(logits, x, taps=tuple(taps)) if self.taps else StepOut(logits, x)

    def find_non_finite(self, tokens: Sequence[int], attend: Attend, cache: KVCache) -> str | None:
        """Where NaN or infinity first appears in a step: the step is run again, module by module, over the same slots
        (so call it before they are committed or given back). None when all is finite."""
        step = self._begin(attend, cache)
        x = self._embed(tokens)
        if not _finite(x):
            return "model.embed_tokens"
        for index in range(len(self.spec.layers)):
            x = self._attention(x, index, step)
            if not _finite(x):
                return f"model.layers.{index}.self_attn"
            x = self._mlp(x, index)
            if not _finite(x):
                return f"model.layers.{index}.mlp"
        x = self._norm(x, self.weights.norm)
        if not _finite(x):
            return "model.norm"
        return None if _finite(self._logits(x)) else "lm_head"

    def _begin(self, attend: Attend, cache: KVCache) -> _Step:
        return _Step(attend, cache, {rope: table.rows(attend.positions) for rope, table in self._ropes.items()})

    def _embed(self, tokens: Sequence[int]) -> Tensor:
        """(R, H)"""
        ids = torch.tensor(tokens, device=self.kernels.device)
        return self.kernels.embedding(ids, self.weights.embedding) * self.spec.embedding_scale

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """x (…, H) unchanged where the family has no norm."""
        return x if weight is None else self.kernels.rms_norm(x, weight, self.spec.norm_eps)

    def _attention(self, x: Tensor, index: int, step: _Step) -> Tensor:
        """x (R, H) plus what the attention of layer `index` adds."""
        if index in self._skipped_attention:
            return x
        spec, layer, weights = self.spec, self.spec.layers[index], self.weights.layers[index]
        stored = step.cache.layers[index]
        h = self._norm(x, weights.before_attention)
        q = self._heads(h, weights.q, weights.q_norm)
        k = self._heads(h, weights.k, weights.k_norm)
        v = self._heads(h, weights.v, None)
        angles = None if layer.rope is None else step.angles[layer.rope]
        q = self.kernels.rope_write(q, k, v, angles, stored, step.attend.start)
        mixed = self.kernels.attention(
            q, stored, step.attend, spec.attention_scale, layer.window, spec.attention_softcap
        )
        return self._add(x, self.kernels.linear(mixed.flatten(1), weights.o), weights.after_attention)

    def _heads(self, h: Tensor, linear: Linear, norm: Tensor | None) -> Tensor:
        """h (R, H) → (R, heads, D), normalised per head or over all heads where the family does that."""
        y = self.kernels.linear(h, linear)
        if self.spec.qk_norm == "projection":
            y = self._norm(y, norm)
        y = y.view(len(h), -1, self.spec.head_dim)
        return self._norm(y, norm) if self.spec.qk_norm == "head" else y

    def _mlp(self, x: Tensor, index: int) -> Tensor:
        """x (R, H) plus what the MLP of layer `index` adds."""
        if index in self._skipped_mlp:
            return x
        weights = self.weights.layers[index]
        h = self._norm(x, weights.before_mlp)
        moe = self.spec.layers[index].moe
        if isinstance(weights.mlp, MoeWeights):
            assert moe is not None
            return self._add(x, self._experts(h, weights.mlp, moe), weights.after_mlp)
        return self._add(x, self._dense(h, weights.mlp), weights.after_mlp)

    def _dense(self, h: Tensor, mlp: MlpWeights) -> Tensor:
        gate, up = self.kernels.linear(h, mlp.gate), self.kernels.linear(h, mlp.up)
        return self.kernels.linear(self.kernels.gated(gate, up, self.spec.activation), mlp.down)

    def _experts(self, h: Tensor, weights: MoeWeights, moe: MoeSpec) -> Tensor:
        """Each expert that any row wants runs once, over the rows that want it, in ascending order for every row."""
        probs = each_row(lambda row: row.softmax(-1), self.kernels.linear(h, weights.router))  # (R, E)
        share, chosen = probs.topk(moe.active, dim=-1)  # (R, active)
        if moe.renormalise:
            share = share / each_row(lambda row: row.sum(-1, keepdim=True), share)
        out = torch.zeros_like(h)
        for expert in sorted(set(chosen.flatten().tolist())):
            rows, slots = (chosen == expert).nonzero(as_tuple=True)
            out[rows] += self._dense(h[rows], weights.experts[expert]) * share[rows, slots, None]
        return out

    def _add(self, x: Tensor, y: Tensor, norm: Tensor | None) -> Tensor:
        y = self._norm(y, norm)
        # Multiply, then add: `add(alpha=)` may fuse the two in one vector lane and not in another.
        return x + y if self.spec.residual_scale == 1.0 else x + y * self.spec.residual_scale

    def _logits(self, h: Tensor) -> Tensor:
        """h (R, H) after the final norm → (R, V)."""
        return self._scaled(self.kernels.linear(h, self.weights.head))

    def _scaled(self, logits: Tensor) -> Tensor:
        """What the family does to the head's output (R, V)."""
        if self.spec.logit_scale != 1.0:
            logits = logits * self.spec.logit_scale
        cap = self.spec.final_softcap
        return logits if cap is None else each_row(lambda row: torch.tanh(row / cap) * cap, logits)


def _finite(x: Tensor) -> bool:
    return bool(x.isfinite().all())
