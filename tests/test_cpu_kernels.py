"""Every op of the CPU backend: against the reference, against the exact int8 arithmetic, and bitwise row by row."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from cpu import cpu_kernels
from cpu_oracles import int_linear
from torch import Tensor

from specgen.kernels.base import NON_FINITE, Attend, KVLayer, Noise, Truncation
from specgen.kernels.cpu.ops import CpuKernels, Prepared
from specgen.kernels.reference import ReferenceKernels
from specgen.weights.packed import Codebook4, Dense, Fp8, GroupedInt4, GroupedInt8, QuantLinear

REFERENCE = ReferenceKernels()
MAX_ROWS = 17
FLOAT_TOLERANCE = 2e-6  # of the largest output: float32 sums in another order
INT_TOLERANCE = 2e-6  # against the exact int8 arithmetic
QUANT_TOLERANCE = 1.001  # int8 activations against float ones: of half a step in every input


@pytest.fixture(scope="module", params=[1, 2], ids=["1 thread", "2 threads"])
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    return cpu_kernels(request.param)


def randoms(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def integers(low: int, high: int, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(7)).to(dtype)


def int4(n: int, k: int, group: int, dtype: torch.dtype = torch.float16, bias: bool = False) -> GroupedInt4:
    scale = (randoms(n, k // group, seed=1).abs() / 8).to(dtype)
    low = (-randoms(n, k // group, seed=2).abs()).to(dtype)
    return GroupedInt4(
        integers(0, 256, n, k // 2, dtype=torch.uint8), scale, low, group, randoms(n, seed=3) if bias else None
    )


def int8(n: int, k: int, group: int, dtype: torch.dtype = torch.float16, low: bool = False) -> GroupedInt8:
    scale = (randoms(n, k // group, seed=1) / 128).to(dtype)
    minimum = randoms(n, k // group, seed=2).to(dtype) if low else None
    return GroupedInt8(integers(-128, 128, n, k, dtype=torch.int8), scale, group, minimum)


def fp8(n: int, k: int, block: tuple[int, int]) -> Fp8:
    q = integers(0, 256, n, k, dtype=torch.uint8)
    q = torch.where((q & 0x7F) == 0x7F, 0, q).to(torch.uint8).view(torch.float8_e4m3fn)  # every code but NaN
    return Fp8(q, randoms(-(-n // block[0]), -(-k // block[1]), seed=1).abs(), block)


INTEGER: dict[str, QuantLinear] = {
    "int4 32": int4(70, 96, 32),
    "int4 32 f32": int4(33, 64, 32, torch.float32, bias=True),
    "int4 64": int4(8, 128, 64),
    "int4 128": int4(130, 256, 128, bias=True),
    "int4 whole row": int4(9, 40, 40),
    "int8 32": int8(70, 96, 32),
    "int8 32 f32": int8(40, 64, 32, torch.float32),
    "int8 16": int8(31, 96, 16),
    "int8 16 f32 min": int8(31, 96, 16, torch.float32, low=True),
    "int8 16 min": int8(3, 48, 16, low=True),
    "int8 64 min": int8(1, 128, 64, low=True),
    "int8 32 f32 min": int8(17, 64, 32, torch.float32, low=True),
    "int8 whole row": int8(19, 45, 45, torch.float32),
    "int8 whole row min": int8(19, 77, 77, low=True),
    "int4 in another order": replace(
        int4(9, 64, 32), perm=torch.randperm(64, generator=torch.Generator().manual_seed(1))
    ),
}

FLOATS: dict[str, QuantLinear] = {
    "dense f32": Dense(randoms(37, 70), randoms(37, seed=1)),
    "dense bf16": Dense(randoms(16, 129).bfloat16()),
    "dense f16": Dense(randoms(5, 64).half()),
    "dense f16 subnormal": Dense((randoms(5, 64) * 1e-6).half()),
    "fp8 tensor": fp8(20, 72, (20, 72)),
    "fp8 channel": fp8(20, 72, (1, 72)),
    "fp8 blocks": fp8(200, 160, (128, 128)),
    "fp8 ragged": fp8(50, 100, (16, 48)),
    "codebook": Codebook4(integers(0, 256, 21, 48, dtype=torch.uint8), randoms(16), randoms(21, 3).half(), 32),
    "codebook 64": Codebook4(integers(0, 256, 8, 64, dtype=torch.uint8), randoms(16), randoms(8, 2), 64),
    "int4 odd group": int4(13, 72, 24),
    "int8 odd group": int8(13, 72, 12, low=True),
}

WEIGHTS = INTEGER | FLOATS


def inputs(weight: QuantLinear, rows: int = MAX_ROWS) -> Tensor:
    return randoms(rows, weight.shape[1], seed=11) * 10.0 ** randoms(rows, 1, seed=12)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """The largest error of a row in terms of its largest output."""
    return float(((found.double() - expected).abs().amax(-1) / expected.abs().amax(-1).clamp(min=1e-30)).max())


# ---- linears ----


def half_steps(x: Tensor, weight: GroupedInt4 | GroupedInt8) -> Tensor:
    """(R, N): how far a product moves when every activation moves by half of its block's int8 step."""
    if weight.perm is not None:
        x = x[:, weight.perm.long()]
        weight = replace(weight, perm=None)
    blocks = torch.nn.functional.pad(x, (0, -x.shape[1] % 32)).view(len(x), -1, 32)
    steps = (blocks.abs().amax(-1) / 254).repeat_interleave(32, dim=1)[:, : x.shape[1]]
    return steps @ weight.dequantize().abs().T + 1e-6 * (x.abs() @ weight.dequantize().abs().T)


