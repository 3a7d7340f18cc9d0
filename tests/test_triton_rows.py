"""Norms, rotation and gates on a card, against their definitions; under Triton's interpreter where there is no card."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from specgen.kernels.base import Attend, DeviceAttend, KVLayer, device_attend
from specgen.kernels.reference import ReferenceKernels
from specgen.kernels.triton_rows import ACTIVATIONS, add_rms_norm, gated, rms_norm, rope_write

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
REFERENCE = ReferenceKernels()

BF16_ULP = 2.0**-7
"""The interpreter cuts float32 to bfloat16 where a card rounds, so results may be a whole unit apart."""


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_near(actual: Tensor, expected: Tensor, relative: float) -> None:
    """Within `relative` of the largest of `expected`."""
    assert actual.shape == expected.shape
    error = (actual.cpu().float() - expected).abs().max()
    assert error <= relative * expected.abs().max(), float(error)


@pytest.mark.parametrize("shape", [(1, 1), (3, 300), (17, 64), (2, 5, 40), (65, 96)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rms_norm_is_the_definition(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = randn(*shape) * 3, randn(shape[-1], seed=1)
    expected = REFERENCE.rms_norm(x, weight, 1e-5)
    # float32: another order of summation. float16: one rounding of the result.
    relative = 2e-6 if dtype == torch.float32 else 1e-3
    actual = rms_norm(x.to(DEVICE), weight.to(DEVICE), 1e-5, dtype)
    assert actual.dtype == dtype
    assert_near(actual, expected, relative)
    with pytest.raises(AssertionError):  # the check sees another eps
        assert_near(rms_norm(x.to(DEVICE), weight.to(DEVICE), 1.0, dtype), expected, relative)


def test_rms_norm_reads_a_part_of_wider_rows_in_any_dtype() -> None:
    wide = randn(4, 200).to(torch.bfloat16)
    heads = wide[:, 8:128].view(4, 3, 40)
    expected = REFERENCE.rms_norm(heads.float(), torch.ones(40), 1e-6)
    actual = rms_norm(heads.to(DEVICE), torch.ones(40, device=DEVICE), 1e-6, torch.bfloat16)
    assert_near(actual, expected, BF16_ULP)
    on_device = wide.to(DEVICE)
    view = on_device[:, 8:128].view(4, 3, 40)
    assert torch.equal(rms_norm(view, torch.ones(40, device=DEVICE), 1e-6, torch.bfloat16), actual)


def test_add_rms_norm_is_an_addition_and_the_norm() -> None:
    x, y, weight = randn(5, 100).to(DEVICE), randn(5, 100, seed=1).to(DEVICE), randn(100, seed=2).to(DEVICE)
    total, normed = add_rms_norm(x, y, 0.3, weight, 1e-6, torch.float16)
    assert_near(total, (x + y * 0.3).cpu(), 1e-7)  # at most the last bit
    assert torch.equal(normed, rms_norm(total, weight, 1e-6, torch.float16))


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gated_is_the_definition(activation: str, dtype: torch.dtype) -> None:
    both = (randn(3, 2 * 1100) * 5).to(DEVICE)
    gate, up = both[:, :1100], both[:, 1100:]  # as one linear writes them
    expected = REFERENCE.gated(gate.cpu(), up.cpu(), activation)
    relative = 1e-6 if dtype == torch.float32 else 1e-3
    assert_near(gated(gate, up, activation, dtype), expected, relative)
    other = next(name for name in ACTIVATIONS if name != activation)
    with pytest.raises(AssertionError):
        assert_near(gated(gate, up, other, dtype), expected, relative)


def test_gates_far_out_do_not_overflow() -> None:
    gate = torch.tensor([[-1e4, -200.0, -0.0, 200.0, 1e4]], device=DEVICE)
    for activation in ACTIVATIONS:
        result = gated(gate, torch.ones_like(gate), activation, torch.float32).cpu()
        assert result.tolist() == [[0.0, 0.0, 0.0, 200.0, 1e4]]


ROWS = (
    lambda x: rms_norm(x, torch.ones(70, device=DEVICE), 1e-5, torch.float16),
    lambda x: add_rms_norm(x, x, 0.5, torch.ones(70, device=DEVICE), 1e-5, torch.float32)[1],
    lambda x: gated(x, x, "silu", torch.float16),
    lambda x: gated(x, x, "gelu_tanh", torch.float32),
)


def assert_rows_alone(op: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Every row of op(x) has the bits that it has alone; row 1 of x is rubbish and stays among itself."""
    x = x.clone()
    x[1] = torch.nan
    together = op(x)
    for row in (0, *range(2, len(x))):
        assert torch.equal(op(x[row : row + 1])[0], together[row])


@pytest.mark.parametrize("op", ROWS)
@pytest.mark.parametrize("rows", [2, 9, 33])
def test_a_row_does_not_see_its_neighbours(op: Callable[[Tensor], Tensor], rows: int) -> None:
    assert_rows_alone(op, randn(rows, 70).to(DEVICE))


def test_the_check_of_rows_sees_a_neighbour() -> None:
    with pytest.raises(AssertionError):
        assert_rows_alone(lambda x: x - x.mean(), randn(3, 70).to(DEVICE))


# --- rotation and the write into the cache

CONTEXT = 40


