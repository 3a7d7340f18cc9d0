"""What any proposer and γ would have done on a recorded answer: exact counts, predicted times.

With the `coupled` rule the text does not depend on how it is speculated (DESIGN, section 5), so one plain run is the
ground truth for every setting. Knows: token ids, a proposer, a γ policy, costs. Does not know: models, clocks, text.
The counts are those that the engine's own loop would record; tests hold the two equal on the same traces.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from specgen.draft import ROOT, Draft
from specgen.options import MAX_GAMMA, NgramOptions
from specgen.propose.base import Proposer
from specgen.propose.mix import Judge, MixProposer
from specgen.propose.ngram import NgramProposer
from specgen.records import CycleRecord, Ending, RunRecord
from specgen.tune.predict import Costs, ProposeMs

if TYPE_CHECKING:
    from torch import Tensor

MISMATCH = -1
"""Stands for a token that is not the target's."""


class Policy(Protocol):
    """What `engine.GammaPolicy` is; this module stands beside the engine, not above it."""

    reason: str | None

    def limit(self, source: str) -> int: ...

    def worth(self, draft: Draft) -> bool: ...

    def trim(self, draft: Draft) -> Draft | None: ...

    def observe(self, record: CycleRecord) -> None: ...


@dataclass(frozen=True, slots=True)
class Guess:
    """What a proposer says one token ahead."""

    token: int
    confidence: float | None = None


class Guesses(Protocol):
    """What a model that drafts says along one answer."""

    def ahead(self, begin: int, levels: int) -> Sequence[Guess | None]:
        """Its draft before token `begin` of the answer, at most `levels` long; shorter where nothing further is known
        but that it is wrong. None: there it refuses to draft."""
        ...


@dataclass(frozen=True, slots=True)
class PrefixGuesses:
    """Of a model whose guess depends on the tokens before it alone: one guess for each token serves every draft."""

    tokens: tuple[Guess | None, ...]

    def ahead(self, begin: int, levels: int) -> Sequence[Guess | None]:
        return self.tokens[begin : begin + levels]


@dataclass(frozen=True, slots=True)
class ChainGuesses:
    """Of a model whose guess also depends on where its draft began (`skip`: it reads the target's keys and values up to
    there, and its own behind): a draft for each token, up to its first wrong one."""

    chains: tuple[tuple[Guess, ...], ...]

    def ahead(self, begin: int, levels: int) -> Sequence[Guess | None]:
        return self.chains[begin][:levels] if begin < len(self.chains) else ()


@dataclass(frozen=True, slots=True)
class Drafter:
    """One model that drafts, along one answer, with the limits that decide how long its drafts are."""

    guesses: Guesses
    capacity: int | None = None  # tokens that it can read; None: more than there are
    at_once: int | None = None  # committed tokens that it reads in one cycle; None: it never has to catch up


@dataclass(frozen=True, slots=True)
class Trace:
    """One complete answer: the target's own tokens, and what would have ended it."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    max_tokens: int | None
    context_tokens: int  # capacity of the cache
    max_rows: int = 64  # the widest step of the runner
    drafters: Mapping[str, Drafter] = field(default_factory=dict)  # by proposer
    # What lookups find, kept between replays: sizes of n-gram → the longest draft before every token of the answer.
    recalled: dict[NgramOptions, tuple[Draft | None, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def budget(self, produced: int) -> int:
        """Tokens that may still be committed: the engine's own rule."""
        room = self.context_tokens - len(self.prompt) - produced
        return room if self.max_tokens is None else min(room, self.max_tokens - produced)


def teacher_forced(
    proposer: Proposer, trace: Trace, observe: Callable[[Sequence[int]], None] = lambda tokens: None
) -> PrefixGuesses:
    """The proposer's guess for every token of the answer, given all tokens before it: one pass, good for every γ.

    Only for chain proposers whose guess depends on the tokens before it alone (a draft model; not a lookup, whose guess
    depends on where the copy began). observe: told of every committed token, as the answer's sampler is.
    """
    committed = list(trace.prompt)
    proposer.rollback(0)
    guesses: list[Guess | None] = []
    for token in trace.answer:
        draft = proposer.propose(committed, 1)
        guesses.append(None if draft is None else Guess(draft.tokens[0], draft.confidence))
        committed.append(token)
        observe([token])
    return PrefixGuesses(tuple(guesses))


class GuessProposer:
    """A model that drafts (propose.model) played back on one trace: as in a new session, it has read nothing."""

    reason: str | None = None

    def __init__(
        self,
        name: str,
        prompt_tokens: int,
        drafter: Drafter,
        cost: ProposeMs | None = None,
        filler: int = MISMATCH,
    ) -> None:
        """filler: proposed where there is no guess; a token of the vocabulary when a model is to read it."""
        self.name = name
        self.spent_ms = 0.0  # in all calls of `propose`
        self._filler = filler
        self._prompt_tokens = prompt_tokens
        self._drafter = drafter
        self._cost = cost or ProposeMs()
        self._read = 0  # committed tokens that are in its cache,
        self._drafted: list[int] = []  # and those of its last draft behind them

    def propose(self, committed: Sequence[int], limit: int) -> Draft | None:
        drafter = self._drafter
        levels = limit if drafter.capacity is None else min(limit, drafter.capacity - len(committed) + 1)
        ahead = drafter.guesses.ahead(len(committed) - self._prompt_tokens, max(0, levels))
        if not ahead or ahead[0] is None:
            return None
        unread = self._unread(committed)
        if drafter.at_once is not None and unread > drafter.at_once:
            self._read, self._drafted = len(committed) - unread + drafter.at_once, []
            self.spent_ms += self._cost.of(0, drafter.at_once)
            return None
        tokens = [self._filler if guess is None else guess.token for guess in ahead]
        # The real one goes on behind a wrong token, and behind the end of the answer.
        tokens += [self._filler] * (levels - len(tokens))
        self._read, self._drafted = len(committed), tokens[:-1]
        self.spent_ms += self._cost.of(levels, unread)
        return replace(Draft.chain(tokens, source=self.name), confidence=ahead[0].confidence)

    def _unread(self, committed: Sequence[int]) -> int:
        """As `DraftModel.lag`: what was read for accepted drafts counts, and the last token is always read anew."""
        if self._drafter.at_once is None:
            return 1
        most = len(committed) - 1
        kept = min(self._read, most)
        for token in self._drafted:
            if kept >= most or token != committed[kept]:
                break
            kept += 1
        return len(committed) - kept

    def observe(self, tokens: Sequence[int], hidden: object, start: int) -> None:
        pass

    def rollback(self, length: int) -> None:
        self._read, self._drafted = min(self._read, length), []


