"""The file of one conversation: it grows by a line for each record, and is never rewritten.

Knows: where conversations are kept, private files, locks, torn lines, full disks. Does not know: what records mean.
A line is written by one call and counts only when it is whole, so a killed process loses nothing that was committed; a
record that could not be written waits and is tried again with the next.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterable
from pathlib import Path

from specgen.chat.records import SCHEMA, Asked, Opened, Record, Replied, TranscriptError, from_line, to_line
from specgen.errors import SpecgenError, UsageError
from specgen.paths import data_dir, ensure_dir

MAX_FILE_BYTES = 256 << 20
SUFFIX = ".jsonl"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def chats_dir() -> Path:
    return data_dir() / "chats"


def path_of(name: str) -> Path:
    """The file of a conversation by name. UsageError for a name that is none."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} is no name for a conversation", hint="letters, digits, dot, dash and underscore, at most 64"
        )
    return chats_dir() / f"{name}{SUFFIX}"


def saved_names() -> list[str]:
    """Every saved conversation, the latest first."""
    files = []
    for path in chats_dir().glob(f"*{SUFFIX}"):
        try:
            files.append((path.stat().st_mtime_ns, path.stem))
        except FileNotFoundError:
            continue  # removed by another process
    return [name for _, name in sorted(files, reverse=True)]


class Transcript:
    """An open file, locked against a second writer. `trouble` says why the latest records are not on disk."""

    def __init__(self, path: Path, fd: int, whole_bytes: int) -> None:
        self.path = path
        self.trouble: str | None = None
        self._fd = fd
        self._whole_bytes = whole_bytes  # up to the end of the last whole line
        self._pending = b""
        self.said_something = False  # somebody asked something, so the file is worth keeping

    @classmethod
    def open(cls, path: Path) -> tuple[Transcript, list[Record]]:
        """The file at `path`, created when there is none, and its records. TranscriptError when it cannot be used or
        another process has it open."""
        ensure_dir(path.parent)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise TranscriptError(f"cannot open {path}: {error.strerror}") from error
        try:
            _lock(fd, path)
            data = _read(fd, path)
            records, whole_bytes = _records(data, path)
            transcript = cls(path, fd, whole_bytes)
            transcript.said_something = any(isinstance(record, Asked) for record in records)
            if whole_bytes < len(data):
                os.ftruncate(fd, whole_bytes)  # a line that was cut off when the process died
            return transcript, records
        except BaseException:
            os.close(fd)
            raise

    @property
    def name(self) -> str:
        return self.path.stem

    def append(self, record: Record) -> None:
        """Never raises: a conversation goes on while its disk is full."""
        self._pending += to_line(record)
        self.said_something = self.said_something or isinstance(record, Asked)
        try:
            while self._pending:
                written = os.write(self._fd, self._pending)
                self._pending = self._pending[written:]
            self._whole_bytes = os.fstat(self._fd).st_size
            self.trouble = None
            if isinstance(record, Replied):
                os.fsync(self._fd)
        except OSError as error:
            self._take_back()
            self.trouble = error.strerror or str(error)

    def _take_back(self) -> None:
        """A line that was written in part is removed and waits as a whole."""
        try:
            extra = os.fstat(self._fd).st_size - self._whole_bytes
            if extra > 0:
                torn = os.pread(self._fd, extra, self._whole_bytes)
                os.ftruncate(self._fd, self._whole_bytes)
                self._pending = torn + self._pending
        except OSError:
            pass  # the reader drops a torn line, and `trouble` is told anyway

    def rename(self, path: Path) -> None:
        """SpecgenError when there is one already."""
        try:
            os.link(self.path, path)  # unlike a rename, never over an existing file
            os.unlink(self.path)
        except FileExistsError:
            raise UsageError(f"there is a conversation {path.stem!r} already", hint="choose another name") from None
        except OSError as error:
            raise SpecgenError(f"cannot rename {self.path}: {error.strerror}") from error
        self.path = path

    def close(self, *, remove: bool = False) -> None:
        """`remove`: nothing was said, so no file should stay."""
        if remove:
            self.path.unlink(missing_ok=True)
        os.close(self._fd)


def _lock(fd: int, path: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise TranscriptError(
            f"the conversation {path.stem} is open in another specgen", hint="leave it there, or start another one"
        ) from None
    except OSError:
        pass  # a file system without locks


def _read(fd: int, path: Path) -> bytes:
    size = os.fstat(fd).st_size
    if size > MAX_FILE_BYTES:
        raise TranscriptError(f"{path} has more than {MAX_FILE_BYTES >> 20} MiB")
    data = bytearray()
    while part := os.pread(fd, 1 << 20, len(data)):
        data += part
    return bytes(data)


def _records(data: bytes, path: Path) -> tuple[list[Record], int]:
    """The records of all whole lines, and where those end."""
    end = data.rfind(b"\n") + 1
    records: list[Record] = []
    for number, line in enumerate(data[:end].splitlines(), start=1):
        try:
            records.append(from_line(line))
        except TranscriptError as error:
            raise TranscriptError(f"{path}, line {number}: {error.message}", error.hint) from None
    check_first(records, path)
    return records, end


def check_first(records: Iterable[Record], path: Path) -> None:
    """TranscriptError unless a file that has records begins as one of ours."""
    first = next(iter(records), None)
    if first is None:
        return
    if not isinstance(first, Opened):
        raise TranscriptError(f"{path} is no saved conversation")
    if first.schema != SCHEMA:
        raise TranscriptError(f"{path} is of version {first.schema}, this specgen reads {SCHEMA}")