@pytest.mark.parametrize("name", INTEGER)
def test_integer_linear_is_the_exact_arithmetic(name: str, kernels: CpuKernels) -> None:
    weight = INTEGER[name]
    assert isinstance(weight, GroupedInt4 | GroupedInt8)
    x = inputs(weight)
    found = kernels.linear(x, kernels.prepare(weight))
    # Against the size of the sums' terms: scale · q and min cancel, float rounding does not.
    terms = x.abs() @ weight.dequantize().abs().T
    assert float(((found.double() - int_linear(x, weight)).abs() / terms.clamp(min=1e-20)).max()) < INT_TOLERANCE
    reference = REFERENCE.linear(x, REFERENCE.prepare(weight))
    assert float(((found - reference).abs() / half_steps(x, weight)).max()) < QUANT_TOLERANCE


def test_the_exact_arithmetic_tells_a_wrong_block_apart(kernels: CpuKernels) -> None:
    """The mutant: activations quantised over 64 inputs in place of 32."""
    weight = INTEGER["int4 64"]
    assert isinstance(weight, GroupedInt4)
    x = inputs(weight)
    wide = x.view(len(x), -1, 64)
    scale = wide.abs().amax(-1, keepdim=True) / 127
    found = kernels.linear(((wide / scale).round() * scale).view_as(x), kernels.prepare(weight))
    terms = x.abs() @ weight.dequantize().abs().T
    assert float(((found.double() - int_linear(x, weight)).abs() / terms).max()) > 10 * INT_TOLERANCE


@pytest.mark.parametrize("name", FLOATS)
def test_float_linear(name: str, kernels: CpuKernels) -> None:
    weight = FLOATS[name]
    x = inputs(weight)
    expected = x.double() @ weight.dequantize().double().T
    if weight.bias is not None:
        expected += weight.bias
    assert relative_error(kernels.linear(x, kernels.prepare(weight)), expected) < FLOAT_TOLERANCE


