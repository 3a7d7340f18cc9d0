"""Which part of a row's ranking is kept (top-k, top-p, min-p), without sorting.

Knows: rows of logits in chunks, and `Truncation` as a tensor. Does not know: noise.

A row of V logits is read by V / CHUNK programs, so that one row uses the whole card; each pass is a launch, and what
the programs found is combined in the order of the chunks, or as integers. Nothing is read back, every setting comes
from memory, and no row sees another.

Each token has a code that grows along the ranking (logit descending, id ascending). The code of the last token kept is
found digit by digit, from the largest, by adding up how many tokens (top-k), or how much mass (top-p), each value of
the digit holds. Sorting 128k logits would pass over them as often, move keys and ids each time, and take one row after
another. The sums are integers, so the order of the atomic additions changes nothing: counts, and masses
exp((logit - largest) / temperature) in units of 2**-86, finer than the float64 sums of the reference.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgen.kernels.aot import AotCase
from specgen.kernels.base import Truncation
from specgen.kernels.device_sampling import DeviceCut, device_cut
from specgen.kernels.launch import Launch

CHUNK = 1024
"""Logits of one program."""

MAX_VOCAB = 1 << 19
"""A code has 19 bits for the id, and 2**19 masses of 2**43 units fit into 62 bits."""

DIGITS = ((51, 8), (40, 11), (29, 11), (19, 10), (9, 10), (0, 9))
"""(shift, bits) of a code's digits: how far the logit lies below the largest, in eighths, which spreads the tokens over
many values at once; the logit's 32 bits; the id."""

BINS = 1 << max(bits for _, bits in DIGITS)

EVERYTHING = tl.constexpr(1 << 62)
"""A code behind all tokens."""

UNIT = tl.constexpr(float(2**43))
TEMPERATURE, TOP_K, TOP_P, MIN_P = (tl.constexpr(index) for index in range(4))
"""Where each number stands in `DeviceCut.values`."""


@triton.jit
def load_chunk(logits, row, stride, vocab, CHUNK: tl.constexpr):
    """The chunk's ids and logits, -inf behind the vocabulary."""
    ids = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(logits + row.to(tl.int64) * stride + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
    return ids, values


@triton.jit
def row_largest(part_value, row, CHUNKS: tl.constexpr, CHUNKS_PADDED: tl.constexpr):
    """The row's largest logit; +inf when it holds NaN or +inf."""
    chunk = tl.arange(0, CHUNKS_PADDED)
    return tl.max(tl.load(part_value + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=float("-inf")), axis=0)


@triton.jit
def chunk_weights(values, largest, temperature):
    """exp((logit - largest) / temperature) as float64: 1 for the largest."""
    return tl.exp((values.to(tl.float64) - largest.to(tl.float64)) / temperature)


@triton.jit
def chunk_codes(ids, values, largest):
    """int64 that grow along the ranking, all different."""
    eighths = tl.minimum((largest - values) * 8.0, 255.0).to(tl.int64)
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)  # -0 is 0
    ascending = tl.where(bits < 0, ~bits, bits ^ -2147483648)  # as unsigned, ordered like the logits
    below = (~ascending).to(tl.int64) & 0xFFFFFFFF
    return (eighths << 51) | (below << 19) | ids.to(tl.int64)


@triton.jit
def _next_count(
    hist, state, row, top_k, PASS: tl.constexpr, BITS: tl.constexpr, BINS: tl.constexpr, PASSES: tl.constexpr
):
    """What pass PASS of the search for the k-th token found: (its code so far, tokens before that)."""
    bin = tl.arange(0, BINS)
    at = state + (row * (PASSES + 1) + PASS) * 2
    before = tl.load(at + 1)
    held = tl.load(hist + (row * PASSES + PASS) * BINS + bin)
    digit = tl.sum((before + tl.cumsum(held, axis=0) < top_k).to(tl.int64), axis=0)
    return (tl.load(at) << BITS) | digit, before + tl.sum(tl.where(bin < digit, held, 0), axis=0)


@triton.jit
def _next_mass(
    hist, state, row, target, PASS: tl.constexpr, BITS: tl.constexpr, BINS: tl.constexpr, PASSES: tl.constexpr
):
    """What pass PASS of the search for the last token with less than `target` before it found: (its code so far, the
    mass before that in units of 2**-43 and of 2**-86)."""
    bin = tl.arange(0, BINS)
    at = state + (row * (PASSES + 1) + PASS) * 3
    before, before_low = tl.load(at + 1), tl.load(at + 2)
    high = tl.load(hist + (row * PASSES + PASS) * 2 * BINS + bin)
    low = tl.load(hist + ((row * PASSES + PASS) * 2 + 1) * BINS + bin)
    units = (before + tl.cumsum(high, axis=0) - high).to(tl.float64)
    units_low = (before_low + tl.cumsum(low, axis=0) - low).to(tl.float64)
    held = high + low > 0
    under = held & (units / UNIT + units_low / UNIT / UNIT < target)
    first = tl.min(tl.where(held, bin, BINS - 1), axis=0)  # is kept whatever the target
    digit = tl.maximum(tl.max(tl.where(under, bin, 0), axis=0), first).to(tl.int64)
    before += tl.sum(tl.where(bin < digit, high, 0), axis=0)
    return (tl.load(at) << BITS) | digit, before, before_low + tl.sum(tl.where(bin < digit, low, 0), axis=0)


