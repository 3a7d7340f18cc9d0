"""From a conversation to the next prompt: only what is new is put behind the tokens that are there.

Knows: renderings of a chat template and their difference. Does not know: models, files. What a model generated stays as
it generated it: a reply is never tokenised again, unless the template itself rewrites earlier replies; then the context
is rendered anew, and that is told.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from specgen.chat.conversation import Conversation

REWRITTEN = "the chat template rewrites earlier replies"
THOUGHTS = "thoughts are left out of the context once they are thought"


class Format(Protocol):
    """How one model writes conversations."""

    ends: Collection[int]  # tokens that end a reply

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The chat template's text, up to where the model's turn begins."""
        ...

    def shown(self, text: str) -> str:
        """A message's text as it stands in a rendering."""
        ...

    def encode(self, rendered: str) -> list[int]: ...

    def joins(self, rendered: str) -> bool:
        """Whether a rendering's tokens may be put behind others without changing for it."""
        ...


@dataclass(frozen=True, slots=True)
class NextPrompt:
    ids: tuple[int, ...]  # the whole context
    added: tuple[int, ...]  # what of it is new; all when `fresh`
    fresh: bool
    rendered: str
    notice: str | None = None  # why what was there is read again


def next_prompt(conversation: Conversation, user: str, style: Format) -> NextPrompt:
    """The prompt that asks `user` next."""
    before = conversation.messages()
    first = not conversation.exchanges
    rendered = style.render([*before, {"role": "user", "content": conversation.as_read(user, first=first)}])
    why = None if first else conversation.stale or _obstacle(conversation)
    if not first and why is None:
        tail = _tail(rendered, before, style)
        if tail is not None:
            added = tuple(style.encode(tail))
            return NextPrompt((*_kept(conversation, style.ends), *added), added, False, rendered)
        why = REWRITTEN
    ids = tuple(style.encode(rendered))
    return NextPrompt(ids, ids, True, rendered, why)


def _obstacle(conversation: Conversation) -> str | None:
    last = conversation.last
    return THOUGHTS if last is not None and last.thinking else None


def _kept(conversation: Conversation, ends: Collection[int]) -> list[int]:
    last = conversation.last
    assert last is not None
    ids = conversation.context_ids(ends)
    return ids[: len(ids) - len(last.reply_ids) + len(last.continued(ends))]


def _tail(rendered: str, before: Sequence[Mapping[str, str]], style: Format) -> str | None:
    """What the template writes behind the last reply; None when the rendering does not hold what went before."""
    *earlier, reply = before
    prefix = style.render(earlier)
    if not rendered.startswith(prefix):
        return None
    rest, text = rendered[len(prefix) :], style.shown(reply["content"])
    for spelled in (text, text.rstrip(), text.lstrip(), text.strip()):  # templates often trim
        if rest.startswith(spelled):
            tail = rest[len(spelled) :]
            return tail if style.joins(tail) else None
    return None
