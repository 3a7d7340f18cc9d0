"""Plain decoding: the proposer that never has a draft."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specgen.draft import Draft

if TYPE_CHECKING:
    from torch import Tensor


class NoProposer:
    """`--proposer none`."""

    name = "none"
    reason: str | None = None

    def propose(self, committed: Sequence[int], limit: int) -> Draft | None:
        return None

    def observe(self, tokens: Sequence[int], hidden: Tensor | None, start: int) -> None:
        pass

    def rollback(self, length: int) -> None:
        pass
