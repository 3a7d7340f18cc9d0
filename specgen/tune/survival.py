"""How far drafts survive: decayed estimates of acceptance by kind of draft and position.

Knows: which kinds of draft were accepted how far, lately. Does not know: costs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

DECAY = 0.93
"""Weight of the past per observed draft of a kind: a change of text is followed within some tens of cycles."""
PRIOR_TRIED = 2.0
"""How many imagined drafts the prior is worth."""

Kind = tuple[str, int]
"""(proposer, bucket of the match length)"""


def kind_of(source: str, match: int) -> Kind:
    """Drafts that rest on similarly long matches are estimated together."""
    return source, 0 if match <= 0 else min(5, match.bit_length())


def _prior(kind: Kind, position: int) -> float:
    """Acceptance at a position before anything is known: a longer match is trusted more."""
    _, bucket = kind
    first = (0.6, 0.35, 0.45, 0.6, 0.75, 0.85)[bucket]
    return first if position == 0 else min(0.95, first + 0.2)


@dataclass(slots=True)
class _Counts:
    tried: list[float] = field(default_factory=list)  # by position
    accepted: list[float] = field(default_factory=list)


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
        for position in range(len(counts.tried)):
            counts.tried[position] *= DECAY
            counts.accepted[position] *= DECAY
        reached = accepted if cut else min(depth, accepted + 1)
        for position in range(reached):
            counts.tried[position] += 1.0
            counts.accepted[position] += position < accepted

    def survival(self, kind: Kind, depth: int) -> list[float]:
        """s_1 … s_depth."""
        counts = self._counts.get(kind, _Counts())
        shares: list[float] = []
        survived = 1.0
        last_seen = 1.0
        for position in range(depth):
            tried = counts.tried[position] if position < len(counts.tried) else 0.0
            accepted = counts.accepted[position] if position < len(counts.accepted) else 0.0
            prior = _prior(kind, position)
            if position:
                # Deeper positions are seen rarely: what the one before showed is the better guess.
                prior = 0.5 * (prior + last_seen)
            last_seen = (accepted + PRIOR_TRIED * prior) / (tried + PRIOR_TRIED)
            survived *= last_seen
            shares.append(survived)
        return shares