class RecalledLookup:
    """A lookup of chains, played back: what it finds at a place is a function of the tokens before it, so all γ share
    one table of the longest drafts, made the first time that it is asked for."""

    name = "ngram"
    reason: str | None = None

    def __init__(self, trace: Trace, options: NgramOptions) -> None:
        self._prompt_tokens = len(trace.prompt)
        if options not in trace.recalled:
            trace.recalled[options] = _all_lookups(trace, options)
        self._drafts = trace.recalled[options]

    def propose(self, committed: Sequence[int], limit: int) -> Draft | None:
        draft = self._drafts[len(committed) - self._prompt_tokens]
        return None if draft is None else draft.first(limit)

    def observe(self, tokens: Sequence[int], hidden: object, start: int) -> None:
        pass

    def rollback(self, length: int) -> None:
        pass


def _all_lookups(trace: Trace, options: NgramOptions) -> tuple[Draft | None, ...]:
    """The longest draft before every token of the answer."""
    proposer, committed = NgramProposer(options), list(trace.prompt)
    found: list[Draft | None] = []
    for token in trace.answer:
        found.append(proposer.propose(committed, MAX_GAMMA))
        committed.append(token)
    return tuple(found)


class PlayedLookup:
    """A lookup that knows what it would have taken: the first one indexes the whole prompt."""

    reason: str | None = None

    def __init__(self, inner: Proposer, cost: ProposeMs) -> None:
        self.name = inner.name
        self.spent_ms = 0.0  # in all calls of `propose`
        self._inner = inner
        self._cost = cost
        self._indexed = 0

    def propose(self, committed: Sequence[int], limit: int) -> Draft | None:
        self.spent_ms += self._cost.of(0, len(committed) - self._indexed)
        self._indexed = len(committed)
        return self._inner.propose(committed, limit)

    def observe(self, tokens: Sequence[int], hidden: Tensor | None, start: int) -> None:
        self._inner.observe(tokens, hidden, start)

    def rollback(self, length: int) -> None:
        self._inner.rollback(length)
        self._indexed = min(self._indexed, length)


class PlayedMix(MixProposer):
    """`mix` with a model that is played back."""

    def __init__(self, lookup: PlayedLookup, model: GuessProposer, judge: Judge) -> None:
        super().__init__(lookup, model, judge)
        self._parts = (lookup, model)

    @property
    def spent_ms(self) -> float:
        return sum(part.spent_ms for part in self._parts)

    def propose(self, committed: Sequence[int], limit: int) -> Draft | None:
        draft = super().propose(committed, limit)
        assert draft is None or isinstance(draft, Draft), "nothing that is played back is made on a device"
        return draft


@runtime_checkable
class Timed(Protocol):
    """A proposer that knows what its proposing would have taken."""

    @property
    def spent_ms(self) -> float: ...


def replay(trace: Trace, proposer: Proposer, policy: Policy, costs: Costs) -> RunRecord:
    """The record of answering `trace` again with this proposer and policy. Every cycle's counts are exact; the times
    are what `costs` says. Prefill is not replayed: it is the same for all."""
    record = RunRecord(prompt_tokens=len(trace.prompt))
    committed = list(trace.prompt)
    proposer.rollback(0)
    proposer.observe(committed[:-1], None, 0)
    timed = proposer if isinstance(proposer, Timed) else None
    while (produced := len(committed) - len(trace.prompt)) < len(trace.answer):
        cycle = _cycle(trace, committed, proposer, policy, costs, timed)
        _book(record, cycle, costs)
        policy.observe(cycle)
        stored = committed[-1:] + list(trace.answer[produced : produced + cycle.committed - 1])
        proposer.observe(stored, None, len(committed) - 1)
        committed.extend(trace.answer[produced : produced + cycle.committed])
    record.kv_tokens = len(committed) - 1
    return record


def _cycle(
    trace: Trace, committed: list[int], proposer: Proposer, policy: Policy, costs: Costs, timed: Timed | None
) -> CycleRecord:
    """timed: the proposer, where it knows what it takes; asking a protocol each time is slow."""
    produced = len(committed) - len(trace.prompt)
    room = min(trace.budget(produced), trace.max_rows) - 1
    limit = min(room, policy.limit(proposer.name)) if room >= 1 else 0
    before = timed.spent_ms if timed else 0.0
    found = proposer.propose(committed, limit) if limit >= 1 else None
    propose_ms = timed.spent_ms - before if timed else costs.propose_ms(proposer.name) if limit >= 1 else 0.0
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
        propose_ms=propose_ms,
        verify_ms=costs.step_ms(1 + proposed, len(committed)),
        reconcile_ms=costs.token_ms * count,
        source=draft.source if draft else "none",
        match=draft.match if draft else 0,
        width=draft.width if draft else 1,
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
