"""What guesses ahead.

Knows: the interface of a proposer. Does not know: what becomes of a draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from specgen.draft import Draft

if TYPE_CHECKING:
    from torch import Tensor


class Proposer(Protocol):
    """A proposer keeps whatever state it likes about the committed sequence; the loop tells it of every change."""

    name: str
    reason: str | None  # why the last `propose` had nothing, where there is more to say than that

    def propose(self, committed: Sequence[int], limit: int) -> Draft | None:
        """At most `limit` ≥ 1 nodes after `committed`, or None: decode plainly this cycle."""
        ...

    def observe(self, tokens: Sequence[int], hidden: Tensor | None, start: int) -> None:
        """Committed `tokens` are now in slots start … of the target's cache; `hidden` (len(tokens), H) is the target's
        hidden state of each, where the runner gives it. Prefill, plain and speculative cycles look alike."""
        ...

    def rollback(self, length: int) -> None:
        """The session rewound to `length` committed tokens."""
        ...


@runtime_checkable
class ReadsRows(Protocol):
    """A proposer that learns from what the target said of its draft, accepted or not."""

    def checked(self, draft: Draft, logits: Tensor) -> None:
        """The target's logits (1 + N, V) for the rows of `draft`."""
        ...
