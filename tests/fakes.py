"""A target without a network: logits are a seeded function of the whole prefix, which it can only read from the cache.

The token of each slot is stored as the slot's key, so a wrong commit, rollback or path compaction changes the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from specgen.cache import KVCache
from specgen.draft import Draft
from specgen.kernels.base import Attend
from specgen.step import StepOut

Logits = Callable[[tuple[int, ...]], torch.Tensor]


def hashed_logits(vocab: int, seed: int = 0, scale: float = 2.0, order: int = 3) -> Logits:
    """Normal logits (V,) seeded by the last `order` tokens."""
    memo: dict[tuple[int, ...], torch.Tensor] = {}

    def logits(prefix: tuple[int, ...]) -> torch.Tensor:
        key = prefix[-order:]
        if key not in memo:
            mixed = seed
            for token in key:
                mixed = (mixed * 1000003 + token + 1) % 2**31
            memo[key] = torch.randn(vocab, generator=torch.Generator().manual_seed(mixed)) * scale
        return memo[key]

    return logits


def fake_cache(capacity: int = 256) -> KVCache:
    return KVCache(layers=1, kv_heads=1, head_dim=1, capacity=capacity, dtype=torch.float32)


class FakeRunner:
    """A StepRunner over `logits`. `fail_at` raises in the step that would see that many cached tokens."""

    def __init__(self, logits: Logits, max_rows: int = 32, fail_at: int | None = None) -> None:
        self.logits = logits
        self.widths = tuple(range(1, max_rows + 1))
        self.fail_at = fail_at
        self.steps: list[int] = []
        self.on_step: Callable[[], None] | None = None

    def step(self, tokens: Sequence[int], parents: Sequence[int], cache: KVCache) -> StepOut:
        self.steps.append(len(tokens))
        if self.on_step:
            self.on_step()
        start, keys = cache.length, cache.layers[0].k[0, :, 0]
        keys[start : start + len(tokens)] = torch.tensor(tokens, dtype=torch.float32)
        if self.fail_at is not None and start >= self.fail_at:
            raise RuntimeError("the target failed")
        rows = [self.logits(self._prefix(keys, start, parents, row)) for row in range(len(tokens))]
        return StepOut(torch.stack(rows), torch.zeros(len(tokens), 1))

    @staticmethod
    def _prefix(keys: torch.Tensor, start: int, parents: Sequence[int], row: int) -> tuple[int, ...]:
        path = []
        while row >= 0:
            path.append(start + row)
            row = parents[row]
        slots = [*range(start), *reversed(path)]
        return tuple(int(keys[slot]) for slot in slots)

    def prefill(self, tokens: Sequence[int], cache: KVCache) -> StepOut:
        out = self.step(tokens, range(-1, len(tokens) - 1), cache)
        return StepOut(out.logits[-1:], out.hidden[-1:])

    def diagnose(self, tokens: Sequence[int], attend: Attend, cache: KVCache) -> str:
        return "layer 7"


class ScriptedProposer:
    """Proposes what `guess(committed, limit)` returns."""

    name = "scripted"
    reason: str | None = None

    def __init__(self, guess: Callable[[Sequence[int], int], Draft | None]) -> None:
        self.guess = guess
        self.observed: list[int] = []

    def propose(self, committed: Sequence[int], limit: int) -> Draft | None:
        return self.guess(committed, limit)

    def observe(self, tokens: Sequence[int], hidden: torch.Tensor | None, start: int) -> None:
        assert start == len(self.observed), "observed tokens are contiguous"
        self.observed.extend(tokens)

    def rollback(self, length: int) -> None:
        del self.observed[length:]
