"""A yardstick: plain decoding the way gpt-fast does it, with int4 weights in torch's own kernel and the whole step
compiled and recorded by torch.compile.

Knows: a Llama of random weights in plain torch, and when the comparison is fair. Does not know: specgen's kernels. It
measures as kindly as gpt-fast does: tokens stay on the card, and one wait comes after all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from specgen.kernels.card_memory import release, shortage
from specgen.kernels.cuda import BFLOAT16_CAPABILITY, dotted
from specgen.measure.shape_bench import ShapeRequest
from specgen.model.rope import RopeTable
from specgen.model.spec import ModelSpec
from specgen.placement import Placement

GROUP = 128
FAIR_PACKINGS = ("awq", "gptq")
FAIR_FAMILIES = ("llama", "mistral", "qwen2")
TOKENS = 64
WARM_TOKENS = 8
INNER_TILES = 8
"""Of torch's int4 layout: what gpt-fast takes."""


@dataclass(frozen=True, slots=True)
class CompiledSpeed:
    """Tokens per second, or why there are none."""

    tok_s: float | None = None
    compile_s: float | None = None
    skipped: str | None = None


class Int4Op(Protocol):
    """torch's int4 product on one kind of device."""

    def pack(self, nibbles: Tensor) -> Tensor:
        """Random bytes (N, K / 2) uint8 → the weight as the product reads it."""
        ...

    def multiply(self, x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
        """x (R, K) bfloat16, scales (K / GROUP, N, 2) of scale and offset → (R, N)."""
        ...


class CudaInt4:
    def pack(self, nibbles: Tensor) -> Tensor:
        packed: Tensor = torch.ops.aten._convert_weight_to_int4pack(nibbles, INNER_TILES)
        return packed

    def multiply(self, x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
        product: Tensor = torch.ops.aten._weight_int4pack_mm(x, weight, GROUP, scales)
        return product


class CpuInt4:
    """For tests of the yardstick itself."""

    def pack(self, nibbles: Tensor) -> Tensor:
        wide = torch.stack((nibbles & 15, nibbles >> 4), -1).flatten(-2).int()
        packed: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(wide, 1)
        return packed

    def multiply(self, x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
        product: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, weight, GROUP, scales)
        return product


class Linear4(nn.Module):
    """(K → N) in 4 bits, random."""

    weight: Tensor
    scales: Tensor

    def __init__(self, inputs: int, outputs: int, op: Int4Op, device: torch.device) -> None:
        super().__init__()
        self._op = op
        nibbles = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8, device=device)
        scales = torch.zeros(inputs // GROUP, outputs, 2, dtype=torch.bfloat16, device=device)
        scales[..., 0] = inputs**-0.5 / 4.6
        self.register_buffer("weight", op.pack(nibbles))
        self.register_buffer("scales", scales)

    def forward(self, x: Tensor) -> Tensor:
        return self._op.multiply(x, self.weight, self.scales)


class Layer(nn.Module):
    """Attention with a static cache, and SwiGLU."""

    k: Tensor
    v: Tensor

    def __init__(self, spec: ModelSpec, op: Int4Op, device: torch.device) -> None:
        super().__init__()
        self.spec = spec
        kv, wide = spec.kv_heads * spec.head_dim, spec.heads * spec.head_dim
        self.qkv = Linear4(spec.hidden, wide + 2 * kv, op, device)
        self.o = Linear4(wide, spec.hidden, op, device)
        self.gate = Linear4(spec.hidden, spec.intermediate, op, device)
        self.up = Linear4(spec.hidden, spec.intermediate, op, device)
        self.down = Linear4(spec.intermediate, spec.hidden, op, device)
        cache = torch.zeros(1, spec.kv_heads, spec.context, spec.head_dim, dtype=torch.bfloat16, device=device)
        self.register_buffer("k", cache)
        self.register_buffer("v", cache.clone())

    def forward(self, x: Tensor, position: Tensor, turn: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        spec = self.spec
        kv = spec.kv_heads * spec.head_dim
        q, k, v = self.qkv(_normed(x)).split([spec.heads * spec.head_dim, kv, kv], dim=1)
        q, k = (_rotated(part.view(1, -1, spec.head_dim), turn)[None].transpose(1, 2) for part in (q, k))
        self.k.index_copy_(2, position, k)
        self.v.index_copy_(2, position, v.view(1, -1, 1, spec.head_dim))
        y = functional.scaled_dot_product_attention(q, self.k, self.v, attn_mask=mask, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).reshape(1, -1))
        h = _normed(x)
        fed: Tensor = self.down(functional.silu(self.gate(h)) * self.up(h))
        return x + fed


class Yardstick(nn.Module):
    """Token and position in, the likeliest next token out: all of a decoding step."""

    def __init__(self, spec: ModelSpec, op: Int4Op, device: torch.device) -> None:
        super().__init__()
        self._layers = nn.ModuleList(Layer(spec, op, device) for _ in spec.layers)
        self._embedding = _half(spec, device)
        self._head = self._embedding if spec.tied_head else _half(spec, device)
        rope = next(layer.rope for layer in spec.layers if layer.rope is not None)
        self._cos, self._sin = RopeTable(rope, device).table(spec.context)
        self._places = torch.arange(spec.context, device=device)

    def forward(self, token: Tensor, position: Tensor) -> Tensor:
        """(1,) int64 each → (1,) int64"""
        x = self._embedding[token]
        turn = (self._cos[position].bfloat16(), self._sin[position].bfloat16())
        mask = (self._places <= position)[None, None, None]
        for layer in self._layers:
            x = layer(x, position, turn, mask)
        return functional.linear(_normed(x), self._head).argmax(-1)


def _half(spec: ModelSpec, device: torch.device) -> Tensor:
    size = (spec.vocab, spec.hidden)
    return torch.empty(size, dtype=torch.bfloat16, device=device).normal_(0, spec.hidden**-0.5)


def _normed(x: Tensor) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:], eps=1e-5)


