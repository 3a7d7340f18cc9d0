"""When a kind of draft that was found worthless is tried again: ever more rarely, and never for more than a small share
of the time.

Knows: refusals, and what probes cost. Does not know: γ, drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

SOON, FIRST, MOST = 3, 12, 192
"""A refused kind is tried again after FIRST refusals, then after twice as many, … at most MOST; SOON after a probe that
was accepted."""
LATER = 8
"""A probe that costs more than was saved up is thought of again after so many refusals."""
SHARE = 0.01
"""Of the time spent decoding, what lost probes may take. A probe that is known to cost more than was saved up waits,
and so does the next one after a probe that did."""


class ProbeSchedule:
    def __init__(self) -> None:
        self._refused: dict[Hashable, int] = {}  # since the last probe
        self._patience: dict[Hashable, int] = {}  # refusals before the next probe
        self._saved_ms = 0.0  # what probes may still lose; below 0 when one lost more

    def is_due(self, kind: Hashable, cost_ms: Callable[[], float] = lambda: 0.0) -> bool:
        """The kind is refused once more: whether to try it all the same, at an expected loss of `cost_ms` (which is
        asked for only when it matters)."""
        self._refused[kind] = self._refused.get(kind, 0) + 1
        patience = self._patience.setdefault(kind, FIRST)
        if self._refused[kind] < patience:
            return False
        if self._saved_ms < cost_ms():
            self._refused[kind] = patience - LATER  # it is not asked again in every cycle
            return False
        self._refused[kind] = 0
        self._patience[kind] = min(MOST, 2 * patience)
        return True

    def is_parked(self, kind: Hashable) -> bool:
        """Whether the kind was ever refused."""
        return kind in self._patience

    def take_up(self, kind: Hashable) -> None:
        """The kind pays again."""
        self._refused.pop(kind, None)

    def encourage(self, kind: Hashable) -> None:
        """A probe was accepted: the next one comes soon."""
        assert kind in self._patience
        self._patience[kind] = SOON

    def spent(self, ms: float, *, lost_ms: float) -> None:
        """A cycle took `ms`, of which a probe lost `lost_ms` against plain decoding."""
        self._saved_ms += SHARE * ms - lost_ms

    def new_text(self) -> None:
        """Another answer begins: what was worthless may not be so in it."""
        self._refused.clear()
        self._patience.clear()
