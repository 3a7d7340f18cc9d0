"""What any proposer and γ would have done on a recorded answer: exact counts, predicted times.

With the `coupled` rule the text does not depend on how it is speculated (DESIGN, section 5), so one plain run is the
ground truth for every setting. Knows: token ids, a proposer, a γ policy, costs. Does not know: models, clocks, text.
The counts are those that the engine's own loop would record; tests hold the two equal on the same traces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from specgen.draft import ROOT, Draft
from specgen.propose.base import Proposer
from specgen.records import CycleRecord, Ending, RunRecord
from specgen.tune.predict import Costs

MISMATCH = -1
"""Stands for a token that is not the target's."""


class Policy(Protocol):
    """What `engine.GammaPolicy` is; this module stands beside the engine, not above it."""

    reason: str | None

    def limit(self, source: str) -> int: ...

    def trim(self, draft: Draft) -> Draft | None: ...

    def observe(self, record: CycleRecord) -> None: ...


@dataclass(frozen=True, slots=True)
class Trace:
    """One complete answer: the target's own tokens, and what would have ended it."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    max_tokens: int | None
    context_tokens: int  # capacity of the cache
    max_rows: int = 64  # the widest step of the runner

    def budget(self, produced: int) -> int:
        """Tokens that may still be committed: the engine's own rule."""
        room = self.context_tokens - len(self.prompt) - produced
        return room if self.max_tokens is None else min(room, self.max_tokens - produced)


@dataclass(frozen=True, slots=True)
class Guess:
    """What a proposer says one token ahead."""

    token: int
    confidence: float | None = None


def teacher_forced(proposer: Proposer, trace: Trace) -> tuple[Guess | None, ...]:
    """The proposer's guess for every token of the answer, given all tokens before it: one pass, good for every γ.

    Only for chain proposers whose guess depends on the tokens before it alone (a draft model; not a lookup, whose guess
    depends on where the copy began).
    """
    committed = list(trace.prompt)
    proposer.rollback(0)
    guesses: list[Guess | None] = []
    for token in trace.answer:
        draft = proposer.propose(committed, 1)
        guesses.append(None if draft is None else Guess(draft.tokens[0], draft.confidence))
        committed.append(token)
    return tuple(guesses)


class GuessProposer:
    """A proposer played back from its guesses on one trace."""

    reason: str | None = None

    def __init__(self, name: str, prompt_tokens: int, guesses: Sequence[Guess | None], filler: int = MISMATCH) -> None:
        """filler: proposed where there is no guess; a token of the vocabulary when a model is to read it."""
        self.name = name
        self._filler = filler
        self._prompt_tokens = prompt_tokens
        self._guesses = guesses

    def propose(self, committed: Sequence[int], limit: int) -> Draft | None:
        begin = len(committed) - self._prompt_tokens
        ahead = self._guesses[begin : begin + limit]
        if not ahead or ahead[0] is None:
            return None
        tokens = [self._filler if guess is None else guess.token for guess in ahead]
        # The real one would go on behind the end of the answer, where nothing can be committed.
        tokens += [self._filler] * (limit - len(tokens))
        return replace(Draft.chain(tokens, source=self.name), confidence=ahead[0].confidence)

    def observe(self, tokens: Sequence[int], hidden: object, start: int) -> None:
        pass

    def rollback(self, length: int) -> None:
        pass


def replay(trace: Trace, proposer: Proposer, policy: Policy, costs: Costs) -> RunRecord:
    """The record of answering `trace` again with this proposer and policy. Every cycle's counts are exact; the times
    are what `costs` says. Prefill is not replayed: it is the same for all."""
    record = RunRecord(prompt_tokens=len(trace.prompt))
    committed = list(trace.prompt)
    proposer.rollback(0)
    proposer.observe(committed[:-1], None, 0)
    while (produced := len(committed) - len(trace.prompt)) < len(trace.answer):
        cycle = _cycle(trace, committed, proposer, policy, costs)
        _book(record, cycle, costs)
        policy.observe(cycle)
        stored = committed[-1:] + list(trace.answer[produced : produced + cycle.committed - 1])
        proposer.observe(stored, None, len(committed) - 1)
        committed.extend(trace.answer[produced : produced + cycle.committed])
    record.kv_tokens = len(committed) - 1
    return record


def _cycle(trace: Trace, committed: list[int], proposer: Proposer, policy: Policy, costs: Costs) -> CycleRecord:
    produced = len(committed) - len(trace.prompt)
    room = min(trace.budget(produced), trace.max_rows) - 1
    limit = min(room, policy.limit(proposer.name)) if room >= 1 else 0
    found = proposer.propose(committed, limit) if limit >= 1 else None
    draft = policy.trim(found) if found else None
    upcoming = trace.answer[produced:]
    accepted, ending = _accept(draft, upcoming)
    count = min(accepted + 1, len(upcoming))
    proposed = len(draft) if draft else 0
    return CycleRecord(
        proposed=proposed,
        depth=draft.depth if draft else 0,
        accepted=accepted,
        committed=count,
        ending=ending,
        propose_ms=costs.propose_ms(found.source, len(found)) if found else costs.propose_ms(proposer.name, 0),
        verify_ms=costs.step_ms(1 + proposed, len(committed)),
        reconcile_ms=costs.token_ms * count,
        source=draft.source if draft else "none",
        match=draft.match if draft else 0,
        confidence=draft.confidence if draft else None,
    )


def _accept(draft: Draft | None, upcoming: Sequence[int]) -> tuple[int, Ending]:
    """(draft tokens kept, how the cycle ends) when the target says `upcoming`."""
    if draft is None:
        return 0, "plain"
    node, depth = ROOT, 0
    while children := draft.children(node):
        if depth == len(upcoming):
            return depth, "cut"
        node = next((child for child in children if draft.tokens[child] == upcoming[depth]), ROOT)
        if node == ROOT:
            return depth, "corrected"
        depth += 1
    return depth, "cut" if depth == len(upcoming) else "bonus"


def _book(record: RunRecord, cycle: CycleRecord, costs: Costs) -> None:
    """As the session books a measured cycle: tokens committed together arrive together."""
    ms = cycle.propose_ms + cycle.verify_ms + cycle.reconcile_ms + costs.cycle_ms
    if record.cycles:
        record.decode_ms += ms
        record.gaps_ms += [ms, *[0.0] * (cycle.committed - 1)]
    else:
        record.ttft_ms = ms
        record.gaps_ms += [0.0] * (cycle.committed - 1)
    record.cycles.append(cycle)
