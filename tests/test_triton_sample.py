"""Tokens chosen on a card are the tokens of the definition; under Triton's interpreter where there is no card."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton
import triton.language as tl

from specgen.kernels.base import NON_FINITE, Noise, Truncation
from specgen.kernels.device_sampling import device_cut, device_noise
from specgen.kernels.philox import philox4x32
from specgen.kernels.reference import ReferenceKernels, truncated_probs
from specgen.kernels.triton_math import philox_word
from specgen.kernels.triton_rank import CHUNK, DIGITS, MAX_VOCAB, Plan, Searches, kept_mass_launch, search_launches
from specgen.kernels.triton_sample import _largest_launch, argmax, gumbel_argmax

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
REFERENCE = ReferenceKernels()
VOCAB = CHUNK + 77
"""A whole chunk and a part of one."""


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@triton.jit
def _words_kernel(ids, key, position, purpose, out, SIZE: tl.constexpr):
    lane = tl.arange(0, SIZE)
    low, high = tl.load(key).to(tl.uint32), tl.load(key + 1).to(tl.uint32)
    token = tl.load(ids + lane).to(tl.uint32)
    word = philox_word(token, tl.load(position).to(tl.uint32), tl.load(purpose).to(tl.uint32), low, high)
    tl.store(out + lane, word.to(tl.int64))


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**63 + 12345, 2**64 - 1])
@pytest.mark.parametrize(("position", "purpose"), [(0, 0), (131071, 3), (2**31 - 1, 1)])
def test_words_are_those_of_the_definition(seed: int, position: int, purpose: int) -> None:
    ids = torch.tensor([0, 1, 2, 50256, 262207, 2**31 - 1, 77, 8])
    out = torch.empty(8, dtype=torch.int64, device=DEVICE)
    key = device_noise(seed, ids.to(DEVICE), purpose).key
    place = torch.tensor([position], device=DEVICE)
    _words_kernel[(1,)](ids.to(DEVICE), key, place, key[2:], out, SIZE=8)
    counter = (ids, torch.full_like(ids, position), torch.full_like(ids, purpose), torch.zeros_like(ids))
    assert torch.equal(out.cpu(), philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32))[0])


# --- argmax


def hard_rows(vocab: int) -> Tensor:
    """Rows where the first largest, or the lack of one, is easy to miss."""
    rows = randn(8, vocab)
    last = vocab - 1
    rows[0, [last, 0]] = 9.0
    rows[1, [last // 2, last]] = 9.0
    rows[2] = -3.0
    rows[3, last] = torch.nan
    rows[4, last // 2] = torch.inf
    rows[5] = -torch.inf
    rows[6] = -torch.inf
    rows[6, last] = -1e38
    rows[7] = 0.0
    rows[7, 0] = -0.0
    return rows


@pytest.mark.parametrize("vocab", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5])
def test_argmax_is_the_definition(vocab: int) -> None:
    rows = hard_rows(vocab)
    padded = torch.full((len(rows), vocab + 3), torch.nan)  # logits behind the vocabulary
    padded[:, :vocab] = rows
    assert argmax(padded.to(DEVICE), vocab).tolist() == REFERENCE.argmax(rows)
    assert argmax(rows.to(DEVICE)).tolist() == REFERENCE.argmax(rows)


def test_argmax_and_samples_agree_at_temperature_zero() -> None:
    rows = hard_rows(VOCAB)
    positions = torch.arange(len(rows), dtype=torch.int32, device=DEVICE)
    cut = device_cut(Truncation(0.0, 5, 0.5, 0.1), DEVICE)
    assert gumbel_argmax(rows.to(DEVICE), cut, device_noise(1, positions), VOCAB).tolist() == REFERENCE.argmax(rows)


def test_rows_without_a_finite_maximum_are_marked_at_any_temperature() -> None:
    rows = hard_rows(VOCAB)
    positions = torch.arange(len(rows), dtype=torch.int32, device=DEVICE)
    for cut in (Truncation(1.0), Truncation(1.0, 5, 0.5)):
        tokens = gumbel_argmax(rows.to(DEVICE), device_cut(cut, DEVICE), device_noise(1, positions), VOCAB).tolist()
        assert [index for index, token in enumerate(tokens) if token == NON_FINITE] == [3, 4, 5]


# --- samples

Sampler = Callable[[Tensor, Truncation, int, Sequence[int]], list[int]]


def on_device(logits: Tensor, cut: Truncation, seed: int, positions: Sequence[int]) -> list[int]:
    """A token for each row of logits (R, V), at `positions` (R)."""
    rows = torch.tensor([position - 1 for position in positions], dtype=torch.int32, device=DEVICE)
    vocab = logits.shape[1]
    padded = torch.cat((logits, torch.full((len(logits), 2), 99.0)), 1).to(DEVICE)
    return gumbel_argmax(padded, device_cut(cut, DEVICE), device_noise(seed, rows), vocab).tolist()


def assert_samples(sampler: Sampler, logits: Tensor, cut: Truncation, seed: int) -> None:
    """The very tokens of the definition."""
    positions = [7 * row + 1 for row in range(len(logits))]
    expected = [
        REFERENCE.gumbel_argmax(row, cut, Noise(seed, place)) for row, place in zip(logits, positions, strict=True)
    ]
    assert sampler(logits, cut, seed, positions) == expected


CUTS = [
    Truncation(1.0),
    Truncation(0.3),
    Truncation(50.0),
    Truncation(1e-4),
    Truncation(1.0, top_k=1),
    Truncation(0.8, top_k=40),
    Truncation(2.0, top_k=VOCAB - 1),
    Truncation(1.0, top_k=VOCAB + 5),
    Truncation(1.0, top_p=0.9),
    Truncation(1.5, top_p=0.05),
    Truncation(1.0, top_p=1e-9),
    Truncation(1.0, min_p=0.05),
    Truncation(1.0, top_k=100, top_p=0.8),
    Truncation(0.9, top_k=50, top_p=0.95, min_p=0.02),
]


def spread_logits(rows: int) -> Tensor:
    """Rows of the shapes that models give: flat, peaked, with ties, with many forbidden tokens."""
    logits = randn(rows, VOCAB, seed=4) * torch.tensor([0.3, 1.0, 3.0, 6.0]).repeat(rows)[:rows, None]
    logits[1::4] = (logits[1::4] * 2).round() / 2
    logits[2::4, : VOCAB // 2] = -torch.inf
    return logits


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_samples_are_those_of_the_definition(cut: Truncation) -> None:
    assert_samples(on_device, spread_logits(4), cut, seed=2**40 + 3)


def test_the_check_of_samples_sees_other_noise_and_other_cuts() -> None:
    logits = spread_logits(8)

    def later(logits: Tensor, cut: Truncation, seed: int, positions: Sequence[int]) -> list[int]:
        return on_device(logits, cut, seed, [position + 1 for position in positions])

    def low_half(logits: Tensor, cut: Truncation, seed: int, positions: Sequence[int]) -> list[int]:
        return on_device(logits, cut, seed & 0xFFFFFFFF, positions)

    def uncut(logits: Tensor, cut: Truncation, seed: int, positions: Sequence[int]) -> list[int]:
        return on_device(logits, Truncation(cut.temperature), seed, positions)

    for mutant in (later, low_half, uncut):
        with pytest.raises(AssertionError):
            assert_samples(mutant, logits, Truncation(1.5, top_k=20), seed=2**40 + 3)


# --- where the ranking ends

Cutter = Callable[[Tensor, Truncation], int]


def last_kept(logits: Tensor, cut: Truncation) -> int:
    """The last token of logits (V,) that the searches keep."""
    plan, settings = Plan.of(logits[None].to(DEVICE), len(logits)), device_cut(cut, DEVICE, ranked=True)
    found = Searches.of(plan)
    ended = kept_mass_launch(plan, settings, found, plan.part(torch.float64))
    for launch in (_largest_launch(plan), *search_launches(plan, settings, found), ended):
        launch.run()
    return int(found.mass_state[0, len(DIGITS), 0]) % MAX_VOCAB


def assert_last_kept(cutter: Cutter, logits: Tensor, cut: Truncation) -> None:
    """That of the definition: the last, in the order of the ranking, of its tokens."""
    probs = truncated_probs(logits, cut)
    order = logits.sort(descending=True, stable=True).indices
    assert cutter(logits, cut) == int(order[int((probs > 0).sum()) - 1])


TIES = {
    "all equal": (torch.zeros(VOCAB), Truncation(1.0, top_k=300)),
    "all equal, half the mass": (torch.zeros(2048), Truncation(1.0, top_p=0.5)),
    "equal in both chunks": (torch.arange(VOCAB).flip(0).float() // 100, Truncation(1.0, top_k=177)),
    "zeros of both signs": (torch.tensor([-0.0, 0.0]).repeat(600), Truncation(1.0, top_k=7)),
    "a neighbour in float32": (torch.tensor([1.0, 1.0 + 2.0**-23, 1.0 - 2.0**-24]), Truncation(1.0, top_k=2)),
    "far below": (torch.tensor([50.0, -200.0, 100.0, -210.0, 1.0]), Truncation(4.0, top_k=4)),
    "halves": (torch.tensor([3.0, 3.0, 0.0]), Truncation(1.0, top_p=0.48)),
    "just reached": (torch.tensor([0.0, 0.0, 0.0, 0.0]), Truncation(1.0, top_p=0.75)),
    "just missed": (torch.tensor([0.0, 0.0, 0.0, 0.0]), Truncation(1.0, top_p=0.75 + 1e-12)),
    "nearly all": (randn(VOCAB, seed=8), Truncation(1.0, top_p=1 - 1e-7)),
    "of the first 4": (torch.zeros(100), Truncation(1.0, top_k=4, top_p=0.5)),
    "a tie of masses": ((randn(VOCAB, seed=9) * 4).round(), Truncation(1.0, top_p=0.7)),
}


@pytest.mark.parametrize("name", TIES)
def test_the_ranking_ends_where_it_does_in_the_definition(name: str) -> None:
    assert_last_kept(last_kept, *TIES[name])


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.999])
def test_the_mass_ends_where_it_does_in_the_definition(top_p: float) -> None:
    """Right before and right behind the sum of a prefix, by less than float32 could tell."""
    logits = randn(VOCAB, seed=6) * 2
    masses = logits.double().softmax(-1).sort(descending=True).values.cumsum(0)
    border = float(masses[int((masses < top_p).sum())])
    for nudge in (-1e-11, 1e-11):
        assert_last_kept(last_kept, logits, Truncation(1.0, top_p=border + nudge))


def test_the_check_of_the_ranking_sees_other_ties_and_coarser_masses() -> None:
    def high_ids_first(logits: Tensor, cut: Truncation) -> int:
        return len(logits) - 1 - last_kept(logits.flip(0), cut)

    def in_float32(logits: Tensor, cut: Truncation) -> int:
        ranked = logits.sort(descending=True, stable=True)
        masses = ranked.values.softmax(-1).cumsum(0) - ranked.values.softmax(-1)
        return int(ranked.indices[int((masses < cut.top_p).sum()) - 1])

    with pytest.raises(AssertionError):
        assert_last_kept(high_ids_first, *TIES["equal in both chunks"])
    with pytest.raises(AssertionError):
        assert_last_kept(in_float32, *TIES["just missed"])


# --- rows and steps


@pytest.mark.parametrize("cut", [Truncation(1.3), Truncation(1.3, top_k=30, top_p=0.9)], ids=str)
def test_a_row_does_not_see_its_neighbours(cut: Truncation) -> None:
    logits = spread_logits(5)
    logits[1], logits[3] = torch.nan, -torch.inf
    positions = [3, 3, 90, 90, 5]
    together = on_device(logits, cut, 11, positions)
    alone = [on_device(logits[row : row + 1], cut, 11, [positions[row]])[0] for row in range(5)]
    assert together == alone
    assert [token == NON_FINITE for token in together] == [False, True, False, True, False]


def test_settings_are_read_when_the_kernels_run() -> None:
    cut, noise = device_cut(Truncation(), DEVICE, ranked=True), device_noise(0, torch.zeros(1, dtype=torch.int32))
    logits = spread_logits(1)
    moved = type(noise)(noise.key.to(DEVICE), noise.positions.to(DEVICE))
    setting = Truncation(1.4, top_k=17)
    cut.write(setting)
    moved.write(2**50, purpose=3)
    expected = REFERENCE.gumbel_argmax(logits[0], setting, Noise(2**50, 1, 3))
    assert gumbel_argmax(logits.to(DEVICE), cut, moved, VOCAB).tolist() == [expected]
    unranked = device_cut(Truncation(1.0), DEVICE)
    with pytest.raises(AssertionError):
        unranked.write(setting)
