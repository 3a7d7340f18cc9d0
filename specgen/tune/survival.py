"""How far drafts survive: decayed estimates of acceptance by kind of draft and position.

Knows: which kinds of draft were accepted how far, lately. Does not know: costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, islice, repeat

DECAY = 0.93
"""Weight of the past per observed draft of a kind: a change of text is followed within some tens of cycles."""
PRIOR_TRIED, PRIOR_LEFT = 2.0, 0.1
"""How many imagined drafts the prior is worth at first, and in the end: it fades like any other observation, or else
worthless drafts would keep a share of it for ever."""

EXPECTED = 8
"""Imagined drafts, and positions of them, that stand for what was measured beforehand."""

Kind = tuple[str, int]
"""(proposer, bucket of the match length or of the confidence; ALL: whatever the proposer says)"""
ALL = -1
OVERALL = 0.6
"""Acceptance of a first position, for a proposer that has not drafted yet."""
FIRST = (0.3, 0.35, 0.5, 0.72, 0.84, 0.95)
"""The same by bucket, 0 being drafts that say nothing of themselves. Lookups with matches of 2, 4, 8, 16 tokens were
right for 0.51, 0.79, 0.87, 0.98 of all places on the shipped workloads; other models repeat themselves less."""
LATER, MOST = 0.15, 0.97
"""A later position is reached by drafts that were right so far: by so much it is better, but never above MOST."""
CONFIDENCE_BOUNDS = (0.3, 0.6, 0.85, 0.97)


def kind_of(source: str, match: int, confidence: float | None = None) -> Kind:
    """Drafts that rest on similarly long matches, or of which a model is similarly sure, are estimated together."""
    if confidence is not None:
        return source, 1 + sum(confidence >= bound for bound in CONFIDENCE_BOUNDS)
    return source, 0 if match <= 0 else min(5, match.bit_length())


def all_of(source: str) -> Kind:
    """All drafts of a proposer together: what can be said before it has made one."""
    return source, ALL


def _priors(kind: Kind) -> tuple[float, float]:
    """Acceptance at the first and at later positions before anything is known: a longer match, or more confidence, is
    trusted more."""
    _, bucket = kind
    first = OVERALL if bucket == ALL else FIRST[bucket]
    return first, min(MOST, first + LATER)


@dataclass(slots=True)
class _Counts:
    drafts: int = 0
    # By position:
    tried: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)
    prior: list[float] = field(default_factory=list)  # imagined drafts


class SurvivalEstimate:
    """s_k by kind of draft. Position k counts as tried only when the positions before it were accepted."""

    def __init__(self) -> None:
        self._counts: dict[Kind, _Counts] = {}

    def observe(self, kind: Kind, depth: int, accepted: int, *, cut: bool = False) -> None:
        """A draft of `depth` positions of which `accepted` were kept; `cut`: the answer ended inside it."""
        counts = self._counts.setdefault(kind, _Counts())
        while len(counts.tried) < depth:
            counts.tried.append(0.0)
            counts.accepted.append(0.0)
            counts.prior.append(PRIOR_TRIED)
        counts.drafts += 1
        for position in range(len(counts.tried)):
            counts.tried[position] *= DECAY
            counts.accepted[position] *= DECAY
        reached = accepted if cut else min(depth, accepted + 1)
        for position in range(reached):
            counts.tried[position] += 1.0
            counts.accepted[position] += position < accepted
            counts.prior[position] = max(PRIOR_LEFT, counts.prior[position] * DECAY)

    def expect(self, kind: Kind, share: float) -> None:
        """Before the first draft of a kind: each of its positions was found to be right with that probability."""
        assert kind not in self._counts
        reached = [EXPECTED * share**position for position in range(EXPECTED)]
        self._counts[kind] = _Counts(0, reached, [share * tried for tried in reached], [PRIOR_LEFT] * EXPECTED)

    def drafts(self, kind: Kind) -> int:
        """How many drafts of the kind were observed."""
        return self._counts.get(kind, _Counts()).drafts

    def survival(self, kind: Kind, depth: int) -> list[float]:
        """s_1 … s_depth."""
        return list(islice(self.levels(kind), depth))

    def levels(self, kind: Kind) -> Iterator[float]:
        """s_1, s_2, … without end."""
        counts = self._counts.get(kind, _Counts())
        observed = chain(zip(counts.tried, counts.accepted, counts.prior, strict=True), repeat((0.0, 0.0, PRIOR_TRIED)))
        first, later = _priors(kind)
        survived = 1.0
        shown = first
        for tried, accepted, prior in observed:
            # Deeper positions are seen rarely: what the one before showed is the better guess.
            shown = (accepted + prior * shown) / (tried + prior)
            survived *= shown
            yield survived
            shown = 0.5 * (later + shown)
