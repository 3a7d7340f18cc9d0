"""Joined weights: the numbers of all parts, one behind the other, or a refusal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specgen.weights.join import joined
from specgen.weights.packed import Codebook4, Dense, Fp8, GroupedInt4, GroupedInt8, Nested, QuantLinear

K, GROUP = 64, 32


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def integers(seed: int, low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def dense(n: int, seed: int = 0) -> Dense:
    return Dense(numbers(seed, n, K).half())


def int4(n: int, seed: int = 0) -> GroupedInt4:
    nibbles = integers(seed, 0, 256, n, K // 2).to(torch.uint8)
    return GroupedInt4(nibbles, numbers(seed, n, K // GROUP).half(), numbers(seed + 9, n, K // GROUP).half(), GROUP)


def nested(n: int, seed: int = 0) -> GroupedInt4:
    def values(offset: int) -> Nested:
        return Nested(integers(seed + offset, 0, 63, n, K // GROUP).to(torch.int8), numbers(seed + offset, n, 1).half())

    return replace(int4(n, seed), scale=values(1), min=values(2))


def int8(n: int, seed: int = 0) -> GroupedInt8:
    return GroupedInt8(integers(seed, -127, 128, n, K).to(torch.int8), numbers(seed, n, K // GROUP).half(), GROUP)


def int8_min(n: int, seed: int = 0) -> GroupedInt8:
    return replace(int8(n, seed), min=numbers(seed + 5, n, K // GROUP).half())


def fp8(n: int, seed: int = 0, block: tuple[int, int] | None = None) -> Fp8:
    block = block or (n, K)
    scales = (-(-n // block[0]), -(-K // block[1]))
    return Fp8(numbers(seed, n, K).to(torch.float8_e4m3fn), numbers(seed, *scales).abs(), block)


def fp8_blocks(n: int, seed: int = 0) -> Fp8:
    return fp8(n, seed, (16, 32))


def codebook(n: int, seed: int = 0) -> Codebook4:
    nibbles = integers(seed, 0, 256, n, K // 2).to(torch.uint8)
    return Codebook4(nibbles, numbers(77, 16), numbers(seed, n, K // GROUP), GROUP)


KINDS = [dense, int4, nested, int8, int8_min, fp8, fp8_blocks, codebook]


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("sizes", [(32, 16, 16), (24, 8)], ids=str)
def test_all_outputs_one_behind_the_other(make: Callable[..., Any], sizes: tuple[int, ...]) -> None:
    parts = [make(size, seed) for seed, size in enumerate(sizes)]
    parts[1] = replace(parts[1], bias=numbers(3, sizes[1]))
    whole = joined(parts)
    assert whole is not None
    assert type(whole) is type(parts[0])
    assert whole.shape == (sum(sizes), K)
    assert torch.equal(whole.dequantize(), torch.cat([part.dequantize() for part in parts]))
    biases = [torch.zeros(part.shape[0]) if part.bias is None else part.bias for part in parts]
    assert whole.bias is not None
    assert torch.equal(whole.bias, torch.cat(biases))
    # The mutant: parts in another order.
    assert not torch.equal(whole.dequantize(), torch.cat([part.dequantize() for part in parts[::-1]]))


def test_no_bias_stays_none() -> None:
    whole = joined([int4(8), int4(8, 1)])
    assert whole is not None
    assert whole.bias is None


def test_columns_in_an_order_of_their_own() -> None:
    perm = torch.randperm(K, generator=torch.Generator().manual_seed(1)).int()
    first, second = replace(int4(8), perm=perm), replace(int4(8, 1), perm=perm.clone())
    whole = joined([first, second])
    assert whole is not None
    assert torch.equal(whole.dequantize(), torch.cat((first.dequantize(), second.dequantize())))
    assert joined([first, replace(second, perm=perm.flip(0))]) is None
    assert joined([first, int4(8)]) is None
    assert joined([int8(8), replace(int8(8, 1), perm=perm)]) is None


UNLIKE: list[tuple[QuantLinear, QuantLinear]] = [
    (int4(8), int8(8)),
    (int4(8), nested(8)),
    (int4(8), replace(int4(8), scale=int4(8).scale.float())),
    (int8(8), int8_min(8)),
    (dense(8), Dense(dense(8).weight.float())),
    (codebook(8), replace(codebook(8), code=numbers(1, 16))),
    (fp8(16, 0, (16, 32)), fp8(16, 0, (16, 16))),
    (int4(8), GroupedInt4(int4(8).nibbles, numbers(0, 8, 1).half(), numbers(1, 8, 1).half(), K)),
    (dense(8), Dense(numbers(0, 8, 32).half())),
]


@pytest.mark.parametrize("pair", UNLIKE, ids=lambda pair: f"{type(pair[0]).__name__} {type(pair[1]).__name__}")
def test_what_is_packed_otherwise_stays_apart(pair: tuple[QuantLinear, QuantLinear]) -> None:
    assert joined(pair) is None
