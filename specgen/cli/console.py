"""The streams of one process, and what goes to them beside the answer: errors, hints, notes.

Knows: which streams are terminals, whether to colour, how a failure becomes lines and an exit code. Does not know:
commands, models, events.
"""

from __future__ import annotations

import errno
import io
import os
import stat
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, TextIO, cast

import typer

from specgen.config import ColorName
from specgen.errors import ExitCode, SpecgenError, UsageError

if TYPE_CHECKING:
    import rich.console

CLOSED_PIPE = 141
"""Exit code when the reader of our output went away: what a shell shows for `yes` in `yes | head`."""

# Typer carries its own copy of click in newer versions; this is the class of a usage error in either.
ParsingError: type[Exception] = typer.BadParameter.__mro__[1]


class ClosedPipeError(Exception):
    """The reader of our output went away. Not an OSError: the command-line parser would turn that into code 1."""


def printable(text: str) -> str:
    """`text` on one line, with everything that could steer a terminal shown as an escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def is_terminal(stream: IO[str] | None) -> bool:
    """Closed streams are not terminals."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:
        return False


def descriptor(stream: IO[str] | None) -> int | None:
    """The file descriptor behind `stream`, if there is one."""
    try:
        return None if stream is None else stream.fileno()
    except (OSError, ValueError):
        return None


@dataclass
class Console:
    """Streams are injected, so that a test can look at them. A stream that was closed at the start is None."""

    stdin: TextIO | None
    stdout: TextIO | None
    stderr: TextIO | None
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    color: ColorName = "auto"
    quiet: bool = False
    debug: bool = False

    @classmethod
    def of_process(cls) -> Console:
        """The process's own streams. Text is UTF-8 whatever the locale says: prompts and models know nothing else."""
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(encoding="utf-8", errors="backslashreplace")
        return cls(sys.stdin, sys.stdout, sys.stderr)

    @classmethod
    def of(cls, context: typer.Context) -> Console:
        """The console of a running command."""
        found = context.find_object(cls)
        return found if found is not None else cls.of_process()

    @property
    def dumb(self) -> bool:
        """The terminal understands no control sequences."""
        return self.environ.get("TERM", "") in ("", "dumb")

    def can_steer(self, stream: IO[str] | None) -> bool:
        """Whether a line on `stream` can be drawn and erased."""
        return is_terminal(stream) and not self.dumb

    def can_color(self, stream: IO[str] | None) -> bool:
        """--color decides; `auto` is a terminal that is not dumb, without NO_COLOR (https://no-color.org)."""
        if self.color != "auto":
            return self.color == "always"
        return self.can_steer(stream) and not self.environ.get("NO_COLOR")

    def is_pipe(self, stream: IO[str] | None) -> bool:
        """A pipe or a socket: somebody reads what we write."""
        fd = descriptor(stream)
        return fd is not None and stat.S_IFMT(os.fstat(fd).st_mode) in (stat.S_IFIFO, stat.S_IFSOCK)

    @property
    def same_screen(self) -> bool:
        """stdout and stderr are one terminal."""
        ends = descriptor(self.stdout), descriptor(self.stderr)
        if ends[0] is None or ends[1] is None or not (is_terminal(self.stdout) and is_terminal(self.stderr)):
            return False
        return os.fstat(ends[0]).st_rdev == os.fstat(ends[1]).st_rdev

    def say(self, label: str, text: str, sgr: str = "1") -> None:
        """One line `label: text` on stderr; `sgr` colours the label."""
        head = f"\x1b[{sgr}m{label}:\x1b[0m" if self.can_color(self.stderr) else f"{label}:"
        self.line(f"{head} {printable(text)}")

    def note(self, text: str) -> None:
        """Something worth knowing that is no failure; not with --quiet."""
        if not self.quiet:
            self.say("note", text, "36")

    def warn(self, text: str) -> None:
        self.say("warning", text, "33")

    def line(self, text: str, *, after_pipe: bool = False) -> None:
        """A line of our own words on stderr. After a pipe's text the cursor may be anywhere in a line."""
        if self.stderr is None:
            return
        try:
            self.stderr.write(("\n" if after_pipe else "") + text + "\n")
            self.stderr.flush()
        except (OSError, ValueError):
            pass  # nobody can be told; the answer goes on

    def error(self, message: str, hint: str | None) -> None:
        self.say("error", message, "1;31")
        if hint:
            self.say("hint", hint, "36")

    def answer(self) -> TextIO:
        """stdout, or a UsageError when it was closed before we began."""
        if self.stdout is None:
            raise UsageError("standard output is closed", hint="redirect it, or write to a file with -o FILE")
        return self.stdout

    def rich(self) -> rich.console.Console:
        """A Rich console on stderr, for tables and bars. Never give it a model's text."""
        import rich.console

        wanted = None if self.color == "auto" else self.color == "always"
        stream = self.stderr if self.stderr is not None else io.StringIO()
        no_color = self.color == "never" or (self.color == "auto" and bool(self.environ.get("NO_COLOR")))
        return rich.console.Console(
            file=stream, force_terminal=None if wanted is not True else True, no_color=no_color, highlight=False
        )

    @contextmanager
    def busy(self, text: str) -> Iterator[None]:
        """A spinner beside `text` on a terminal's stderr while the block runs; nothing elsewhere."""
        if self.quiet or not self.can_steer(self.stderr):
            yield
            return
        with self.rich().status(printable(text), spinner="dots"):
            yield

    def abandon(self) -> None:
        """Point a stream that cannot be written any more at nothing, so that Python's last flush does not complain."""
        for stream in (self.stdout, self.stderr):
            fd = descriptor(stream)
            if fd is None or stream is None:
                continue
            try:
                stream.flush()
            except (OSError, ValueError):
                sink = os.open(os.devnull, os.O_WRONLY)
                os.dup2(sink, fd)
                os.close(sink)


