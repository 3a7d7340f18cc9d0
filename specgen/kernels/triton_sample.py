"""Choosing tokens on the device: argmax, and the sample of a truncated softmax.

Knows: `Truncation` and `Noise` as tensors. Does not know: penalties, grammars, drafts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgen.kernels.aot import AotCase
from specgen.kernels.base import NON_FINITE, Truncation
from specgen.kernels.device_sampling import DeviceCut, DeviceNoise, device_cut, device_noise
from specgen.kernels.launch import Launch
from specgen.kernels.triton_math import philox_word
from specgen.kernels.triton_rank import (
    CHUNK,
    DIGITS,
    MIN_P,
    TEMPERATURE,
    Plan,
    Searches,
    chunk_codes,
    chunk_weights,
    draws,
    kept_mass_launch,
    load_chunk,
    row_largest,
    row_mass,
    search_launches,
)

_NON_FINITE = tl.constexpr(NON_FINITE)


@triton.jit
def _largest_kernel(
    logits,  # (R, V)
    part_value,  # (R, CHUNKS) float32
    part_id,  # (R, CHUNKS) int32
    stride,
    vocab,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0)
    ids, values = load_chunk(logits, row, stride, vocab, CHUNK)
    # A maximum may pass NaN over, so NaN becomes +inf, which is as bad.
    values = tl.where(values != values, float("inf"), values)
    largest = tl.max(values, axis=0)
    at = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(part_value + at, largest)
    tl.store(part_id + at, tl.min(tl.where(values == largest, ids, 2147483647), axis=0))


@triton.jit
def _first_largest(part_value, part_id, row, CHUNKS: tl.constexpr, CHUNKS_PADDED: tl.constexpr):
    """The first largest token, or NON_FINITE."""
    chunk = tl.arange(0, CHUNKS_PADDED)
    inside = chunk < CHUNKS
    values = tl.load(part_value + row * CHUNKS + chunk, mask=inside, other=float("-inf"))
    ids = tl.load(part_id + row * CHUNKS + chunk, mask=inside, other=2147483647)
    largest = tl.max(values, axis=0)
    first = tl.min(tl.where(values == largest, ids, 2147483647), axis=0)
    return tl.where(tl.abs(largest) == float("inf"), _NON_FINITE, first)


@triton.jit
def _argmax_kernel(part_value, part_id, out, CHUNKS: tl.constexpr, CHUNKS_PADDED: tl.constexpr):
    row = tl.program_id(0)
    tl.store(out + row, _first_largest(part_value, part_id, row, CHUNKS, CHUNKS_PADDED))


@triton.jit
def _race_kernel(
    logits,  # (R, V)
    part_value,
    cut,
    state,  # where top-p ends
    part_kept,
    key,  # (3,) int64
    positions,  # (R,) int32
    part_arrival,  # (R, CHUNKS) float64
    part_winner,  # (R, CHUNKS) int32
    stride,
    vocab,
    RANKED: tl.constexpr,
    PASSES: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_PADDED: tl.constexpr,
):
    """argmin(E / p) of each chunk, E = -log(u): see `reference.race`."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    largest = row_largest(part_value, row, CHUNKS, CHUNKS_PADDED)
    temperature = tl.load(cut + TEMPERATURE)
    if draws(largest, temperature):
        ids, values = load_chunk(logits, row, stride, vocab, CHUNK)
        weights = chunk_weights(values, largest, temperature)
        kept = weights >= tl.load(cut + MIN_P)
        if RANKED:
            kept = kept & (chunk_codes(ids, values, largest) <= tl.load(state + (row * (PASSES + 1) + PASSES) * 3))
        # The definition rounds probabilities to float32 before the race.
        probs = (weights / row_mass(part_kept, row, CHUNKS, CHUNKS_PADDED)).to(tl.float32).to(tl.float64)
        runs = kept & (probs > 0.0)
        position = (tl.load(positions + row) + 1).to(tl.uint32)
        low, high = tl.load(key).to(tl.uint32), tl.load(key + 1).to(tl.uint32)
        word = philox_word(ids.to(tl.uint32), position, tl.load(key + 2).to(tl.uint32), low, high)
        uniform = (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10  # 2**-32
        arrival = tl.where(runs, -tl.log(uniform) / tl.where(runs, probs, 1.0), float("inf"))
        first = tl.min(arrival, axis=0)
        tl.store(part_arrival + row * CHUNKS + chunk, first)
        tl.store(part_winner + row * CHUNKS + chunk, tl.min(tl.where(arrival == first, ids, 2147483647), axis=0))


@triton.jit
def _winner_kernel(
    part_value,
    part_id,
    cut,
    part_arrival,
    part_winner,
    out,  # (R,) int32
    CHUNKS: tl.constexpr,
    CHUNKS_PADDED: tl.constexpr,
):
    row = tl.program_id(0)
    token = _first_largest(part_value, part_id, row, CHUNKS, CHUNKS_PADDED)
    if (token != _NON_FINITE) & (tl.load(cut + TEMPERATURE) > 0.0):
        chunk = tl.arange(0, CHUNKS_PADDED)
        inside = chunk < CHUNKS
        arrival = tl.load(part_arrival + row * CHUNKS + chunk, mask=inside, other=float("inf"))
        winner = tl.load(part_winner + row * CHUNKS + chunk, mask=inside, other=2147483647)
        token = tl.min(tl.where(arrival == tl.min(arrival, axis=0), winner, 2147483647), axis=0)
    tl.store(out + row, token)


def _largest_launch(plan: Plan) -> Launch:
    arguments = {
        "logits": plan.logits, "part_value": plan.part_value, "part_id": plan.part_id,
        "stride": plan.logits.stride(0), "vocab": plan.vocab,
    }  # fmt: skip
    return Launch(_largest_kernel, plan.grid, arguments, {"CHUNK": CHUNK})


def _sample_launches(plan: Plan, cut: DeviceCut, noise: DeviceNoise, out: Tensor) -> list[Launch]:
    found = Searches.of(plan) if cut.ranked else None
    kept = plan.part(torch.float64)
    race = {
        "cut": cut.values, "state": None if found is None else found.mass_state, "part_kept": kept, "key": noise.key,
        "positions": noise.positions,
    }  # fmt: skip
    winners = {"part_arrival": plan.part(torch.float64), "part_winner": plan.part(torch.int32)}
    largest = {"part_value": plan.part_value, "part_id": plan.part_id, "cut": cut.values}
    constants = {"RANKED": found is not None, "PASSES": len(DIGITS)}
    return [
        _largest_launch(plan),
        *(() if found is None else search_launches(plan, cut, found)),
        kept_mass_launch(plan, cut, found, kept),
        plan.over_chunks(_race_kernel, race | winners, constants),
        Launch(_winner_kernel, (len(plan.logits),), largest | winners | {"out": out}, plan.chunks, num_warps=1),
    ]


def argmax(logits: Tensor, vocab: int | None = None) -> Tensor:
    """The first largest of the first `vocab` (None: all) logits of each row of (R, V) → (R,) int32, NON_FINITE where
    they hold NaN or +inf or are all -inf."""
    out = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
    for launch in _argmax_launches(Plan.of(logits, logits.shape[1] if vocab is None else vocab), out):
        launch.run()
    return out


def _argmax_launches(plan: Plan, out: Tensor) -> list[Launch]:
    combined = {"part_value": plan.part_value, "part_id": plan.part_id, "out": out}
    return [_largest_launch(plan), Launch(_argmax_kernel, (len(out),), combined, plan.chunks, num_warps=1)]


def gumbel_argmax(logits: Tensor, cut: DeviceCut, noise: DeviceNoise, vocab: int) -> Tensor:
    """`reference.gumbel_argmax` of the first `vocab` logits of each row of (R, V) → (R,) int32, NON_FINITE as there.

    Row r draws with the noise of position noise.positions[r] + 1. `cut` and `noise` are read when the kernels run.
    """
    assert len(noise.positions) >= len(logits)
    out = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
    for launch in _sample_launches(Plan.of(logits, vocab), cut, noise, out):
        launch.run()
    return out


def aot_cases() -> list[AotCase]:
    """A small and a large vocabulary, with and without searches."""
    cases: dict[str, AotCase] = {}
    for vocab in (32000, 262208):
        logits, out = torch.empty(1, vocab), torch.empty(1, dtype=torch.int32)
        plan, noise = Plan.of(logits, vocab), device_noise(0, out)
        for cut in (Truncation(1.0), Truncation(1.0, top_k=40)):
            drawn = _sample_launches(plan, device_cut(cut, "cpu"), noise, out)
            for launch in (drawn[0], *drawn[-2:], *_argmax_launches(plan, out)):
                name = f"{launch.name} V={vocab}" + (" ranked" if launch.constants.get("RANKED") else "")
                cases.setdefault(name, launch.case(name))
    return list(cases.values())
