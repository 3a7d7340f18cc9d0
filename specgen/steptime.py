"""What steps of a loaded model take, by the clock.

Knows: an engine's runner and cache. Does not know: what is made of the figures. The cache is emptied.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median

from specgen.engine import Engine

SEED_TOKENS = 128
"""Really computed; longer contexts repeat their keys and values, which costs a step the same."""
QUICK_ROWS = (1, 2, 3, 5, 9, 17)
QUICK_CONTEXT_TOKENS = 32
QUICK_ROUNDS = 3
DEAREST = 2.0
"""A step of R rows counts as at most so many times R steps of one: a process that was stopped in the middle of one (the
machine slept, Ctrl-Z) would else believe for long that drafts are hopeless."""


def fill_cache(engine: Engine, context: int, vocab: int) -> None:
    """Bring `context` slots of the cache into use."""
    cache = engine.cache
    engine.rewind(0)
    seed = min(SEED_TOKENS, context)
    with cache.transaction(seed):
        engine.runner.prefill([(7 * i + 3) % vocab for i in range(seed)], cache)
        cache.commit(seed)
    for layer in cache.layers:
        for tensor in (layer.k, layer.v, layer.k_scale, layer.v_scale):
            if tensor is not None:
                for start in range(seed, context, seed):
                    stop = min(start + seed, context)
                    tensor[:, start:stop] = tensor[:, : stop - start]
    if context > seed:
        with cache.transaction(context - seed):
            cache.commit(context - seed)


def step_task(engine: Engine, rows: int, vocab: int) -> Callable[[], float]:
    """A task that runs one step of `rows` rows after what is cached → its milliseconds."""
    tokens = [(11 * row + 5) % vocab for row in range(rows)]
    parents = range(-1, rows - 1)

    def step() -> float:
        with engine.cache.transaction(rows):
            begin = time.perf_counter()
            out = engine.runner.step(tokens, parents, engine.cache)
            out.logits[-1, -1].item()  # a device has to be waited for
            return 1e3 * (time.perf_counter() - begin)

    return step


def quick_costs(engine: Engine, vocab: int, budget_s: float = 0.3) -> dict[int, list[float]]:
    """rows → milliseconds of a few steps after a short text; nothing more is begun once `budget_s` are over, so
    that a model of a second per step is not held up. Whatever was begun is finished."""
    widest = min(engine.runner.widths[-1], engine.cache.capacity - QUICK_CONTEXT_TOKENS)
    tasks = {rows: step_task(engine, rows, vocab) for rows in QUICK_ROWS if rows <= widest}
    found: dict[int, list[float]] = {}
    if not tasks:
        return {}
    end = time.perf_counter() + budget_s
    try:
        fill_cache(engine, QUICK_CONTEXT_TOKENS, vocab)
        warm_up_ms = tasks[1]()
        for _ in range(QUICK_ROUNDS):
            for rows, task in tasks.items():
                if time.perf_counter() > end:
                    return _plausible(found, warm_up_ms)
                found.setdefault(rows, []).append(task())
    finally:
        engine.rewind(0)
    return _plausible(found, warm_up_ms)


def _plausible(found: Mapping[int, Sequence[float]], warm_up_ms: float) -> dict[int, list[float]]:
    """One of few measurements may be wild. warm_up_ms: of a step of one row before."""
    if not found:
        return {}
    one_ms = min(warm_up_ms, median(found[1]))
    return {1: [one_ms]} | {
        rows: [min(ms, DEAREST * rows * one_ms) for ms in times] for rows, times in found.items() if rows > 1
    }
