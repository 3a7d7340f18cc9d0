"""How a draft model chooses what to propose, so that the acceptance rule stays exact and agrees as often as it can.

Knows: the draft's logits, the one pipeline of transforms, and which noise is whose. Does not know: models, caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from specgen.options import AcceptName
from specgen.sampling import Purpose, Sampler


@dataclass(frozen=True, slots=True)
class Child:
    """One continuation of a place."""

    token: int
    probs: Tensor | None  # (V,) draft_probs that it was drawn from; None = chosen


class Chooser(Protocol):
    """The continuations of one place, the best first. `path`: draft tokens between the committed text and here."""

    def __call__(self, logits: Tensor, path: Sequence[int], position: int, width: int) -> list[Child]:
        """At most `width` ≥ 1 distinct children from the draft's logits (≥ V,)."""
        ...


class SharedNoise:
    """With the noise that the target will use at this position: the likeliest tokens to be the target's own sample.

    The first child is the draft's own sample under coupling (2408.07978); the others are those that would have won
    without it. All are functions of prefix and seed, hence point masses to any rule.
    """

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def __call__(self, logits: Tensor, path: Sequence[int], position: int, width: int) -> list[Child]:
        sampler = self._sampler
        best = sampler.token(logits, path, position)
        if width == 1:
            return [Child(best, None)]
        if sampler.options.temperature == 0.0:
            ranked = sampler.adjust(logits, path).topk(width).indices.tolist()
        else:
            ranked = sampler.order(sampler.probs(logits, path), position, Purpose.TOKEN, width)
        return [Child(token, None) for token in dict.fromkeys([best, *ranked])][:width]


class OwnNoise:
    """Independent draws, without replacement among siblings, each with the distribution that it was drawn from."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._greedy = SharedNoise(sampler)

    def __call__(self, logits: Tensor, path: Sequence[int], position: int, width: int) -> list[Child]:
        sampler = self._sampler
        if sampler.options.temperature == 0.0:
            return self._greedy(logits, path, position, width)  # nothing is drawn
        left = sampler.probs(logits, path)
        children = []
        for token in sampler.order(left, position, Purpose.DRAFT, width):
            children.append(Child(token, left))
            left = left.clone()
            left[token] = 0.0
            left = left / left.sum()
        return children


CHOOSERS: dict[AcceptName, type[SharedNoise] | type[OwnNoise]] = {
    "coupled": SharedNoise,
    "rejection": OwnNoise,
    "typical": SharedNoise,
}
"""What a draft model does under each acceptance rule."""
