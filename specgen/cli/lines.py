"""What a person types: lines with editing, a history that outlives the process, completion of commands.

Knows: prompt-toolkit and keys. Does not know: what a line means. Enter sends; Alt-Enter, Ctrl-J or a backslash before
Enter begin a new line, and a paste keeps its lines.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from specgen.paths import ensure_dir

MAX_HISTORY_BYTES = 1 << 20
MAX_COMPLETED_CHARS = 200
"""A longer line is no command that somebody is typing."""

Words = Callable[[str], Sequence[str]]
"""The words that may stand after a command and the text before the last word."""


class PrivateHistory(FileHistory):
    """Lines of earlier chats in a file that only the user may read. A disk that is full costs the history only."""

    def __init__(self, path: Path) -> None:
        self.trouble: str | None = None
        try:
            ensure_dir(path.parent)
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600))
            _shorten(path)
        except OSError as error:
            self.trouble = error.strerror
        super().__init__(str(path))

    def load_history_strings(self) -> Iterable[str]:
        try:
            return list(super().load_history_strings())
        except OSError as error:
            self.trouble = error.strerror
            return []

    def store_string(self, string: str) -> None:
        try:
            super().store_string(string)
        except OSError as error:
            self.trouble = error.strerror


def _shorten(path: Path) -> None:
    """Keep the newer half of a file that has grown too long; an entry begins with a blank line."""
    data = path.read_bytes()
    if len(data) <= MAX_HISTORY_BYTES:
        return
    rest = data[-MAX_HISTORY_BYTES // 2 :]
    partial = path.with_suffix(f".{os.getpid()}")
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(rest[max(0, rest.find(b"\n\n")) :])
    partial.replace(path)


class CommandCompleter(Completer):
    """`/` and the beginning of a command; behind a command the words that it knows."""

    def __init__(self, commands: Sequence[str], words: dict[str, Words]) -> None:
        self._commands = commands
        self._words = words

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        text = document.text_before_cursor
        if not text.startswith("/") or len(text) > MAX_COMPLETED_CHARS or "\n" in text:
            return []
        command, space, rest = text.partition(" ")
        if not space:
            return [Completion(name, -len(text)) for name in self._commands if name.startswith(text)]
        before, _, word = rest.rpartition(" ")
        words = self._words.get(command)
        known = () if words is None else words(before)
        return [Completion(name, -len(word)) for name in known if name.startswith(word)]


class LineReader:
    """Reads messages. KeyboardInterrupt for Ctrl-C, EOFError for Ctrl-D on an empty line."""

    def __init__(self, history: PrivateHistory, completer: Completer) -> None:
        self.history = history
        self._session: PromptSession[str] = PromptSession(
            history=history,
            completer=completer,
            complete_while_typing=False,
            multiline=True,
            key_bindings=_keys(),
            prompt_continuation="  ",
            reserve_space_for_menu=4,
        )

    def read(self, default: str = "") -> str:
        """One message; `default` is there to be edited."""
        return self._session.prompt("> ", default=default)


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> Any:
        buffer = event.current_buffer
        if buffer.document.char_before_cursor == "\\" and buffer.document.is_cursor_at_the_end:
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("c-j")
    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> Any:
        event.current_buffer.insert_text("\n")

    return keys
