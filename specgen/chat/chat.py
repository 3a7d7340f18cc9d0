"""One conversation with one model: messages in, events out, every committed token on its way to disk.

Knows: how a turn is asked, kept, undone; what happens when the context is full. Does not know: terminals, flags.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, cast

from specgen.chat import settings
from specgen.chat.conversation import Conversation, Exchange
from specgen.chat.records import (
    SCHEMA,
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
    Undone,
)
from specgen.chat.transcript import Transcript
from specgen.chat.wording import NextPrompt, next_prompt
from specgen.errors import ContextFullError, SpecgenError, UsageError
from specgen.events import CycleDone, Event, Finished, FinishReason
from specgen.options import SEED_LIMIT, RunOptions, SamplingOptions
from specgen.prompt import Prompt
from specgen.text.answer import AnswerText
from specgen.text.shield import shield
from specgen.text.think import ThinkSplitter, opens_thought

if TYPE_CHECKING:
    from specgen.session import Cancel, Session

OnFull = Literal["stop", "slide", "summarise-oldest"]

REPLY_SHARE = 4
"""A prompt should leave a quarter of the context (or what --max-tokens says) for the reply."""
SUMMARY_TOKENS = 160
"""At most, and at most an eighth of the context."""
SUMMARY_REQUEST = "Summarise the following conversation in a few sentences. Keep names, numbers and decisions.\n\n"


class SessionFormat:
    """Implements `wording.Format` for a loaded model."""

    def __init__(self, session: Session, options: RunOptions) -> None:
        self.ends: Collection[int] = session.tokenizer.eos_ids
        self._session = session
        self._think = options.think

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        return self._session.render(messages, self._think)

    def shown(self, text: str) -> str:
        return shield(text, self._session.tokenizer.special_strings)

    def encode(self, rendered: str) -> list[int]:
        return self._session.tokenizer.encode_chat(rendered)

    def joins(self, rendered: str) -> bool:
        # A SentencePiece tokenizer puts a space before every text that does not begin with a special token.
        tokenizer = self._session.tokenizer
        return not tokenizer.prefixes_space or rendered.startswith(tokenizer.special_strings)


@dataclass(frozen=True, slots=True)
class Setup:
    """How a conversation is begun or resumed."""

    options: RunOptions
    on_full: OnFull
    model: str  # what --model would say
    explicit: frozenset[str] = frozenset()  # settings that count although the conversation had others


@dataclass(slots=True)
class Chat:
    """`notes` takes one line about what the user should know, as it happens."""

    session: Session
    transcript: Transcript
    conversation: Conversation
    options: RunOptions
    on_full: OnFull
    notes: Callable[[str], None]

    @classmethod
    def begin(
        cls, session: Session, saved: tuple[Transcript, Sequence[Record]], setup: Setup, notes: Callable[[str], None]
    ) -> Chat:
        """A new conversation, or the one that the transcript holds, with the settings it had."""
        transcript, records = saved
        chat = cls(session, transcript, Conversation.of(records), setup.options, setup.on_full, notes)
        if not records:
            chat._record(Opened(SCHEMA, setup.model, session.loaded.digest))
        elif chat.conversation.digest != session.loaded.digest:
            chat._record(ModelChanged(setup.model, session.loaded.digest))
        known = chat.conversation.settings
        chat.use(settings.from_json(setup.options, {name: known[name] for name in known if name not in setup.explicit}))
        chat._close_torn_reply()
        return chat

    @property
    def context_tokens(self) -> tuple[int, int]:
        """(used, limit)."""
        used = len(self.conversation.context_ids(self.session.tokenizer.eos_ids))
        return used, self.session.engine.cache.capacity

    def use(self, options: RunOptions) -> None:
        """Settings for what is asked from now on."""
        self.options = options
        for name, value in settings.differing(options, self.conversation.settings).items():
            self._record(SettingChanged(name, value))

    def use_model(self, session: Session, model: str) -> None:
        """`model`: what --model would say."""
        self.session = session
        self._record(ModelChanged(model, session.loaded.digest))

    def close(self) -> None:
        """The file of a conversation in which nothing was said does not stay."""
        self.transcript.close(remove=not self.transcript.said_something)

    def set_system(self, text: str | None) -> None:
        self._record(SystemSet(text))

    def clear(self) -> None:
        self._record(Cleared())

    def undo(self) -> Exchange:
        """Take back the last exchange. UsageError when there is none."""
        last = self.conversation.last
        if last is None:
            raise UsageError("nothing was said yet")
        self._record(Undone())
        return last

    def ask(self, user: str, cancel: Cancel, *, seed: int | None = None) -> Iterator[Event]:
        """The events of one reply. What is committed is recorded before it is yielded; a reply that is cancelled, or
        whose reader goes away, stays as far as it came. ContextFullError when `user` does not fit at all."""
        prompt = self._fitting(user, cancel)
        if prompt.notice is not None:
            self.notes(f"{prompt.notice}: the conversation is read again")
        seed = self.options.sampling.seed if seed is None else seed
        return self._reply(
            user, prompt, replace(self.options, sampling=replace(self.options.sampling, seed=seed)), cancel
        )

    def retry(self, cancel: Cancel) -> Iterator[Event]:
        """Another reply to the last message: the next seed's."""
        last = self.undo()
        if self.options.sampling.temperature == 0.0:
            self.notes("at temperature 0 the reply is always the same: /set temperature 0.8")
        return self.ask(last.user, cancel, seed=(last.seed + 1) % SEED_LIMIT)

    def _reply(self, user: str, prompt: NextPrompt, options: RunOptions, cancel: Cancel) -> Iterator[Event]:
        events = self.session.generate(Prompt(prompt.ids, thinking=opens_thought(prompt.rendered)), options, cancel)
        self._record(Asked(user, prompt.added, prompt.fresh, options.sampling.seed))
        with closing(cast("Any", events)):
            try:
                for event in events:
                    self._keep(event)
                    yield event
            finally:
                self._close_torn_reply()

    def _keep(self, event: Event) -> None:
        if isinstance(event, CycleDone) and event.tokens:
            self._record(Said(event.tokens))
        elif isinstance(event, Finished):
            self._record(Replied(event.text, event.thinking, str(event.reason)))

    def _close_torn_reply(self) -> None:
        """A reply whose end is not recorded (the process was killed, the view failed) ends where it is."""
        last = self.conversation.last
        if last is None or last.reason is not None:
            return
        plain = self.options.think == "show" or self.options.constraint is not None
        text = AnswerText(
            self.session.tokenizer,
            (),
            turn=self.options.constraint is None,
            thoughts=None if plain else ThinkSplitter(),
        )
        list(text.pieces(last.reply_ids, 0))
        list(text.flush())
        self._record(Replied(text.text, text.thinking, str(FinishReason.CANCELLED)))

    def _record(self, record: Record) -> None:
        self.conversation.apply(record)
        before = self.transcript.trouble
        self.transcript.append(record)
        if self.transcript.trouble != before:
            trouble = self.transcript.trouble
            self.notes("the conversation is saved again" if trouble is None else f"not saved: {trouble}")

    # When the context is full.

    def _fitting(self, user: str, cancel: Cancel) -> NextPrompt:
        """The next prompt, after making room where there is too little and the policy says so."""
        prompt = self._next(user)
        capacity = self.session.engine.cache.capacity
        if self.on_full != "stop" and self.conversation.exchanges and len(prompt.ids) + self._room() > capacity:
            count = self._droppable(user)
            if count:
                self._drop(count, cancel)
                prompt = self._next(user)
        if len(prompt.ids) >= capacity:
            raise ContextFullError(
                f"the conversation would have {len(prompt.ids)} tokens and the context holds {capacity}",
                hint="/undo or /clear, a shorter message, or start with --on-full slide",
            )
        return prompt

    def _next(self, user: str, conversation: Conversation | None = None) -> NextPrompt:
        return next_prompt(conversation or self.conversation, user, SessionFormat(self.session, self.options))

    def _room(self) -> int:
        """Tokens that a reply should find."""
        share = self.session.engine.cache.capacity // REPLY_SHARE
        return share if self.options.max_tokens is None else min(share, self.options.max_tokens)

    def _summary_tokens(self) -> int:
        return min(SUMMARY_TOKENS, self.session.engine.cache.capacity // 8)

    def _droppable(self, user: str) -> int:
        """How many of the oldest exchanges to drop so that half of the context is free: dropping means reading all
        that is left again, so it should be rare."""
        exchanges = self.conversation.exchanges
        capacity = self.session.engine.cache.capacity
        summary = self._summary_tokens() if self.on_full == "summarise-oldest" else 0
        for count in range(1, len(exchanges)):
            kept = replace(self.conversation, exchanges=exchanges[count:], stale="dropped")
            if len(self._next(user, kept).ids) + summary <= capacity // 2:
                return count
        return len(exchanges)

    def _drop(self, count: int, cancel: Cancel) -> None:
        """SpecgenError when the user stopped the summary: nothing is dropped then."""
        summary = None
        if self.on_full == "summarise-oldest":
            self.notes(f"the context is full: the oldest {count} messages are being summarised")
            summary = self._summary(self.conversation.exchanges[:count], cancel)
            if cancel.is_set():
                raise SpecgenError("stopped before the message was sent")
        else:
            self.notes(f"the context is full: the oldest {count} messages are left out")
        self._record(Dropped(count, summary))

    def _summary(self, exchanges: Sequence[Exchange], cancel: Cancel) -> str | None:
        """What was said, in the model's words; what does not fit into one prompt is left out, the oldest first."""
        earlier = self.conversation.summary
        text = "" if earlier is None else f"Before: {earlier}\n"
        text += "".join(f"User: {one.user}\nAssistant: {one.reply}\n" for one in exchanges)
        most = self._summary_tokens()
        budget = self.session.engine.cache.capacity - most - 1
        while True:
            prompt = self.session.chat_ids([{"role": "user", "content": SUMMARY_REQUEST + text}], "off")
            if len(prompt.ids) <= budget:
                break
            if len(text) < 2:
                return earlier
            kept = int(len(text) * min(0.9, budget / len(prompt.ids)))
            text = text[len(text) - kept :]
        options = RunOptions(SamplingOptions(), max_tokens=most)
        finished = None
        for event in self.session.generate(prompt, options, cancel):
            finished = event
        assert isinstance(finished, Finished)
        return finished.text.strip() or earlier
