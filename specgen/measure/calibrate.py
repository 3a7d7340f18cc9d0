"""What steps cost on this machine with this model: t(R) at several context lengths, and the rest of a cycle.

Knows: the session's runner and cache. Does not know: what is made of the table. The cache is emptied before and after.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

from specgen.measure.runs import Report, silent
from specgen.measure.timer import in_turns
from specgen.options import MAX_GAMMA, NgramOptions
from specgen.propose.ngram import NgramProposer
from specgen.records import RunRecord
from specgen.steptime import fill_cache, step_task
from specgen.tune.predict import ProposeMs
from specgen.tune.replay import Trace

if TYPE_CHECKING:
    from specgen.session import Session

ROWS = (1, 2, 3, 4, 5, 6, 7, 9, 11, 13, 17)
CONTEXTS = (128, 1024, 4096)

assert max(ROWS) == MAX_GAMMA + 1


def contexts_for(capacity: int) -> list[int]:
    """The context lengths that a cache of `capacity` slots can be calibrated at."""
    fitting = [context for context in CONTEXTS if context + max(ROWS) <= capacity]
    return fitting or [max(1, min(CONTEXTS[0], capacity - max(ROWS)))]


def calibrate(
    session: Session, contexts: Sequence[int], repeats: int, rows: Sequence[int] = ROWS, report: Report = silent
) -> dict[int, dict[int, list[float]]]:
    """context → rows → milliseconds of each of `repeats` steps, all row counts in turns."""
    engine = session.engine
    fitting = [count for count in rows if count <= engine.runner.widths[-1] and count < engine.cache.capacity]
    found: dict[int, dict[int, list[float]]] = {}
    try:
        for number, context in enumerate(contexts):
            report(number, len(contexts), f"steps after {context} tokens")
            fill_cache(engine, context, session.loaded.spec.vocab)
            tasks = {str(count): step_task(engine, count, session.loaded.spec.vocab) for count in fitting}
            in_turns(tasks, 1)  # warm-up
            found[context] = {int(name): times for name, times in in_turns(tasks, repeats).items()}
    finally:
        engine.rewind(0)
    return found


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
