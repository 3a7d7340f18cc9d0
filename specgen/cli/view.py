"""What a user sees of an answer while it is made: one of three views, chosen by where the output goes.

`StreamView`: a pipe, a file, a terminal without a status line. `LiveView`: text and status on one terminal.
`WaitingView`: the text is needed as a whole (--json, -o), or stdout is a file: only a status line on stderr.

Knows: events and streams. Does not know: sessions. Text of the model is cleaned before a terminal sees it, and never
goes through Rich markup.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, TextIO

from specgen.cli.console import ClosedPipeError, Console, descriptor, is_terminal
from specgen.cli.screen import Screen, terminal_size
from specgen.cli.status import Marks, Progress, status_line
from specgen.events import Event, Piece, Prefilled, Started
from specgen.text.sanitise import sanitise

REDRAW_S = 1 / 15
"""A status line that changes more often cannot be read."""


class View(Protocol):
    progress: Progress
    marks: Marks  # how the text was highlighted, for the legend of the summary

    def show(self, event: Event) -> None: ...

    def close(self) -> None:
        """Leave the terminal with plain text and the cursor at the start of a line. May be called twice."""
        ...


def write_bytes(stream: TextIO, data: bytes) -> None:
    """All of `data`, now. ClosedPipeError when the reader went away."""
    try:
        buffer = getattr(stream, "buffer", None)
        if buffer is None:
            stream.write(data.decode("utf-8"))
        else:
            stream.flush()
            rest = memoryview(data)
            while rest:  # with PYTHONUNBUFFERED a write may take only a part
                rest = rest[buffer.write(rest) or 0 :]
        stream.flush()
    except BrokenPipeError as error:
        raise ClosedPipeError from error


class StreamView:
    """Text as it is committed, byte for byte, without thoughts; cleaned and ended with a newline on a terminal."""

    def __init__(self, stream: TextIO, marks: Marks, *, terminal: bool) -> None:
        self.progress = Progress()
        self.marks = marks
        self._stream = stream
        self._terminal = terminal
        self._open_line = False

    def show(self, event: Event) -> None:
        self.progress.see(event)
        if not isinstance(event, Piece) or event.thinking or not event.text:
            return
        text = sanitise(event.text) if self._terminal or self.marks.draft else event.text
        self._open_line = bool(text) and not text.endswith("\n")
        write_bytes(self._stream, (self.marks.paint(text) if event.drafted else text).encode("utf-8"))

    def close(self) -> None:
        if self._terminal and self._open_line:
            self._open_line = False
            write_bytes(self._stream, b"\n")


class _Redrawn:
    """A status line that is worded anew at most every REDRAW_S."""

    def __init__(self, progress: Progress, marks: Marks, clock: Callable[[], float]) -> None:
        self._progress = progress
        self._marks = marks
        self._clock = clock
        self._last_s = float("-inf")
        self._columns = 0
        self._line = ""

    def due(self) -> bool:
        return self._clock() - self._last_s >= REDRAW_S

    def __call__(self, columns: int) -> str:
        if columns != self._columns or self.due():
            self._last_s, self._columns = self._clock(), columns
            self._line = status_line(self._progress, columns, self._marks)
        return self._line


def _redraws(event: Event) -> bool:
    """Events that change what the status line says, and are rare."""
    return isinstance(event, Started | Prefilled)


class LiveView:
    """Text and status line on one terminal; of thoughts only that there are any. Each update is one write."""

    def __init__(self, screen: Screen, marks: Marks, clock: Callable[[], float] = time.monotonic) -> None:
        self.progress = Progress()
        self.marks = marks
        self._screen = screen
        self._status = _Redrawn(self.progress, marks, clock)

    def show(self, event: Event) -> None:
        self.progress.see(event)
        if isinstance(event, Piece) and not event.thinking:
            paint = self.marks.paint if event.drafted else str
            self._screen.update(sanitise(event.text), paint, self._status)
        elif _redraws(event) or self._status.due():
            self._screen.update("", str, self._status)

    def close(self) -> None:
        self._screen.close()


class WaitingView:
    """A status line on stderr alone, while another view (or nobody) gets the text."""

    def __init__(self, screen: Screen, inner: View | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.progress = Progress()
        self.marks = Marks() if inner is None else inner.marks
        self._inner = inner
        self._screen = screen
        self._status = _Redrawn(self.progress, Marks(), clock)

    def show(self, event: Event) -> None:
        self.progress.see(event)
        if self._inner is not None:
            self._inner.show(event)
        if _redraws(event) or self._status.due():
            self._screen.update("", str, self._status)

    def close(self) -> None:
        self._screen.close()
        if self._inner is not None:
            self._inner.close()


class SilentView:
    """Nothing until the end."""

    def __init__(self) -> None:
        self.progress = Progress()
        self.marks = Marks()

    def show(self, event: Event) -> None:
        self.progress.see(event)

    def close(self) -> None:
        pass


def choose_view(console: Console, *, whole: bool) -> View:
    """`whole`: the answer is written when it is complete (--json, -o), so no text is streamed."""
    status = not console.quiet and console.can_steer(console.stderr)
    if whole:
        return WaitingView(_screen(console.stderr)) if status else SilentView()
    stdout = console.answer()
    terminal = is_terminal(stdout)
    steer = console.can_steer(stdout) and not console.quiet
    marks = Marks.chosen(steer=steer, color=console.can_color(stdout) and not console.quiet)
    if status and console.same_screen:
        return LiveView(_screen(stdout), marks)
    view = StreamView(stdout, marks, terminal=terminal)
    # A pipe's reader may write to our terminal as well, in the middle of the status line.
    return WaitingView(_screen(console.stderr), view) if status and not console.is_pipe(stdout) else view


def _screen(stream: TextIO | None) -> Screen:
    assert stream is not None
    fd = descriptor(stream)
    return Screen(
        lambda text: write_bytes(stream, text.encode("utf-8")),
        lambda: terminal_size(fd),
    )
