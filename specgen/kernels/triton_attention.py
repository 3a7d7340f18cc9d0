"""Attention over the static cache, split along the keys.

Knows: which keys a row sees, in the order of their positions. Does not know: models, the cache's owner.

How a row's bits stay the same whatever else is in the step, and however its prefix came into the cache:
- keys are taken by position, in blocks that begin at multiples of KV_BLOCK; a tree's row finds the slots of its
  ancestors through `DeviceAttend.path`, so it sees what a chain of the same tokens would see;
- block b belongs to split b mod SPLITS and SPLITS depends on the model alone; a split folds its blocks in order, and
  the splits are merged in order, with the same fused multiply-adds wherever that is done; an empty one changes no bit;
- every product is of 16 lanes, a lane being one head of one row. A lane's bits do not depend on the other lanes, so a
  long chain (prefill) puts several rows into one tile, and merges the splits as it goes instead of storing them.
Slots that a row does not see are never read, so rubbish behind the committed length does no harm.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgen.kernels.aot import BF16_CAPABILITIES, CACHE_DTYPES, AotCase
from specgen.kernels.base import KV_BLOCK, Attend, DeviceAttend, KVLayer, device_attend
from specgen.kernels.launch import Launch
from specgen.kernels.triton_math import numbers, tanh

MAX_TREE_ROWS = 64
"""Rows of a step that may be a tree; wider steps are prefill, and must be chains."""

LEAST_LANES = 16
"""Rows of the smallest matrix product; a larger group of heads takes the next power of two."""

_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _fold_block(
    m,  # (LANES,) largest score so far
    l,  # noqa: E741  (LANES,) sum of exp(score - m)
    acc,  # (LANES, D) weighted values
    q,  # (LANES, D)
    block,
    lane_position,  # (LANES,) -1: not a real row
    start,
    path,  # of the one row, when PATH
    k,  # this head's (S, D)
    v,
    k_scale,  # this head's (S,)
    v_scale,
    scale,
    size,  # D
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PATH: tl.constexpr,
    QUANTISED: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    DOT: tl.constexpr,  # the dtype of products
):
    position = block * KEYS + tl.arange(0, KEYS)
    dim = tl.arange(0, BLOCK)
    held = position <= tl.max(lane_position, axis=0)
    slot = position
    if PATH:
        own = position >= start
        slot = tl.where(own, start + tl.load(path + position - start, mask=own & held, other=0), position)
    at = slot.to(tl.int64)[:, None] * size + dim[None, :]
    inside = held[:, None] & (dim < size)[None, :]
    keys = tl.load(k + at, mask=inside, other=0.0)
    if QUANTISED:
        keys = keys.to(tl.float32)
    scores = tl.dot(numbers(q), tl.trans(numbers(keys.to(DOT))), input_precision="ieee")
    if QUANTISED:
        scores *= tl.load(k_scale + slot, mask=held, other=0.0)[None, :]
    scores *= scale
    if SOFTCAP > 0.0:
        scores = tanh(scores / SOFTCAP) * SOFTCAP
    seen = position[None, :] <= lane_position[:, None]
    if WINDOW > 0:
        seen = seen & (position[None, :] > lane_position[:, None] - WINDOW)
    scores = tl.where(seen, scores, float("-inf"))
    m_next = tl.maximum(m, tl.max(scores, axis=1))
    # A lane that has seen nothing yet has no largest score; any finite one will do.
    base = tl.where(m_next == float("-inf"), 0.0, m_next)
    shrink = tl.exp(m - base)
    weights = tl.exp(scores - base[:, None])
    values = tl.load(v + at, mask=inside, other=0.0)
    if QUANTISED:
        values = values.to(tl.float32) * tl.load(v_scale + slot, mask=held, other=0.0)[:, None]
    factors = numbers(weights.to(DOT))
    acc = tl.dot(factors, numbers(values.to(DOT)), acc * shrink[:, None], input_precision="ieee")
    return m_next, tl.fma(l, shrink, tl.sum(weights, axis=1)), acc


@triton.jit
def _merge(m, l, acc, m_new, l_new, acc_new):  # noqa: E741
    """Two partial softmaxes over different keys as one; acc has one dimension more than m and l."""
    m_next = tl.maximum(m, m_new)
    base = tl.where(m_next == float("-inf"), 0.0, m_next)
    old, new = tl.exp(m - base), tl.exp(m_new - base)
    l_next = tl.fma(l, old, l_new * new)
    if len(acc.shape) == 2:
        old, new = old[:, None], new[:, None]
    acc_next = tl.fma(acc, tl.zeros_like(acc) + old, acc_new * new)
    return m_next, l_next, acc_next


@triton.jit
def _load_lanes(q, row, head, real, stride_row, size, BLOCK: tl.constexpr):
    """q (R, heads, D) at (row, head) of each lane → (LANES, D), zeros for lanes that are not real."""
    dim = tl.arange(0, BLOCK)
    at = row[:, None] * stride_row + head[:, None] * size + dim[None, :]
    return tl.load(q + at, mask=real[:, None] & (dim < size)[None, :], other=0.0)


@triton.jit(do_not_specialize=["stride_path"])  # the width of the step
def _split_kernel(
    q,  # (R, heads, D)
    k,  # (kv_heads, S, D)
    v,
    k_scale,  # (kv_heads, S)
    v_scale,
    start,
    rows,
    positions,
    path,  # (W, W)
    part_m,  # (R, heads, SPLITS) float32
    part_l,
    part_acc,  # (R, heads, SPLITS, D) float32
    stride_q,
    stride_cache,
    stride_scale,
    stride_path,
    heads,
    size,
    scale,
    GROUP: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    QUANTISED: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    DOT: tl.constexpr,
):
    # The row varies fastest: programs that run together read the same keys.
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if row >= tl.load(rows):
        return
    lane = tl.arange(0, LANES)
    real = lane < GROUP
    head = kv_head * GROUP + lane
    position = tl.load(positions + row)
    queries = _load_lanes(q, tl.zeros_like(lane) + row, head, real, stride_q, size, BLOCK).to(DOT)
    m = tl.full((LANES,), float("-inf"), tl.float32)
    l = tl.zeros((LANES,), tl.float32)  # noqa: E741
    acc = tl.zeros((LANES, BLOCK), tl.float32)
    oldest = 0
    if WINDOW > 0:
        oldest = tl.maximum(position - (WINDOW - 1), 0) // KEYS
    first = oldest + (split - oldest % SPLITS + SPLITS) % SPLITS
    lane_position = tl.where(real, position, -1)
    at, at_scale = kv_head.to(tl.int64) * stride_cache, kv_head.to(tl.int64) * stride_scale
    first_slot = tl.load(start)
    for block in range(first, position // KEYS + 1, SPLITS):
        m, l, acc = _fold_block(  # noqa: E741
            m, l, acc, queries, block, lane_position, first_slot, path + row * stride_path,
            k + at, v + at, k_scale + at_scale, v_scale + at_scale, scale, size,
            WINDOW, SOFTCAP, True, QUANTISED, KEYS, BLOCK, DOT,
        )  # fmt: skip
    out = (row * heads + head) * SPLITS + split
    tl.store(part_m + out, m, mask=real)
    if first <= position // KEYS:  # what an empty split leaves is not read
        dim = tl.arange(0, BLOCK)
        tl.store(part_l + out, l, mask=real)
        tl.store(part_acc + out.to(tl.int64)[:, None] * size + dim[None, :], acc, mask=real[:, None] & (dim < size))


@triton.jit
def _merge_kernel(
    part_m,  # (R, heads, SPLITS)
    part_l,
    part_acc,  # (R, heads, SPLITS, D)
    out,  # (R, heads, D)
    rows,
    heads,
    size,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, program = tl.program_id(0), tl.program_id(0) * heads + tl.program_id(1)
    dim = tl.arange(0, BLOCK)
    target = out + program * size + dim
    if row >= tl.load(rows):
        tl.store(target, tl.zeros((BLOCK,), out.dtype.element_ty), mask=dim < size)
        return
    m = tl.full((BLOCK,), float("-inf"), tl.float32)  # every element carries the same m and l
    l = tl.zeros((BLOCK,), tl.float32)  # noqa: E741
    acc = tl.zeros((BLOCK,), tl.float32)
    for split in range(SPLITS):
        part = program * SPLITS + split
        m_new = tl.load(part_m + part + dim * 0)
        filled = (m_new > float("-inf")) & (dim < size)
        l_new = tl.load(part_l + part + dim * 0, mask=filled, other=0.0)
        acc_new = tl.load(part_acc + part.to(tl.int64) * size + dim, mask=filled, other=0.0)
        m, l, acc = _merge(m, l, acc, m_new, l_new, acc_new)  # noqa: E741
    tl.store(target, (acc / l).to(out.dtype.element_ty), mask=dim < size)


@triton.jit(do_not_specialize=["width"])
def _chain_kernel(
    q,  # (R, heads, D)
    k,  # (kv_heads, S, D)
    v,
    k_scale,  # (kv_heads, S)
    v_scale,
    rows,
    positions,
    out,  # (R, heads, D) contiguous
    stride_q,
    stride_cache,
    stride_scale,
    width,  # R
    heads,
    size,
    scale,
    GROUP: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    QUANTISED: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    DOT: tl.constexpr,
):
    """LANES // GROUP rows of a chain and one key head: every split, merged in order."""
    PACK: tl.constexpr = LANES // GROUP
    lane = tl.arange(0, LANES)
    kv_head = tl.program_id(1)
    row = tl.program_id(0) * PACK + lane // GROUP
    real = (lane < PACK * GROUP) & (row < tl.load(rows))
    head = kv_head * GROUP + lane % GROUP
    lane_position = tl.load(positions + row, mask=real, other=-1)
    newest = tl.max(lane_position, axis=0) // KEYS
    oldest = 0
    if WINDOW > 0:
        # Positions of a chain ascend, so the first lane's window begins first.
        oldest = tl.maximum(tl.min(tl.where(real, lane_position, 2147483647), axis=0) - (WINDOW - 1), 0) // KEYS
    queries = _load_lanes(q, row, head, real, stride_q, size, BLOCK).to(DOT)
    m = tl.full((LANES,), float("-inf"), tl.float32)
    l = tl.zeros((LANES,), tl.float32)  # noqa: E741
    acc = tl.zeros((LANES, BLOCK), tl.float32)
    at, at_scale = kv_head.to(tl.int64) * stride_cache, kv_head.to(tl.int64) * stride_scale
    for split in range(SPLITS):
        first = oldest + (split - oldest % SPLITS + SPLITS) % SPLITS
        m_new = tl.full((LANES,), float("-inf"), tl.float32)
        l_new = tl.zeros((LANES,), tl.float32)
        acc_new = tl.zeros((LANES, BLOCK), tl.float32)
        for block in range(first, newest + 1, SPLITS):
            m_new, l_new, acc_new = _fold_block(
                m_new, l_new, acc_new, queries, block, lane_position, 0, positions,
                k + at, v + at, k_scale + at_scale, v_scale + at_scale, scale, size,
                WINDOW, SOFTCAP, False, QUANTISED, KEYS, BLOCK, DOT,
            )  # fmt: skip
        m, l, acc = _merge(m, l, acc, m_new, l_new, acc_new)  # noqa: E741
    dim = tl.arange(0, BLOCK)
    target = out + row.to(tl.int64)[:, None] * heads * size + head[:, None] * size + dim[None, :]
    shown = tl.where(real[:, None], acc / l[:, None], 0.0)  # padding rows are zeros, not 0 / 0
    inside = (lane < PACK * GROUP) & (row < width)
    tl.store(target, shown.to(out.dtype.element_ty), mask=inside[:, None] & (dim < size)[None, :])


