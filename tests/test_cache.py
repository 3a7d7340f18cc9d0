"""The cache as a transaction, against a list."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specgen.cache import KVCache
from specgen.errors import ContextFullError
from specgen.kernels.base import Attend


def write(cache: KVCache, values: list[int]) -> None:
    """What a step does: rows behind the committed length."""
    for layer in cache.layers:
        for stored in (layer.k, layer.v):
            stored[:, cache.length : cache.length + len(values)] = torch.tensor(values, dtype=stored.dtype)[
                None, :, None
            ]
        for scales in (layer.k_scale, layer.v_scale):
            if scales is not None:
                scales[:, cache.length : cache.length + len(values)] = torch.tensor(values, dtype=torch.float32)


def contents(cache: KVCache) -> list[list[float]]:
    found = []
    for layer in cache.layers:
        for stored in (layer.k, layer.v, layer.k_scale, layer.v_scale):
            if stored is not None:
                rows = stored[:, : cache.length].float()
                found.append((rows if rows.dim() == 2 else rows[..., -1])[-1].tolist())
    return found


operations = st.lists(
    st.tuples(st.sampled_from(["commit", "path", "rollback", "rewind"]), st.integers(1, 6), st.data())
)


@given(operations, st.sampled_from([torch.float32, torch.bfloat16, torch.int8]))
@settings(max_examples=60, deadline=None)
def test_equals_a_list(steps, dtype: torch.dtype) -> None:
    cache, model, counter = KVCache(2, 2, 4, 40, dtype), [], 0
    for name, rows, data in steps:
        if name == "rewind":
            length = data.draw(st.integers(0, len(model)))
            cache.rollback(length)
            model = model[:length]
            continue
        if rows > cache.room():
            with pytest.raises(ContextFullError):
                cache.reserve(rows)
            continue
        assert cache.reserve(rows) == len(model)
        values = [(counter + index) % 100 for index in range(rows)]
        counter += rows
        write(cache, values)
        if name == "commit":
            kept = data.draw(st.integers(0, rows))
            cache.commit(kept)
            model += values[:kept]
        elif name == "path":
            path = sorted(data.draw(st.sets(st.integers(0, rows - 1))))
            cache.commit(path)
            model += [values[row] for row in path]
        else:
            cache.rollback()
        assert cache.length == len(model)
    assert all(found == model for found in contents(cache))


def test_a_transaction_left_by_an_exception_is_rolled_back() -> None:
    cache = KVCache(1, 1, 4, 8, torch.float32)
    with pytest.raises(RuntimeError), cache.transaction(3):
        raise RuntimeError
    assert (cache.length, cache.reserved) == (0, 0)
    with cache.transaction(3) as start:
        assert start == 0
        cache.commit(2)
    assert (cache.length, cache.reserved) == (2, 0)


def test_nested_reservations_are_our_bug() -> None:
    cache = KVCache(1, 1, 4, 8, torch.float32)
    cache.reserve(1)
    with pytest.raises(AssertionError):
        cache.reserve(1)


def test_context_full_names_the_numbers() -> None:
    cache = KVCache(1, 1, 4, 8, torch.float32)
    with pytest.raises(ContextFullError, match=r"0 of 8 .* 9 more"):
        cache.reserve(9)


def test_slot_bytes_and_rollback_questions() -> None:
    assert KVCache(3, 2, 4, 10, torch.bfloat16).slot_bytes == 3 * 2 * 4 * 2 * 2
    assert KVCache(3, 2, 4, 10, torch.int8).slot_bytes == 3 * 2 * 2 * (4 + 4)
    cache = KVCache(1, 1, 4, 8, torch.float32)
    assert cache.can_rollback(0) is None
    assert "0 tokens" in (cache.can_rollback(3) or "")


def test_positions_of_a_tree_are_length_plus_depth() -> None:
    attend = Attend.tree(10, (-1, 0, 0, 1, 3, 2))
    assert attend.positions == (10, 11, 11, 12, 13, 12)
    assert not attend.is_chain
    assert Attend.chain(4, 3) == Attend.tree(4, (-1, 0, 1))
