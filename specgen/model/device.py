"""A decoder whose whole step reads its place from device memory: what a graph captures.

Knows: how a layer's ops are fused (q, k, v in one product, gate and up in one, the residual add with the norm behind
it), and that nothing in `run` depends on a number of the host's. Does not know: lengths, sampling, drafts, graphs.

A mixture of experts asks the host which experts run: such a model, and one with taps, runs op by op as `Decoder` does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specgen.cache import KVCache
from specgen.errors import DeviceError
from specgen.kernels.base import Attend, DeviceAttend, KVLayer, device_attend
from specgen.kernels.device import DeviceKernels, use_device
from specgen.model.decoder import Decoder
from specgen.model.spec import ModelSpec
from specgen.model.weights import LayerWeights, MlpWeights, ModelWeights
from specgen.step import StepOut
from specgen.weights.join import joined
from specgen.weights.packed import QuantLinear

CHECKED_OUTPUTS = 64
PRODUCT_ERROR = 0.03
"""Of the largest output: activations are rounded to 8 bits of bfloat16, and dense weights may be too."""

Visit = Callable[[str, Tensor], None]
"""Told of every module's name and the residual stream (W, H) behind it."""


@dataclass(frozen=True, slots=True)
class DeviceLayer:
    """One layer, prepared. Norms as in `LayerWeights`."""

    qkv: tuple[Any, ...]  # one weight, or three that could not be joined
    o: Any
    gate_up: tuple[Any, ...]  # one weight, or two
    down: Any
    norms: LayerWeights  # its norms alone are used


def host_bound(spec: ModelSpec, taps: Collection[int]) -> str | None:
    """None when a step needs nothing of the host; else what it needs it for."""
    if any(layer.moe is not None for layer in spec.layers):
        return "a mixture of experts asks the processor which of them run"
    return "hidden states are tapped" if taps else None


