"""A model that drafts: token by token, with the transforms and the noise that the target will use.

Knows: a reader (a model that has read the committed tokens), how children are chosen, when to stop. Does not know: what
becomes of a draft, tokenizers, files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from torch import Tensor
from torch.nn import functional

from specgen.draft import ROOT, Draft
from specgen.options import DraftOptions
from specgen.propose.draw import Child, Chooser
from specgen.sampling import NonFiniteLogitsError, Sampler

if TYPE_CHECKING:
    from specgen.cache import KVCache
    from specgen.step import StepRunner

CATCH_UP_TOKENS = 512
"""Committed tokens that a draft model reads in one cycle: a long prompt must not hold up the answer, nor Ctrl-C."""


class Reader(Protocol):
    """A model that reads the committed tokens and goes on from there."""

    vocab: int  # rows of its embedding: it cannot read a token behind them
    capacity: int  # tokens that it can read

    def lag(self, committed: Sequence[int], agreed: int) -> int:
        """Tokens of `committed` that it has not read; the first `agreed` are those of the last call."""
        ...

    def read(self, committed: Sequence[int], count: int) -> Tensor:
        """Read the next `count` unread tokens → logits (V,) of what follows them."""
        ...

    def extend(self, token: int) -> Tensor:
        """Read one token of a draft → logits (V,) of what follows it."""
        ...


def advance(runner: StepRunner, cache: KVCache, tokens: Sequence[int]) -> Tensor:
    """Read `tokens` into the cache, in one step where they fit → logits (V,) of what follows them."""
    rows = len(tokens)
    with cache.transaction(rows):
        if rows <= runner.widths[-1]:
            out = runner.step(tokens, range(-1, rows - 1), cache)
        else:
            out = runner.prefill(tokens, cache)
        cache.commit(rows)
    return out.logits[-1]


class DraftModel:
    """A reader with a cache of its own, which keeps the longest prefix it shares with the committed tokens: what was
    read for an accepted draft stays, so that a cycle begins with one step over one or two tokens."""

    def __init__(self, runner: StepRunner, cache: KVCache, vocab: int) -> None:
        self.vocab = vocab
        self.capacity = cache.capacity
        self.cache = cache
        self._runner = runner
        self._tokens: list[int] = []  # whose K and V are cached

    def lag(self, committed: Sequence[int], agreed: int) -> int:
        shared = self._shared(committed, agreed)
        self.cache.rollback(shared)
        del self._tokens[shared:]
        return len(committed) - shared

    def unread(self, tokens: Sequence[int]) -> int:
        """How many of `tokens` it would have to read; nothing changes."""
        return len(tokens) - self._shared(tokens, 0)

    def _shared(self, tokens: Sequence[int], agreed: int) -> int:
        """Tokens of the longest cached prefix that leaves at least one to be read; the first `agreed` are known."""
        limit = min(len(self._tokens), len(tokens) - 1)
        return next((i for i in range(min(agreed, limit), limit) if self._tokens[i] != tokens[i]), limit)

    def read(self, committed: Sequence[int], count: int) -> Tensor:
        begin = len(self._tokens)
        return self._advance(committed[begin : begin + count])

    def extend(self, token: int) -> Tensor:
        return self._advance([token])

    def keep(self, tokens: Sequence[int]) -> None:
        """Others have written K and V of `tokens` behind those read, into an open transaction of the cache."""
        self.cache.commit(len(tokens))
        self._tokens.extend(tokens)

    def forget(self) -> None:
        """As if nothing had been read."""
        self.cache.rollback(0)
        self._tokens.clear()

    def _advance(self, tokens: Sequence[int]) -> Tensor:
        logits = advance(self._runner, self.cache, tokens)
        self._tokens.extend(tokens)
        return logits


class ModelProposer:
    """Drafts with a reader. A tree is a chain whose every token has siblings: the best of them is followed."""

    def __init__(
        self, name: str, reader: Reader, sampler: Sampler, chooser: Chooser, options: DraftOptions, width: int = 1
    ) -> None:
        self.name = name
        self.reason: str | None = None
        self._reader = reader
        self._sampler = sampler
        self._chooser = chooser
        self._options = options
        self._width = width
        self._agreed = 0  # leading committed tokens that are those of the last `propose`
        self._known = 0  # leading committed tokens whose ids the reader can read
        self._broken: str | None = None

    def propose(self, committed: Sequence[int], limit: int) -> Draft | None:
        assert limit >= 1
        levels = self.levels(committed, limit)
        if levels == 0:
            return None
        try:
            logits = self._catch_up(committed)
            return None if logits is None else self._draft(len(committed), levels, limit, logits)
        except NonFiniteLogitsError:
            self.give_up()
            return None

    def levels(self, committed: Sequence[int], limit: int) -> int:
        """How deep a draft of at most `limit` nodes could be; 0, and a `reason`, where the reader cannot go on."""
        self.reason = self._broken or self._refusal(committed)
        if self.reason is not None:
            return 0
        return min(-(-limit // self._width), self._reader.capacity - len(committed) + 1)

    def unread(self, committed: Sequence[int]) -> int:
        """Committed tokens that the reader has not read."""
        lag = self._reader.lag(committed, self._agreed)
        self._agreed = len(committed)
        return lag

    def give_up(self) -> None:
        """The draft is broken. The answer does not depend on it: go on without."""
        self.reason = self._broken = f"{self.name}: the draft's logits are not finite"

    def observe(self, tokens: Sequence[int], hidden: Tensor | None, start: int) -> None:
        """Nothing to do: `propose` is given the whole committed sequence, and a parked draft need not read it."""

    def rollback(self, length: int) -> None:
        self._agreed = min(self._agreed, length)
        self._known = min(self._known, length)

    def _refusal(self, committed: Sequence[int]) -> str | None:
        """Why the reader cannot go on from here."""
        if len(committed) > self._reader.capacity:
            return f"{self.name}: the draft's context of {self._reader.capacity} tokens is full"
        while self._known < len(committed):
            if committed[self._known] >= self._reader.vocab:
                return f"{self.name}: the draft does not know token {committed[self._known]}"
            self._known += 1
        return None

    def _catch_up(self, committed: Sequence[int]) -> Tensor | None:
        """Logits (V,) after the committed tokens, or None while they are still being read."""
        lag = self.unread(committed)
        logits = self._reader.read(committed, min(lag, CATCH_UP_TOKENS))
        if lag > CATCH_UP_TOKENS:
            self.reason = f"{self.name}: the draft is still reading"
            return None
        return self._padded(logits)

    def _padded(self, logits: Tensor) -> Tensor:
        """logits (V of the draft,) with tokens that only the target has made impossible."""
        missing = self._sampler.vocab - len(logits)
        return functional.pad(logits, (0, missing), value=-float("inf")) if missing > 0 else logits

    def _draft(self, position: int, levels: int, limit: int, logits: Tensor) -> Draft:
        """Up to `limit` nodes on at most `levels` levels; `logits` (V,) follow the committed tokens."""
        confidence = self._sampler.likelihood(logits, ())
        children: list[Child] = []
        parents: list[int] = []
        path: list[int] = []
        parent = ROOT
        for level in range(levels):
            width = min(self._width, limit - len(children))
            found = self._chooser(logits, path, position + level, width)
            first = len(children)
            children += found
            parents += [parent] * len(found)
            if level + 1 == levels or len(children) == limit or self._doubtful(logits, path, found[0].token):
                break
            path.append(found[0].token)
            parent = first
            logits = self._padded(self._reader.extend(found[0].token))
        tokens, probs = tuple(child.token for child in children), tuple(child.probs for child in children)
        return Draft(tokens, tuple(parents), probs, self.name, confidence=confidence)

    def _doubtful(self, logits: Tensor, path: Sequence[int], token: int) -> bool:
        """Whether the draft should end here. The doubtful token itself is still checked: its step is paid for, and
        under `rejection` leaving it out for what was drawn would change the distribution."""
        bound = self._options.stop_below
        return bound > 0.0 and self._sampler.likelihood(logits, path, token) < bound
