"""Constrained answers: which tokens a grammar allows next.

Knows: llguidance's masks over a vocabulary, and how its matcher follows a path of draft tokens and comes back. Does not
know: logits, drafts. What may follow is a function of the answer's tokens alone, however they were reached: that makes
a constraint exact together with every proposer and acceptance rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import llguidance
import numpy as np
import torch
from torch import Tensor

from specgen.engine import Cut
from specgen.errors import SpecgenError
from specgen.events import FinishReason
from specgen.text.grammar import GrammarError, short_message
from specgen.text.tokenizer import Tokenizer


class _Vocabulary:
    """What llguidance wants to know of a tokenizer."""

    bos_token_id: int | None = None

    def __init__(self, tokenizer: Tokenizer, end: int) -> None:
        self.eos_token_id = end
        self.special_token_ids = sorted(tokenizer.special_ids)
        self.tokens = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
        if end == tokenizer.vocab_size:
            self.tokens.append(b"")
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        return self._tokenizer.encode(text if isinstance(text, str) else text.decode(), add_special=False)


class GrammarVocabulary:
    """One tokenizer's tokens as llguidance holds them; takes a few tenths of a second, so it is made once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.size = tokenizer.vocab_size
        # Without an end token of its own a vocabulary gets one behind it, which no mask that we hand out contains.
        self.ends = tokenizer.eos_ids
        ends = list(self.ends) or [self.size]
        wrapper = llguidance.TokenizerWrapper(_Vocabulary(tokenizer, ends[0]))
        self.core = llguidance.LLTokenizer(wrapper, eos_token=ends)

    def matcher(self, grammar: str) -> llguidance.LLMatcher:
        matcher = llguidance.LLMatcher(self.core, grammar, log_level=0)
        if matcher.is_error():
            raise GrammarError(f"the grammar cannot be used with this model: {short_message(matcher.get_error())}")
        return matcher


@dataclass(frozen=True, slots=True)
class _Next:
    """What may follow one path."""

    allowed: Tensor  # (V,) bool
    only: int | None  # the token, where there is just one
    over: bool  # nothing but the end may follow, or the end is in the path


class GrammarConstraint:
    """Follows one answer. Implements `sampling.Constraint`; also knows forced tokens and where the grammar ends."""

    def __init__(self, vocabulary: GrammarVocabulary, grammar: str) -> None:
        self._vocabulary = vocabulary
        self._grammar = grammar
        self._matcher = vocabulary.matcher(grammar)
        self._committed: list[int] = []
        self._at: list[int] = []  # the tokens that the matcher has consumed
        self._known: dict[tuple[int, ...], _Next] = {}  # by path

    def allowed(self, path: Sequence[int]) -> Tensor:
        return self._next(tuple(path)).allowed

    def commit(self, tokens: Sequence[int]) -> None:
        count, new = len(tokens), tuple(tokens)
        self._committed.extend(tokens)
        self._known = {path[count:]: known for path, known in self._known.items() if path[:count] == new}

    def forced(self, limit: int) -> list[int]:
        """At most `limit` tokens that must come next: each is the only one that may follow those before it."""
        path: list[int] = []
        while len(path) < limit:
            known = self._next(tuple(path))
            if known.only is None or known.over:
                break
            path.append(known.only)
        return path

    def legal(self, path: Sequence[int], token: int) -> bool:
        """Whether `token` may follow a path of legal tokens; nothing follows an end."""
        if not self._move(path):
            return False
        if token in self._vocabulary.ends:
            return bool(self._matcher.is_accepting())
        return token < self._vocabulary.size and self._matcher.validate_tokens([token]) == 1

    def end(self, tokens: Sequence[int]) -> int | None:
        """The index of the first of `tokens` (legal ones) behind which nothing but the end may follow."""
        return next((index for index in range(len(tokens)) if self._next(tuple(tokens[: index + 1])).over), None)

    def accepts(self, text: str) -> bool:
        """Whether `text` is a whole sentence of the grammar, whatever its tokens were."""
        matcher = self._vocabulary.matcher(self._grammar)
        tokens = self._vocabulary.core.greedy_tokenize(text)
        return matcher.try_consume_tokens(tokens) == len(tokens) and bool(matcher.is_accepting())

    def _next(self, path: tuple[int, ...]) -> _Next:
        known = self._known.get(path)
        if known is None:
            known = self._known[path] = self._computed() if self._move(path) else self._ended()
        return known

    def _computed(self) -> _Next:
        """What may follow where the matcher stands."""
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        if self._matcher.is_error():
            raise self._failure()
        allowed = torch.from_numpy(bits[: self._vocabulary.size].astype(np.bool_))
        count = int(allowed.sum())
        ends = sum(bool(allowed[end]) for end in self._vocabulary.ends)
        if count == ends:
            return self._ended()
        return _Next(allowed, int(allowed.nonzero()) if count == 1 else None, False)

    def _failure(self) -> SpecgenError:
        if self._matcher.get_error().startswith("NoExtension"):
            return SpecgenError("the grammar has come to a place where no token of this model fits")
        return SpecgenError(f"the grammar is too complex: {short_message(self._matcher.get_error())}")

    def _ended(self) -> _Next:
        """Behind the end: a draft may have rows there, which must have a distribution and are never committed."""
        ends = torch.zeros(self._vocabulary.size, dtype=torch.bool)
        ends[list(self._vocabulary.ends) or slice(None)] = True
        return _Next(ends, None, True)

    def _move(self, path: Sequence[int]) -> bool:
        """Take the matcher to the committed answer and `path`. False: the answer has ended on the way."""
        wanted = [*self._committed, *path]
        pairs = enumerate(zip(self._at, wanted, strict=False))
        shared = next((i for i, (old, new) in pairs if old != new), min(len(self._at), len(wanted)))
        if shared < len(self._at):
            self._matcher.rollback(len(self._at) - shared)
            del self._at[shared:]
        for token in wanted[shared:]:
            # llguidance cannot roll back over an end token, so it never sees one.
            if token in self._vocabulary.ends or self._matcher.validate_tokens([token]) != 1:
                return False
            self._matcher.consume_token(token)
            self._at.append(token)
        assert not self._matcher.is_error(), self._matcher.get_error()
        return True


class GrammarCut:
    """An `engine.Cut` that also ends the answer where its grammar ends."""

    def __init__(self, inner: Cut, constraint: GrammarConstraint) -> None:
        self._inner = inner
        self._constraint = constraint

    def __call__(self, tokens: Sequence[int]) -> tuple[int, FinishReason | None]:
        kept, reason = self._inner(tokens)
        end = self._constraint.end(tokens[:kept])
        if end is None or (end == kept - 1 and reason is not None):
            return kept, reason
        return end + 1, FinishReason.GRAMMAR
