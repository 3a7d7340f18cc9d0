"""How far drafts survive: decayed estimates of acceptance by what a draft rests on.

Knows: which drafts were accepted how far, lately. Does not know: costs.

A place in a draft counts as tried only when the places before it were accepted. Behind k accepted tokens a lookup with
a match of m tokens rests on m + k: its places are as good as first places of longer matches, and are estimated together
with them. What a model says of itself holds for its first place; its later ones are estimated one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count, islice

ALL = -1
"""Bucket of drafts of which nothing is known yet."""
BANDS = (0, 1, 2, 4, 8, 16)
"""Lookups whose match has at least so many tokens belong together."""
LOOKUP_SHARES = (0.3, 0.35, 0.5, 0.75, 0.86, 0.96)
"""How often their next token is right before anything is known, by band. Over 88 answers to the shipped workloads, by
tokens of match and of draft accepted so far: 2 … 3: 0.51, 4 … 7: 0.67 to 0.79, 8 … 15: 0.85 to 0.89, from 16 on 0.9 to
0.98, the most where answers loop."""
MODEL_SHARES = (0.3, 0.35, 0.5, 0.72, 0.84, 0.95)
"""The same for the first place of other drafts, by bucket: 0 of those that say nothing of themselves, then by bounds of
the confidence."""
CONFIDENCE_BOUNDS = (0.3, 0.6, 0.85, 0.97)
OVERALL = 0.6
"""The same for a proposer that has not drafted yet."""
LATER, MOST = 0.15, 0.97
"""A later place is reached by drafts that were right so far: by so much it is better, but never above MOST."""
EXPECTED = 8
"""Imagined drafts, and places of them, that stand for what was measured beforehand."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Drafts that are judged together. Lookups among them rest on matches of their own length."""

    source: str
    bucket: int  # of the match or of the confidence
    match: int = field(default=0, compare=False)  # tokens; 0: no lookup


def kind_of(source: str, match: int, confidence: float | None = None) -> Kind:
    """Of drafts that rest on similarly long matches, or of which a model is similarly sure."""
    if confidence is not None:
        return Kind(source, 1 + sum(confidence >= bound for bound in CONFIDENCE_BOUNDS))
    return _lookup(source, match)


@lru_cache(maxsize=256)
def _lookup(source: str, match: int) -> Kind:
    return Kind(source, _band(match), max(0, match))


def all_of(source: str) -> Kind:
    """All drafts of a proposer together: what can be said before it has made one."""
    return Kind(source, ALL)


def _band(match: int) -> int:
    return 0 if match <= 0 else min(match.bit_length(), len(BANDS) - 1)


@dataclass(frozen=True, slots=True)
class _Fading:
    """How evidence ages."""

    decay: float  # weight of the past per observation: a change of text is followed within some tens of cycles
    # Imagined observations that what is expected beforehand is worth at first, and in the end: it fades like what was
    # observed, or else worthless drafts would keep a share of it for ever.
    prior: float
    left: float


BY_PLACE = _Fading(0.93, 2.0, 0.1)
BY_MATCH = _Fading(0.94, 6.0, 1.0)


@dataclass(slots=True)
class _Evidence:
    """How often one thing was tried, and how often it was right; both decayed."""

    prior: float
    tried: float = 0.0
    right: float = 0.0

    def share(self, expected: float) -> float:
        return (self.right + self.prior * expected) / (self.tried + self.prior)

    def age(self, fading: _Fading) -> None:
        self.tried *= fading.decay
        self.right *= fading.decay

    def add(self, right: float, fading: _Fading) -> None:
        self.tried += 1.0
        self.right += right
        self.prior = max(fading.left, self.prior * fading.decay)


