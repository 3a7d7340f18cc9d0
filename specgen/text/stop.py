"""Stop strings: text goes in as it comes, text that cannot be part of one comes out.

Knows: strings. Does not know: tokens, or why an answer should end.
The stop string whose last character comes first ends the text; of several that end with the same character, the
longest. So the result does not depend on how the text was cut into pieces. Search: Aho and Corasick 1975, one step per
character, however many strings there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopHit:
    text: str  # to be shown: neither a stop string nor anything that may become one is in it
    stopped: bool


class StopScanner:
    """Holds back the longest end of the text that may still become a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string would end every answer"
        self.active = bool(stops)
        self._stopped = False
        self._held = ""  # spells the way from the root to the present node
        self._node = 0
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._match = [0]  # length of the longest stop string that ends at a node, 0: none
        self._fallback = [0]
        for stop in stops:
            self._add(stop)
        self._link()

    def _add(self, stop: str) -> None:
        node = 0
        for letter in stop:
            if letter not in self._next[node]:
                self._next[node][letter] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[node] + 1)
                self._match.append(0)
                self._fallback.append(0)
            node = self._next[node][letter]
        self._match[node] = len(stop)

    def _link(self) -> None:
        """Give every node the longest proper end of its string that is a node too, nodes near the root first."""
        queue = list(self._next[0].values())
        for node in queue:
            for letter, child in self._next[node].items():
                self._fallback[child] = self._step(self._fallback[node], letter)
                self._match[child] = self._match[child] or self._match[self._fallback[child]]
                queue.append(child)

    def _step(self, node: int, letter: str) -> int:
        while letter not in self._next[node]:
            if node == 0:
                return 0
            node = self._fallback[node]
        return self._next[node][letter]

    def _walk(self, text: str) -> Iterator[int]:
        node = self._node
        for letter in text:
            node = self._step(node, letter)
            yield node

    def push(self, text: str) -> StopHit:
        """Take more text; once stopped, all further text is swallowed."""
        if self._stopped or not self.active:
            return StopHit("" if self._stopped else text, self._stopped)
        whole = self._held + text
        for end, node in enumerate(self._walk(text), start=len(self._held) + 1):
            self._node = node
            if self._match[node]:
                self._stopped, self._held = True, ""
                return StopHit(whole[: end - self._match[node]], True)
        safe = len(whole) - self._depth[self._node]
        self._held = whole[safe:]
        return StopHit(whole[:safe], False)

    def first_stop(self, pieces: Sequence[str]) -> int | None:
        """The index of the piece that would complete a stop string if all were pushed in turn. Changes nothing."""
        index_of = [index for index, piece in enumerate(pieces) for _ in piece]
        for index, node in zip(index_of, self._walk("".join(pieces)), strict=True):
            if self._match[node]:
                return index
        return None

    def flush(self) -> str:
        """What is held back, at the end of the text; nothing after a stop."""
        held, self._held, self._node = self._held, "", 0
        return held
