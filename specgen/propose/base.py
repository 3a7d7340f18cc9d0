"""What guesses ahead.

Knows: the interface of a proposer. Does not know: what becomes of a draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from specgen.draft import Draft

if TYPE_CHECKING:
    from torch import Tensor

    from specgen.cache import KVCache
    from specgen.step import StepOut


@dataclass(frozen=True, slots=True)
class Checked:
    """A draft, and the target's step over its rows."""

    draft: Draft | None  # None: only the pending token's row counts
    out: StepOut  # (1 + N) rows
    draft_ms: float = 0.0  # of the time that the whole took, what making the draft took
    reason: str | None = None  # why a draft that was on its way cannot be used


class DeviceDraft(Protocol):
    """A chain that is not made yet: a device makes and checks it without coming back to the host in between. Its length
    is settled, so it is checked whole."""

    def __len__(self) -> int: ...

    def check(self, cache: KVCache) -> Checked:
        """Make and check it. `cache` is the target's, with 1 + len(self) rows reserved; the step's rows are drawn."""
        ...


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


class AnyProposer(Protocol):
    """A `Proposer`, or one that may leave its drafts to a device."""

    name: str

    @property
    def reason(self) -> str | None: ...

    def propose(self, committed: Sequence[int], limit: int) -> Draft | DeviceDraft | None: ...

    def observe(self, tokens: Sequence[int], hidden: Tensor | None, start: int) -> None: ...

    def rollback(self, length: int) -> None: ...


@runtime_checkable
class ReadsRows(Protocol):
    """A proposer that learns from what the target said of its draft, accepted or not."""

    def checked(self, draft: Draft, logits: Tensor) -> None:
        """The target's logits (1 + N, V) for the rows of `draft`."""
        ...