class DeviceDecoder(Decoder):
    """Implements `step.Model`, and `run` for steps that are on the device already. `forward` goes through `run`: what a
    graph replays can be compared with it bit for bit. `refusal` says why a model runs op by op instead."""

    def __init__(
        self, spec: ModelSpec, weights: ModelWeights, kernels: DeviceKernels, taps: Collection[int] = ()
    ) -> None:
        self.refusal = host_bound(spec, taps)
        self.ops = kernels.ops
        self.device = kernels.device
        self._layers: tuple[DeviceLayer, ...] = ()
        super().__init__(spec, weights, kernels, taps)
        # Whole, so that no graph ever reads a table that was replaced by a longer one.
        self._tables = {rope: table.table(spec.context) for rope, table in self._ropes.items()}

    def _lay_out(self, weights: ModelWeights) -> ModelWeights:
        if self.refusal is not None:
            return super()._lay_out(weights)
        ends = ModelWeights(weights.embedding, (), weights.norm, weights.head).map(self.kernels.prepare)
        self._check_product("lm_head", weights.head, ends.head)
        self._layers = tuple(self._prepared(layer, check=index == 0) for index, layer in enumerate(weights.layers))
        return ends

    def _check_product(self, name: str, weight: QuantLinear, prepared: Any) -> None:
        """A few outputs against their definition, since a card that computes something else must not answer.

        DeviceError when they are wrong.
        """
        outputs, inputs = weight.shape
        part = weight.rows(0, min(outputs, CHECKED_OUTPUTS))
        x = torch.arange(2 * inputs, device=self.device).view(2, inputs).mul(0.7).sin()
        expected = (x.double() @ part.dequantize().double().t()).float()
        if part.bias is not None:
            expected = expected + part.bias
        if not bool(expected.isfinite().all()):
            return  # damaged weights are named when a step comes upon them
        error = (self.ops.linear(x, prepared)[:, : len(expected[0])] - expected).abs().amax()
        allowed = PRODUCT_ERROR * float(expected.abs().amax()) + 1e-6
        if not float(error) <= allowed:
            raise DeviceError(
                f"{self.kernels.name}: the products of {name} are off by {float(error):.3g}, not {allowed:.3g} at most",
                hint="--device cpu is right; `specgen doctor` says what the card runs with",
            )

    def _prepared(self, layer: LayerWeights, *, check: bool) -> DeviceLayer:
        mlp = layer.mlp
        assert isinstance(mlp, MlpWeights)
        o, down = self.kernels.prepare(layer.o), self.kernels.prepare(mlp.down)
        if check:
            self._check_product("self_attn.o_proj", layer.o, o)
            self._check_product("mlp.down_proj", mlp.down, down)
        qkv, gate_up = self._joined(layer.q, layer.k, layer.v), self._joined(mlp.gate, mlp.up)
        return DeviceLayer(qkv, o, gate_up, down, layer.map(lambda linear: None))

    def _joined(self, *weights: QuantLinear) -> tuple[Any, ...]:
        whole = joined(weights)
        return tuple(self.kernels.prepare(weight) for weight in (weights if whole is None else (whole,)))

    def linears(self) -> Iterator[tuple[str, Any]]:
        if self.refusal is not None:
            yield from super().linears()
            return
        for layer in self._layers:
            yield from (("qkv", layer.qkv[0]),) if len(layer.qkv) == 1 else zip("qkv", layer.qkv, strict=True)
            yield "o", layer.o
            wide = layer.gate_up
            yield from (("gate_up", wide[0]),) if len(wide) == 1 else zip(("gate", "up"), wide, strict=True)
            yield "down", layer.down
        yield "head", self.weights.head

    def forward(self, tokens: Sequence[int], attend: Attend, cache: KVCache, last_only: bool) -> StepOut:
        use_device(self.device)
        if self.refusal is not None:
            return super().forward(tokens, attend, cache, last_only)
        assert attend.start + len(tokens) <= cache.capacity <= self.spec.context
        assert 0 <= min(tokens) <= max(tokens) < self.spec.vocab
        wanted = torch.tensor([len(tokens) - 1], device=self.device) if last_only else None
        out = self.run(*self._placed(tokens, attend), cache.layers, wanted)
        if last_only and self.device.type == "cuda":
            # A long prompt is read chunk by chunk: without waiting, the chunks behind a ^C would be queued already.
            torch.cuda.synchronize(self.device)
        return out

    def find_non_finite(self, tokens: Sequence[int], attend: Attend, cache: KVCache) -> str | None:
        if self.refusal is not None:
            return super().find_non_finite(tokens, attend, cache)
        found: list[str] = []

        def visit(name: str, x: Tensor) -> None:
            if not found and not bool(x.isfinite().all()):
                found.append(name)

        _, h = self._blocks(*self._placed(tokens, attend), cache.layers, visit)
        visit("model.norm", h)
        visit("lm_head", self._logits(h))
        return found[0] if found else None

    def _placed(self, tokens: Sequence[int], attend: Attend) -> tuple[Tensor, DeviceAttend]:
        ids = torch.tensor(tokens, dtype=torch.int32).to(self.device)
        return ids, device_attend(attend, len(tokens), self.device)

    def run(
        self,
        tokens: Tensor,  # (W,) int32 on the device; those of padding rows are any known ones
        attend: DeviceAttend,
        layers: Sequence[KVLayer],  # of a cache of at most `spec.context` slots
        wanted: Tensor | None = None,  # (n,) rows whose logits are computed; None: all
    ) -> StepOut:
        """Logits and hidden states of the wanted rows. No number is read back, none comes from the host."""
        assert self.refusal is None
        x, h = self._blocks(tokens, attend, layers, lambda name, x: None)
        if wanted is not None:
            x, h = x.index_select(0, wanted), h.index_select(0, wanted)
        return StepOut(self._logits(h), x)

    def _blocks(
        self, tokens: Tensor, attend: DeviceAttend, layers: Sequence[KVLayer], visit: Visit
    ) -> tuple[Tensor, Tensor]:
        """All layers: the residual stream (W, H) float32 behind them, and its norm."""
        x = self.ops.embedding(tokens, self.weights.embedding)
        if self.spec.embedding_scale != 1.0:
            x = x * self.spec.embedding_scale
        visit("model.embed_tokens", x)
        h = self._normed(x, self._layers[0].norms.before_attention)
        for index, layer in enumerate(self._layers):
            y = None if index in self._skipped_attention else self._mixed(h, index, layers[index], attend)
            x, h = self._sum(x, y, layer.norms.before_mlp)
            visit(f"model.layers.{index}.self_attn", x)
            y = None if index in self._skipped_mlp else self._fed_forward(h, layer)
            x, h = self._sum(x, y, self._norm_behind(index))
            visit(f"model.layers.{index}.mlp", x)
        return x, h

    def _norm_behind(self, index: int) -> Tensor | None:
        """The norm that reads what layer `index` leaves."""
        last = index + 1 == len(self._layers)
        return self.weights.norm if last else self._layers[index + 1].norms.before_attention

    def _normed(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else self.ops.rms_norm(x, weight, self.spec.norm_eps, self.ops.compute)

    def _sum(self, x: Tensor, y: Tensor | None, norm: Tensor | None) -> tuple[Tensor, Tensor]:
        """x + y (W, H), y None where the sublayer is left out, and what the next linear reads of it."""
        if y is None:
            return x, self._normed(x, norm)
        if norm is None:
            x = x + y * self.spec.residual_scale
            return x, x
        return self.ops.add_rms_norm(x, y, self.spec.residual_scale, norm, self.spec.norm_eps, self.ops.compute)

    def _mixed(self, h: Tensor, index: int, stored: KVLayer, attend: DeviceAttend) -> Tensor:
        """What the attention of layer `index` adds, from h (W, H)."""
        spec, layer, rope = self.spec, self._layers[index], self.spec.layers[index].rope
        q, k, v = self._rotatable(h, layer)
        q = self.ops.rope_write(q, k, v, None if rope is None else self._tables[rope], stored, attend)
        window = spec.layers[index].window
        mixed = self.ops.attention(
            q, stored, attend, spec.attention_scale, window, spec.attention_softcap, self.ops.compute
        )
        return self._after(self.ops.linear(mixed.flatten(1), layer.o), layer.norms.after_attention)

    def _rotatable(self, h: Tensor, layer: DeviceLayer) -> tuple[Tensor, Tensor, Tensor]:
        """h (W, H) → q (W, heads, D), k and v (W, kv_heads, D), normalised where the family does that."""
        spec = self.spec
        kv = spec.kv_heads * spec.head_dim
        q, k, v = self._parts(h, layer.qkv, (spec.heads * spec.head_dim, kv, kv))
        if spec.qk_norm == "projection":
            q, k = self._head_norm(q, layer.norms.q_norm), self._head_norm(k, layer.norms.k_norm)
        q, k, v = (part.view(len(h), -1, spec.head_dim) for part in (q, k, v))
        if spec.qk_norm == "head":
            q, k = self._head_norm(q, layer.norms.q_norm), self._head_norm(k, layer.norms.k_norm)
        return q, k, v

    def _head_norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        assert weight is not None
        return self.ops.rms_norm(x, weight, self.spec.norm_eps, torch.float32)

    def _fed_forward(self, h: Tensor, layer: DeviceLayer) -> Tensor:
        size = self.spec.intermediate
        gate, up = self._parts(h, layer.gate_up, (size, size))
        wide = self.ops.gated(gate, up, self.spec.activation, self.ops.compute)
        return self._after(self.ops.linear(wide, layer.down), layer.norms.after_mlp)

    def _parts(self, h: Tensor, weights: tuple[Any, ...], sizes: Sequence[int]) -> Sequence[Tensor]:
        """The products of h (W, H) with each weight, or of a joined one cut at `sizes`: views with dense rows."""
        if len(weights) > 1:
            return [self.ops.linear(h, weight) for weight in weights]
        return torch.split(self.ops.linear(h, weights[0]), list(sizes), dim=1)

    def _after(self, y: Tensor, norm: Tensor | None) -> Tensor:
        """y (W, H) through the norm that some families have before the residual add."""
        return y if norm is None else self.ops.rms_norm(y, norm, self.spec.norm_eps, torch.float32)

    def _scaled(self, logits: Tensor) -> Tensor:
        # Element by element: on a device no row sees where it stands.
        if self.spec.logit_scale != 1.0:
            logits = logits * self.spec.logit_scale
        cap = self.spec.final_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap
