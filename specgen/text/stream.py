"""Committed tokens → text, whole characters only.

Knows: UTF-8. Does not know: vocabularies (it is given `token_bytes`), stop strings, terminals.
A character's bytes may be split over tokens (emoji, CJK); they are held back until the character is whole. A combining
mark or the next part of a joined emoji is a character of its own and comes when it is whole: waiting for the end of a
grapheme would hold back every last letter, and a terminal joins them by itself.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence


class TextStream:
    """The concatenation of all pushes and the flush equals the decoding of all bytes with errors="replace".

    `at_start`: the text begins here, so the space that SentencePiece puts before every text is dropped. Leave it out
    where the text continues a prompt.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], *, at_start: bool = False) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = at_start

    def push(self, tokens: Sequence[int]) -> str:
        """The text that these tokens complete."""
        return self._without_first_space(self._decoder.decode(b"".join(map(self._token_bytes, tokens))))

    def preview(self, tokens: Sequence[int]) -> list[str]:
        """What pushing `tokens` one by one would return. Changes nothing."""
        state, at_start = self._decoder.getstate(), self._at_start
        pieces = [self.push((token,)) for token in tokens]
        self._decoder.setstate(state)
        self._at_start = at_start
        return pieces

    def flush(self) -> str:
        """What is left at the end: U+FFFD where a character never became whole."""
        return self._without_first_space(self._decoder.decode(b"", final=True))

    def _without_first_space(self, text: str) -> str:
        if not self._at_start or not text:
            return text
        self._at_start = False
        return text.removeprefix(" ")
