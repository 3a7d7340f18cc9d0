"""Drafts under a grammar: tokens that must come are a draft that costs nothing and is always right.

Knows: a grammar's forced and legal tokens, another proposer, and how to prune a draft. Does not know: grammars.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from specgen.draft import ROOT, Draft
from specgen.propose.base import AnyProposer
from specgen.propose.mix import Judge

if TYPE_CHECKING:
    from torch import Tensor


class Grammar(Protocol):
    """What this proposer asks of a constraint."""

    def forced(self, limit: int) -> list[int]: ...

    def legal(self, path: Sequence[int], token: int) -> bool: ...


class ForcedProposer:
    """Tokens that must come, else the other proposer's draft without what the grammar forbids."""

    def __init__(self, grammar: Grammar, inner: AnyProposer, judge: Judge) -> None:
        self.name = f"forced+{inner.name}"
        self.reason: str | None = None
        self._grammar = grammar
        self._inner = inner
        self._judge = judge

    def propose(self, committed: Sequence[int], limit: int) -> Draft | None:
        self.reason = None
        forced = self._grammar.forced(limit)
        if forced:
            return Draft.chain(forced, source="forced")
        allowed = min(limit, self._judge.limit(self._inner.name))
        if allowed < 1:
            self.reason = self._judge.reason
            return None
        draft = self._inner.propose(committed, allowed)
        self.reason = self._inner.reason
        assert draft is None or isinstance(draft, Draft), "nobody leaves a draft to a device where a grammar prunes it"
        return None if draft is None else pruned(draft, self._grammar)

    def observe(self, tokens: Sequence[int], hidden: Tensor | None, start: int) -> None:
        self._inner.observe(tokens, hidden, start)

    def rollback(self, length: int) -> None:
        self._inner.rollback(length)


def pruned(draft: Draft, grammar: Grammar) -> Draft | None:
    """The draft without forbidden nodes and what follows them; None when nothing is left.

    Dropping a node that was drawn changes no distribution: target and draft give a forbidden token probability 0.
    """
    number = {ROOT: ROOT}  # old node → new node
    paths: dict[int, tuple[int, ...]] = {ROOT: ()}
    for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
        if parent in number and grammar.legal(paths[parent], token):
            number[node] = len(number) - 1
            paths[node] = (*paths[parent], token)
    kept = [node for node in number if node != ROOT]
    if not kept:
        return None
    return Draft(
        tuple(draft.tokens[node] for node in kept),
        tuple(number[draft.parents[node]] for node in kept),
        tuple(draft.probs[node] for node in kept),
        draft.source,
        draft.match,
        draft.confidence,
    )
