"""The text of one answer as its tokens are committed, and where it ends.

Knows: EOS tokens, stop strings, bytes of characters that are not whole yet, thoughts before the answer. Does not know:
models, drafts.
The loop asks `cut` before it commits, so that text, token ids, cache and counters end at one boundary: the token that
is EOS or that completes a stop string is the last one committed; neither EOS nor the stop string is in the text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from specgen.events import FinishReason, Piece
from specgen.text.stop import StopScanner
from specgen.text.stream import TextStream
from specgen.text.think import Part, ThinkSplitter
from specgen.text.tokenizer import Tokenizer


class AnswerText:
    """Implements `engine.Cut`. `token_ids`, `text` and `thinking` hold what was committed so far.

    `turn`: the answer is a turn of its own, so a tokenizer's leading space is not part of it; else it continues a text.
    `thoughts`: takes reasoning apart from the answer; without it all is answer.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str],
        *,
        ignore_eos: bool = False,
        turn: bool = False,
        thoughts: ThinkSplitter | None = None,
    ) -> None:
        self.token_ids: list[int] = []
        self._parts: list[str] = []
        self._thoughts: list[str] = []
        self._splitter = thoughts
        self._ends = frozenset() if ignore_eos else frozenset(tokenizer.eos_ids)
        self._special = tokenizer.special_ids
        self._token_bytes = tokenizer.token_bytes
        self._stream = TextStream(self._visible_bytes, at_start=turn and tokenizer.prefixes_space)
        self._stops = StopScanner(stops)
        self._stopped = False

    @property
    def text(self) -> str:
        return "".join(self._parts)

    @property
    def thinking(self) -> str:
        return "".join(self._thoughts)

    def _visible_bytes(self, token: int) -> bytes:
        """Special tokens steer the model and are no text."""
        return b"" if token in self._special else self._token_bytes(token)

    def cut(self, tokens: Sequence[int]) -> tuple[int, FinishReason | None]:
        """(how many of `tokens` may be committed, why the answer ends there or None). Changes nothing."""
        eos = next((index for index, token in enumerate(tokens) if token in self._ends), None)
        if self._stops.active:
            stop = self._stops.first_stop(self._stream.preview(tokens))
            if stop is not None and (eos is None or stop < eos):
                return stop + 1, FinishReason.STOP
        return (len(tokens), None) if eos is None else (eos + 1, FinishReason.EOS)

    def pieces(self, tokens: Sequence[int], accepted: int) -> Iterator[Piece]:
        """Committed tokens, the first `accepted` of them drafted → the text that is whole now."""
        self.token_ids.extend(tokens)
        for part, drafted in ((tokens[:accepted], True), (tokens[accepted:], False)):
            yield from self._emit(self._stream.push(part), drafted)

    def flush(self) -> Iterator[Piece]:
        """What was held back, at the end of the answer."""
        yield from self._emit(self._stream.flush(), False)
        if not self._stopped:
            yield from self._keep(self._stops.flush(), False)
        if self._splitter is not None:
            yield from self._pieces(self._splitter.flush(), False)

    def _emit(self, text: str, drafted: bool) -> Iterator[Piece]:
        if self._stopped or not text:
            return
        hit = self._stops.push(text)
        self._stopped = hit.stopped
        yield from self._keep(hit.text, drafted)

    def _keep(self, text: str, drafted: bool) -> Iterator[Piece]:
        yield from self._pieces([Part(text, False)] if self._splitter is None else self._splitter.push(text), drafted)

    def _pieces(self, parts: Sequence[Part], drafted: bool) -> Iterator[Piece]:
        for text, thinking in parts:
            if text:
                (self._thoughts if thinking else self._parts).append(text)
                yield Piece(text, drafted, thinking)
