"""What was said so far: a fold over the records of a conversation.

Knows: exchanges, and the tokens that they are. Does not know: templates, files, models. The live conversation and a
resumed one are the same fold over the same records, so they cannot differ.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

from specgen.chat.records import (
    Asked,
    Cleared,
    Dropped,
    ModelChanged,
    Opened,
    Record,
    Replied,
    Said,
    SettingChanged,
    SystemSet,
    TranscriptError,
    Undone,
)
from specgen.events import FinishReason

SUMMARY = "[Summary of the conversation before this message: {summary}]\n\n"


@dataclass(frozen=True, slots=True)
class Exchange:
    """A message and its reply."""

    user: str
    prompt_ids: tuple[int, ...]  # see `Asked`
    fresh: bool
    seed: int
    reply_ids: tuple[int, ...] = ()
    reply: str = ""  # without thoughts
    thinking: str = ""
    reason: str | None = None  # None: the reply goes on, or the process was killed

    def continued(self, ends: Collection[int]) -> tuple[int, ...]:
        """The reply's tokens without the one that ended it, which the template writes itself."""
        ended = self.reason == FinishReason.EOS and self.reply_ids and self.reply_ids[-1] in ends
        return self.reply_ids[:-1] if ended else self.reply_ids


@dataclass(slots=True)
class Conversation:
    """`apply` is the only way to change it."""

    model: str = ""
    digest: str = ""
    system: str | None = None
    summary: str | None = None  # of exchanges that were dropped
    settings: dict[str, str] = field(default_factory=dict)  # name → JSON
    exchanges: list[Exchange] = field(default_factory=list)
    stale: str | None = None  # why the context must be rendered anew

    @classmethod
    def of(cls, records: Iterable[Record]) -> Conversation:
        conversation = cls()
        for record in records:
            conversation.apply(record)
        return conversation

    @property
    def last(self) -> Exchange | None:
        return self.exchanges[-1] if self.exchanges else None

    def context_ids(self, ends: Collection[int]) -> list[int]:
        """Every token in the context, the last reply included."""
        ids: list[int] = []
        said: tuple[int, ...] = ()
        for exchange in self.exchanges:
            ids = [] if exchange.fresh else [*ids, *said]
            ids += exchange.prompt_ids
            said = exchange.continued(ends)
        return [*ids, *(self.exchanges[-1].reply_ids if self.exchanges else ())]

    def messages(self) -> list[dict[str, str]]:
        """As a chat template wants them."""
        found = [] if self.system is None else [{"role": "system", "content": self.system}]
        for index, exchange in enumerate(self.exchanges):
            found.append({"role": "user", "content": self.as_read(exchange.user, first=index == 0)})
            found.append({"role": "assistant", "content": exchange.reply})
        return found

    def as_read(self, user: str, *, first: bool) -> str:
        """A message as the model reads it: a summary of what was dropped stands before the first one. (Not in the
        system message, which some templates do not have.)"""
        return SUMMARY.format(summary=self.summary) + user if first and self.summary is not None else user

    def apply(self, record: Record) -> None:
        """TranscriptError for a record that cannot come here."""
        match record:
            case Opened(model=model, digest=digest):
                self.model, self.digest = model, digest
            case ModelChanged(model=model, digest=digest):
                self.model, self.digest, self.stale = model, digest, "the model changed"
            case SystemSet(text=text):
                self.system, self.stale = text, "the system message changed"
            case SettingChanged(name=name, value=value):
                self.settings[name] = value
            case Asked(user=user, ids=ids, fresh=fresh, seed=seed):
                self._ask(Exchange(user, ids, fresh, seed))
            case Said() | Replied():
                self._reply(record)
            case Undone():
                self._undo()
            case Dropped(count=count, summary=summary):
                self._drop(count, summary)
            case Cleared():
                self.exchanges, self.summary = [], None

    def _ask(self, exchange: Exchange) -> None:
        if not exchange.fresh and (self.stale or not self.exchanges):
            raise TranscriptError("a message has no context to stand in")
        self.exchanges.append(exchange)
        self.stale = None

    def _reply(self, record: Said | Replied) -> None:
        last = self.last
        if last is None or last.reason is not None:
            raise TranscriptError("a reply has no message before it")
        if isinstance(record, Said):
            self.exchanges[-1] = replace(last, reply_ids=(*last.reply_ids, *record.ids))
        else:
            self.exchanges[-1] = replace(last, reply=record.text, thinking=record.thinking, reason=record.reason)

    def _undo(self) -> None:
        if not self.exchanges:
            raise TranscriptError("there is nothing to undo")
        undone = self.exchanges.pop()
        # What it had rendered anew for must be rendered anew again.
        if undone.fresh and self.exchanges:
            self.stale = "an undone message had it rendered anew"

    def _drop(self, count: int, summary: str | None) -> None:
        if count > len(self.exchanges):
            raise TranscriptError("more exchanges are dropped than there are")
        del self.exchanges[:count]
        self.summary = summary
        self.stale = "the oldest messages were dropped"
