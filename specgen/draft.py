"""The candidates of one cycle.

Knows: the tree that a proposer hands to the loop. Does not know: where the candidates come from or who accepts them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

ROOT = -1
"""Parent of a node that follows the pending token directly."""


@dataclass(frozen=True, slots=True)
class Draft:
    """N candidates. Node i follows node `parents[i]` (< i), or the pending token when that is `ROOT`.

    A chain is the tree with `parents[i] == i - 1`. Siblings carry distinct tokens.
    """

    tokens: tuple[int, ...]  # N
    parents: tuple[int, ...]  # N
    probs: tuple[Tensor | None, ...]  # N × (V,) draft_probs that the node was drawn from; None = chosen, a point mass
    source: str = ""  # which proposer, for the records
    match: int = 0  # tokens of context that the draft rests on, for the controller; 0 = the proposer cannot say
    # How sure the proposer was of its first level, 0 … 1: a function of the prefix alone. Drafts may be dropped for it,
    # and dropping one for what it happened to draw would change the distribution under `rejection`.
    confidence: float | None = None
    indivisible: bool = False  # of no use to its proposer when it is cut short

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.parents) == len(self.probs) > 0
        assert self.is_chain or all(ROOT <= parent < node for node, parent in enumerate(self.parents))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(ROOT, len(self.parents) - 1))

    def children(self, node: int) -> list[int]:
        """The nodes that follow `node` (ROOT for the first level), in proposal order."""
        return [child for child, parent in enumerate(self.parents) if parent == node]

    @classmethod
    def chain(
        cls, tokens: Sequence[int], probs: Sequence[Tensor | None] | None = None, *, source: str = "", match: int = 0
    ) -> Draft:
        """A linear draft of γ = len(tokens) candidates."""
        count = len(tokens)
        return cls(tuple(tokens), tuple(range(-1, count - 1)), tuple(probs or [None] * count), source, match)

    def first(self, count: int) -> Draft:
        """The first `count` nodes (parents come before children, so what is kept is a tree too)."""
        kept = (self.tokens[:count], self.parents[:count], self.probs[:count])
        return Draft(*kept, self.source, self.match, self.confidence, self.indivisible)

    @property
    def depths(self) -> list[int]:
        """The level of each node, 1 for those that follow the pending token."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return depths

    @property
    def depth(self) -> int:
        """Levels of the tree: γ of a chain."""
        return len(self.level_sizes)

    @property
    def width(self) -> int:
        """Continuations of the pending token: 1 for a chain."""
        return self.parents.count(ROOT)

    @property
    def level_sizes(self) -> list[int]:
        """For each level, how many leading nodes come before the first that is deeper."""
        if self.is_chain:
            return list(range(1, len(self.tokens) + 1))
        sizes: list[int] = []
        for node, depth in enumerate(self.depths):
            if depth > len(sizes) + 1:
                sizes.append(node)
        return [*sizes, len(self)]
