"""One chat on one terminal: a reply shown as it comes, and what is said around it.

Knows: views, signals, notes that must wait for the end of a reply. Does not know: flags, keys, commands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from specgen.cancel import Cancel
from specgen.cli.console import Console, descriptor
from specgen.cli.interrupt import interrupts
from specgen.cli.report import Outcome
from specgen.cli.run import tell, tidy, watch
from specgen.cli.screen import terminal_size, unechoed
from specgen.cli.view import View, choose_view, write_bytes
from specgen.errors import SpecgenError
from specgen.text.sanitise import sanitise

if TYPE_CHECKING:
    from specgen.chat.chat import Chat
    from specgen.session import Session

RECALLED_LINES = 12
"""Of the last reply, shown when a conversation is resumed."""


@dataclass(frozen=True, slots=True)
class TurnCount:
    """What one turn cost in tokens."""

    prefilled: int
    reused: int
    completed: int


@dataclass(slots=True)
class Talk:
    console: Console
    chat: Chat
    load: Callable[[str], tuple[Session, str]]  # a model's name → it in memory, and what --model would say
    markdown: bool = False
    attached: list[str] = field(default_factory=list)  # files for the next message
    draft: str = ""  # what the next line begins with
    leaving: bool = False
    outcome: Outcome | None = None  # of the last reply
    turns: list[TurnCount] = field(default_factory=list)
    _answering: bool = False
    _waiting: list[str] = field(default_factory=list)  # notes that came while a reply was shown
    _noted: set[str] = field(default_factory=set)

    def note(self, text: str) -> None:
        """One line now, or behind the reply that is being shown."""
        if self._answering:
            self._waiting.append(text)
        else:
            self.console.note(text)

    def once(self, text: str) -> None:
        """What every answer of a session says again is told once."""
        if text not in self._noted:
            self._noted.add(text)
            self.note(text)

    def say(self, message: str) -> None:
        """Ask the model; a failure that a user can understand ends the turn and not the chat."""
        whole = "\n\n".join([*self.attached, message])
        self.reply(lambda cancel: self.chat.ask(whole, cancel))
        self.attached.clear()

    def reply(self, begin: Callable[[Cancel], Iterator[Any]]) -> None:
        view = choose_view(self.console, whole=self.markdown)
        cancel = Cancel()
        with unechoed(descriptor(self.console.stdin)) as restore, interrupts(cancel.set, lambda: tidy(restore, view)):
            try:
                self._show(view, begin, cancel)
            except SpecgenError as error:
                view.close()
                self.console.error(error.message, error.hint)

    def _show(self, view: View, begin: Callable[[Cancel], Iterator[Any]], cancel: Cancel) -> None:
        events = begin(cancel)
        self._answering = True
        try:
            started, finished = watch(self.once, view, events)
        finally:
            view.close()
            self._answering = False
            self._tell_waiting()
        if self.markdown:
            self._print_markdown(finished.text)
        self.outcome = Outcome(started, finished, self.chat.options, self.chat.session.report())
        record = finished.record
        self.turns.append(TurnCount(record.prefilled_tokens, record.reused_tokens, record.completion_tokens))
        if finished.thinking and self.chat.options.think != "hide":
            words = len(finished.thinking.split())
            self.console.note(f"thought for {words} words (/set think show lets you read along)")
        if self.console.quiet:
            return
        tell(self.console, view, self.outcome, stats=False)

    def _tell_waiting(self) -> None:
        for text in self._waiting:
            self.console.note(text)
        self._waiting.clear()

    def _print_markdown(self, text: str) -> None:
        import rich.console
        from rich.markdown import Markdown

        stdout = self.console.answer()
        columns, _ = terminal_size(descriptor(stdout))
        painter = rich.console.Console(file=stdout, width=columns, no_color=not self.console.can_color(stdout))
        # Links that say one thing and open another are left as text.
        painter.print(Markdown(sanitise(text), hyperlinks=False))

    def show(self, text: str) -> None:
        """Our own words, or saved ones, on the terminal."""
        write_bytes(self.console.answer(), (sanitise(text).rstrip("\n") + "\n").encode("utf-8"))

    def recall(self) -> None:
        """Where a resumed conversation stands."""
        last = self.chat.conversation.last
        if last is None:
            return
        used, limit = self.chat.context_tokens
        count = len(self.chat.conversation.exchanges)
        self.note(f"resumed {self.chat.transcript.name}: {count} messages, {used} of {limit} tokens")
        user, reply = last.user.splitlines() or [""], last.reply.splitlines()
        shown = ["> " + user[0] + (" …" if len(user) > 1 else "")]
        shown += [*(["…"] if len(reply) > RECALLED_LINES else []), *reply[-RECALLED_LINES:]]
        self.show("\n".join(shown))
        if not last.reply:
            self.note("the last message has no reply: /retry answers it")
