"""The KV cache of one sequence: a transaction, and the only owner of its length.

Knows: `reserve(rows)` → the step writes → `commit(rows)` or `rollback()`. Does not know: tokens.
Invariant kept by the engine: `length == len(committed) - 1` (the pending token's KV is not in the cache yet).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from specgen.errors import ContextFullError
from specgen.kernels.base import KVLayer

KV_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}


class KVCache:
    """Static storage for `capacity` slots per layer. Slots behind `length` hold rubbish and are never seen."""

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (layers, kv_heads, capacity, head_dim)
        # On the CPU torch.empty leaves untouched pages unmapped: memory grows with the slots that are really written.
        self._k = torch.empty(shape, dtype=dtype, device=device)
        self._v = torch.empty(shape, dtype=dtype, device=device)
        quantised = dtype == torch.int8
        self._k_scale = torch.empty(shape[:3], dtype=torch.float32, device=device) if quantised else None
        self._v_scale = torch.empty(shape[:3], dtype=torch.float32, device=device) if quantised else None
        self.layers = tuple(self._layer(index) for index in range(layers))
        self.capacity = capacity
        self._length = 0
        self._reserved = 0

    def _layer(self, index: int) -> KVLayer:
        k_scale = None if self._k_scale is None else self._k_scale[index]
        v_scale = None if self._v_scale is None else self._v_scale[index]
        return KVLayer(self._k[index], self._v[index], k_scale, v_scale)

    @property
    def length(self) -> int:
        """Committed slots."""
        return self._length

    @property
    def reserved(self) -> int:
        """Rows of the open transaction; 0 when there is none."""
        return self._reserved

    @property
    def slot_bytes(self) -> int:
        """Bytes of one cached token over all layers."""
        tensors = [t for t in (self._k, self._v, self._k_scale, self._v_scale) if t is not None]
        return sum(t.numel() * t.element_size() for t in tensors) // self.capacity

    def room(self) -> int:
        """Rows that can still be reserved."""
        return self.capacity - self._length

    def reserve(self, rows: int) -> int:
        """Open a transaction of `rows` rows; returns the first slot. ContextFullError when they do not fit."""
        assert self._reserved == 0, "a transaction is open"
        assert rows > 0
        if rows > self.room():
            raise ContextFullError(
                f"the context is full: {self._length} of {self.capacity} tokens are used and {rows} more are needed",
                hint="shorten the prompt, or ask for a longer context with --ctx if the model allows it",
            )
        self._reserved = rows
        return self._length

    @contextmanager
    def transaction(self, rows: int) -> Iterator[int]:
        """`reserve(rows)`; whatever leaves the block without a commit is rolled back."""
        start = self.reserve(rows)
        try:
            yield start
        finally:
            self._reserved = 0

    def commit(self, rows: int | Sequence[int]) -> None:
        """Keep the first `rows` reserved rows, or a tree's path: ascending row numbers, moved together."""
        if not isinstance(rows, int):
            self._compact(rows)
            rows = len(rows)
        assert 0 <= rows <= self._reserved
        self._length += rows
        self._reserved = 0

    def _compact(self, path: Sequence[int]) -> None:
        assert all(row < self._reserved for row in path)
        for slot, row in enumerate(path):
            assert slot <= row, "a path ascends"
            if slot == row:
                continue
            source, target = self._length + row, self._length + slot
            for tensor in (self._k, self._v, self._k_scale, self._v_scale):
                if tensor is not None:
                    tensor[:, :, target] = tensor[:, :, source]

    def shadow(self) -> KVCache:
        """A cache over the same storage with a length of its own, for a draft that shares this one's prefix: it reads
        the slots committed here and writes only behind them, where the next transaction overwrites what it wrote."""
        assert self._reserved == 0, "a transaction is open"
        return copy.copy(self)

    def follow(self, owner: KVCache) -> None:
        """A shadow takes over its owner's length, dropping whatever it wrote itself."""
        assert self._k is owner._k, "not a shadow of that cache"
        assert owner._reserved == 0, "a transaction is open"
        self._length, self._reserved = owner._length, 0

    def rollback(self, length: int | None = None) -> None:
        """Drop the open transaction; with `length`, also rewind to that many slots."""
        self._reserved = 0
        if length is not None:
            assert 0 <= length <= self._length
            self._length = length

    def can_rollback(self, length: int) -> str | None:
        """None when the cache can be rewound to `length`, else why not. A static cache always can."""
        return None if 0 <= length <= self._length else f"only {self._length} tokens are cached"
