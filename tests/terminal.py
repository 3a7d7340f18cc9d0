"""A pseudo-terminal with a screen behind it: what a person would see, cell by cell."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pexpect
import pyte
from rich.cells import get_character_cell_size

ROOT = Path(__file__).resolve().parents[1]


class Glass(pyte.HistoryScreen):
    """pyte's screen, with wide characters wrapped before the last column as terminals do."""

    def draw(self, data: str) -> None:
        for character in data:
            if get_character_cell_size(character) == 2 and self.cursor.x == self.columns - 1:
                super().draw(" ")
            super().draw(character)

    def rows(self) -> list[str]:
        """Scrollback and screen, without blanks at the ends."""
        rows = [*self.history.top, *(self.buffer[y] for y in range(self.lines))]
        text = ["".join(row[x].data for x in range(self.columns)).rstrip() for row in rows]
        while text and not text[-1]:
            text.pop()
        return text


class Terminal:
    """`arguments` of Python, run in a terminal of columns × rows."""

    def __init__(self, arguments: Sequence[str], columns: int = 80, rows: int = 24, **environment: str) -> None:
        environ = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "COLUMNS", "LINES")}
        environ |= {"TERM": "xterm-256color", "OMP_NUM_THREADS": "1", "PYTHONPATH": _path(environ)}
        environ |= {"SPECGEN_CONFIG": os.devnull, **environment}
        self.screen = Glass(columns, rows, history=2000, ratio=0.5)
        self.stream = pyte.ByteStream(self.screen)
        self.raw = b""
        self.process = pexpect.spawn(
            sys.executable, list(arguments), dimensions=(rows, columns), env=environ, timeout=60
        )

    def read(self, timeout_s: float = 0.05) -> bool:
        """Feed what came; False at the end."""
        try:
            data = self.process.read_nonblocking(65536, timeout=timeout_s)
        except pexpect.TIMEOUT:
            return True
        except pexpect.EOF:
            return False
        self.raw += data
        self.stream.feed(data)
        return True

    def until(self, text: str, timeout_s: float = 60) -> None:
        """Until the screen shows `text`."""
        end_s = time.monotonic() + timeout_s
        while not any(text in line for line in self.lines()):
            assert self.read(), f"ended without {text!r}: {self.raw!r}"
            assert time.monotonic() < end_s, f"no {text!r} in {self.lines()}"

    def finish(self, timeout_s: float = 60) -> int:
        """Until the process ends; its exit code."""
        end_s = time.monotonic() + timeout_s
        while self.read():
            assert time.monotonic() < end_s, f"still running: {self.lines()}"
        self.process.wait()
        status = self.process.exitstatus
        return status if status is not None else 128 + int(self.process.signalstatus or 0)

    def resize(self, columns: int, rows: int) -> None:
        self.process.setwinsize(rows, columns)
        self.screen.resize(rows, columns)

    def interrupt(self) -> None:
        self.process.kill(signal.SIGINT)

    def lines(self) -> list[str]:
        """Scrollback and screen, without blanks at the ends."""
        return self.screen.rows()

    def cells(self, word: str) -> list[Any]:
        """The cells of the first place on the screen that shows `word`."""
        for y in range(self.screen.lines):
            row = [self.screen.buffer[y][x] for x in range(self.screen.columns)]
            start = "".join(cell.data or "\0" for cell in row).find(word)
            if start >= 0:
                return row[start : start + len(word)]
        raise AssertionError(f"{word!r} is not on the screen: {self.lines()}")


def _path(environ: dict[str, str]) -> str:
    return os.pathsep.join(part for part in (str(ROOT), environ.get("PYTHONPATH", "")) if part)