class _ByPlace:
    """Of one kind of draft, place by place."""

    def __init__(self, kind: Kind) -> None:
        self.drafts = 0
        self.places: list[_Evidence] = []
        self._first = OVERALL if kind.bucket == ALL else MODEL_SHARES[kind.bucket]
        self._later = min(MOST, self._first + LATER)

    def observe(self, reached: int, accepted: int) -> None:
        self.drafts += 1
        while len(self.places) < reached:
            self.places.append(_Evidence(BY_PLACE.prior))
        for place, evidence in enumerate(self.places):
            # What is no longer tried is forgotten too, but its prior does not fade.
            evidence.age(BY_PLACE)
            if place < reached:
                evidence.add(place < accepted, BY_PLACE)

    def levels(self) -> Iterator[float]:
        """s_1, s_2, … without end."""
        survived = 1.0
        unseen = _Evidence(BY_PLACE.prior)
        share = self._first
        for place in count():
            share = (self.places[place] if place < len(self.places) else unseen).share(share)
            survived *= share
            yield survived
            # Deeper places are seen rarely: what the one before showed is the better guess.
            share = 0.5 * (self._later + share)


class _ByMatch:
    """Of one proposer's lookups, by the tokens that a place rests on."""

    def __init__(self) -> None:
        self.bands = [_Evidence(BY_MATCH.prior) for _ in BANDS]

    def observe(self, match: int, reached: int, accepted: int) -> None:
        tried, right = [0] * len(BANDS), [0] * len(BANDS)
        for place in range(reached):
            band = _band(match + place)
            tried[band] += 1
            right[band] += place < accepted
        for evidence, n, k in zip(self.bands, tried, right, strict=True):
            if n:
                evidence.age(BY_MATCH)
                # The places of one draft succeed or fail together: they are one observation. Were they counted one by
                # one, good drafts would say more than bad ones, which end at their first place.
                evidence.add(k / n, BY_MATCH)

    def levels(self, match: int) -> Iterator[float]:
        """s_1, s_2, … without end."""
        survived = 1.0
        band, last = _band(match), len(BANDS) - 1
        while True:
            share = self.bands[band].share(LOOKUP_SHARES[band])
            for _ in range(match, BANDS[band + 1]) if band < last else count():
                survived *= share
                yield survived
            band += 1
            match = BANDS[band]


class SurvivalEstimate:
    """s_k by kind of draft."""

    def __init__(self) -> None:
        self._by_place: dict[Kind, _ByPlace] = {}
        self._by_match: dict[str, _ByMatch] = {}

    def observe(self, kind: Kind, depth: int, accepted: int, *, cut: bool = False) -> None:
        """A draft of `depth` places of which `accepted` were kept; `cut`: the answer ended inside it."""
        reached = accepted if cut else min(depth, accepted + 1)
        if kind.match:
            self._by_match.setdefault(kind.source, _ByMatch()).observe(kind.match, reached, accepted)
        else:
            self._by_place.setdefault(kind, _ByPlace(kind)).observe(reached, accepted)

    def expect(self, kind: Kind, share: float) -> None:
        """Before the first draft of a kind: each of its places was found to be right with that probability."""
        assert not kind.match
        assert kind not in self._by_place
        found = self._by_place[kind] = _ByPlace(kind)
        reached = [EXPECTED * share**place for place in range(EXPECTED)]
        found.places = [_Evidence(BY_PLACE.left, tried, share * tried) for tried in reached]

    def drafts(self, kind: Kind) -> int:
        """How many drafts of the kind were observed; of no use for lookups."""
        return self._by_place[kind].drafts if kind in self._by_place else 0

    def survival(self, kind: Kind, depth: int) -> list[float]:
        """s_1 … s_depth."""
        return list(islice(self.levels(kind), depth))

    def levels(self, kind: Kind) -> Iterator[float]:
        """s_1, s_2, … without end."""
        if kind.match:
            return (self._by_match.get(kind.source) or _ByMatch()).levels(kind.match)
        return (self._by_place.get(kind) or _ByPlace(kind)).levels()
