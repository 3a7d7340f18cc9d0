"""A reasoning model's thoughts, apart from its answer.

Knows: `<think>` … `</think>` at the beginning of an answer, as text. Does not know: tokens, templates, who sees what.
The tag counts only where the answer begins: an answer that merely speaks of it is left alone.
"""

from __future__ import annotations

from typing import NamedTuple

OPEN, CLOSE = "<think>", "</think>"


THINK_VARIABLES: dict[str, dict[str, object]] = {
    "on": {"enable_thinking": True, "thinking": True},
    "off": {"enable_thinking": False, "thinking": False},
}
"""What chat templates are told: Qwen 3 and SmolLM 3 ask for the first name, Granite and DeepSeek for the second."""


def opens_thought(rendered: str) -> bool:
    """Whether a rendered prompt ends inside a thought."""
    return rendered.rstrip().endswith(OPEN)


class Part(NamedTuple):
    text: str
    thinking: bool


class ThinkSplitter:
    """Takes text as it comes; the parts do not depend on how it was cut. `inside`: the prompt opened the thought."""

    def __init__(self, *, inside: bool = False) -> None:
        self._step = self._thought if inside else self._beginning
        self._held = ""

    def push(self, text: str) -> list[Part]:
        """What is certain now; a tag that may still be coming is held back."""
        self._held += text
        return [part for part in self._step() if part.text]

    def flush(self) -> list[Part]:
        """What was held back, at the end of the answer."""
        held, self._held = self._held, ""
        return [Part(held, self._step == self._thought)] if held and self._step != self._gap else []

    def _beginning(self) -> list[Part]:
        start = self._held.lstrip()
        if start.startswith(OPEN):
            self._step, self._held = self._thought, start.removeprefix(OPEN)
            return self._step()
        return [] if OPEN.startswith(start) else self._open()

    def _thought(self) -> list[Part]:
        thought, closed, rest = self._held.partition(CLOSE)
        if closed:
            self._step, self._held = self._gap, rest
            return [Part(thought, True), *self._step()]
        length = next((n for n in range(len(CLOSE) - 1, 0, -1) if thought.endswith(CLOSE[:n])), 0)
        self._held = thought[len(thought) - length :]
        return [Part(thought[: len(thought) - length], True)]

    def _gap(self) -> list[Part]:
        """White space between thought and answer belongs to neither."""
        self._held = self._held.lstrip()
        return self._open() if self._held else []

    def _open(self) -> list[Part]:
        self._step = self._answer
        return self._answer()

    def _answer(self) -> list[Part]:
        text, self._held = self._held, ""
        return [Part(text, False)]
