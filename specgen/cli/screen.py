"""One terminal: text that grows at the cursor, and a status line under it that is redrawn.

Nothing is ever redrawn but the status line, so the text may be longer than the screen and stays in the scrollback. The
cursor rests at the end of the text; everything below it is ours to erase, also after a resize has re-wrapped it.

Knows: control sequences and cells. Does not know: events. All text given to it is already safe to print.
"""

from __future__ import annotations

import os
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.cells import get_character_cell_size

BEGIN, END = "\x1b[?2026h", "\x1b[?2026l"  # synchronised output: shown as one frame, ignored where unknown
ERASE_BELOW = "\x1b[J"
SAVE, RESTORE = "\x1b7", "\x1b8"
DOWN_OR_SCROLL, UP, DOWN = "\x1bD", "\x1b[A", "\x1b[B"
TAB_CELLS = 8


def terminal_size(fd: int | None) -> tuple[int, int]:
    """Columns and rows of the terminal now; 80 × 24 when it does not say."""
    try:
        columns, rows = os.get_terminal_size(-1 if fd is None else fd)
    except OSError:
        return 80, 24
    return columns or 80, rows or 24


@contextmanager
def unechoed(fd: int | None) -> Iterator[Callable[[], None]]:
    """Keys (^C among them) are not shown on the terminal `fd` while the block runs, and ^C does not throw away what the
    terminal has not shown yet, which could be half of a redrawn line; yields what restores it early."""
    # A background job that changes the terminal would be stopped.
    if fd is None or not os.isatty(fd) or os.tcgetpgrp(fd) != os.getpgrp():
        yield lambda: None
        return
    before = termios.tcgetattr(fd)
    silent = [*before]
    silent[3] = (silent[3] & ~termios.ECHO) | termios.NOFLSH

    def restore() -> None:
        termios.tcsetattr(fd, termios.TCSANOW, before)

    termios.tcsetattr(fd, termios.TCSANOW, silent)
    try:
        yield restore
    finally:
        restore()


class Screen:
    """`write` gets each update as one string."""

    def __init__(self, write: Callable[[str], None], size: Callable[[], tuple[int, int]]) -> None:
        self._write = write
        self._size = size
        self._columns = 0
        self._line = ""  # since the last newline: measured again after a resize
        self._column = 0  # cells; == columns means the terminal will wrap before the next character
        self._stepped = False  # we did that wrap ourselves, to have the cursor in a known place
        self._shown = False

    def update(self, text: str, paint: Callable[[str], str], status: Callable[[int], str] | None) -> None:
        """Append `text`, then draw `status(columns)` below it (None: no status line)."""
        columns, rows = self._size()
        self._resized(columns)
        out = ERASE_BELOW if self._shown else ""
        if text:
            out += paint(self._appended(text))
        self._shown = status is not None and rows > 1
        if status is not None and self._shown:
            out += self._step() + self._below(status(columns - 1))
        if out:
            self._write(f"{BEGIN}{out}{END}" if self._shown or ERASE_BELOW in out else out)

    def close(self, *, newline: bool = True) -> None:
        """Erase the status line; the cursor goes to the start of a line."""
        out = ERASE_BELOW if self._shown else ""
        if newline and self._column:
            out += "\r\n"
        self._shown, self._column, self._line = False, 0, ""
        if out:
            self._write(out)

    def _below(self, status: str) -> str:
        """The drawn status, with the cursor back at the end of the text."""
        if self._column == 0:
            return f"{status}\r"
        return f"{DOWN_OR_SCROLL}{UP}{SAVE}{DOWN}\r{status}{RESTORE}"

    def _appended(self, text: str) -> str:
        if self._stepped and text.startswith("\n"):
            text = text[1:]  # the cursor is on the next line already
            self._line = ""
        self._stepped = False
        self._line = (self._line + text).rpartition("\n")[2]
        self._column = self._advance(0 if "\n" in text else self._column, text.rpartition("\n")[2])
        return text

    def _step(self) -> str:
        """Leave the last column: a cursor that is about to wrap cannot be saved and moved on every terminal."""
        if self._column < self._columns:
            return ""
        self._column, self._stepped = 0, True
        return " \r"

    def _resized(self, columns: int) -> None:
        if columns == self._columns:
            return
        self._columns = columns
        self._column = self._advance(0, self._line)
        if self._stepped and self._column == columns:
            self._column = 0

    def _advance(self, column: int, text: str) -> int:
        """The column after `text` (no newlines) on a terminal that wraps."""
        for character in text:
            if character == "\t":
                column = min(self._columns - 1, (column // TAB_CELLS + 1) * TAB_CELLS)
                continue
            cells = get_character_cell_size(character)
            column = cells if column + cells > self._columns else column + cells
        return column
