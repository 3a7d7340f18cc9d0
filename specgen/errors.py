"""What a user is told when something fails.

Knows: the exit codes and the two lines (`error:`, `hint:`) of a failure. Does not know: how they are printed (cli).
`assert` is for our own bugs; `SpecgenError` is for everything that a user can meet.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from enum import IntEnum


class ExitCode(IntEnum):
    """Process exit codes, documented in README and `specgen --help`."""

    OK = 0
    ERROR = 1
    USAGE = 2
    MODEL = 3
    MEMORY = 4
    CONTEXT = 5
    INCOMPLETE = 6
    INTERRUPTED = 130


class SpecgenError(Exception):
    """A failure the user can understand: one line of what, one line of what to do."""

    code: ExitCode = ExitCode.ERROR

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(SpecgenError):
    """Options or input that make no sense, found before work begins."""

    code = ExitCode.USAGE


class ModelError(SpecgenError):
    """A model, checkpoint, tokenizer or registry entry that cannot be used; names the file and the tensor."""

    code = ExitCode.MODEL


class DeviceError(SpecgenError):
    """The graphics card that was asked for cannot be used here."""


class OutOfMemoryError(SpecgenError):
    """The plan does not fit; the message has the numbers."""

    code = ExitCode.MEMORY


class ContextFullError(SpecgenError):
    """The sequence has reached the context limit."""

    code = ExitCode.CONTEXT


def nearest(word: str, known: Iterable[str]) -> str | None:
    """A hint like `did you mean 'gamma'?`, or None when nothing known resembles `word`."""
    close = get_close_matches(word, list(known), n=3, cutoff=0.55)
    if not close:
        return None
    return "did you mean " + " or ".join(repr(name) for name in close) + "?"
