"""Graphics cards that are not there: a system that answers what a test wants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch

from specgen.kernels.cuda import Card, CardLostError, Driver, Version

GB = 10**9


def card(index: int = 0, name: str = "Card", capability: Version = (8, 9), total_bytes: int = 8 * GB) -> Card:
    return Card(index, name, capability, total_bytes)


@dataclass
class FakeSystem:
    """A machine with one good card, unless told otherwise."""

    driver_: Driver | None = field(default_factory=lambda: Driver("570.1", (12, 8)))
    cards_: Sequence[Card] = (card(),)
    built: Version | None = (12, 8)
    archs: Sequence[str] = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_120", "compute_120")
    triton_: str | None = "3.6.0"
    obstacle: tuple[str, str] | None = None
    free_bytes: dict[int, int | str] = field(default_factory=dict)  # by card; text: it does not answer, and says this
    opened: list[int] = field(default_factory=list)  # cards that a context was made on

    def driver(self) -> Driver | None:
        return self.driver_

    def cards(self) -> Sequence[Card]:
        return self.cards_

    def torch_cuda(self) -> Version | None:
        return self.built

    def torch_archs(self) -> Sequence[str]:
        return self.archs

    def triton(self) -> str | None:
        return self.triton_

    def triton_obstacle(self) -> tuple[str, str] | None:
        return self.obstacle

    def memory(self, card: Card) -> tuple[int, int]:
        self.opened.append(card.index)
        free = self.free_bytes.get(card.index, card.total_bytes - GB // 2)
        if isinstance(free, str):
            raise CardLostError(free)
        return free, card.total_bytes


needs_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA card here")