def split_count(kv_heads: int) -> int:
    """Splits of the keys, by the model alone: enough programs for a card even with one row."""
    return max(8, min(32, int(triton.next_power_of_2(128 // kv_heads))))


def _keys(element_bytes: int, block: int, matrix: bool) -> int:
    """Keys that are folded in at once, a divisor of KV_BLOCK: as many as stay in registers. `matrix`: the card has
    matrix instructions (as far as Triton knows them: not Turing)."""
    if not matrix or element_bytes == 4:
        return 16
    return 32 if element_bytes == 1 and block >= 128 else KV_BLOCK


def _has_matrix(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] >= 8


def _stages(element_bytes: int, block: int, keys: int) -> int:
    """Blocks of K and V under way at once: two blocks fit into 64 KiB of shared memory, or else one."""
    return 3 if 2 * element_bytes * keys * block <= 32 * 1024 else 2


def attention(
    q: Tensor,  # (R, heads, D), rotated, heads dense
    layer: KVLayer,
    attend: DeviceAttend,
    scale: float,
    window: int | None,
    softcap: float | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """softmax(scale · q kᵀ, capped, masked) v over the cache → (R, heads, D); rows behind `attend.rows` are zeros.

    Products are of the cache's dtype, or of `out_dtype` where the cache is int8; sums are float32. A step of more than
    MAX_TREE_ROWS rows must be a chain.
    """
    out = torch.empty(q.shape, dtype=out_dtype, device=q.device)
    for launch in _launches(q, layer, attend, _Score(scale, window, softcap), out, _has_matrix(q.device)):
        launch.run()
    return out


class _Score(NamedTuple):
    """What becomes of q kᵀ."""

    scale: float
    window: int | None
    softcap: float | None


def _launches(
    q: Tensor, layer: KVLayer, attend: DeviceAttend, score: _Score, out: Tensor, matrix: bool
) -> list[Launch]:
    rows, heads, size = q.shape
    kv_heads = len(layer.k)
    for part in (q, layer.k, layer.v):
        assert part.stride()[1:] == (size, 1)
    assert heads % kv_heads == 0
    assert rows <= attend.width
    k_scale = layer.k if layer.k_scale is None else layer.k_scale  # not read when there are no scales
    v_scale = layer.v if layer.v_scale is None else layer.v_scale
    shared = {
        "q": q, "k": layer.k, "v": layer.v, "k_scale": k_scale, "v_scale": v_scale, "rows": attend.rows,
        "positions": attend.positions, "stride_q": q.stride(0), "stride_cache": layer.k.stride(0),
        "stride_scale": k_scale.stride(0), "heads": heads, "size": size, "scale": score.scale,
    }  # fmt: skip
    constants = _constants(layer, heads, score, out.dtype, matrix)
    stages = _stages(layer.k.element_size(), constants["BLOCK"], constants["KEYS"])
    warps = 4 if matrix or constants["BLOCK"] <= 128 else 8
    if rows > MAX_TREE_ROWS:
        grid = (triton.cdiv(rows, constants["LANES"] // constants["GROUP"]), kv_heads)
        return [Launch(_chain_kernel, grid, shared | {"width": rows, "out": out}, constants, warps, stages)]
    splits = constants["SPLITS"]
    sums = torch.empty(2, rows, heads, splits, dtype=torch.float32, device=q.device)
    acc = torch.empty(rows, heads, splits, size, dtype=torch.float32, device=q.device)
    parts = {"part_m": sums[0], "part_l": sums[1], "part_acc": acc}
    tree = {"start": attend.start, "path": attend.path, "stride_path": attend.path.stride(0)}
    merged = parts | {"out": out, "rows": attend.rows, "heads": heads, "size": size}
    return [
        Launch(_split_kernel, (rows, kv_heads, splits), shared | tree | parts, constants, warps, stages),
        Launch(_merge_kernel, (rows, heads), merged, {"SPLITS": splits, "BLOCK": constants["BLOCK"]}, 2),
    ]


def _constants(layer: KVLayer, heads: int, score: _Score, out_dtype: torch.dtype, matrix: bool) -> dict[str, Any]:
    kv_heads, _, size = layer.k.shape
    group = heads // kv_heads
    block = max(LEAST_LANES, triton.next_power_of_2(size))
    return {
        "GROUP": group,
        "SPLITS": split_count(kv_heads),
        "WINDOW": score.window or 0,
        "SOFTCAP": score.softcap or 0.0,
        "QUANTISED": layer.k_scale is not None,
        "KEYS": _keys(layer.k.element_size(), block, matrix),
        "BLOCK": block,
        "LANES": max(LEAST_LANES, triton.next_power_of_2(group)),
        "DOT": _DTYPES[out_dtype if layer.k.dtype == torch.int8 else layer.k.dtype],
    }


def aot_cases() -> list[AotCase]:
    """Every head dimension and kind of cache, few rows and prefill, with and without window and softcap."""
    cases: dict[str, AotCase] = {}
    for compute, capabilities in ((torch.bfloat16, BF16_CAPABILITIES), (torch.float16, (75,))):
        for dtype, size, rows in itertools.product(CACHE_DTYPES, (64, 128, 256), (1, 128)):
            for group, score in {4: _Score(0.125, None, None), 7: _Score(0.125, 4096, 50.0)}.items():
                for launch in _example((rows, group, size), (compute, dtype), score):
                    tag = f"D={size} {str(compute)[6:]}"
                    if launch.kernel is not _merge_kernel:
                        tag += f" {str(dtype)[6:]} cache" + (" window softcap" if score.window else "")
                    name = f"{launch.name} {tag}"
                    cases.setdefault(name, launch.case(name, capabilities))
    return list(cases.values())


def _example(shape: tuple[int, int, int], dtypes: tuple[torch.dtype, torch.dtype], score: _Score) -> list[Launch]:
    rows, group, size = shape
    cache = torch.empty(2, KV_BLOCK, size, dtype=dtypes[1])
    scales = torch.empty(2, KV_BLOCK) if dtypes[1] == torch.int8 else None
    attend = device_attend(Attend.chain(0, rows), rows, "cpu")
    q = torch.empty(rows, 2 * group, size)
    matrix = dtypes[0] == torch.bfloat16
    return _launches(q, KVLayer(cache, cache, scales, scales), attend, score, q.to(dtypes[0]), matrix)
