"""Lookahead decoding: n-grams that the target itself makes up on the side (Fu et al., 2402.02057).

Knows: a window of guesses that every step moves one Jacobi iteration on, and the pool of n-grams that come out of it.
Does not know: models. Candidates and window are one tree, so one step verifies the ones and computes the others:
column j of the window hangs on the guesses before it, and each of its levels on the one above, which is what the tree
mask shows a row. Window nodes are candidates too, if unlikely ones: no rule needs to tell them apart.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from specgen.draft import ROOT, Draft

if TYPE_CHECKING:
    from torch import Tensor

LEVELS = 2
"""Jacobi iterations in the window: n-grams of LEVELS + 1 tokens come out."""
PER_TOKEN, MAX_KEYS = 8, 8192
"""The pool keeps the latest n-grams per first token, and the first tokens that were used last."""


class NgramPool:
    """What followed a token in the window."""

    def __init__(self) -> None:
        self._grams: OrderedDict[int, OrderedDict[tuple[int, ...], None]] = OrderedDict()

    def add(self, first: int, rest: tuple[int, ...]) -> None:
        grams = self._grams.setdefault(first, OrderedDict())
        self._grams.move_to_end(first)
        grams[rest] = None
        grams.move_to_end(rest)
        if len(grams) > PER_TOKEN:
            grams.popitem(last=False)
        if len(self._grams) > MAX_KEYS:
            self._grams.popitem(last=False)

    def after(self, token: int) -> list[tuple[int, ...]]:
        """The latest first."""
        return list(reversed(self._grams.get(token, ())))


class _Tree:
    """Nodes by parent and token: siblings with one token are one node."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self._nodes: dict[tuple[int, int], int] = {}

    def add(self, parent: int, token: int) -> int:
        node = self._nodes.setdefault((parent, token), len(self.tokens))
        if node == len(self.tokens):
            self.tokens.append(token)
            self.parents.append(parent)
        return node


class LookaheadProposer:
    """Half of a draft's nodes are the window, the others candidates from the pool."""

    name = "lookahead"
    reason: str | None = None

    def __init__(self) -> None:
        self._pool = NgramPool()
        self._window: list[list[int]] = [[] for _ in range(LEVELS)]  # LEVELS × W tokens; [0][0] is the pending token
        self._cells: list[list[int]] = []  # LEVELS × W nodes of the last draft
        self._nodes = 0  # of the last draft

    def propose(self, committed: Sequence[int], limit: int) -> Draft | None:
        columns = (limit // 2 + 1) // LEVELS
        if columns < 1:
            self.reason = f"lookahead: a draft of {limit} has no room for a window"
            return None
        self._fill(committed, columns)
        tree = _Tree()
        for gram in self._pool.after(committed[-1]):
            if len(tree.tokens) + len(gram) + LEVELS * columns - 1 > limit:
                break
            node = ROOT
            for token in gram:
                node = tree.add(node, token)
        self._cells = self._place(tree, columns)
        self._nodes = len(tree.tokens)
        return Draft(tuple(tree.tokens), tuple(tree.parents), (None,) * self._nodes, self.name, indivisible=True)

    def checked(self, draft: Draft, logits: Tensor) -> None:
        """The target's logits (1 + N, V) for the rows of the draft: the window moves on by one iteration."""
        if len(draft) != self._nodes or draft.source != self.name:
            return
        new = logits[[node + 1 for node in self._cells[-1]]].argmax(-1).tolist()
        columns = len(new)
        for column, token in enumerate(new):
            levels = [row[column] for row in self._window]
            self._pool.add(levels[0], (*levels[1:], token))
        self._window = [[*row[:columns]] for row in (*self._window[1:], new)]

    def observe(self, tokens: Sequence[int], hidden: Tensor | None, start: int) -> None:
        """Nothing to do: what the target makes up is read from `checked`."""

    def rollback(self, length: int) -> None:
        """Nothing to do: guesses are not tied to a place."""

    def _fill(self, committed: Sequence[int], columns: int) -> None:
        """Cells that have no guess yet get tokens of the text, and the first cell the pending one."""
        for level, row in enumerate(self._window):
            for column in range(len(row), columns):
                row.append(committed[-1 - (column + level) % len(committed)])
        self._window[0][0] = committed[-1]

    def _place(self, tree: _Tree, columns: int) -> list[list[int]]:
        """The node of every cell."""
        cells: list[list[int]] = []
        for level, row in enumerate(self._window):
            nodes: list[int] = []
            for column in range(columns):
                if level:
                    nodes.append(tree.add(cells[-1][column], row[column]))
                else:
                    nodes.append(tree.add(nodes[-1], row[column]) if column else ROOT)
            cells.append(nodes)
        return cells
