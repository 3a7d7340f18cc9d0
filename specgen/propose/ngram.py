"""Prompt lookup: what followed the last few tokens when they stood in prompt or answer, or in earlier answers.

Knows: tokens, indexed by every n-gram of n_min … n_max tokens as they come: O(n_max) per committed token and per
lookup, however long the context. Does not know: any model, files. Source: Saxena, "Prompt lookup decoding" (2023).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from specgen.draft import ROOT, Draft
from specgen.options import NgramOptions

if TYPE_CHECKING:
    from torch import Tensor

CANDIDATES = 8
"""Most recent occurrences of a suffix that are compared."""
LONGEST_MATCH = 32
"""How far back a match is followed to rank the candidates."""
GAP = -1
"""Stands between texts that have nothing to do with each other."""


class NgramIndex:
    """A growing sequence of tokens in which the places that follow an n-gram are known."""

    def __init__(self, options: NgramOptions, texts: Iterable[Sequence[int]] = ()) -> None:
        self.n_max = options.n_max
        self.n_min = options.n_min
        self.tokens: list[int] = []
        self.suffixes: list[tuple[int, ...]] = []  # the n-grams that end with the last token, the shortest first
        # For each n-gram the positions that follow it, ascending.
        self._follow: dict[tuple[int, ...], list[int]] = {}
        for text in texts:
            for token in (*text, GAP):
                self.append(token)

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self.suffixes = self._suffixes()
        end = len(self.tokens)
        for gram in self.suffixes:
            self._follow.setdefault(gram, []).append(end)

    def pop(self) -> None:
        for gram in self.suffixes:
            positions = self._follow[gram]
            positions.pop()
            if not positions:
                del self._follow[gram]
        self.tokens.pop()
        self.suffixes = self._suffixes()

    def _suffixes(self) -> list[tuple[int, ...]]:
        tail = tuple(self.tokens[-self.n_max :])
        if GAP in tail:
            tail = tail[len(tail) - tail[::-1].index(GAP) :]
        return [tail[len(tail) - n :] for n in range(self.n_min, len(tail) + 1)]

    def places(self, gram: tuple[int, ...]) -> list[int]:
        """The last few positions that follow `gram` and hold a token."""
        found = self._follow.get(gram, ())[-CANDIDATES - 1 :]
        return [place for place in found if place < len(self.tokens) and self.tokens[place] != GAP][-CANDIDATES:]

    def match_length(self, place: int, suffix: Sequence[int]) -> int:
        """Tokens before `place` that equal those at the end of `suffix`, at most LONGEST_MATCH."""
        tokens, end, length = self.tokens, len(suffix), 0
        most = min(place, end, LONGEST_MATCH)
        while length < most and tokens[place - 1 - length] == suffix[end - 1 - length]:
            length += 1
        return length

    def copy(self, place: int, count: int) -> list[int]:
        """What stands at `place` and behind it, up to a gap. A copy that runs into the end of the sequence goes on with
        itself, so that a loop of any period is copied whole."""
        copied = self.tokens[place : place + count]
        if GAP in copied:
            return copied[: copied.index(GAP)]
        period = len(self.tokens) - place
        for index in range(len(copied), count):
            copied.append(copied[index - period])
        return copied


class _Candidate(NamedTuple):
    """An earlier occurrence of the suffix. Candidates are compared by their fields, in this order."""

    rank: int  # of the match length: lengths of like size count as equal
    frequency: int  # candidates that go on with the same token
    here: bool  # from this text, not from an earlier one
    match: int  # tokens
    place: int
    token: int


class NgramProposer:
    """Copies what followed the best earlier occurrences of the longest suffix: the longer match first, of like matches
    the one that goes on as most do, then the most recent. With a width, the best occurrences that go on differently
    become branches: the best one gets the most nodes."""

    name = "ngram"
    reason: str | None = None

    def __init__(self, options: NgramOptions | None = None, width: int = 1, earlier: NgramIndex | None = None) -> None:
        """earlier: other texts to look in, shared and never changed here."""
        self._here = NgramIndex(options or NgramOptions())
        self._earlier = earlier
        self._width = width

    def propose(self, committed: Sequence[int], limit: int) -> Draft | None:
        assert limit >= 1
        tokens = self._here.tokens
        for position in range(len(tokens), len(committed)):
            self._here.append(committed[position])
        best = self._best(min(self._width, limit))
        if not best:
            return None
        if len(best) == 1:
            return Draft.chain(self._copy(best[0], limit), source=self.name, match=best[0].match)
        branches = [self._copy(found, share) for found, share in zip(best, _shares(limit, len(best)), strict=True)]
        return self._draft(branches, best[0].match)

    def observe(self, tokens: Sequence[int], hidden: Tensor | None, start: int) -> None:
        """Nothing to do: `propose` is given the whole committed sequence and indexes what is new."""

    def rollback(self, length: int) -> None:
        for _ in range(len(self._here.tokens) - length):
            self._here.pop()

    def _best(self, width: int) -> list[_Candidate]:
        """The best occurrence for each of at most `width` next tokens: of the longest suffix that stood before, then of
        shorter ones while there are too few."""
        best: dict[int, _Candidate] = {}
        for gram in reversed(self._here.suffixes):
            for found in sorted(self._candidates(gram), reverse=True):
                best.setdefault(found.token, found)
                if len(best) == width:
                    return list(best.values())
        return list(best.values())

    def _candidates(self, gram: tuple[int, ...]) -> list[_Candidate]:
        tokens = self._here.tokens
        found = [(self._here, place) for place in self._here.places(gram)]
        if self._earlier is not None:
            found += [(self._earlier, place) for place in self._earlier.places(gram)]
        nexts = [index.tokens[place] for index, place in found]
        candidates = []
        for (index, place), token in zip(found, nexts, strict=True):
            match, frequency = index.match_length(place, tokens), nexts.count(token)
            candidates.append(_Candidate(match.bit_length(), frequency, index is self._here, match, place, token))
        return candidates

    def _copy(self, found: _Candidate, count: int) -> list[int]:
        index = self._here if found.here else self._earlier
        assert index is not None
        return index.copy(found.place, count)

    def _draft(self, branches: Sequence[Sequence[int]], match: int) -> Draft:
        """The branches side by side, level by level, so that a draft cut short loses its deepest nodes."""
        tokens: list[int] = []
        parents: list[int] = []
        last = [ROOT] * len(branches)
        for level in range(max(map(len, branches))):
            for number, branch in enumerate(branches):
                if level < len(branch):
                    parents.append(last[number])
                    last[number] = len(tokens)
                    tokens.append(branch[level])
        return Draft(tuple(tokens), tuple(parents), (None,) * len(tokens), self.name, match)


def _shares(limit: int, count: int) -> list[int]:
    """Nodes for each of `count` ≤ `limit` branches: the second gets a quarter of all, the third an eighth, …"""
    others = [max(1, limit >> (number + 1)) for number in range(1, count)]
    return [limit - sum(others), *others]
