"""The loop: propose → reserve → step → accept → cut → commit → report. Plain decoding is the proposer without a draft.

Knows: token ids, one cache, one proposer, one acceptance rule, when to stop. Does not know: strings, models' insides.
Invariant: `cache.length == len(committed) - 1`: the last committed token is pending, its KV is written by the next step
as row 0. Every exit, also by an exception in the middle of a step, leaves a committed cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from specgen.accept import AcceptRule, Verdict, follow_drawn
from specgen.cache import KVCache
from specgen.cancel import Cancel
from specgen.draft import Draft
from specgen.events import FinishReason
from specgen.kernels.base import Attend
from specgen.propose.base import AnyProposer, Checked, DeviceDraft, ReadsRows
from specgen.records import CycleRecord, Ending, RunRecord
from specgen.sampling import NonFiniteLogitsError, Sampler
from specgen.step import DrawsRows, StepOut, StepRunner

if TYPE_CHECKING:
    from torch import Tensor


class GammaPolicy(Protocol):
    """How deep to draft. γ = 0 is always a candidate; `reason` says why it was chosen."""

    reason: str | None

    def limit(self, source: str) -> int:
        """The most nodes worth asking that proposer for in this cycle; 0 = decode plainly."""
        ...

    def worth(self, draft: Draft) -> bool:
        """Whether a draft would be checked at all; asking changes nothing."""
        ...

    def trim(self, draft: Draft) -> Draft | None:
        """What of the draft is worth checking."""
        ...

    def observe(self, record: CycleRecord) -> None:
        """What came of a cycle."""
        ...


class Cut(Protocol):
    """Where the answer ends, among the tokens that a cycle would commit."""

    def __call__(self, tokens: Sequence[int]) -> tuple[int, FinishReason | None]:
        """(how many of `tokens` are kept, why the answer ends there or None). Changes nothing."""
        ...


@dataclass(slots=True)
class Answer:
    """Everything one answer needs beside the target itself."""

    prompt: Sequence[int]  # ≥ 1 token
    proposer: AnyProposer
    policy: GammaPolicy
    rule: AcceptRule
    sampler: Sampler
    cut: Cut
    max_tokens: int | None
    cancel: Cancel


@dataclass(frozen=True, slots=True)
class Cycle:
    """What one cycle committed."""

    tokens: tuple[int, ...]
    accepted: int  # the first so many are draft tokens, the rest is the target's own
    record: CycleRecord
    reason: FinishReason | None  # set on the last cycle


class Engine:
    """Runs answers on one target and its cache, one after another. `committed` survives between them."""

    def __init__(self, runner: StepRunner, cache: KVCache, clock: Callable[[], float] = time.perf_counter) -> None:
        self.runner = runner
        self.cache = cache
        self.committed: list[int] = []
        self.clock = clock

    def rewind(self, length: int) -> None:
        """Forget all committed tokens behind `length`."""
        del self.committed[length:]
        self.cache.rollback(min(self.cache.length, max(0, length - 1)))

    def prefill(self, answer: Answer, record: RunRecord) -> bool:
        """Commit the prompt, reusing the longest prefix that is cached. False: cancelled (what was computed stays)."""
        begin = self.clock()
        reused = self._reuse(answer.prompt)
        answer.proposer.rollback(reused)
        self.cache.rollback(reused)
        self.committed = list(answer.prompt[: reused + 1])
        record.prompt_tokens, record.reused_tokens = len(answer.prompt), reused
        done = self._prefill_chunks(answer)
        record.kv_tokens = max(record.kv_tokens, self.cache.length)
        record.prefill_ms = 1e3 * (self.clock() - begin)
        return done

    def _reuse(self, prompt: Sequence[int]) -> int:
        """Cached slots that hold a prefix of `prompt`, leaving at least its last token to be the pending one."""
        limit = min(self.cache.length, len(self.committed), len(prompt) - 1)
        return next((i for i in range(limit) if self.committed[i] != prompt[i]), limit)

    def _prefill_chunks(self, answer: Answer, chunk: int = 512) -> bool:
        target = len(answer.prompt) - 1
        while self.cache.length < target:
            if answer.cancel.is_set():
                return False
            start = self.cache.length
            tokens = answer.prompt[start : min(start + chunk, target)]
            with self.cache.transaction(len(tokens)):
                self.runner.prefill(tokens, self.cache)
                self.cache.commit(len(tokens))
            self.committed.extend(answer.prompt[start + 1 : start + 1 + len(tokens)])
            answer.proposer.observe(tokens, None, start)
        return True

    def decode(self, answer: Answer, record: RunRecord) -> Iterator[Cycle]:
        """Cycles until the answer ends; the last one carries the reason. Closing the iterator is a cancel: whatever was
        yielded is committed, and nothing else."""
        assert self.cache.length == len(self.committed) - 1
        if isinstance(self.runner, DrawsRows):
            self.runner.draw_with(answer.rule.drawing(answer.sampler))
        # Asked once: what a protocol is takes Python long to find out.
        reader = answer.proposer if isinstance(answer.proposer, ReadsRows) else None
        produced = 0
        while True:
            reason = self._out_of_budget(answer, produced)
            if reason is not None:
                yield Cycle((), 0, _empty_record(), reason)
                return
            cycle = self._cycle(answer, self._budget(answer, produced), reader)
            produced += len(cycle.tokens)
            record.cycles.append(cycle.record)
            record.kv_tokens = max(record.kv_tokens, self.cache.length)
            yield cycle
            if cycle.reason is not None:
                return

    def _budget(self, answer: Answer, produced: int) -> int:
        room = self.cache.capacity - len(self.committed)
        return room if answer.max_tokens is None else min(room, answer.max_tokens - produced)

    def _out_of_budget(self, answer: Answer, produced: int) -> FinishReason | None:
        """Why no further cycle may begin."""
        if answer.cancel.is_set():
            return FinishReason.CANCELLED
        if answer.max_tokens is not None and produced >= answer.max_tokens:
            return FinishReason.LENGTH
        return FinishReason.CONTEXT if len(self.committed) >= self.cache.capacity else None

    def _cycle(self, answer: Answer, budget: int, reader: ReadsRows | None) -> Cycle:
        began = self.clock()
        asked, fallback = self._propose(answer, budget)
        proposed = self.clock()
        with self.cache.transaction(1 + (len(asked) if asked else 0)):
            checked = self._check(answer, asked)
            draft, out = checked.draft, checked.out
            verified = self.clock()
            verdict = self._accept(answer, draft, out)
            if draft is not None and reader is not None:
                reader.checked(draft, out.logits)
            new = [*(draft.tokens[node] for node in verdict.path if draft), verdict.next_token]
            kept, reason = answer.cut(new)
            rows = [0, *(node + 1 for node in verdict.path)][:kept]
            start = self.cache.length
            self.cache.commit(rows)
        proposed += 1e-3 * checked.draft_ms
        stored = [self.committed[-1], *new[: kept - 1]]
        self.committed.extend(new[:kept])
        answer.sampler.observe(new[:kept])
        answer.proposer.observe(stored, _taken(out.hidden, rows), start)
        record = CycleRecord(
            proposed=len(draft) if draft else 0,
            depth=draft.depth if draft else 0,
            accepted=min(kept, len(verdict.path)),
            committed=kept,
            ending=_ending(draft, verdict, kept),
            propose_ms=1e3 * (proposed - began),
            verify_ms=1e3 * (verified - proposed),
            reconcile_ms=1e3 * (self.clock() - verified),
            source=draft.source if draft else "none",
            match=draft.match if draft else 0,
            width=draft.width if draft else 1,
            confidence=draft.confidence if draft else None,
            fallback=checked.reason or fallback,
        )
        answer.policy.observe(record)
        return Cycle(tuple(new[:kept]), record.accepted, record, reason)

    def _propose(self, answer: Answer, budget: int) -> tuple[Draft | DeviceDraft | None, str | None]:
        """A draft of which every token could still be committed, or None and why."""
        # The target's own token takes one place of the budget, so a longer draft could not be kept anyway.
        room = min(budget - 1, self.runner.widths[-1] - 1, self.cache.room() - 1)
        if room < 1:
            return None, "no room for a draft before the end"
        limit = min(room, answer.policy.limit(answer.proposer.name))
        if limit < 1:
            return None, None if answer.proposer.name == "none" else answer.policy.reason
        draft = answer.proposer.propose(self.committed, limit)
        if draft is None:
            return None, _nothing_proposed(answer.proposer)
        assert len(draft) <= limit
        if not isinstance(draft, Draft):
            return draft, None
        trimmed = answer.policy.trim(draft)
        return trimmed, None if trimmed else answer.policy.reason

    def _check(self, answer: Answer, asked: Draft | DeviceDraft | None) -> Checked:
        """The target's step over the pending token and the draft, which a device may make within that step."""
        if asked is None or isinstance(asked, Draft):
            return Checked(asked, self.runner.step(self._rows(asked), _parents(asked), self.cache))
        checked = asked.check(self.cache)
        if checked.draft is not None:
            answer.policy.trim(checked.draft)  # nothing is left to trim: the policy learns what the draft was like
        return checked

    def _rows(self, draft: Draft | None) -> list[int]:
        return [self.committed[-1], *(draft.tokens if draft else ())]

    def _accept(self, answer: Answer, draft: Draft | None, out: StepOut) -> Verdict:
        try:
            if out.drawn is not None:
                return follow_drawn(draft, out.drawn)
            return answer.rule(draft, out.logits, len(self.committed), answer.sampler)
        except NonFiniteLogitsError as error:
            attend = Attend.tree(self.cache.length, tuple(_parents(draft)))
            where = self.runner.diagnose(self._rows(draft), attend, self.cache)
            raise NonFiniteLogitsError(f"{error.message}: first in {where or 'the sampler'}", error.hint) from None


def _parents(draft: Draft | None) -> list[int]:
    """Parent rows: row 0 is the pending token, row i + 1 is draft node i."""
    return [-1, *(parent + 1 for parent in draft.parents)] if draft else [-1]


def _taken(hidden: Tensor, rows: Sequence[int]) -> Tensor:
    """Rows of hidden (R, H); a view where they are the first ones, as in a chain: no index has to reach a device."""
    if rows[-1] != len(rows) - 1:
        return hidden[rows]
    return hidden if len(rows) == len(hidden) else hidden.narrow(0, 0, len(rows))


def _ending(draft: Draft | None, verdict: Verdict, kept: int) -> Ending:
    if draft is None:
        return "plain"
    if kept <= len(verdict.path):
        return "cut"
    leaf = verdict.path[-1] if verdict.path else -1
    return "corrected" if draft.children(leaf) else "bonus"


def _nothing_proposed(proposer: AnyProposer) -> str | None:
    if proposer.name == "none":
        return None
    return proposer.reason or f"{proposer.name}: nothing to propose"


def _empty_record() -> CycleRecord:
    return CycleRecord(0, 0, 0, 0, "plain", 0.0, 0.0, 0.0)
