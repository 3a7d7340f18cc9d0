"""Products with packed weights on a card, against the reference; under Triton's interpreter where there is no card.

The interpreter multiplies with numpy, whose order of summation follows the matrices' sizes; where bits count, its
product is replaced by one that sums in ascending order, as a matrix instruction does for every column alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton, which the kernels for graphics cards are written in, is not installed")

from specgen.errors import ModelError
from specgen.kernels import triton_layout, triton_linear
from specgen.kernels.reference import ReferenceKernels
from specgen.kernels.triton_layout import PARTED_ROWS, Kind, Tiles, TritonWeight, prepare
from specgen.kernels.triton_linear import ROW_TILES, Program, embedding, linear
from specgen.weights.packed import Codebook4, Dense, Fp8, GroupedInt4, GroupedInt8, Nested, QuantLinear

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
BF16, FP16 = torch.bfloat16, torch.float16
REFERENCE = ReferenceKernels()

ORDER = 2e-6
"""Of a row's largest result: sums in float32 in another order, K ≤ 1200; 8e-7 was the most seen."""

ROUNDED = {BF16: 2.0**-8, FP16: 2.0**-11}
"""Each weight is off by half a unit of the compute type at most; three fifths of this was the most seen."""


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed))


def integers(low: int, high: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randint(low, high, shape, generator=generator(3)).to(dtype)


def scales(n: int, groups: int) -> Tensor:
    return (0.5 + torch.rand(n, groups, generator=generator(1))).half() / 64


def nested(n: int, groups: int, outer: int, high: int = 64) -> Nested:
    return Nested(integers(0, high, (n, groups), torch.uint8), scales(n, outer))


def int4(n: int, k: int, group: int, scale: Any = None, low: Any = None, **more: Any) -> GroupedInt4:
    scale = scales(n, k // group) if scale is None else scale
    low = randn(n, k // group, seed=2).half() / 8 if low is None else low
    return GroupedInt4(integers(0, 256, (n, k // 2), torch.uint8), scale, low, group, **more)


def int8(n: int, k: int, group: int, **more: Any) -> GroupedInt8:
    return GroupedInt8(integers(-128, 128, (n, k), torch.int8), scales(n, k // group), group, **more)


def fp8(n: int, k: int, block: tuple[int, int]) -> Fp8:
    values = torch.arange(n * k, dtype=torch.int32).remainder(251).to(torch.uint8)  # subnormals and ±448 among them
    values[(values & 0x7F) == 0x7F] = 0
    shape = (-(-n // block[0]), -(-k // block[1]))
    scale = 0.5 + torch.rand(shape, generator=generator(1))
    return Fp8(values.view(n, k).view(torch.float8_e4m3fn), scale, block)


def codebook(n: int, k: int, group: int, code: Tensor) -> Codebook4:
    return Codebook4(integers(0, 256, (n, k // 2), torch.uint8), code, scales(n, k // group), group)


IQ4_NL = torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=torch.float32)
NF4 = torch.linspace(-1.0, 1.0, 16).sign() * torch.linspace(-1.0, 1.0, 16).abs() ** 1.3

WEIGHTS: dict[str, Callable[[], QuantLinear]] = {
    "int4 g32": lambda: int4(70, 352, 32, bias=randn(70)),
    "int4 g64 symmetric": lambda: int4(70, 320, 64, scales(70, 5), -8 * scales(70, 5)),
    "int4 g128, two splits": lambda: int4(30, 1152, 128),
    "int4 g128 zeros": lambda: int4(
        30, 256, 128, scales(30, 2), Nested(-integers(0, 16, (30, 2), torch.int8), scales(30, 2))
    ),
    "int4 g16": lambda: int4(33, 176, 16),
    "int4 of one group": lambda: int4(33, 200, 200),
    "int4 g192": lambda: int4(33, 384, 192),
    "int4 K-quant": lambda: int4(40, 512, 32, nested(40, 16, 2), nested(40, 16, 2)),
    "int4 act-order": lambda: int4(40, 256, 64, perm=torch.randperm(256, generator=generator()).int()),
    "int8 g32": lambda: int8(70, 352, 32, bias=randn(70)),
    "int8 per channel, two splits": lambda: int8(20, 1100, 1100),
    "int8 min, act-order": lambda: int8(
        20, 256, 128, min=randn(20, 2).half(), perm=torch.randperm(256, generator=generator()).int()
    ),
    "int8 K-quant": lambda: GroupedInt8(integers(-32, 32, (20, 512), torch.int8), nested(20, 32, 2), 16),
    "fp8 per tensor": lambda: fp8(70, 300, (70, 300)),
    "fp8 per channel, two splits": lambda: fp8(20, 1100, (1, 1100)),
    "fp8 blocks": lambda: fp8(200, 300, (128, 128)),
    "IQ4_NL": lambda: codebook(33, 352, 32, IQ4_NL),
    "NF4": lambda: codebook(33, 384, 64, NF4),
    "dense bfloat16, two splits": lambda: Dense(randn(30, 577).bfloat16(), randn(30)),
    "dense float16": lambda: Dense(randn(33, 65).half()),
    "dense float32": lambda: Dense(randn(33, 65)),
}
"""Odd shapes: outputs and inputs beside every multiple of a tile, a block and a group."""


def tolerance(weight: QuantLinear, compute: torch.dtype) -> float:
    """ORDER where every value is exact in the compute type."""
    values = weight.code if isinstance(weight, Codebook4) else weight.weight if isinstance(weight, Dense) else None
    return ORDER if values is None or torch.equal(values.to(compute).float(), values.float()) else ROUNDED[compute]


def assert_near(actual: Tensor, expected: Tensor, relative: float) -> None:
    """Within `relative` of the largest of each row."""
    assert actual.shape == expected.shape
    assert actual.dtype == torch.float32
    error = (actual.cpu() - expected).abs().amax(-1) / expected.abs().amax(-1)
    assert error.max() <= relative, float(error.max())


@pytest.mark.parametrize("compute", [BF16, FP16])
@pytest.mark.parametrize("name", WEIGHTS)
def test_linear_is_the_reference(name: str, compute: torch.dtype) -> None:
    weight = WEIGHTS[name]()
    x = randn(3, weight.shape[1], seed=5).to(compute)
    expected = REFERENCE.linear(x.float(), REFERENCE.prepare(weight))
    prepared = prepare(weight, compute, DEVICE)
    assert (prepared.tiles.splits == 2) == ("two splits" in name)
    assert_near(linear(x.to(DEVICE), prepared), expected, tolerance(weight, compute))
    other = replace(prepared, words=prepared.words.roll(1, -1))
    with pytest.raises(AssertionError):  # neighbouring inputs mixed up
        assert_near(linear(x.to(DEVICE), other), expected, tolerance(weight, compute))


@pytest.mark.parametrize("rows", [*range(1, 18), 33, 64, 65, 130])
def test_linear_at_every_width(rows: int) -> None:
    weight = int4(30, 1152, 128)
    x = randn(rows, 1152, seed=5)
    prepared = prepare(weight, BF16, DEVICE)
    expected = REFERENCE.linear(x.bfloat16().float(), REFERENCE.prepare(weight))
    assert_near(linear(x.to(DEVICE), prepared), expected, ORDER)  # float32 is rounded first
    assert prepared.counters is not None
    assert not prepared.counters.any(), "the next call would not wait for all parts"


def test_no_rows() -> None:
    prepared = prepare(int4(20, 64, 32), BF16, DEVICE)
    assert linear(torch.empty(0, 64, device=DEVICE), prepared).shape == (0, 20)
    assert embedding(torch.empty(0, dtype=torch.int32, device=DEVICE), prepared).shape == (0, 64)


@pytest.mark.skipif(CUDA, reason="compiles for the card that is there")
@pytest.mark.parametrize("rows", [1, 8, 9, 65])
def test_linear_in_the_programs_of_turing(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_linear, "_capability", lambda device: 75)
    weight = int4(30, 1152, 128)
    prepared, x = prepare(weight, FP16, DEVICE), randn(rows, 1152).half()
    assert Program.of(prepared, 75).most_rows == ROW_TILES[0] == triton_layout.LEAST_ROWS
    assert_near(linear(x, prepared), REFERENCE.linear(x.float(), REFERENCE.prepare(weight)), ORDER)


@contextmanager
def ascending() -> Iterator[None]:
    """The interpreter's product, summed in the order of K."""
    from triton.runtime import interpreter

    def dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        products = a.data.astype(np.float32).T[:, :, None] * b.data.astype(np.float32)[:, None, :]  # (K, M, N)
        sums = np.add.accumulate(np.concatenate((d.data[None], products)), axis=0)
        return interpreter.TensorHandle(sums[-1], d.dtype.scalar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
        yield


def exact() -> AbstractContextManager[None]:
    return nullcontext() if CUDA else ascending()


INVARIANT = ["int4 g128, two splits", "int8 per channel, two splits", "dense bfloat16, two splits", "fp8 blocks", "NF4"]


def same_bits(prepared: TritonWeight, x: Tensor) -> bool:
    """Whether every row of `linear` keeps its bits alone, in front, at the end, and among any number of others."""
    alone = [linear(x[row : row + 1], prepared) for row in range(3)]
    for count in (3, 9, 17, 33, PARTED_ROWS + 1):
        others = randn(count, x.shape[1], seed=count).to(x)
        places = (0, count // 2, count - 1)
        others[list(places)] = x
        result = linear(others, prepared)
        if not all(torch.equal(result[place], alone[row][0]) for row, place in enumerate(places)):
            return False
    return True


@pytest.mark.parametrize("name", INVARIANT)
def test_a_rows_bits_do_not_depend_on_the_step(name: str) -> None:
    weight = WEIGHTS[name]()
    x = randn(3, weight.shape[1], seed=5).to(DEVICE, BF16)
    with exact():
        assert same_bits(prepare(weight, BF16, DEVICE), x)


def test_parts_that_follow_the_rows_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = WEIGHTS["int4 g128, two splits"]()
    prepared, x = prepare(weight, BF16, DEVICE), randn(3, weight.shape[1], seed=5).to(DEVICE, BF16)
    launch = triton_linear._linear_launch

    def following(x: Tensor, weight: TritonWeight, out: Tensor, program: Program) -> Any:
        whole = replace(weight, tiles=replace(weight.tiles, split_steps=weight.tiles.steps))
        return launch(x, whole if len(x) > 8 else weight, out, program)

    monkeypatch.setattr(triton_linear, "_linear_launch", following)
    with exact():
        assert not same_bits(prepared, x)


def test_parts_are_added_in_the_order_of_inputs() -> None:
    """Whichever program is last: the order of their ends must not reach the sum."""
    tiles = Tiles.of(Kind.INT4, (20, 2048), 128)
    assert tiles.splits == 4
    weight = int4(20, 2048, 128)
    prepared, x = prepare(weight, BF16, DEVICE), randn(1, 2048).to(DEVICE, BF16)
    parts = []
    for split in range(tiles.splits):
        masked = torch.zeros_like(x)
        taken = slice(split * tiles.split_steps * tiles.step, (split + 1) * tiles.split_steps * tiles.step)
        masked[:, taken] = x[:, taken]
        parts.append(linear(masked, prepared))
    with_order = parts[0]
    for part in parts[1:]:
        with_order = with_order + part
    backwards = parts[-1]
    for part in parts[-2::-1]:
        backwards = backwards + part
    assert torch.equal(linear(x, prepared), with_order)
    assert not torch.equal(backwards, with_order)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["int4 g32", "int8 g32", "dense float16"])
def test_a_row_that_is_not_finite_stays_alone(name: str, bad: float) -> None:
    weight = WEIGHTS[name]()
    prepared = prepare(weight, BF16, DEVICE)
    x = randn(5, weight.shape[1]).to(DEVICE, BF16)
    expected = linear(x, prepared)
    x[3] = bad
    result = linear(x, prepared)
    keep = torch.tensor([0, 1, 2, 4], device=DEVICE)
    assert torch.equal(result[keep], expected[keep])
    assert not result[3].isfinite().any()


def test_parts_behind_the_tensors_are_not_read() -> None:
    """x is a view into a buffer of NaN, as a padded step's activations may be."""
    weight = WEIGHTS["int4 g32"]()
    prepared = prepare(weight, BF16, DEVICE)
    buffer = torch.full((40, weight.shape[1]), float("nan"), device=DEVICE, dtype=BF16)
    buffer[:5] = randn(5, weight.shape[1]).to(buffer)
    assert torch.equal(linear(buffer[:5], prepared), linear(buffer[:5].clone(), prepared))
    assert linear(buffer[:5], prepared).isfinite().all()


@pytest.mark.parametrize("name", [name for name in WEIGHTS if "act-order" not in name])
def test_embedding_is_exact(name: str) -> None:
    ids = torch.int64 if "g32" in name else torch.int32
    weight = WEIGHTS[name]()
    vocab = weight.shape[0]
    rows = torch.tensor([0, 3, vocab - 1, 3], dtype=ids)
    expected = weight.dequantize()[rows.long()]
    if isinstance(weight, Dense):
        expected = expected.to(BF16).float()
    # q · scale + min may be rounded once or twice.
    actual = embedding(rows.to(DEVICE), prepare(weight, BF16, DEVICE)).cpu()
    assert torch.allclose(actual, expected, rtol=2.0**-22, atol=2.0**-24)
    beyond = embedding(torch.tensor([-1, vocab, 2**30], dtype=ids, device=DEVICE), prepare(weight, BF16, DEVICE)).cpu()
    assert torch.equal(beyond[0], actual[0])
    assert torch.equal(beyond[1:], actual[2].expand(2, -1))


@pytest.mark.parametrize("name", WEIGHTS)
def test_bytes_of_a_step(name: str) -> None:
    """Padding aside, a layout reads no more than the packed weight had, and tells what its tensors hold."""
    packed = WEIGHTS[name]()
    prepared = prepare(packed, BF16, DEVICE)
    (n, k), (outputs, inputs) = packed.shape, prepared.tiles.padded
    bits = {Kind.DENSE: 16, Kind.INT4: 4, Kind.INT8: 8, Kind.FP8: 8, Kind.CODE4: 4}[prepared.kind]
    assert prepared.words.nbytes == outputs * inputs * bits // 8
    assert prepared.nbytes >= prepared.words.nbytes
    assert outputs - n < triton_layout.BLOCK_N
    assert inputs - k < prepared.tiles.step


def test_scales_stay_as_small_as_they_came() -> None:
    awq = WEIGHTS["int4 g128 zeros"]()
    prepared = prepare(awq, BF16, DEVICE)
    assert prepared.scale is not None
    assert prepared.min is not None
    assert prepared.scale.inner.dtype == torch.float16
    assert prepared.min.inner.dtype == torch.int8
    assert prepared.min.outer is prepared.scale.inner
    parts = (prepared.words, prepared.scale.inner, prepared.min.inner)
    assert prepared.nbytes == sum(part.nbytes for part in parts), "the shared scale counts once"
    symmetric = prepare(WEIGHTS["int4 g64 symmetric"](), BF16, DEVICE)
    assert symmetric.min is None


def test_a_shape_is_cut_the_same_way_for_every_number_of_rows() -> None:
    """The cut is a function of kind and shape: enough programs for a card, each with a pipeline's worth of work."""
    for shape, programs in (((4096, 4096), 512), ((14336, 4096), 448), ((4096, 14336), 512), ((1024, 4096), 128)):
        tiles = Tiles.of(Kind.INT4, shape, 128)
        assert tiles.tiles * tiles.splits == programs
        assert tiles.split_steps >= triton_layout.LEAST_STEPS
        assert tiles.split_steps * (tiles.splits - 1) < tiles.steps <= tiles.split_steps * tiles.splits


@pytest.mark.parametrize("group", [8, 24])
def test_groups_without_a_kernel_are_refused(group: int) -> None:
    with pytest.raises(ModelError, match=f"groups of {group}"):
        prepare(int4(20, group * 4, group), BF16, DEVICE)


def test_nan_in_fp8_is_refused() -> None:
    weight = fp8(20, 64, (20, 64))
    weight.q.view(torch.uint8)[7, 9] = 0xFF
    with pytest.raises(ModelError, match="NaN"):
        prepare(weight, BF16, DEVICE)


def test_unknown_weights_are_refused() -> None:
    with pytest.raises(ModelError, match="Secret"):
        prepare(type("Secret", (), {})(), BF16, DEVICE)


def test_weights_of_more_outputs_than_are_laid_out_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = int4(100, 128, 32)
    whole = prepare(weight, BF16, DEVICE)
    monkeypatch.setattr(triton_layout, "CHUNK_OUTPUTS", 48)
    assert torch.equal(prepare(weight, BF16, DEVICE).words, whole.words)