@pytest.mark.parametrize("name", WEIGHTS)
def test_embedding_rows_are_the_dequantised_rows(name: str, kernels: CpuKernels) -> None:
    weight = WEIGHTS[name]
    ids = torch.tensor([weight.shape[0] - 1, 0, weight.shape[0] // 2])
    assert torch.equal(kernels.embedding(ids, kernels.prepare(weight)), weight.dequantize()[ids])


def rows_agree(op: Callable[[Tensor], Tensor], x: Tensor) -> bool:
    """Whether each row has the same bits for R = 1 … len(x), forwards, backwards and shuffled."""
    alone = torch.cat([op(x[row : row + 1]) for row in range(len(x))])
    for count in range(1, len(x) + 1):
        shuffled = torch.randperm(count, generator=torch.Generator().manual_seed(count))
        for order in (torch.arange(count), torch.arange(count).flip(0), shuffled):
            if not torch.equal(op(x[order]), alone[order]):
                return False
    return True


@pytest.mark.parametrize("name", WEIGHTS)
def test_linear_rows_do_not_depend_on_each_other(name: str, kernels: CpuKernels) -> None:
    weight = WEIGHTS[name]
    prepared, x = kernels.prepare(weight), inputs(weight)
    assert rows_agree(lambda rows: kernels.linear(rows, prepared), x)
    many = x.repeat(6, 1)  # as wide as a chunk of prefill
    assert torch.equal(kernels.linear(many, prepared), kernels.linear(x, prepared).repeat(6, 1))


def test_a_linear_that_shares_a_scale_between_rows_is_caught(kernels: CpuKernels) -> None:
    weight = INTEGER["int4 32"]
    prepared = kernels.prepare(weight)

    def shared(rows: Tensor) -> Tensor:
        scale = rows.abs().max() / 127
        return kernels.linear((rows / scale).round() * scale, prepared)

    assert not rows_agree(shared, inputs(weight))


def threads_agree(weight: QuantLinear, kinds: Sequence[CpuKernels]) -> bool:
    """Whether a linear has the same bits on each of `kinds`."""
    x = inputs(weight)
    first, *others = (kernels.linear(x, kernels.prepare(weight)) for kernels in kinds)
    return all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("name", WEIGHTS)
def test_threads_do_not_change_a_bit(name: str) -> None:
    assert threads_agree(WEIGHTS[name], [cpu_kernels(threads) for threads in (1, 2, 3)])


@pytest.mark.parametrize("name", ["int4 32", "int8 32", "dense bf16"])
def test_a_sum_split_among_threads_is_caught(name: str) -> None:
    class Splitting(CpuKernels):
        """The mutant: each thread sums its share of the inputs, and the shares are added."""

        def __init__(self, threads: int) -> None:
            self.__dict__.update(cpu_kernels(threads).__dict__)

        def linear(self, x: Tensor, weight: Prepared) -> Tensor:
            share = torch.arange(x.shape[1]) * self.threads // x.shape[1]
            parts = (super(Splitting, self).linear(x * (share == thread), weight) for thread in range(self.threads))
            return torch.stack(list(parts)).sum(0)

    assert not threads_agree(WEIGHTS[name], [Splitting(threads) for threads in (1, 2, 3)])


def test_extreme_activations(kernels: CpuKernels) -> None:
    weight = INTEGER["int4 32"]
    assert isinstance(weight, GroupedInt4)
    prepared = kernels.prepare(weight)
    outlier = randoms(1, 96)
    outlier[0, 40] = 3e4
    rows = torch.cat(
        [torch.zeros(1, 96), randoms(1, 96) * 1e-40, randoms(1, 96) * 1e-31, randoms(1, 96) * 1e30, outlier]
    )
    found = kernels.linear(rows, prepared)
    expected = int_linear(rows, weight)
    assert torch.equal(found[:2], torch.zeros(2, 70))  # denormals count as zeros
    assert relative_error(found[3:], expected[3:]) < 1e-5
    assert found.isfinite().all()


@pytest.mark.parametrize("scale", [65504.0, -65504.0, 6e-8, 0.0])
def test_extreme_scales(scale: float, kernels: CpuKernels) -> None:
    base = int4(16, 64, 32)
    weight = GroupedInt4(base.nibbles, torch.full_like(base.scale, scale), torch.full_like(base.min, -scale), 32)
    x = inputs(weight, 3)
    found = kernels.linear(x, kernels.prepare(weight))
    terms = (x.abs() @ weight.dequantize().abs().T).clamp(min=1e-12)
    assert float(((found.double() - int_linear(x, weight)).abs() / terms).max()) < 1e-5


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", WEIGHTS)
def test_what_is_not_finite_stays_visible(name: str, bad: float, kernels: CpuKernels) -> None:
    weight = WEIGHTS[name]
    x = inputs(weight, 3)
    clean = kernels.linear(x, kernels.prepare(weight))
    x[1, 2] = bad
    found = kernels.linear(x, kernels.prepare(weight))
    column = weight.dequantize()[:, 2]
    assert not found[1][column != 0].isfinite().any()
    assert torch.equal(found[[0, 2]], clean[[0, 2]])


# ---- norm, activation, rotation ----


@pytest.mark.parametrize("size", [1, 7, 8, 31, 64, 576, 1000])
def test_rms_norm(size: int, kernels: CpuKernels) -> None:
    x, weight = randoms(MAX_ROWS, size) * 3, randoms(size, seed=1)
    found = kernels.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(found, REFERENCE.rms_norm(x, weight, 1e-5), rtol=2e-6, atol=1e-6)
    assert rows_agree(lambda rows: kernels.rms_norm(rows, weight, 1e-5), x)
    heads = randoms(3, 4, size)
    assert torch.equal(kernels.rms_norm(heads, weight, 1e-5)[1, 2], kernels.rms_norm(heads[1, 2:3], weight, 1e-5)[0])
    x[1, 0] = float("nan")
    assert kernels.rms_norm(x, weight, 1e-5)[1].isnan().all()


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("size", [1, 9, 96])
def test_gated(size: int, activation: str, kernels: CpuKernels) -> None:
    gate, up = randoms(5, size) * 10, randoms(5, size, seed=1)
    gate[0, 0], gate[1, 0], gate[2, 0] = 200.0, -200.0, 1e-30
    found = kernels.gated(gate, up, activation)
    torch.testing.assert_close(found, REFERENCE.gated(gate, up, activation), rtol=2e-6, atol=1e-6)
    gate[3, 0] = float("nan")
    assert kernels.gated(gate, up, activation)[3, 0].isnan()


def empty_layer(heads: int, slots: int, dim: int, dtype: torch.dtype) -> KVLayer:
    """A cache whose slots hold rubbish that must never be seen."""
    rubbish = 77 if dtype == torch.int8 else float("nan")
    k, v = (torch.full((heads, slots, dim), rubbish).to(dtype) for _ in range(2))
    if dtype != torch.int8:
        return KVLayer(k, v)
    return KVLayer(k, v, torch.full((heads, slots), float("nan")), torch.full((heads, slots), float("nan")))


DTYPES = [torch.float32, torch.bfloat16, torch.int8]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("dim", "turned"), [(64, 64), (80, 32), (20, 12), (16, 0)])
def test_rope_and_cache_write_are_the_reference(dim: int, turned: int, dtype: torch.dtype, kernels: CpuKernels) -> None:
    q, k, v = randoms(5, 6, dim), randoms(5, 2, dim, seed=1), randoms(5, 2, dim, seed=2)
    k[0] = 0.0
    angles = (randoms(5, turned // 2, seed=3), randoms(5, turned // 2, seed=4)) if turned else None
    ours, theirs = empty_layer(2, 12, dim, dtype), empty_layer(2, 12, dim, dtype)
    assert torch.equal(kernels.rope_write(q, k, v, angles, ours, 4), REFERENCE.rope_write(q, k, v, angles, theirs, 4))
    assert torch.equal(ours.k[:, 4:9], theirs.k[:, 4:9])
    assert torch.equal(ours.v[:, 4:9], theirs.v[:, 4:9])
    if dtype == torch.int8:
        assert ours.k_scale is not None
        assert theirs.k_scale is not None
        assert torch.equal(ours.k_scale[:, 4:9], theirs.k_scale[:, 4:9])
    untouched = empty_layer(2, 12, dim, dtype)
    assert torch.equal(ours.k[:, 9:].view(torch.uint8), untouched.k[:, 9:].view(torch.uint8))


# ---- attention ----

SLOTS = 420


def filled_layer(kernels: CpuKernels, dim: int, dtype: torch.dtype, count: int) -> KVLayer:
    layer = empty_layer(2, SLOTS, dim, dtype)
    k, v = randoms(count, 2, dim, seed=1) * 2, randoms(count, 2, dim, seed=2)
    kernels.rope_write(randoms(count, 6, dim), k, v, None, layer, 0)
    return layer


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [8, 20, 64, 128])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (100, None), (1, 3.0), (None, 20.0)])
def test_attention(
    dim: int, dtype: torch.dtype, window: int | None, softcap: float | None, kernels: CpuKernels
) -> None:
    layer, q = filled_layer(kernels, dim, dtype, 300), randoms(300, 6, dim, seed=3)
    attend = Attend.chain(0, 300)
    found = kernels.attention(q, layer, attend, dim**-0.5, window, softcap)
    expected = REFERENCE.attention(q, layer, attend, dim**-0.5, window, softcap)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for row in (0, 1, 63, 64, 127, 128, 255, 256, 299):
        alone = kernels.attention(q[row : row + 1], layer, Attend.chain(row, 1), dim**-0.5, window, softcap)
        assert torch.equal(alone[0], found[row]), row
    for start, rows in [(120, 17), (60, 9), (250, 33), (0, 5)]:
        part = kernels.attention(q[start : start + rows], layer, Attend.chain(start, rows), dim**-0.5, window, softcap)
        assert torch.equal(part, found[start : start + rows])


