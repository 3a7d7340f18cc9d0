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

from specgen.kernels.aot import BF16_CAPABILITIES, CACHE_DTYPES, AotCase
from specgen.kernels.base import Attend, DeviceAttend, KVLayer, device_attend
from specgen.kernels.launch import Launch
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
        # A maximum may pass NaN over, and an int8 would hide it.
        scale = tl.where(tl.max((values != values).to(tl.int32), axis=0) > 0, float("nan"), scale)
        divisor = tl.where(scale == 0.0, 1.0, scale)
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
    out = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    _rms_norm_launch(x, weight, eps, out).run()
    return out


def _rms_norm_launch(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> Launch:
    assert x.stride(-1) == 1
    size, heads = x.shape[-1], x.shape[1] if x.dim() == 3 else 1
    arguments = {
        "x": x, "weight": weight, "out": out, "stride_row": x.stride(0), "stride_head": x.stride(1), "heads": heads,
        "size": size, "eps": eps,
    }  # fmt: skip
    block = triton.next_power_of_2(size)
    return Launch(_rms_norm_kernel, (x.shape[0] * heads,), arguments, {"BLOCK": block}, _warps(block))


def add_rms_norm(
    x: Tensor,  # (R, H) float32: the residual stream
    y: Tensor,  # (R, H): what a sublayer adds to it
    residual_scale: float,
    weight: Tensor,  # (H,)
    eps: float,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """x + residual_scale · y as a new float32 (R, H), and its norm as (R, H) `out_dtype`."""
    total = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    out = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    _add_rms_norm_launch((x, y), weight, (residual_scale, eps), (total, out)).run()
    return total, out


def _add_rms_norm_launch(
    terms: tuple[Tensor, Tensor], weight: Tensor, scalars: tuple[float, float], outs: tuple[Tensor, Tensor]
) -> Launch:
    x, y = terms
    assert x.stride(1) == y.stride(1) == 1
    arguments = {
        "x": x, "y": y, "weight": weight, "total": outs[0], "out": outs[1], "stride_x": x.stride(0),
        "stride_y": y.stride(0), "size": x.shape[1], "residual_scale": scalars[0], "eps": scalars[1],
    }  # fmt: skip
    block = triton.next_power_of_2(x.shape[1])
    return Launch(_add_rms_norm_kernel, (len(x),), arguments, {"BLOCK": block}, _warps(block))


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
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    _rope_write_launch((q, k, v), cos_sin, layer, attend, out).run()
    return out


def _rope_write_launch(
    qkv: tuple[Tensor, Tensor, Tensor],
    cos_sin: tuple[Tensor, Tensor] | None,
    layer: KVLayer,
    attend: DeviceAttend,
    out: Tensor,
) -> Launch:
    q, k, v = qkv
    rows, heads, size = q.shape
    kv_heads = k.shape[1]
    assert rows <= attend.width
    for part in (*qkv, layer.k, layer.v):
        assert part.stride()[1:] == (size, 1)
    k_scale = layer.k if layer.k_scale is None else layer.k_scale  # not touched when there are no scales
    v_scale = layer.v if layer.v_scale is None else layer.v_scale
    cos, sin = cos_sin if cos_sin is not None else (out, out)  # not read when HALF is 0
    arguments = {
        "q": q, "k": k, "v": v, "cos": cos, "sin": sin, "q_out": out, "k_cache": layer.k, "v_cache": layer.v,
        "k_scale": k_scale, "v_scale": v_scale,
        "start": attend.start, "rows": attend.rows, "positions": attend.positions,
        "stride_q": q.stride(0), "stride_k": k.stride(0), "stride_v": v.stride(0),
        "stride_cache": layer.k.stride(0), "stride_scale": k_scale.stride(0),
        "heads": heads, "kv_heads": kv_heads, "size": size,
    }  # fmt: skip
    constants = {
        "HALF": 0 if cos_sin is None else cos.shape[1],
        "BLOCK": triton.next_power_of_2(size),
        "QUANTISED": layer.k_scale is not None,
    }
    return Launch(_rope_write_kernel, (rows, heads + 2 * kv_heads), arguments, constants, num_warps=1)


def gated(gate: Tensor, up: Tensor, activation: str, out_dtype: torch.dtype) -> Tensor:
    """activation(gate) · up, both (R, I) with dense rows → (R, I) `out_dtype`. Activations: see ACTIVATIONS."""
    out = torch.empty(gate.shape, dtype=out_dtype, device=gate.device)
    _gated_launch(gate, up, activation, out).run()
    return out


def _gated_launch(gate: Tensor, up: Tensor, activation: str, out: Tensor) -> Launch:
    rows, size = gate.shape
    assert gate.stride(1) == up.stride(1) == 1
    arguments = {
        "gate": gate, "up": up, "out": out, "stride_gate": gate.stride(0), "stride_up": up.stride(0), "size": size,
    }  # fmt: skip
    constants = {"ACTIVATION": ACTIVATIONS[activation], "BLOCK": _GATED_BLOCK}
    return Launch(_gated_kernel, (rows, triton.cdiv(size, _GATED_BLOCK)), arguments, constants)


def aot_cases() -> list[AotCase]:
    """Every op at the sizes that models have, in both compute dtypes, with every kind of cache."""
    cases = []
    for compute, capabilities in ((torch.bfloat16, BF16_CAPABILITIES), (torch.float16, (75,))):
        name = str(compute).removeprefix("torch.")
        for size in (576, 4096, 16384):
            x, out = torch.empty(2, size), torch.empty(2, size, dtype=compute)
            cases += [
                _rms_norm_launch(x, x[0], 1e-5, out).case(f"rms_norm H={size} {name}", capabilities),
                _add_rms_norm_launch((x, x), x[0], (1.0, 1e-5), (x, out)).case(
                    f"add_rms_norm H={size} {name}", capabilities
                ),
            ]
        wide = torch.empty(2, 14336)
        cases += [
            _gated_launch(wide, wide, activation, wide.to(compute)).case(f"gated {activation} {name}", capabilities)
            for activation in ACTIVATIONS
        ]
        for size in (64, 128, 256):
            cases += [
                _rope_example(size, dtype).case(f"rope_write D={size} {name} {str(dtype)[6:]} cache", capabilities)
                for dtype in CACHE_DTYPES
            ]
    return cases


def _rope_example(size: int, dtype: torch.dtype) -> Launch:
    q, kv = torch.empty(2, 4, size), torch.empty(2, 2, size)
    cache = torch.empty(2, 16, size, dtype=dtype)
    scales = torch.empty(2, 16) if dtype == torch.int8 else None
    tables = torch.empty(16, size // 2)
    attend = device_attend(Attend.chain(0, 2), 2, "cpu")
    return _rope_write_launch((q, kv, kv), (tables, tables), KVLayer(cache, cache, scales, scales), attend, q)
