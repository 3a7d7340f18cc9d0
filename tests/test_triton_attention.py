"""Attention on a card: against its definition, and the same bits for a row however it is computed.

Under Triton's interpreter where there is no card; there bfloat16 is cut, not rounded, from float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from specgen.kernels import triton_attention
from specgen.kernels.base import KV_BLOCK, Attend, DeviceAttend, KVLayer, device_attend
from specgen.kernels.reference import ReferenceKernels, quantise_rows
from specgen.kernels.triton_attention import MAX_TREE_ROWS, attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
REFERENCE = ReferenceKernels()


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layer_of(kv_heads: int, slots: int, size: int, dtype: torch.dtype) -> KVLayer:
    k, v = randn(kv_heads, slots, size, seed=1), randn(kv_heads, slots, size, seed=2)
    if dtype == torch.int8:
        (k, k_scale), (v, v_scale) = quantise_rows(k), quantise_rows(v)
        return KVLayer(k, v, k_scale, v_scale)
    return KVLayer(k.to(dtype), v.to(dtype))


def with_slots(layer: KVLayer, slots: list[int], capacity: int) -> KVLayer:
    """`layer`'s slots 0 … at other places of a cache that holds rubbish everywhere else."""

    def spread(part: Tensor | None) -> Tensor | None:
        if part is None:
            return None
        rubbish = torch.full((part.shape[0], capacity, *part.shape[2:]), 77 if part.dtype == torch.int8 else torch.nan)
        placed = rubbish.to(part.dtype)
        placed[:, slots] = part[:, : len(slots)]
        return placed.to(DEVICE)

    k, v = spread(layer.k), spread(layer.v)
    assert k is not None
    assert v is not None
    return KVLayer(k, v, spread(layer.k_scale), spread(layer.v_scale))