TREES = [(-1, 0, 0, 1, 2, 2, 3, 0, 7), (-1, 0, 0, 0, 0), (-1, 0, 1, 2, 0, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)]


def tree_matches_paths(kernels: CpuKernels, attend: Attend, dtype: torch.dtype, window: int | None) -> bool:
    """Whether each row of a tree has the bits of its own path laid out as a chain."""
    start, rows, dim = attend.start, len(attend.parents), 64
    q, k, v = randoms(rows, 6, dim, seed=5), randoms(rows, 2, dim, seed=6), randoms(rows, 2, dim, seed=7)
    layer = filled_layer(kernels, dim, dtype, start)
    kernels.rope_write(q, k, v, None, layer, start)
    tree = kernels.attention(q, layer, attend, 0.125, window, None)
    for row in range(rows):
        path = [row]
        while Attend.tree(start, attend.parents).parents[path[0]] >= 0:
            path.insert(0, attend.parents[path[0]])
        single = filled_layer(kernels, dim, dtype, start)
        kernels.rope_write(q[path], k[path], v[path], None, single, start)
        last = Attend.chain(start + len(path) - 1, 1)
        if not torch.equal(kernels.attention(q[row : row + 1], single, last, 0.125, window, None)[0], tree[row]):
            return False
    return True


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("start", [5, 60, 120, 250])
@pytest.mark.parametrize("tree", TREES, ids=["mixed", "siblings", "two chains"])
@pytest.mark.parametrize("window", [None, 6])
def test_tree_rows_are_their_paths(
    tree: tuple[int, ...], start: int, dtype: torch.dtype, window: int | None, kernels: CpuKernels
) -> None:
    assert tree_matches_paths(kernels, Attend.tree(start, tree), dtype, window)