def guarded(console: Console, work: Callable[[], object]) -> int:
    """The one error boundary: `work` returns an exit code (anything else is 0) or fails, and a failure is told."""
    try:
        code = work()
        if console.stdout is not None:
            console.stdout.flush()
        return code if isinstance(code, int) else int(ExitCode.OK)
    except (ClosedPipeError, BrokenPipeError):
        return CLOSED_PIPE
    except (KeyboardInterrupt, typer.Abort):
        return int(ExitCode.INTERRUPTED)
    except Exception as error:
        if console.debug:
            console.line("".join(traceback.format_exception(error)).rstrip())
        code, lines = explain(error)
        if lines is not None:
            console.error(*lines)
        return code
    finally:
        console.abandon()


def explain(error: Exception) -> tuple[int, tuple[str, str | None] | None]:
    """Exit code, and the error and hint lines (None: everything was printed already)."""
    if isinstance(error, SpecgenError):
        return int(error.code), (error.message, error.hint)
    if isinstance(error, ParsingError):
        return int(ExitCode.USAGE), _parsing_lines(error)
    if _is_out_of_memory(error):
        return int(ExitCode.MEMORY), _memory_lines(error)
    if isinstance(error, OSError) and error.errno is not None:
        where = f"{error.filename}: " if error.filename else ""
        hint = "free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else None
        return int(ExitCode.ERROR), (f"{where}{os.strerror(error.errno)}", hint)
    return int(ExitCode.ERROR), (
        f"internal error: {type(error).__name__}: {error}",
        "this is a bug in specgen; run again with --debug and report what it prints",
    )


def _parsing_lines(error: Exception) -> tuple[str, str | None] | None:
    """Lines of a bad command line; None when the message was the whole help page, which goes to stderr as it is."""
    message = cast("str", getattr(error, "format_message", lambda: str(error))())
    if type(error).__name__ == "NoArgsIsHelpError":
        typer.echo(message, err=True)
        return None
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "specgen"
    return message.rstrip("."), f"see `{command} --help`"


def _memory_lines(error: Exception) -> tuple[str, str | None]:
    if type(error).__module__.partition(".")[0] != "torch":
        return "memory ran out", "use a smaller model, a shorter --ctx or --kv int8"
    from specgen.kernels.card_memory import shortage

    told = shortage(None, error)
    return told.message, told.hint


def _is_out_of_memory(error: Exception) -> bool:
    # torch has no class of its own for a failed allocation on the CPU.
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))
    )