def assert_near(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    error = (actual.cpu().float() - expected).abs().max()
    assert error <= tolerance, float(error)


REAL_SPLITS = triton_attention.split_count


@pytest.fixture(autouse=True)
def _few_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight times fewer programs to interpret, and several blocks to a split."""
    if DEVICE == "cpu":
        monkeypatch.setattr(triton_attention, "split_count", lambda kv_heads: 4)


@pytest.fixture
def _alike_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane of a product has the same bits anywhere, as on a card; the interpreter's BLAS rounds by place."""
    if DEVICE == "cuda":
        return
    from triton.runtime import interpreter

    def dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        rows = [np.ascontiguousarray(row, np.float32) @ np.ascontiguousarray(b.data, np.float32) for row in a.data]
        return interpreter.TensorHandle(np.stack(rows) + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


same_bits = pytest.mark.usefixtures("_alike_lanes")

TOLERANCE = {
    torch.float32: 4e-6,  # another order of summation
    torch.float16: 4e-3,  # q and weights have 11 bits and keys are normal, so scores err by 2**-11 · |q| |k| · scale
    torch.bfloat16: 6e-2,  # the same with 8 bits, cut by the interpreter
    torch.int8: 6e-2,  # products in bfloat16
}


def check_definition(
    attend: Attend,
    shape: tuple[int, int, int],  # heads, kv_heads, D
    dtype: torch.dtype,
    score: tuple[int | None, float | None] = (None, None),  # window, softcap
    broken: Callable[[DeviceAttend], DeviceAttend] = lambda place: place,
) -> None:
    heads, kv_heads, size = shape
    rows, end = len(attend.positions), attend.start + len(attend.positions)
    stored = layer_of(kv_heads, end, size, dtype)
    q = randn(rows, heads, size, seed=3)
    expected = REFERENCE.attention(q, stored, attend, size**-0.5, *score)
    layer = with_slots(stored, list(range(end)), end + 9)
    out_dtype = torch.bfloat16 if dtype == torch.int8 else dtype
    padded = torch.cat((q, torch.full((2, heads, size), torch.nan))).to(DEVICE)
    place = broken(device_attend(attend, rows + 2, DEVICE))
    actual = attention(padded, layer, place, size**-0.5, *score, out_dtype)
    assert actual.dtype == out_dtype
    assert (actual[rows:] == 0).all()
    assert_near(actual[:rows], expected, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("score", [(None, None), (20, 5.0)])
def test_a_tree_is_the_definition(dtype: torch.dtype, score: tuple[int | None, float | None]) -> None:
    check_definition(Attend.tree(70, (-1, 0, 0, 1, 2)), (4, 2, 32), dtype, score)


@pytest.mark.parametrize(
    ("dtype", "score"),
    [
        (torch.float32, (None, None)),
        (torch.float16, (70, 5.0)),
        (torch.bfloat16, (70, None)),
        (torch.int8, (None, 5.0)),
    ],
)
def test_prefill_is_the_definition(dtype: torch.dtype, score: tuple[int | None, float | None]) -> None:
    check_definition(Attend.chain(60, MAX_TREE_ROWS + 6), (5, 1, 16), dtype, score)


@pytest.mark.parametrize(
    ("shape", "attend"),
    [
        ((1, 1, 64), Attend.chain(0, 1)),  # nothing before the first row
        ((3, 1, 80), Attend.chain(63, 2)),  # from one block into the next
        ((7, 1, 96), Attend.chain(64, 1)),
        ((16, 1, 128), Attend.chain(128, 1)),
        ((20, 1, 16), Attend.chain(5, 1)),  # more heads than a tile has lanes
        ((2, 1, 256), Attend.chain(3, 2)),
        ((2, 2, 8), Attend.chain(KV_BLOCK * 9, 1)),  # splits with two and three blocks
    ],
)
def test_groups_and_head_dimensions(shape: tuple[int, int, int], attend: Attend) -> None:
    check_definition(attend, shape, torch.float32)


def test_the_check_of_the_definition_sees_a_wrong_place() -> None:
    def earlier(place: DeviceAttend) -> DeviceAttend:
        return replace(place, positions=place.positions - 1)

    def further(place: DeviceAttend) -> DeviceAttend:
        return replace(place, start=place.start + 1)

    def chain_path(place: DeviceAttend) -> DeviceAttend:
        return replace(place, path=torch.arange(place.width, dtype=torch.int32, device=DEVICE).repeat(place.width, 1))

    for broken in (earlier, further, chain_path):
        with pytest.raises(AssertionError):
            check_definition(Attend.tree(30, (-1, 0, 0, 2)), (2, 1, 16), torch.float32, broken=broken)


# --- the same bits, however a row is computed

STEPS = [(torch.float16, None, None), (torch.float16, 90, 8.0), (torch.int8, None, None), (torch.bfloat16, 40, None)]
"""Cache, window, softcap."""

HEADS, KV_HEADS, SIZE = 4, 2, 32


class Text:
    """A text's q, k and v by position, and its attention computed in any way."""

    def __init__(self, step: tuple[torch.dtype, int | None, float | None], length: int) -> None:
        dtype, *self.score = step
        self.layer = layer_of(KV_HEADS, length, SIZE, dtype)
        self.q = randn(length, HEADS, SIZE, seed=5)
        self.length = length

    def run(self, place: DeviceAttend, q: Tensor, slots: list[int], capacity: int) -> Tensor:
        layer = with_slots(self.layer, slots, capacity)
        return attention(q.to(DEVICE), layer, place, SIZE**-0.5, *self.score, torch.float16).cpu()

    def chain(self, start: int, rows: int) -> Tensor:
        """Positions start … start + rows - 1 as one step. What comes later is not in the cache."""
        end = start + rows
        place = device_attend(Attend.chain(start, rows), rows, DEVICE)
        return self.run(place, self.q[start:end], list(range(end)), end + 3)

    def tree(self, start: int, rows: int) -> Tensor:
        """The same as the odd rows of a tree whose even rows are rubbish, in a wider step."""
        parents, slots = [-1], list(range(start))
        for index in range(1, 2 * rows):
            parents.append(max(index - 2, -1) if index % 2 else 0)
        parents[1] = -1
        slots += [start + 2 * index + 1 for index in range(rows)]
        q = torch.full((2 * rows + 3, HEADS, SIZE), torch.nan)
        q[1 : 2 * rows : 2] = self.q[start : start + rows]
        place = device_attend(Attend.tree(start, tuple(parents)), 2 * rows + 3, DEVICE)
        return self.run(place, q, slots, start + 2 * rows + 3)[1 : 2 * rows : 2]


def assert_single_steps(text: Text, start: int, results: Tensor) -> None:
    """The rows at start … have the bits of steps of one row."""
    for row, result in enumerate(results):
        assert torch.equal(text.chain(start + row, 1)[0], result), row


@same_bits
@pytest.mark.parametrize("step", STEPS)
def test_a_chain_has_the_bits_of_single_steps(step: tuple[torch.dtype, int | None, float | None]) -> None:
    text = Text(step, 131)
    assert_single_steps(text, 126, text.chain(126, 5))


@same_bits
@pytest.mark.parametrize("step", STEPS)
def test_a_tree_row_has_the_bits_of_its_chain(step: tuple[torch.dtype, int | None, float | None]) -> None:
    text = Text(step, 131)
    result = text.tree(126, 3)
    assert torch.equal(result, text.chain(126, 3))
    assert result.isfinite().all()


@same_bits
@pytest.mark.parametrize("step", STEPS)
def test_prefill_has_the_bits_of_single_steps(step: tuple[torch.dtype, int | None, float | None]) -> None:
    text = Text(step, 138)
    whole = text.chain(0, 138)
    assert torch.equal(text.chain(69, 69), whole[69:])  # in chunks
    for position in (0, 63, 64, 71, 128, 137):
        assert_single_steps(text, position, whole[position : position + 1])


@same_bits
def test_the_check_of_bits_sees_splits_that_depend_on_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    text = Text((torch.float16, None, None), 300)
    result = text.chain(295, 2)
    assert_single_steps(text, 295, result)
    monkeypatch.setattr(triton_attention, "split_count", lambda kv_heads: 2)
    with pytest.raises(AssertionError):
        assert_single_steps(text, 295, result)


@same_bits
def test_the_check_of_bits_sees_blocks_that_depend_on_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    text = Text((torch.float16, None, None), 131)
    result = text.chain(126, 3)
    monkeypatch.setattr(triton_attention, "KV_BLOCK", 32)
    with pytest.raises(AssertionError):
        assert_single_steps(text, 126, result)


@same_bits
def test_a_nan_stays_with_the_rows_that_see_it() -> None:
    text = Text((torch.float16, None, None), 80)
    clean = text.chain(70, 4)
    text.q[71] = torch.nan
    rows = text.chain(70, 4)
    assert rows[1].isnan().all()
    assert torch.equal(rows[[0, 2, 3]], clean[[0, 2, 3]])


def test_splits_depend_on_the_model_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [REAL_SPLITS(kv_heads) for kv_heads in (1, 3, 8, 16, 32, 64)] == [32, 32, 16, 8, 8, 8]
    monkeypatch.setattr(triton_attention, "split_count", REAL_SPLITS)
    check_definition(Attend.chain(70, 2), (2, 1, 16), torch.float32)