def test_a_tree_taken_for_a_chain_is_caught(kernels: CpuKernels) -> None:
    class Chained(CpuKernels):
        """The mutant: every row sees all rows before it."""

        def __init__(self) -> None:
            self.__dict__.update(kernels.__dict__)

        def attention(
            self, q: Tensor, layer: KVLayer, attend: Attend, scale: float, window: int | None, softcap: float | None
        ) -> Tensor:
            return super().attention(q, layer, Attend.chain(attend.start, len(q)), scale, window, softcap)

    assert not tree_matches_paths(Chained(), Attend.tree(60, TREES[0]), torch.float32, None)


def test_attention_with_nan_in_a_seen_key(kernels: CpuKernels) -> None:
    layer, q = filled_layer(kernels, 64, torch.float32, 100), randoms(100, 6, 64)
    layer.k[0, 50, 3] = float("nan")
    found = kernels.attention(q, layer, Attend.chain(0, 100), 0.125, None, None)
    assert found[:50].isfinite().all()
    assert found[50:, :3].isnan().all()
    assert found[50:, 3:].isfinite().all()


# ---- sampling ----

CUTS = [
    Truncation(0.0),
    Truncation(1.0),
    Truncation(0.3),
    Truncation(2.0),
    Truncation(1e-3),
    Truncation(1.0, top_k=1),
    Truncation(1.0, top_k=40),
    Truncation(0.8, top_p=0.9),
    Truncation(0.8, top_p=1e-9),
    Truncation(1.5, min_p=0.05),
    Truncation(1.2, 50, 0.95, 0.01),
    Truncation(1.2, 10**9, 0.999),
]


