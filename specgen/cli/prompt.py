"""Where the prompt comes from: -p, a file, or standard input.

The rule for standard input. A terminal is read only for `-`. Without -p and without a file, anything else is read to
its end. Beside -p, a regular file is read to its end, and a pipe too if something arrives within INPUT_WAIT_S (a pipe
that some parent left open and silent must not hang us; `-` waits for as long as it takes). Beside a file it is not
read, and neither are devices. One line ending at the very end of a file or of the input is not part of the prompt.

Knows: bytes to checked text. Does not know: models, templates, tokens.
"""

from __future__ import annotations

import os
import select
import stat
from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO, TextIO

from specgen.cli.console import descriptor, is_terminal
from specgen.errors import UsageError

MAX_PROMPT_BYTES = 32 << 20
"""More than any context holds; keeps `yes | specgen run` from filling the memory."""

INPUT_WAIT_S = 10.0
"""How long -p waits for the first byte of a pipe: longer than another specgen needs to say its first word."""

STDIN = "-"
_EXAMPLES = 'give a file, pipe something in, or use -p: specgen run -p "Why is the sky blue?"'


@dataclass(frozen=True, slots=True)
class PromptSource:
    file: str | None  # "-" is standard input
    text: str | None  # -p
    raw: bool = False  # white space alone is a prompt too


def read_prompt(source: PromptSource, stdin: TextIO | None, note: Callable[[str], None]) -> str:
    """The text of the prompt; UsageError when there is none or it cannot be read. `note` tells why we wait."""
    given = None if source.text is None else argument_text("-p", source.text)
    body: str | None
    if source.file == STDIN:
        body = _standard_input(stdin, note)
    elif source.file is not None:
        body = read_file(source.file)
    else:
        body = _unasked_input(stdin, note, wait=given is not None)
    prompt = _join(given, body)
    if prompt is None:
        raise UsageError("there is no prompt", hint=_EXAMPLES)
    if not prompt or not (source.raw or prompt.strip()):
        raise UsageError("the prompt is empty", hint=_EXAMPLES)
    return prompt


def read_source(name: str, file: str, stdin: TextIO | None) -> str:
    """The whole text of a file that the option `name` names; - is standard input."""
    if file != STDIN:
        return read_file(file, name)
    if stdin is None or stdin.closed or is_terminal(stdin):
        raise UsageError(f"{name} - reads standard input, and nothing is piped in", hint="give a file")
    return _drain(stdin)


def argument_text(name: str, text: str) -> str:
    """Text of an argument, refused when its bytes were not UTF-8 (Python keeps such bytes as lone surrogates)."""
    return _decoded(name, text.encode("utf-8", "surrogateescape"))


def _join(given: str | None, body: str | None) -> str | None:
    """-p first, then a blank line, then the file or the input."""
    if given is None or body is None:
        return given if body is None else body
    if not body.strip():
        return given
    return f"{given.rstrip()}\n\n{body}" if given.strip() else body


def read_file(path: str, name: str = "the prompt file") -> str:
    """The text of a file; UsageError when it cannot be read or is no UTF-8."""
    try:
        with open(path, "rb") as file:
            data = _read_all(path, file)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise UsageError(f"cannot read {name} {path}: {reason}", hint=_file_hint(path, error)) from error
    except ValueError as error:  # a NUL in the name
        raise UsageError(f"cannot read {name} {path!r}: {error}") from error
    return _content(path, data)


def _file_hint(path: str, error: OSError) -> str | None:
    if isinstance(error, FileNotFoundError):
        return f"the argument is a file name; to give the prompt itself, write -p {path!r}"
    if isinstance(error, IsADirectoryError):
        return "give a file inside it"
    return None


def _standard_input(stdin: TextIO | None, note: Callable[[str], None]) -> str:
    if stdin is None or stdin.closed:
        raise UsageError("standard input is closed", hint=_EXAMPLES)
    if is_terminal(stdin):
        note("reading the prompt from the terminal; end it with Ctrl-D on a line of its own")
    return _drain(stdin)


def _unasked_input(stdin: TextIO | None, note: Callable[[str], None], *, wait: bool) -> str | None:
    """What was piped in, or None. With `wait` there is a prompt already and a silent pipe is given up."""
    if stdin is None or stdin.closed or is_terminal(stdin):
        return None
    fd = descriptor(stdin)
    if fd is None or not wait:
        return _drain(stdin)
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return _drain(stdin)
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        return None
    if not _arrives(fd, note):
        return None
    return _drain(stdin)


def _arrives(fd: int, note: Callable[[str], None]) -> bool:
    """Whether bytes, or the end, come within INPUT_WAIT_S."""
    patience_s = min(1.0, INPUT_WAIT_S)
    for timeout_s in (patience_s, INPUT_WAIT_S - patience_s):
        if select.select([fd], [], [], timeout_s)[0]:
            return True
        if timeout_s == patience_s:
            note(f"waiting up to {INPUT_WAIT_S:g} s for the piped input (`</dev/null` if there is none)")
    note("nothing was piped in: answering -p alone (`-` waits for as long as it takes)")
    return False


def _drain(stdin: TextIO) -> str:
    name = "standard input"
    try:
        return _content(name, _read_all(name, stdin.buffer))
    except OSError as error:
        raise UsageError(f"cannot read {name}: {error.strerror}") from error


def _read_all(name: str, file: BinaryIO) -> bytes:
    data = file.read(MAX_PROMPT_BYTES + 1)
    if len(data) > MAX_PROMPT_BYTES:
        raise UsageError(f"{name} has more than {MAX_PROMPT_BYTES >> 20} MiB", hint="no model's context holds that")
    return data


def _content(name: str, data: bytes) -> str:
    text = _decoded(name, data).removeprefix("\ufeff")  # the mark that some editors put before UTF-8
    return text.removesuffix("\n").removesuffix("\r") if text.endswith("\n") else text


def _decoded(name: str, data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{name} is not valid UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}",
            hint="convert it, for example with `iconv -f LATIN1 -t UTF-8`",
        ) from error