@triton.jit
def draws(largest, temperature):
    """Whether the row's token is drawn at all: it is finite, and not greedy."""
    return (tl.abs(largest) != float("inf")) & (temperature > 0.0)


@triton.jit
def _count_kernel(
    logits,  # (R, V)
    part_value,
    cut,
    hist,  # (R, PASSES, BINS) int64, zeros at first
    state,  # (R, PASSES + 1, 2) int64: code so far, tokens before it; zeros at first
    stride,
    vocab,
    PASS: tl.constexpr,
    SHIFT: tl.constexpr,
    BITS: tl.constexpr,
    LAST_BITS: tl.constexpr,  # of the pass before
    BINS: tl.constexpr,
    PASSES: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_PADDED: tl.constexpr,
):
    """Pass PASS of top-k: how many tokens each value of this digit holds, of those that agree so far."""
    row = tl.program_id(0)
    largest = row_largest(part_value, row, CHUNKS, CHUNKS_PADDED)
    top_k = tl.load(cut + TOP_K)
    if draws(largest, tl.load(cut + TEMPERATURE)) & (top_k > 0.0) & (top_k < vocab):
        prefix = tl.zeros((), tl.int64)
        if PASS > 0:
            prefix, before = _next_count(hist, state, row, top_k.to(tl.int64), PASS - 1, LAST_BITS, BINS, PASSES)
            if tl.program_id(1) == 0:
                tl.store(state + (row * (PASSES + 1) + PASS) * 2, prefix)
                tl.store(state + (row * (PASSES + 1) + PASS) * 2 + 1, before)
        ids, values = load_chunk(logits, row, stride, vocab, CHUNK)
        codes = chunk_codes(ids, values, largest)
        agrees = (ids < vocab) & (codes >> (SHIFT + BITS) == prefix)
        digits = ((codes >> SHIFT) & ((1 << BITS) - 1)).to(tl.int32)
        held = tl.histogram(digits, BINS, mask=agrees).to(tl.int64)
        at = hist + (row * PASSES + PASS) * BINS + tl.arange(0, BINS)
        tl.atomic_add(at, held, mask=held > 0, sem="relaxed")