@pytest.mark.parametrize("vocab", [1, 5, 1000, 49152])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_gumbel_argmax_is_the_reference(vocab: int, cut: Truncation, kernels: CpuKernels) -> None:
    logits = randoms(vocab) * 3
    for seed, position, purpose in itertools.product((0, 2**63 + 12345, 2**64 - 1), (0, 4097), (0, 3)):
        noise = Noise(seed, position, purpose)
        assert kernels.gumbel_argmax(logits, cut, noise) == REFERENCE.gumbel_argmax(logits, cut, noise)


def test_another_purpose_draws_another_token(kernels: CpuKernels) -> None:
    logits = torch.zeros(5000)
    draws = [
        [kernels.gumbel_argmax(logits, Truncation(1.0), Noise(1, p, purpose)) for p in range(20)] for purpose in (0, 1)
    ]
    assert len(set(draws[0])) > 15
    assert draws[0] != draws[1]


def ties() -> Iterator[Tensor]:
    for at in ((3, 900), (0, 1), (7, 8), (996, 999)):
        logits = randoms(1000)
        logits[list(at)] = 50.0
        yield logits


def test_ties_go_to_the_lowest_id(kernels: CpuKernels) -> None:
    for logits in ties():
        expected = int((logits == 50.0).nonzero()[0])
        assert kernels.argmax(logits[None]) == [expected]
        assert kernels.gumbel_argmax(logits, Truncation(0.0), Noise(1, 1)) == expected
        assert kernels.gumbel_argmax(logits, Truncation(1.0, top_k=1), Noise(1, 1)) == expected


@pytest.mark.parametrize("vocab", [1, 9, 1003])
def test_logits_that_are_not_finite(vocab: int, kernels: CpuKernels) -> None:
    rows = randoms(4, vocab)
    rows[1, vocab - 1] = float("nan")
    rows[2, vocab // 2] = float("inf")
    rows[3] = -float("inf")
    best = int(rows[0].argmax())
    assert kernels.argmax(rows) == [best, NON_FINITE, NON_FINITE, NON_FINITE]
    for row, cut in itertools.product((1, 2, 3), CUTS):
        assert kernels.gumbel_argmax(rows[row], cut, Noise(1, 1)) == NON_FINITE
    rows[0, : vocab // 2] = -float("inf")
    for seed in range(50):
        assert kernels.gumbel_argmax(rows[0], Truncation(5.0), Noise(seed, 1)) >= vocab // 2
