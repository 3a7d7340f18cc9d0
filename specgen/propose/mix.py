"""Lookup first, a model where lookup has nothing good.

Knows: two proposers and when to prefer which. Does not know: how either proposes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from specgen.draft import Draft
from specgen.propose.base import AnyProposer, DeviceDraft, Proposer

if TYPE_CHECKING:
    from torch import Tensor

LONG_MATCH = 4
"""Tokens of context from which on a lookup is preferred."""


class Judge(Protocol):
    """What the mix asks of the γ policy."""

    reason: str | None

    def limit(self, source: str) -> int: ...

    def worth(self, draft: Draft) -> bool: ...


class MixProposer:
    """The lookup's draft when it rests on a long match and pays, else the model's, else whatever the lookup had."""

    name = "mix"

    def __init__(self, lookup: Proposer, model: AnyProposer, judge: Judge, long_match: int = LONG_MATCH) -> None:
        self.reason: str | None = None
        self._lookup = lookup
        self._model = model
        self._judge = judge
        self._long_match = long_match

    def propose(self, committed: Sequence[int], limit: int) -> Draft | DeviceDraft | None:
        self.reason = None
        found = self._lookup.propose(committed, limit)
        if found is not None and found.match >= self._long_match and self._judge.worth(found):
            return found
        allowed = min(limit, self._judge.limit(self._model.name))
        if allowed < 1:
            self.reason = self._judge.reason
            return found
        drafted = self._model.propose(committed, allowed)
        self.reason = self._model.reason
        return drafted or found

    def observe(self, tokens: Sequence[int], hidden: Tensor | None, start: int) -> None:
        self._lookup.observe(tokens, hidden, start)
        self._model.observe(tokens, hidden, start)

    def rollback(self, length: int) -> None:
        self._lookup.rollback(length)
        self._model.rollback(length)