@triton.jit(do_not_specialize=["stride"])  # it would decide the order of the sum
def _count_mass_kernel(
    logits,  # (R, V)
    part_value,
    cut,
    hist,  # of _count_kernel
    state,
    part_mass,  # (R, CHUNKS) float64
    stride,
    vocab,
    LAST_BITS: tl.constexpr,
    BINS: tl.constexpr,
    PASSES: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_PADDED: tl.constexpr,
):
    """Ends top-k: the code of the k-th token goes into state[row, PASSES, 0], and each chunk sums what is kept."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    largest = row_largest(part_value, row, CHUNKS, CHUNKS_PADDED)
    temperature, top_k = tl.load(cut + TEMPERATURE), tl.load(cut + TOP_K)
    if draws(largest, temperature):
        last = tl.zeros((), tl.int64) + EVERYTHING
        if (top_k > 0.0) & (top_k < vocab):
            last, _ = _next_count(hist, state, row, top_k.to(tl.int64), PASSES - 1, LAST_BITS, BINS, PASSES)
        if chunk == 0:
            tl.store(state + (row * (PASSES + 1) + PASSES) * 2, last)
        ids, values = load_chunk(logits, row, stride, vocab, CHUNK)
        kept = chunk_codes(ids, values, largest) <= last
        mass = tl.sum(tl.where(kept, chunk_weights(values, largest, temperature), 0.0), axis=0)
        tl.store(part_mass + row * CHUNKS + chunk, mass)


@triton.jit
def row_mass(part_mass, row, CHUNKS: tl.constexpr, CHUNKS_PADDED: tl.constexpr):
    chunk = tl.arange(0, CHUNKS_PADDED)
    return tl.sum(tl.load(part_mass + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=0.0), axis=0)


@triton.jit
def _weigh_kernel(
    logits,  # (R, V)
    part_value,
    cut,
    count_state,  # of _count_kernel: where top-k ends
    part_mass,  # of _count_mass_kernel: the mass that top-p is a part of
    hist,  # (R, PASSES, 2, BINS) int64: masses in units of 2**-43, and what is left in units of 2**-86; zeros at first
    state,  # (R, PASSES + 1, 3) int64: code so far, mass before it in both units; zeros at first
    stride,
    vocab,
    PASS: tl.constexpr,
    SHIFT: tl.constexpr,
    BITS: tl.constexpr,
    LAST_BITS: tl.constexpr,
    BINS: tl.constexpr,
    PASSES: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_PADDED: tl.constexpr,
):
    """Pass PASS of top-p: the mass that each value of this digit holds, of the tokens that agree so far."""
    row = tl.program_id(0)
    largest = row_largest(part_value, row, CHUNKS, CHUNKS_PADDED)
    temperature, top_p = tl.load(cut + TEMPERATURE), tl.load(cut + TOP_P)
    if draws(largest, temperature) & (top_p < 1.0):
        prefix = tl.zeros((), tl.int64)
        if PASS > 0:
            target = top_p * row_mass(part_mass, row, CHUNKS, CHUNKS_PADDED)
            prefix, before, before_low = _next_mass(hist, state, row, target, PASS - 1, LAST_BITS, BINS, PASSES)
            if tl.program_id(1) == 0:
                at = state + (row * (PASSES + 1) + PASS) * 3
                tl.store(at, prefix)
                tl.store(at + 1, before)
                tl.store(at + 2, before_low)
        ids, values = load_chunk(logits, row, stride, vocab, CHUNK)
        codes = chunk_codes(ids, values, largest)
        last = tl.load(count_state + (row * (PASSES + 1) + PASSES) * 2)
        agrees = (codes <= last) & (codes >> (SHIFT + BITS) == prefix)
        units = chunk_weights(values, largest, temperature) * UNIT
        high = units.to(tl.int64)
        low = ((units - high.to(tl.float64)) * UNIT).to(tl.int64)
        at = hist + (row * PASSES + PASS) * 2 * BINS + ((codes >> SHIFT) & ((1 << BITS) - 1))
        tl.atomic_add(at, high, mask=agrees & (high > 0), sem="relaxed")
        tl.atomic_add(at + BINS, low, mask=agrees & (low > 0), sem="relaxed")


@triton.jit(do_not_specialize=["stride"])  # it would decide the order of the sum
def _kept_mass_kernel(
    logits,  # (R, V)
    part_value,
    cut,
    count_state,
    part_mass,
    hist,  # of _weigh_kernel
    state,
    part_kept,  # (R, CHUNKS) float64
    stride,
    vocab,
    RANKED: tl.constexpr,  # whether there were searches
    LAST_BITS: tl.constexpr,
    BINS: tl.constexpr,
    PASSES: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_PADDED: tl.constexpr,
):
    """Ends top-p: the code of the last token kept goes into state[row, PASSES, 0], and each chunk sums what min-p too
    keeps."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    largest = row_largest(part_value, row, CHUNKS, CHUNKS_PADDED)
    temperature, top_p = tl.load(cut + TEMPERATURE), tl.load(cut + TOP_P)
    if draws(largest, temperature):
        ids, values = load_chunk(logits, row, stride, vocab, CHUNK)
        weights = chunk_weights(values, largest, temperature)
        kept = weights >= tl.load(cut + MIN_P)
        if RANKED:
            last = tl.load(count_state + (row * (PASSES + 1) + PASSES) * 2)
            if top_p < 1.0:
                target = top_p * row_mass(part_mass, row, CHUNKS, CHUNKS_PADDED)
                last, _, _ = _next_mass(hist, state, row, target, PASSES - 1, LAST_BITS, BINS, PASSES)
            if chunk == 0:
                tl.store(state + (row * (PASSES + 1) + PASSES) * 3, last)
            kept = kept & (chunk_codes(ids, values, largest) <= last)
        tl.store(part_kept + row * CHUNKS + chunk, tl.sum(tl.where(kept, weights, 0.0), axis=0))


class Plan(NamedTuple):
    """What every pass over the same logits shares."""

    logits: Tensor  # (R, V)
    vocab: int
    part_value: Tensor  # (R, CHUNKS) float32
    part_id: Tensor  # (R, CHUNKS) int32

    @classmethod
    def of(cls, logits: Tensor, vocab: int) -> Plan:
        assert logits.stride(1) == 1
        assert 0 < vocab <= min(logits.shape[1], MAX_VOCAB)
        parts = (len(logits), triton.cdiv(vocab, CHUNK))
        value = torch.empty(parts, dtype=torch.float32, device=logits.device)
        return cls(logits, vocab, value, torch.empty(parts, dtype=torch.int32, device=logits.device))

    @property
    def grid(self) -> tuple[int, int]:
        rows, chunks = self.part_value.shape
        return rows, chunks

    @property
    def chunks(self) -> dict[str, int]:
        return {"CHUNKS": self.grid[1], "CHUNKS_PADDED": triton.next_power_of_2(self.grid[1])}

    def part(self, dtype: torch.dtype) -> Tensor:
        """A number per row and chunk."""
        return torch.empty(self.grid, dtype=dtype, device=self.logits.device)

    def over_chunks(
        self, kernel: Any, arguments: dict[str, Any], constants: dict[str, Any], num_warps: int = 4
    ) -> Launch:
        """A pass over all logits."""
        read = {
            "logits": self.logits,
            "part_value": self.part_value,
            "stride": self.logits.stride(0),
            "vocab": self.vocab,
        }
        return Launch(kernel, self.grid, read | arguments, constants | {"CHUNK": CHUNK} | self.chunks, num_warps)


