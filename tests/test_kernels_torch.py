"""The backend without a compiler: within its stated tolerance of the reference, packed, and bitwise row-invariant."""

from __future__ import annotations

import pytest
import torch
from test_kernels_reference import MAX_ROWS, assert_rows_independent, packed_weights, seeded
from tiny import tiny_decoder, tiny_spec, tiny_weights
from torch import Tensor

import specgen.kernels.cpu
from specgen.errors import SpecgenError
from specgen.kernels import select_kernels
from specgen.kernels.base import Kernels
from specgen.kernels.reference import ReferenceKernels
from specgen.kernels.torch_cpu import Int4Weight, TorchKernels
from specgen.step import EagerRunner
from specgen.weights.packed import GroupedInt4, Nested, QuantLinear

KERNELS = TorchKernels()
REFERENCE = ReferenceKernels()
TOLERANCE = 0.01
"""Of the largest result in a row, for int4; see the module."""


def int4(n: int, k: int, group: int, bias: Tensor | None = None, perm: Tensor | None = None) -> GroupedInt4:
    generator = torch.Generator().manual_seed(n + k)
    nibbles = torch.randint(0, 256, (n, k // 2), generator=generator).to(torch.uint8)
    scale = (torch.rand(n, k // group, generator=generator) * 0.02 + 0.01).half()
    low = (-8.0 * scale.float() + 0.01 * torch.randn(n, k // group, generator=generator)).half()
    return GroupedInt4(nibbles, scale, low, group, bias, perm)


def products(weight: QuantLinear, x: Tensor) -> tuple[Tensor, Tensor]:
    return KERNELS.linear(x, KERNELS.prepare(weight)), REFERENCE.linear(x, REFERENCE.prepare(weight))


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize(("n", "k"), [(16, 128), (80, 256), (576, 384)])
def test_int4_products_are_within_tolerance(n: int, k: int, group: int) -> None:
    perm = torch.randperm(k, generator=torch.Generator().manual_seed(0)).int()
    for weight in (int4(n, k, group), int4(n, k, group, seeded(n), perm)):
        assert isinstance(KERNELS.prepare(weight), Int4Weight)
        got, expected = products(weight, seeded(40, k))
        worst = (got - expected).abs().amax(1) / expected.abs().amax(1)
        assert float(worst.max()) < TOLERANCE


@pytest.mark.parametrize(("n", "k", "group"), [(40, 64, 32), (32, 64, 16), (7, 32, 32)])
def test_int4_of_other_shapes_goes_the_general_way(n: int, k: int, group: int) -> None:
    got, expected = products(int4(n, k, group), seeded(5, k))
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("kind", packed_weights())
def test_other_kinds_equal_the_reference(kind: str) -> None:
    weight = packed_weights()[kind]
    prepared = KERNELS.prepare(weight)
    assert prepared is weight, "it must stay packed"
    got, expected = products(weight, seeded(5, 64))
    assert torch.equal(got, expected)
    ids = torch.tensor([3, 39, 3])
    assert torch.equal(KERNELS.embedding(ids, prepared), weight.dequantize()[ids])


def test_nested_scales() -> None:
    scale = torch.randint(1, 60, (32, 4), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    nested = Nested(scale, torch.full((32, 1), 0.001))
    plain = int4(32, 128, 32)
    got, expected = products(GroupedInt4(plain.nibbles, nested, nested, 32), seeded(3, 128))
    assert float((got - expected).abs().max()) < TOLERANCE * float(expected.abs().max())


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("n", "k", "group"), [(96, 256, 32), (576, 1536, 128), (1536, 64, 64), (40, 64, 32)])
def test_rows_are_independent(n: int, k: int, group: int, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        weight = KERNELS.prepare(int4(n, k, group))
        assert_rows_independent(lambda x: KERNELS.linear(x, weight), seeded(MAX_ROWS, k, seed=1))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kind", packed_weights())
def test_rows_of_other_kinds_are_independent(kind: str) -> None:
    weight = KERNELS.prepare(packed_weights()[kind])
    assert_rows_independent(lambda x: KERNELS.linear(x, weight), seeded(MAX_ROWS, 64, seed=1))


def test_an_int4_embedding_tied_to_the_head() -> None:
    """Rows are read and products made of the same weight; the rows are exact."""
    source = int4(96, 64, 32)
    weight = KERNELS.prepare(source)
    ids = torch.tensor([5, 0, 95])
    for _ in range(2):
        assert torch.equal(KERNELS.embedding(ids, weight), source.dequantize()[ids])
        assert KERNELS.linear(seeded(2, 64), weight).shape == (2, 96)


def test_a_linear_lets_its_nibbles_go() -> None:
    weight = KERNELS.prepare(int4(96, 64, 32))
    KERNELS.linear(seeded(2, 64), weight)
    with pytest.raises(AssertionError):
        KERNELS.embedding(torch.tensor([0]), weight)


def test_prefill_gives_the_bits_of_single_steps() -> None:
    model = tiny_decoder(quant="int4", kernels=KERNELS)
    tokens = [(index * 31) % 97 for index in range(50)]
    whole, single = model.new_cache(64), model.new_cache(64)
    whole.reserve(50)
    together = EagerRunner(model).step(tokens, range(-1, 49), whole).logits
    for index, token in enumerate(tokens):
        single.reserve(1)
        assert torch.equal(EagerRunner(model).step([token], [-1], single).logits[0], together[index])
        single.commit(1)


def test_a_model_is_close_to_the_reference() -> None:
    spec = tiny_spec()
    tokens = [(index * 31) % 97 for index in range(30)]

    def logits(kernels: Kernels) -> Tensor:
        model = tiny_decoder(spec, quant="int4", kernels=kernels)
        cache = model.new_cache(64)
        cache.reserve(30)
        return EagerRunner(model).step(tokens, range(-1, 29), cache).logits

    assert float((logits(KERNELS) - logits(REFERENCE)).abs().mean()) < 0.1
    assert tiny_weights(spec, quant="int4").layers[0].q.group in (32, 64, 128)


# the choice of a backend


def test_without_a_compiler_torch_runs_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(threads: int | None) -> Kernels:
        raise SpecgenError("no C++ compiler was found")

    before = torch.get_num_threads()
    monkeypatch.setattr(specgen.kernels.cpu, "load_cpu_kernels", fail)
    try:
        kernels, notice = select_kernels(threads=1)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
    assert kernels.name == "torch"
    assert notice is not None
    assert "no C++ compiler was found" in notice
    assert "\n" not in notice


def test_the_compiled_backend_is_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int | None] = []
    monkeypatch.setattr(specgen.kernels.cpu, "load_cpu_kernels", lambda threads: asked.append(threads) or REFERENCE)
    assert select_kernels(threads=3) == (REFERENCE, None)
    assert asked == [3]
