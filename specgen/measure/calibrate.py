"""What steps cost on this machine with this model: t(R) at several context lengths, and the rest of a cycle.

Knows: the session's runner and cache. Does not know: what is made of the table. The cache is emptied before and after.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

from specgen.measure.timer import Task, in_turns
from specgen.options import MAX_GAMMA, NgramOptions
from specgen.propose.ngram import NgramProposer
from specgen.records import RunRecord
from specgen.steptime import fill_cache, step_task
from specgen.tune.predict import ProposeMs
from specgen.tune.replay import Trace

if TYPE_CHECKING:
    from specgen.cache import KVCache
    from specgen.session import Session

ROWS = (1, 2, 3, 4, 5, 6, 7, 9, 11, 13, 17)
CONTEXTS = (128, 1024, 4096)

assert max(ROWS) == MAX_GAMMA + 1


def contexts_for(capacity: int) -> list[int]:
    """The context lengths that a cache of `capacity` slots can be calibrated at."""
    fitting = [context for context in CONTEXTS if context + max(ROWS) <= capacity]
    return fitting or [max(1, min(CONTEXTS[0], capacity - max(ROWS)))]


def calibrate(
    session: Session, contexts: Sequence[int], repeats: int, rows: Sequence[int] = ROWS
) -> dict[int, dict[int, list[float]]]:
    """context → rows → milliseconds of each of `repeats` steps. All row counts after all contexts take turns: they are
    compared with each other, and a minute may be slower than the next."""
    engine, vocab = session.engine, session.loaded.spec.vocab
    fitting = [count for count in rows if count <= engine.runner.widths[-1] and count < engine.cache.capacity]
    places = {f"{count} after {context}": (context, count) for context in contexts for count in fitting}
    steps = {count: step_task(engine, count, vocab) for count in fitting}
    try:
        fill_cache(engine, max(contexts), vocab)
        tasks = {name: _after(engine.cache, context, steps[count]) for name, (context, count) in places.items()}
        in_turns(tasks, 1)  # warm-up
        times = in_turns(tasks, repeats)
    finally:
        engine.rewind(0)
    return {context: {count: times[f"{count} after {context}"] for count in fitting} for context in contexts}


def _after(cache: KVCache, context: int, step: Task) -> Task:
    """`step` after the first `context` slots that were filled; the others are left as they are."""

    def task() -> float:
        cache.rollback(min(context, cache.length))
        if missing := context - cache.length:
            with cache.transaction(missing):
                cache.commit(missing)
        return step()

    return task


def medians(times: dict[int, dict[int, list[float]]]) -> dict[int, dict[int, float]]:
    """context → rows → median milliseconds."""
    return {context: {rows: median(values) for rows, values in table.items()} for context, table in times.items()}


def cycle_overheads(records: Sequence[RunRecord]) -> tuple[float, float]:
    """(milliseconds to choose one token, milliseconds of the rest of a cycle) from plain runs."""
    choosing: list[float] = []
    rest: list[float] = []
    for record in records:
        # One gap for each cycle after the first: plain cycles commit one token.
        for cycle, gap in zip(record.cycles[1:], record.gaps_ms, strict=False):
            choosing.append(cycle.reconcile_ms)
            rest.append(max(0.0, gap - cycle.propose_ms - cycle.verify_ms - cycle.reconcile_ms))
    return (median(choosing), median(rest)) if choosing else (0.0, 0.0)


def lookup_cost(trace: Trace) -> ProposeMs:
    """Of a prompt lookup, measured along one answer."""
    proposer, committed, times = NgramProposer(NgramOptions()), list(trace.prompt), []
    for token in trace.answer:
        begin = time.perf_counter()
        proposer.propose(committed, MAX_GAMMA)
        times.append(1e3 * (time.perf_counter() - begin))
        committed.append(token)
    # The first lookup indexes the whole prompt, the others one token each.
    once = median(times[1:] or [0.0])
    return ProposeMs(once=once, read=max(0.0, times[0] - once) / len(trace.prompt) if times else 0.0)


def mean_lookup(costs: Sequence[tuple[ProposeMs, int]]) -> ProposeMs:
    """costs: with the tokens of the prompt that was indexed; a long one takes more for each of them."""
    tokens = sum(count for _, count in costs)
    read = sum(cost.read * count for cost, count in costs) / max(1, tokens)
    return ProposeMs(once=median(cost.once for cost, _ in costs), read=read)