def empty_layer(kv_heads: int, size: int, dtype: torch.dtype) -> KVLayer:
    """A cache of rubbish: nothing may depend on it."""
    if dtype == torch.int8:
        scales = [torch.full((kv_heads, CONTEXT), torch.nan) for _ in range(2)]
        return KVLayer(*[torch.full((kv_heads, CONTEXT, size), 99, dtype=dtype) for _ in range(2)], *scales)
    return KVLayer(*[torch.full((kv_heads, CONTEXT, size), torch.nan, dtype=dtype) for _ in range(2)])


def moved(layer: KVLayer) -> KVLayer:
    parts = (layer.k, layer.v, layer.k_scale, layer.v_scale)
    return KVLayer(*[None if part is None else part.to(DEVICE) for part in parts])  # type: ignore[arg-type]


def assert_same_layer(actual: KVLayer, expected: KVLayer) -> None:
    for name in ("k", "v", "k_scale", "v_scale"):
        one, other = getattr(actual, name), getattr(expected, name)
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one.cpu(), other, rtol=0, atol=0, equal_nan=True)


def check_rope_write(
    size: int,
    dims: int,
    dtype: torch.dtype,
    attend: Attend,
    broken: Callable[[DeviceAttend], DeviceAttend] = lambda place: place,
) -> None:
    """The same cache, slot by slot, and the same q as the definition: no product and sum is fused, so to the bit."""
    rows, heads, kv_heads = len(attend.positions), 4, 2
    qkv = randn(rows, (heads + 2 * kv_heads) * size)
    q, k, v = (part.view(rows, -1, size) for part in qkv.split([heads * size, kv_heads * size, kv_heads * size], 1))
    angles = randn(CONTEXT, dims // 2, seed=3)
    tables = (angles.cos(), angles.sin()) if dims else None
    positions = list(attend.positions)
    own = None if tables is None else (tables[0][positions], tables[1][positions])
    expected_layer, layer = empty_layer(kv_heads, size, dtype), moved(empty_layer(kv_heads, size, dtype))
    expected = REFERENCE.rope_write(q, k, v, own, expected_layer, attend.start)
    on_device = None if tables is None else (tables[0].to(DEVICE), tables[1].to(DEVICE))
    place = broken(device_attend(attend, rows + 2, DEVICE))
    padded = torch.cat((qkv, torch.ones(2, qkv.shape[1]))).to(DEVICE)
    parts = (p.view(rows + 2, -1, size) for p in padded.split([heads * size, kv_heads * size, kv_heads * size], 1))
    actual = rope_write(*parts, on_device, layer, place)
    assert torch.equal(actual[:rows].cpu(), expected)
    assert_same_layer(layer, expected_layer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8])
@pytest.mark.parametrize(("size", "dims"), [(64, 64), (80, 32), (16, 0), (96, 96)])
def test_rope_write_is_the_definition(size: int, dims: int, dtype: torch.dtype) -> None:
    check_rope_write(size, dims, dtype, Attend.tree(7, (-1, 0, 0, 1)))


def test_the_first_and_the_last_slot_are_written() -> None:
    check_rope_write(32, 32, torch.float32, Attend.chain(0, 1))
    check_rope_write(32, 32, torch.float32, Attend.chain(CONTEXT - 3, 3))


def test_the_check_of_rope_write_sees_a_wrong_place() -> None:
    def later(place: DeviceAttend) -> DeviceAttend:
        return replace(place, positions=place.positions + 1)

    def further(place: DeviceAttend) -> DeviceAttend:
        return replace(place, start=place.start + 1)

    def padding_too(place: DeviceAttend) -> DeviceAttend:
        return replace(place, rows=place.rows + 1)

    for broken in (later, further, padding_too):
        with pytest.raises(AssertionError):
            check_rope_write(32, 32, torch.float32, Attend.chain(7, 3), broken)


def test_a_bfloat16_cache_is_within_one_unit() -> None:
    k, layer = randn(2, 2, 32), moved(empty_layer(2, 32, torch.bfloat16))
    rope_write(k.to(DEVICE), k.to(DEVICE), k.to(DEVICE), None, layer, device_attend(Attend.chain(3, 2), 2, DEVICE))
    stored = layer.k[:, 3:5].cpu().float().transpose(0, 1)
    assert ((stored - k).abs() <= BF16_ULP * k.abs()).all()
    assert layer.k[:, 5:].isnan().all()


def test_a_key_of_zeros_has_scale_zero_and_one_of_nan_stays_visible() -> None:
    k = torch.stack((torch.zeros(1, 16), torch.full((1, 16), torch.nan)))
    layer = moved(empty_layer(1, 16, torch.int8))
    rope_write(k.to(DEVICE), k.to(DEVICE), k.to(DEVICE), None, layer, device_attend(Attend.chain(0, 2), 2, DEVICE))
    assert layer.k_scale is not None
    assert layer.k_scale[0, 0] == 0.0
    assert layer.k_scale[0, 1].isnan()
    assert (layer.k[0, 0] == 0).all()


def test_a_place_is_written_anew_in_the_same_memory() -> None:
    place = device_attend(Attend.tree(10, (-1, 0, 0, 1, 3)), 8, DEVICE)
    assert place.path[4, :4].tolist() == [0, 1, 3, 4]
    before = place.packed.data_ptr()
    place.write(Attend.chain(3, 4))
    assert place.packed.data_ptr() == before
    assert (place.start.item(), place.rows.item()) == (3, 4)
    assert place.positions.tolist() == [3, 4, 5, 6, 3, 3, 3, 3]
    assert place.path[3, :4].tolist() == [0, 1, 2, 3]
