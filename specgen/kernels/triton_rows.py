"""The small ops between linears: norms, rotation with the write into the cache, gated activations.

Knows: one row (or one head of a row) per program, so that no row sees another. Does not know: where a step's place
comes from; it is read from memory (DeviceAttend), so that a graph can be captured. Arithmetic is float32, whatever
comes in and goes out. `reference.py` defines every op.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgen.kernels.base import DeviceAttend, KVLayer
from specgen.kernels.triton_math import gelu_tanh, round_half_even, silu

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}

_GATED_BLOCK = 1024


@triton.jit
def _rms_norm_kernel(
    x,  # (R, heads, H)
    weight,  # (H,)
    out,  # (R, heads, H) contiguous
    stride_row,
    stride_head,
    heads,
    size,  # H
    eps,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    row, head = program // heads, program % heads
    lane = tl.arange(0, BLOCK)
    inside = lane < size
    values = tl.load(x + row * stride_row + head * stride_head + lane, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(values * values, axis=0) / size + eps)
    scaled = values * scale * tl.load(weight + lane, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + program * size + lane, scaled.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _add_rms_norm_kernel(
    x,  # (R, H) float32
    y,  # (R, H)
    weight,  # (H,)
    total,  # (R, H) float32 contiguous
    out,  # (R, H) contiguous
    stride_x,
    stride_y,
    size,  # H
    residual_scale,
    eps,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    inside = lane < size
    added = tl.load(y + row * stride_y + lane, mask=inside, other=0.0).to(tl.float32) * residual_scale
    values = tl.load(x + row * stride_x + lane, mask=inside, other=0.0).to(tl.float32) + added
    tl.store(total + row * size + lane, values, mask=inside)
    scale = 1.0 / tl.sqrt_rn(tl.sum(values * values, axis=0) / size + eps)
    scaled = values * scale * tl.load(weight + lane, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + lane, scaled.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rotated(x, cos, sin, position, lane, size, HALF: tl.constexpr):
    """One head, rotated: lanes below HALF with the lanes HALF further, the rest unchanged (HALF 0: all)."""
    values = tl.load(x + lane, mask=lane < size, other=0.0).to(tl.float32)
    if HALF > 0:
        turning = lane < 2 * HALF
        partner = tl.where(lane < HALF, lane + HALF, lane - HALF)
        other = tl.load(x + partner, mask=turning, other=0.0).to(tl.float32)
        angle = position.to(tl.int64) * HALF + lane % HALF
        c = tl.load(cos + angle, mask=turning, other=1.0)
        s = tl.load(sin + angle, mask=turning, other=0.0)
        values = tl.where(turning, values * c + tl.where(lane < HALF, -other, other) * s, values)
    return values


@triton.jit
def _write_head(values, stored, scales, slot, lane, size, QUANTISED: tl.constexpr):
    """One head (D,) into its slot of stored (S, D), with its scale where the cache is int8."""
    inside = lane < size
    if QUANTISED:
        scale = tl.div_rn(tl.max(tl.abs(values), axis=0), 127.0)
        divisor = tl.where(scale == 0.0, 1.0, scale)
        # Clamped after rounding: a NaN or inf must not become an undefined integer.
        whole = round_half_even(tl.div_rn(values, tl.zeros_like(values) + divisor))
        tl.store(stored + slot * size + lane, tl.clamp(whole, -127.0, 127.0).to(tl.int8), mask=inside)
        tl.store(scales + slot, scale)
    else:
        tl.store(stored + slot * size + lane, values.to(stored.dtype.element_ty), mask=inside)


@triton.jit
def _rope_write_kernel(
    q,  # (R, heads, D)
    k,  # (R, kv_heads, D)
    v,  # (R, kv_heads, D)
    cos,  # (context, HALF) float32
    sin,
    q_out,  # (R, heads, D) contiguous
    k_cache,  # (kv_heads, S, D)
    v_cache,
    k_scale,  # (kv_heads, S) float32
    v_scale,
    start,
    rows,
    positions,
    stride_q,
    stride_k,
    stride_v,
    stride_cache,  # of a head of the cache
    stride_scale,
    heads,
    kv_heads,
    size,  # D
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    QUANTISED: tl.constexpr,
):
    row = tl.program_id(0)
    head = tl.program_id(1)  # q's heads, then k's, then v's
    lane = tl.arange(0, BLOCK)
    position = tl.load(positions + row)
    slot = (tl.load(start) + row).to(tl.int64)
    real = row < tl.load(rows)
    if head < heads:
        turned = _rotated(q + row * stride_q + head * size, cos, sin, position, lane, size, HALF)
        tl.store(q_out + (row * heads + head) * size + lane, turned.to(q_out.dtype.element_ty), mask=lane < size)
    elif real:
        kv_head = (head - heads) % kv_heads
        at, at_scale = kv_head.to(tl.int64) * stride_cache, kv_head.to(tl.int64) * stride_scale
        if head < heads + kv_heads:
            turned = _rotated(k + row * stride_k + kv_head * size, cos, sin, position, lane, size, HALF)
            _write_head(turned, k_cache + at, k_scale + at_scale, slot, lane, size, QUANTISED)
        else:
            values = _rotated(v + row * stride_v + kv_head * size, cos, sin, position, lane, size, 0)
            _write_head(values, v_cache + at, v_scale + at_scale, slot, lane, size, QUANTISED)


@triton.jit
def _gated_kernel(
    gate,  # (R, I)
    up,  # (R, I)
    out,  # (R, I) contiguous
    stride_gate,
    stride_up,
    size,  # I
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < size
    g = tl.load(gate + row * stride_gate + lane, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * stride_up + lane, mask=inside, other=0.0).to(tl.float32)
    activated = silu(g) if ACTIVATION == 0 else gelu_tanh(g)
    tl.store(out + row * size + lane, (activated * u).to(out.dtype.element_ty), mask=inside)


def _warps(block: int) -> int:
    """Warps for a row of `block` lanes: a function of the model alone, so that a row's sum keeps its order."""
    return max(1, min(16, block // 512))


def rms_norm(x: Tensor, weight: Tensor, eps: float, out_dtype: torch.dtype) -> Tensor:
    """x (R, H) or per head (R, heads, D), last dimension dense, weight (H,) or (D,) → the same shape in `out_dtype`."""
    size = x.shape[-1]
    heads = x.shape[1] if x.dim() == 3 else 1
    assert x.stride(-1) == 1
    out = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    block = triton.next_power_of_2(size)
    _rms_norm_kernel[(x.shape[0] * heads,)](
        x, weight, out, x.stride(0), x.stride(1), heads, size, eps, BLOCK=block, num_warps=_warps(block)
    )
    return out


def add_rms_norm(
    x: Tensor,  # (R, H) float32: the residual stream
    y: Tensor,  # (R, H): what a sublayer adds to it
    residual_scale: float,
    weight: Tensor,  # (H,)
    eps: float,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """x + residual_scale · y as a new float32 (R, H), and its norm as (R, H) `out_dtype`."""
    rows, size = x.shape
    assert x.stride(1) == y.stride(1) == 1
    total = torch.empty(rows, size, dtype=torch.float32, device=x.device)
    out = torch.empty(rows, size, dtype=out_dtype, device=x.device)
    block = triton.next_power_of_2(size)
    _add_rms_norm_kernel[(rows,)](
        x, y, weight, total, out, x.stride(0), y.stride(0), size, residual_scale, eps,
        BLOCK=block, num_warps=_warps(block),
    )  # fmt: skip
    return total, out


def rope_write(
    q: Tensor,  # (R, heads, D), heads dense
    k: Tensor,  # (R, kv_heads, D)
    v: Tensor,  # (R, kv_heads, D)
    cos_sin: tuple[Tensor, Tensor] | None,  # whole tables (context, dims / 2) float32; None: NoPE
    layer: KVLayer,
    attend: DeviceAttend,
) -> Tensor:
    """Rotate q and k by their rows' positions, write k and v into slots start + row, return the rotated q.

    Rows behind `attend.rows` write nothing. An int8 cache gets the values and scales of `reference.quantise_rows`.
    """
    rows, heads, size = q.shape
    kv_heads = k.shape[1]
    assert rows <= attend.width
    for part in (q, k, v):
        assert part.stride()[1:] == (size, 1)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    k_scale = layer.k if layer.k_scale is None else layer.k_scale  # not touched when there are no scales
    v_scale = layer.v if layer.v_scale is None else layer.v_scale
    cos, sin = cos_sin if cos_sin is not None else (q, q)  # not read when HALF is 0
    _rope_write_kernel[(rows, heads + 2 * kv_heads)](
        q, k, v, cos, sin, out, layer.k, layer.v, k_scale, v_scale, attend.start, attend.rows, attend.positions,
        q.stride(0), k.stride(0), v.stride(0), layer.k.stride(0), k_scale.stride(0), heads, kv_heads, size,
        HALF=0 if cos_sin is None else cos.shape[1], BLOCK=triton.next_power_of_2(size),
        QUANTISED=layer.k_scale is not None, num_warps=1,
    )  # fmt: skip
    return out


def gated(gate: Tensor, up: Tensor, activation: str, out_dtype: torch.dtype) -> Tensor:
    """activation(gate) · up, both (R, I) with dense rows → (R, I) `out_dtype`. Activations: see ACTIVATIONS."""
    rows, size = gate.shape
    assert gate.stride(1) == up.stride(1) == 1
    out = torch.empty(rows, size, dtype=out_dtype, device=gate.device)
    _gated_kernel[(rows, triton.cdiv(size, _GATED_BLOCK))](
        gate, up, out, gate.stride(0), up.stride(0), size,
        ACTIVATION=ACTIVATIONS[activation], BLOCK=_GATED_BLOCK, num_warps=4,
    )  # fmt: skip
    return out
