"""Prompt lookup: what followed the last few tokens the last time they stood in prompt or answer.

Knows: the committed tokens, indexed by every n-gram of n_min … n_max tokens as they come: O(n_max) per committed token
and per lookup, however long the context. Does not know: any model. Source: Saxena, "Prompt lookup decoding" (2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specgen.draft import Draft
from specgen.options import NgramOptions

if TYPE_CHECKING:
    from torch import Tensor

CANDIDATES = 8
"""Most recent occurrences of a suffix that are compared."""
LONGEST_MATCH = 32
"""How far back a match is followed to rank the candidates."""


class NgramProposer:
    """Chains copied from the best earlier occurrence: the longest suffix first, then the longest match behind it, then
    the most recent. A copy that runs into the end of the sequence goes on with the draft itself, so a loop of any
    period is drafted whole."""

    name = "ngram"
    reason: str | None = None

    def __init__(self, options: NgramOptions | None = None) -> None:
        options = options or NgramOptions()
        self.n_max = options.n_max
        self.n_min = options.n_min
        self._tokens: list[int] = []
        # For each n-gram the positions that follow it, ascending.
        self._follow: dict[tuple[int, ...], list[int]] = {}

    def propose(self, committed: Sequence[int], limit: int) -> Draft | None:
        assert limit >= 1
        self._index(committed)
        found = self._best_match()
        if found is None:
            return None
        match, begin = found
        return Draft.chain(self._copy(begin, limit), source=self.name, match=match)

    def observe(self, tokens: Sequence[int], hidden: Tensor | None, start: int) -> None:
        """Nothing to do: `propose` is given the whole committed sequence and indexes what is new."""

    def rollback(self, length: int) -> None:
        for end in range(len(self._tokens), length, -1):
            for gram in self._grams_ending(end):
                positions = self._follow[gram]
                positions.pop()
                if not positions:
                    del self._follow[gram]
            self._tokens.pop()

    def _index(self, committed: Sequence[int]) -> None:
        for position in range(len(self._tokens), len(committed)):
            self._tokens.append(committed[position])
            for gram in self._grams_ending(position + 1):
                self._follow.setdefault(gram, []).append(position + 1)

    def _grams_ending(self, end: int) -> list[tuple[int, ...]]:
        """The n-grams that end just before position `end`."""
        return [tuple(self._tokens[end - n : end]) for n in range(self.n_min, min(self.n_max, end) + 1)]

    def _best_match(self) -> tuple[int, int] | None:
        """(tokens that match, at most LONGEST_MATCH; the position whose tokens continue the sequence), or None."""
        for gram in reversed(self._grams_ending(len(self._tokens))):
            # The last entry is the suffix itself.
            earlier = self._follow[gram][-CANDIDATES - 1 : -1]
            if earlier:
                return max((self._match_length(position), position) for position in earlier)
        return None

    def _match_length(self, begin: int) -> int:
        """Tokens before `begin` that equal the tokens before the end."""
        tokens, end = self._tokens, len(self._tokens)
        length = 0
        while length < min(begin, LONGEST_MATCH) and tokens[begin - 1 - length] == tokens[end - 1 - length]:
            length += 1
        return length

    def _copy(self, begin: int, count: int) -> list[int]:
        copied = self._tokens[begin : begin + count]
        period = len(self._tokens) - begin
        for index in range(len(copied), count):
            copied.append(copied[index - period])
        return copied
