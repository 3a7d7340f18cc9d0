"""A whole decoding step of a model as one call into the CPU library.

Knows: how a decoder's weights and numbers become the library's plan, and that the results are bit for bit those of
`Decoder` over the same kernels, op by op. Does not know: lengths (the cache owns them), sampling, drafts.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Collection, Sequence
from ctypes import Array, byref, c_int64, c_uint8, pointer
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specgen.cache import KVCache
from specgen.kernels.base import Attend
from specgen.kernels.cpu import library as lib
from specgen.kernels.cpu.ops import ACTIVATIONS, HEAD_DIM_MAX, CpuKernels, Prepared, int32s, kv_view
from specgen.model.decoder import Decoder
from specgen.model.spec import ModelSpec, RopeSpec
from specgen.model.weights import LayerWeights, MlpWeights, ModelWeights
from specgen.step import EagerRunner, StepOut

if TYPE_CHECKING:
    from ctypes import _Pointer as Pointer

    from specgen.sampling import Drawing

QK_NORMS = {None: 0, "head": 1, "projection": 2}

SKIP_ATTENTION, SKIP_MLP = 1, 2


def plan_refusal(spec: ModelSpec, weights: ModelWeights) -> str | None:
    """None when a plan covers the model (weights as `CpuKernels` prepared them); else what stands against it."""
    if spec.head_dim > HEAD_DIM_MAX:
        return f"heads of more than {HEAD_DIM_MAX} dimensions"
    linears: list[Prepared] = [weights.embedding, weights.head]
    for layer in weights.layers:
        if not isinstance(layer.mlp, MlpWeights):
            return "a mixture of experts"
        linears += [layer.q, layer.k, layer.v, layer.o, layer.mlp.gate, layer.mlp.up, layer.mlp.down]
    if any(linear.perm is not None for linear in linears):
        return "weights whose columns are in an order of their own"
    return None


@dataclass(frozen=True, slots=True)
class _Turns:
    """Where the library finds cos and sin (positions, dims / 2) of each rope."""

    array: Array[lib.Angles]
    tables: Sequence[tuple[Tensor, Tensor]]  # kept alive
    count: int  # positions that all of them hold


class PlannedDecoder(Decoder):
    """A `Decoder` over `CpuKernels` whose step is one call, where a plan covers the model; else op by op.

    `refusal` says why there is no plan.
    """

    def __init__(self, spec: ModelSpec, weights: ModelWeights, kernels: CpuKernels, taps: Collection[int] = ()) -> None:
        super().__init__(spec, weights, kernels, taps)
        self._cpu = kernels
        self._rope_specs = tuple(self._ropes)
        self._turns: _Turns | None = None
        self._bound: tuple[weakref.ref[KVCache], Array[lib.KvView]] | None = None
        self.refusal = "hidden states are tapped" if self.taps else plan_refusal(spec, self.weights)
        if self.refusal is None:
            self._layers = (lib.PlanLayer * len(spec.layers))(
                *(self._layer(index, layer) for index, layer in enumerate(self.weights.layers))
            )
            self._plan = self._whole_plan()

    @property
    def draws(self) -> bool:
        """Whether `forward_drawn` is possible: the family does nothing more to the head's output."""
        return self.refusal is None and self.spec.logit_scale == 1.0 and self.spec.final_softcap is None

    def forward(self, tokens: Sequence[int], attend: Attend, cache: KVCache, last_only: bool) -> StepOut:
        if self.refusal is not None:
            return super().forward(tokens, attend, cache, last_only)
        return self._step(tokens, attend, cache, last_only, None)

    def forward_drawn(self, tokens: Sequence[int], attend: Attend, cache: KVCache, vocab: int) -> StepOut:
        """All rows, each with the likeliest of its first `vocab` tokens (the lowest of equals, NON_FINITE for none): as
        good as free where the logits are just being made."""
        assert self.draws
        return self._step(tokens, attend, cache, last_only=False, vocab=vocab)

    def _step(
        self, tokens: Sequence[int], attend: Attend, cache: KVCache, last_only: bool, vocab: int | None
    ) -> StepOut:
        rows = len(tokens)
        assert rows == len(attend.parents) == len(attend.positions) > 0
        assert attend.start + rows <= cache.capacity
        assert 0 <= min(tokens) <= max(tokens) < self.spec.vocab
        count = 1 if last_only else rows
        logits, hidden = torch.empty(count, self.spec.vocab), torch.empty(count, self.spec.hidden)
        ids, parents, positions = int32s(tokens), int32s(attend.parents), int32s(attend.positions)
        step = lib.Step(rows=rows, start=attend.start, last_only=int(last_only))
        step.tokens, step.parents, step.positions = _address(ids), _address(parents), _address(positions)
        step.kv, step.angles = self._views(cache), self._angles(max(attend.positions) + 1)
        skip = self._skip_flags()
        step.skip = _address(skip)
        step.logits, step.hidden = logits.data_ptr(), hidden.data_ptr()
        drawn: Array[c_int64] | None = None
        if vocab is not None:
            drawn = (c_int64 * rows)()
            step.drawn, step.vocab = _address(drawn), min(vocab, self.spec.vocab)
        self._cpu.library.sg_step(self._cpu.context, byref(self._plan), byref(step))
        return StepOut(self._scaled(logits), hidden, None if drawn is None else list(drawn))

    def _whole_plan(self) -> lib.Plan:
        spec, weights = self.spec, self.weights
        self._norm_weight = weights.norm.float().contiguous()
        return lib.Plan(
            hidden=spec.hidden,
            intermediate=spec.intermediate,
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            dim=spec.head_dim,
            layer_count=len(spec.layers),
            activation=ACTIVATIONS[spec.activation],
            qk_norm=QK_NORMS[spec.qk_norm],
            eps=spec.norm_eps,
            attention_scale=spec.attention_scale,
            softcap=spec.attention_softcap or 0.0,
            embedding_scale=spec.embedding_scale,
            residual_scale=spec.residual_scale,
            layers=self._layers,
            embedding=_struct(weights.embedding),
            head=_struct(weights.head),
            norm=self._norm_weight.data_ptr(),
        )

    def _layer(self, index: int, weights: LayerWeights) -> lib.PlanLayer:
        layer, mlp = self.spec.layers[index], weights.mlp
        assert isinstance(mlp, MlpWeights)
        result = lib.PlanLayer(window=layer.window or 0, rope=self._rope_number(layer.rope))
        for name in ("q", "k", "v", "o"):
            setattr(result, name, _struct(getattr(weights, name)))
        for name in ("gate", "up", "down"):
            setattr(result, name, _struct(getattr(mlp, name)))
        for name in ("before_attention", "after_attention", "before_mlp", "after_mlp", "q_norm", "k_norm"):
            norm = getattr(weights, name)
            assert norm is None or (norm.dtype == torch.float32 and norm.is_contiguous())
            setattr(result, name, None if norm is None else norm.data_ptr())
        return result

    def _rope_number(self, rope: RopeSpec | None) -> int:
        return -1 if rope is None else self._rope_specs.index(rope)

    def _views(self, cache: KVCache) -> Array[lib.KvView]:
        if self._bound is None or self._bound[0]() is not cache:
            views = (lib.KvView * len(cache.layers))(*(kv_view(layer) for layer in cache.layers))
            self._bound = (weakref.ref(cache), views)
        return self._bound[1]

    def _angles(self, count: int) -> Array[lib.Angles]:
        """cos and sin of at least `count` positions of each rope, which grow rarely."""
        if self._turns is None or self._turns.count < count:
            tables = [self._ropes[rope].table(count) for rope in self._rope_specs]
            angles = (lib.Angles(cos.data_ptr(), sin.data_ptr(), cos.shape[1]) for cos, sin in tables)
            held = min((len(cos) for cos, _ in tables), default=count)
            self._turns = _Turns((lib.Angles * len(tables))(*angles), tables, held)
        return self._turns.array

    def _skip_flags(self) -> Array[c_uint8]:
        flags = (c_uint8 * len(self.spec.layers))()
        for index in self._skipped_attention:
            flags[index] |= SKIP_ATTENTION
        for index in self._skipped_mlp:
            flags[index] |= SKIP_MLP
        return flags


class PlannedRunner(EagerRunner):
    """Steps of a model that draws: for greedy answers each step brings the target's token of every row along."""

    model: PlannedDecoder

    def __init__(self, model: PlannedDecoder) -> None:
        super().__init__(model)
        self._vocab: int | None = None

    def draw_with(self, drawing: Drawing | None) -> None:
        # Whatever else decides needs the noise of each row, which is dearer than drawing only those that are kept.
        self._vocab = drawing.vocab if drawing is not None and drawing.cut.temperature == 0.0 else None

    def step(self, tokens: Sequence[int], parents: Sequence[int], cache: KVCache) -> StepOut:
        if self._vocab is None:
            return super().step(tokens, parents, cache)
        attend = Attend.tree(cache.length, tuple(parents))
        return self.model.forward_drawn(tokens, attend, cache, self._vocab)


def _struct(weight: Prepared) -> Pointer[lib.Linear]:
    return pointer(weight.struct)


def _address(array: Array[Any]) -> int:
    return ctypes.addressof(array)