class Searches(NamedTuple):
    """The tensors that lead to the code of the last token kept."""

    count_hist: Tensor  # (R, PASSES, BINS) int64
    count_state: Tensor  # (R, PASSES + 1, 2) int64
    mass_hist: Tensor  # (R, PASSES, 2, BINS) int64
    mass_state: Tensor  # (R, PASSES + 1, 3) int64
    part_mass: Tensor  # (R, CHUNKS) float64

    @classmethod
    def of(cls, plan: Plan) -> Searches:
        rows, passes = len(plan.logits), len(DIGITS)
        shapes = ((rows, passes, BINS), (rows, passes + 1, 2), (rows, passes, 2, BINS), (rows, passes + 1, 3))
        sizes = [math.prod(shape) for shape in shapes]
        zeros = torch.zeros(sum(sizes), dtype=torch.int64, device=plan.logits.device)  # one launch for all
        count_hist, count_state, mass_hist, mass_state = (
            part.view(shape) for part, shape in zip(zeros.split(sizes), shapes, strict=True)
        )
        return cls(count_hist, count_state, mass_hist, mass_state, plan.part(torch.float64))


_SEARCH_WARPS = 8
"""Two sums over all values of a digit stay in registers."""

_SEARCH = {"BINS": BINS, "PASSES": len(DIGITS), "LAST_BITS": DIGITS[-1][1]}


def search_launches(plan: Plan, cut: DeviceCut, found: Searches) -> list[Launch]:
    """Every pass of top-k and of top-p."""
    count = {"cut": cut.values, "hist": found.count_hist, "state": found.count_state}
    weigh = {"cut": cut.values, "count_state": found.count_state, "part_mass": found.part_mass}
    weigh |= {"hist": found.mass_hist, "state": found.mass_state}
    digits = [
        _SEARCH | {"PASS": index, "SHIFT": shift, "BITS": bits, "LAST_BITS": DIGITS[max(index - 1, 0)][1]}
        for index, (shift, bits) in enumerate(DIGITS)
    ]
    return [
        *(plan.over_chunks(_count_kernel, count, digit) for digit in digits),
        plan.over_chunks(_count_mass_kernel, count | {"part_mass": found.part_mass}, _SEARCH),
        *(plan.over_chunks(_weigh_kernel, weigh, digit, _SEARCH_WARPS) for digit in digits),
    ]


def kept_mass_launch(plan: Plan, cut: DeviceCut, found: Searches | None, part_kept: Tensor) -> Launch:
    """Ends the searches, if there were any, and sums what is kept of each chunk into part_kept (R, CHUNKS) float64."""
    arguments: dict[str, Tensor | None] = {
        "cut": cut.values,
        "count_state": None if found is None else found.count_state,
        "part_mass": None if found is None else found.part_mass,
        "hist": None if found is None else found.mass_hist,
        "state": None if found is None else found.mass_state,
        "part_kept": part_kept,
    }
    return plan.over_chunks(
        _kept_mass_kernel, arguments, _SEARCH | {"RANKED": found is not None}, 4 if found is None else _SEARCH_WARPS
    )


def aot_cases() -> list[AotCase]:
    """A small and a large vocabulary, with and without searches; of a search's passes, the first and the second."""
    cases: dict[str, AotCase] = {}
    for vocab in (32000, 262208):
        plan = Plan.of(torch.empty(1, vocab), vocab)
        cut, found, kept = device_cut(Truncation(1.0, top_k=40), "cpu"), Searches.of(plan), plan.part(torch.float64)
        for launch in search_launches(plan, cut, found):
            name = f"{launch.name} V={vocab}" + (" first" if launch.constants.get("PASS") == 0 else "")
            cases.setdefault(name, launch.case(name))
        for searches in (None, found):
            launch = kept_mass_launch(plan, cut, searches, kept)
            name = f"{launch.name} V={vocab}" + ("" if searches is None else " ranked")
            cases[name] = launch.case(name)
    return list(cases.values())
