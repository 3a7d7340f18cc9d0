"""The definition of every op in plain torch and float32: slow, obvious, the oracle of the other backends.

Knows: what each op computes, and that every row is computed alone, from fresh buffers of a fixed shape. A batched
matmul, or an elementwise op that falls into another vector tail, may round a row in another way when its neighbours
change; one row at a time cannot. A row's attention sees only its own keys in the order of their positions, so neither
chunks nor trees nor rollbacks change a bit. Does not know: models.

Weights are kept dequantised (float32) by `prepare`: this backend is no way to run a big model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from specgen.kernels.base import NON_FINITE, Attend, KVLayer, Noise, Truncation
from specgen.kernels.philox import exponentials
from specgen.weights.packed import Dense, QuantLinear

BLOCK_ELEMENTS = 1 << 18
"""Weights that `linear` decodes at once: 1 MiB of float32, so that they stay in the processor's cache for all rows."""

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}

INT8_MAX = 127.0


def each_row(op: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """`op` of every row alone, each in a buffer of its own, stacked again: (R, …) × n → (R, …)."""
    rows = zip(*(tensor.unbind(0) for tensor in tensors), strict=True)
    return torch.stack([op(*(part.clone(memory_format=torch.contiguous_format) for part in row)) for row in rows])


def truncated_probs(logits: Tensor, cut: Truncation) -> Tensor:
    """softmax of logits (V,) after `cut` → (V,) float32, zero outside. Needs at least one finite logit, none NaN/+inf.

    The order of the transforms and the ranking are those of `Truncation`.
    """
    if cut.temperature == 0.0:
        return functional.one_hot(logits.argmax(), len(logits)).float()
    # The maximum comes off first, so that a small temperature cannot overflow.
    scaled = (logits.double() - logits.max().double()) / cut.temperature
    if cut.top_k > 0 or cut.top_p < 1.0:
        scaled = _keep_ranked(scaled, cut)
    probs = scaled.softmax(-1)
    if cut.min_p > 0.0:
        probs = probs * (probs >= cut.min_p * probs.max())
        probs = probs / probs.sum()
    return probs.float()


def _keep_ranked(scaled: Tensor, cut: Truncation) -> Tensor:
    """scaled (V,) with everything behind the top-k and top-p prefix at -inf."""
    ranked, order = scaled.sort(descending=True, stable=True)
    kept = len(ranked) if cut.top_k <= 0 else min(cut.top_k, len(ranked))
    if cut.top_p < 1.0:
        probs = ranked[:kept].softmax(-1)
        mass_before = probs.cumsum(-1) - probs
        kept = max(1, int((mass_before < cut.top_p).sum()))
    result = torch.full_like(scaled, -torch.inf)
    result[order[:kept]] = ranked[:kept]
    return result


def race(probs: Tensor, noise: Noise) -> int:
    """argmax(log p + G) over probs (V,) > 0, as argmin(E / p) with E = -log(u); the lowest id of equals.

    probs need not be normalised, but one must be positive.
    """
    return race_order(probs, noise, 1)[0]


def race_order(probs: Tensor, noise: Noise, count: int) -> list[int]:
    """The first `count` tokens to arrive in the race of `race`, fewer when fewer have probs (V,) > 0.

    They are a sample without replacement: given the earlier ones, each is drawn from what they left of probs,
    normalised (Kool, van Hoof, Welling, "Stochastic beams and where to find them", 1903.06059).
    """
    ids = probs.nonzero()[:, 0]
    arrival = exponentials(noise, ids) / probs[ids].double()
    order: list[int] = []
    for _ in range(min(count, len(ids))):
        first = int(arrival.argmin())
        order.append(int(ids[first]))
        arrival[first] = torch.inf
    return order


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (…, D) → int8 (…, D) and scales (…): symmetric, amax / 127, rounded half to even. Zeros have scale 0."""
    scale = x.abs().amax(-1) / INT8_MAX
    divisor = torch.where(scale == 0.0, 1.0, scale)
    return (x / divisor[..., None]).round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8), scale


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE, half-split: x (R, heads, D), cos and sin (R, dims / 2); the head's elements behind dims pass unchanged."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def seen_slots(attend: Attend, row: int, window: int | None) -> Tensor:
    """The slots that `row` sees, in the order of their positions (int64)."""
    path: list[int] = []
    ancestor = row
    while ancestor >= 0:
        path.append(attend.start + ancestor)
        ancestor = attend.parents[ancestor]
    slots = torch.cat((torch.arange(attend.start), torch.tensor(path[::-1])))
    return slots if window is None else slots[-window:]


def read_slots(stored: Tensor, scale: Tensor | None, slots: Tensor) -> Tensor:
    """stored (kv_heads, S, D) → (kv_heads, n, D) float32 at slots (n,)."""
    values = stored.index_select(1, slots).float()
    return values if scale is None else values * scale.index_select(1, slots)[..., None]


class ReferenceKernels:
    """Every op of `kernels.base.Kernels`, one row at a time."""

    name = "reference"
    device = torch.device("cpu")

    def prepare(self, weight: QuantLinear) -> Any:
        return Dense(weight.dequantize().contiguous(), weight.bias)

    def embedding(self, ids: Tensor, weight: QuantLinear) -> Tensor:
        return torch.cat([weight.rows(token, token + 1).dequantize() for token in ids.tolist()])

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return each_row(lambda row: row * torch.rsqrt(row.square().mean(-1, keepdim=True) + eps) * weight, x)

    def linear(self, x: Tensor, weight: QuantLinear) -> Tensor:
        outputs, inputs = weight.shape
        rows = [row.clone() for row in x]
        result = torch.empty(len(rows), outputs)
        step = max(16, BLOCK_ELEMENTS // inputs // 16 * 16)
        for start in range(0, outputs, step):
            stop = min(start + step, outputs)
            block = self.decode(weight.rows(start, stop))
            for index, row in enumerate(rows):
                result[index, start:stop] = torch.mv(block, row)
        return result if weight.bias is None else result + weight.bias

    def decode(self, weight: QuantLinear) -> Tensor:
        """A few rows of a weight as float32 (n, K)."""
        return weight.dequantize()

    def rope_write(
        self, q: Tensor, k: Tensor, v: Tensor, cos_sin: tuple[Tensor, Tensor] | None, layer: KVLayer, start: int
    ) -> Tensor:
        if cos_sin is not None:
            q, k = rotate(q, *cos_sin), rotate(k, *cos_sin)
        stop = start + len(k)
        for new, stored, scales in ((k, layer.k, layer.k_scale), (v, layer.v, layer.v_scale)):
            heads_first = new.transpose(0, 1)
            if scales is None:
                stored[:, start:stop] = heads_first
            else:
                stored[:, start:stop], scales[:, start:stop] = quantise_rows(heads_first)
        return q

    def attention(
        self, q: Tensor, layer: KVLayer, attend: Attend, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        rows = []
        for index in range(len(q)):
            slots = seen_slots(attend, index, window)
            keys = read_slots(layer.k, layer.k_scale, slots)
            values = read_slots(layer.v, layer.v_scale, slots)
            queries = q[index].clone().view(len(keys), -1, q.shape[-1])  # (kv_heads, heads / kv_heads, D)
            scores = queries @ keys.transpose(1, 2) * scale  # (kv_heads, heads / kv_heads, n)
            if softcap is not None:
                scores = torch.tanh(scores / softcap) * softcap
            rows.append((scores.softmax(-1) @ values).view(q.shape[1:]))
        return torch.stack(rows)

    def gated(self, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        return each_row(ACTIVATIONS[activation], gate) * up

    def gumbel_argmax(self, logits: Tensor, cut: Truncation, noise: Noise) -> int:
        best = self.argmax(logits[None])[0]
        if best == NON_FINITE or cut.temperature == 0.0:
            return best
        return race(truncated_probs(logits, cut), noise)

    def argmax(self, logits: Tensor) -> list[int]:
        largest, first = logits.max(-1)
        # max() passes NaN on, so a row is good exactly when its largest value is finite.
        return torch.where(largest.isfinite(), first, NON_FINITE).tolist()
