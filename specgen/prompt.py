"""A prompt as the model reads it.

Knows: token ids, and what must be known of them to show the answer. Does not know: text, templates.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prompt:
    ids: tuple[int, ...]
    notices: tuple[str, ...] = ()
    turn: bool = True  # the answer is a chat turn of its own, not the continuation of a text
    thinking: bool = False  # the chat template has opened a thought, which the answer goes on with