def _rotated(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """x (1, heads, D)"""
    cos, sin = turn
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def unfair(request: ShapeRequest, placement: Placement) -> str | None:
    """Why the comparison makes no sense here."""
    card, spec = placement.card, request.shape.spec(request.capacity)
    if card is None:
        return "it is for graphics cards"
    if card.capability < BFLOAT16_CAPABILITY:
        return f"torch's int4 kernel needs compute capability {dotted(BFLOAT16_CAPABILITY)}"
    if request.packing.name not in FAIR_PACKINGS:
        return f"it is of int4 in groups of {GROUP}: --quant {' or '.join(FAIR_PACKINGS)}"
    sizes = (spec.hidden, spec.intermediate, spec.heads * spec.head_dim)
    if spec.family not in FAIR_FAMILIES or any(size % GROUP for size in sizes):
        return "the yardstick is a Llama whose sizes are multiples of 128"
    return None


def measure_compiled(request: ShapeRequest, placement: Placement) -> CompiledSpeed:
    """Compiling takes a minute. What stands against it is told, not raised: the figures before it would be lost."""
    reason = unfair(request, placement)
    if reason is not None:
        return CompiledSpeed(skipped=reason)
    device = placement.kernels.device
    spec = request.shape.spec(request.context_tokens + WARM_TOKENS + TOKENS)
    release()  # what was measured before it is forgotten, but for what torch keeps
    try:
        with torch.inference_mode():
            step = Yardstick(spec, CudaInt4(), device)
            compiled = torch.compile(step, mode="reduce-overhead", fullgraph=True)
            return timed(compiled, request.context_tokens, device)
    except torch.OutOfMemoryError as error:
        return CompiledSpeed(skipped=shortage(None, error).message)
    except Exception as error:  # compilers have many errors
        first = str(error).strip().partition("\n")[0]
        return CompiledSpeed(skipped=f"torch.compile failed: {type(error).__name__}: {first}")


def timed(step: Callable[[Tensor, Tensor], Any], context_tokens: int, device: torch.device) -> CompiledSpeed:
    """Decode behind `context_tokens` slots."""
    token = torch.zeros(1, dtype=torch.long, device=device)
    position = torch.full((1,), context_tokens, dtype=torch.long, device=device)

    def run(count: int) -> float:
        nonlocal token
        _wait(device)
        begin = time.perf_counter()
        for _ in range(count):
            token = step(token, position).clone()  # a recorded step gives its result in the same place each time
            position.add_(1)
        _wait(device)
        return time.perf_counter() - begin

    compile_s = run(WARM_TOKENS)
    return CompiledSpeed(TOKENS / run(TOKENS), compile_s)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
