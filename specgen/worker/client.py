"""The thin client: finds the worker that holds a model, or starts one, and is a session over its socket.

Knows: connections, starting a process, `RemoteSession` with the methods of `Session` that `specgen run` uses. Does not
know: models, terminals. Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import specgen
from specgen.cancel import Cancel
from specgen.errors import SpecgenError
from specgen.events import Event, Finished
from specgen.options import LoadOptions, RunOptions, ThinkName
from specgen.paths import cache_dir, config_dir, data_dir
from specgen.prompt import Prompt
from specgen.worker import place
from specgen.worker.codec import encode
from specgen.worker.protocol import (
    MAX_REPLY_BYTES,
    PROTOCOL,
    AskAnswer,
    AskPrompt,
    AskStatus,
    AskStop,
    Cancelled,
    Failure,
    Hello,
    Order,
    PromptIs,
    ProtocolError,
    Ready,
    Report,
    Source,
    Status,
    Stopping,
    Welcome,
    error_of,
    from_line,
    to_line,
)

HANDSHAKE_S = 5.0
"""A worker that has not greeted us by then is stuck: a thread of its own serves its socket, also while it loads."""

START_S = 30.0
"""How long a new worker may take to open its socket (the model is loaded afterwards)."""

POLL_S = 0.02
CANCEL_POLL_S = 0.05
KILL_AFTER_S = 5.0

Kind = TypeVar("Kind")


class WorkerGoneError(SpecgenError):
    """The worker cannot be used: it ended, does not answer, or is no worker."""


class WorkerLeftError(WorkerGoneError):
    """It closed the connection."""


def source_of(name: str, path: Path) -> Source:
    """A model's files as they are now: the stamp changes with a name, a size or a time."""
    files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.is_file())
    return Source(name, str(path), _stamp(files))


def order_for(model: Source, draft: Source | None, options: LoadOptions) -> Order:
    """What a worker must be to answer exactly as this process would."""
    package = Path(specgen.__file__).parent
    sources = sorted(path for path in package.rglob("*") if path.suffix in (".py", ".cpp", ".h"))
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else ()
    return Order(
        protocol=PROTOCOL,
        version=specgen.__version__,
        code=_stamp(sources),
        model=model,
        draft=draft,
        options=options,
        folders=tuple(str(folder) for folder in (cache_dir(), config_dir(), data_dir())),
        cpus=tuple(cpus),
    )


def digest_of(order: Order) -> str:
    return hashlib.sha256(json.dumps(encode(order), sort_keys=True).encode()).hexdigest()


def _stamp(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        state = file.stat()
        digest.update(f"{file} {state.st_size} {state.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:32]


class Channel:
    """Messages over a connected socket."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._link.settimeout(None)
        self._buffer = bytearray()
        self._searched = 0

    def send(self, message: Any) -> None:
        """WorkerGoneError when nobody is there any more."""
        try:
            self._link.sendall(to_line(message))
        except OSError as error:
            raise _left() from error

    def receive(self, timeout_s: float | None = None) -> Any:
        """The next message; None when none is complete within `timeout_s`. An error that the worker tells is raised;
        WorkerGoneError when it is gone, or says what is no message."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while (end := self._buffer.find(b"\n", self._searched)) < 0:
            self._searched = len(self._buffer)
            if not self._wait(until):
                return None
            self._read()
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        self._searched = 0
        try:
            message = from_line(line)
        except ProtocolError as error:
            raise WorkerGoneError(f"the worker sent {error}", hint="`specgen stop` ends it") from error
        if isinstance(message, Failure):
            raise error_of(message)
        return message

    def expect(self, kind: type[Kind], timeout_s: float | None = None) -> Kind:
        """The next message, which must be a `kind`."""
        message = self.receive(timeout_s)
        if message is None:
            raise WorkerGoneError("the worker does not answer", hint="`specgen stop` ends it")
        if not isinstance(message, kind):
            raise WorkerGoneError(f"the worker sent a {type(message).__name__}, not a {kind.__name__}")
        return message

    def close(self) -> None:
        self._link.close()

    def peer(self) -> int:
        """The worker's process id, from the system."""
        return place.check_peer(self._link)

    def _wait(self, until: float | None) -> bool:
        """Whether there is something to read before `until`."""
        left_s = None if until is None else max(0.0, until - time.monotonic())
        return bool(select.select([self._link], [], [], left_s)[0])

    def _read(self) -> None:
        try:
            data = self._link.recv(1 << 16)
        except OSError as error:
            raise _left() from error
        if not data:
            raise _left()
        self._buffer += data
        if len(self._buffer) > MAX_REPLY_BYTES:
            raise WorkerGoneError("the worker sent a message without end", hint="`specgen stop` ends it")


def _left() -> WorkerLeftError:
    return WorkerLeftError("the worker that held the model is gone", hint="run the command again")


class RemoteSession:
    """A session in another process. One answer at a time; closing an answer's iterator early ends the session."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._report: dict[str, Any] = {}

    def loaded_within(self, timeout_s: float | None) -> bool:
        """Wait for the model; ModelError and its like when the worker cannot load it. Call it until it is true."""
        message = self._channel.receive(timeout_s)
        if message is not None and not isinstance(message, Ready):
            raise WorkerGoneError(f"the worker sent a {type(message).__name__}, not that it is ready")
        return message is not None

    def prompt_ids(
        self, text: str, *, system: str | None = None, raw: bool = False, think: ThinkName = "auto"
    ) -> Prompt:
        """See `Session.prompt_ids`."""
        self._channel.send(AskPrompt(text, system, raw, think))
        return self._channel.expect(PromptIs).prompt

    def generate(self, prompt: Prompt, options: RunOptions, cancel: Cancel | None = None) -> Iterator[Event]:
        """See `Session.generate`."""
        cancel = cancel or Cancel()
        self._channel.send(AskAnswer(prompt, options))
        finished = False
        try:
            for event in self._events(cancel):
                yield event
                finished = isinstance(event, Finished)
            self._report = json.loads(self._channel.expect(Report).json)
        finally:
            if not finished:
                self.close()  # the worker stops at once

    def _events(self, cancel: Cancel) -> Iterator[Event]:
        told = False
        while True:
            if cancel.is_set() and not told:
                self._channel.send(Cancelled())
                told = True
            event = self._channel.receive(CANCEL_POLL_S)
            if event is not None:
                yield event
                if isinstance(event, Finished):
                    return

    def report(self) -> dict[str, Any]:
        """See `Session.report`; as it was after the last answer."""
        return self._report

    def close(self) -> None:
        self._channel.close()


def open_session(order: Order, keep_alive_minutes: float | None) -> RemoteSession | None:
    """The worker for `order`, whose model may still be loading; started when there is none and `keep_alive_minutes`
    says for how long. None: there is none, and none was wanted. SpecgenError when it cannot be had."""
    path = place.socket_path(digest_of(order))
    hello = Hello(PROTOCOL, digest_of(order), keep_alive_minutes)
    channel = _greet(path, hello)
    if channel is None and keep_alive_minutes:
        channel = _start(order, path, hello)
    return None if channel is None else RemoteSession(channel)


def _greet(path: Path, hello: Hello) -> Channel | None:
    """A connection to the worker at `path` that has said who it is; None when there is no worker."""
    try:
        link = place.connect(path, HANDSHAKE_S)
    except TimeoutError as error:
        raise WorkerGoneError(f"the worker at {path} does not answer", hint="`specgen stop` ends it") from error
    if link is None:
        return None
    channel = Channel(link)
    try:
        channel.send(hello)
        welcome = channel.expect(Welcome, HANDSHAKE_S)
        if welcome.protocol != PROTOCOL or (hello.order and welcome.order != hello.order):
            raise WorkerGoneError("the worker is one of another version", hint="`specgen stop` ends it")
    except WorkerLeftError:
        channel.close()
        return None  # it was about to end
    except BaseException:
        channel.close()
        raise
    return channel


def _start(order: Order, path: Path, hello: Hello) -> Channel:
    """Start a worker and connect to it, or to one that another client has just started."""
    process = _spawn(order, path, hello.keep_alive_minutes or 0.0)
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        ended = process.poll() is not None  # asked first: the loser of a race ends after the winner listens
        channel = _greet(path, hello)
        if channel is not None:
            return channel
        if ended:
            break
        time.sleep(POLL_S)
    log = path.with_suffix(".log")
    raise WorkerGoneError("the worker could not be started", hint=f"{log} may say why; --keep-alive 0 runs without")


def _spawn(order: Order, path: Path, keep_alive_minutes: float) -> subprocess.Popen[bytes]:
    # The very modules of this process: its search path goes with it, and nothing from the current folder.
    modules = [os.path.abspath(entry) for entry in sys.path]
    code = "import sys; sys.path[:] = sys.argv[1:]; from specgen.worker.server import main; main()"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    with open(os.open(path.with_suffix(".log"), flags, 0o600), "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", code, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=log,
            cwd="/",
            start_new_session=True,
        )
    assert process.stdin is not None
    with process.stdin:
        process.stdin.write(json.dumps({"order": encode(order), "keep_alive_minutes": keep_alive_minutes}).encode())
    return process


@dataclass(frozen=True, slots=True)
class Found:
    """A worker as a visitor sees it. `status` is None when it does not answer, or speaks another version."""

    path: Path
    pid: int
    status: Status | None


def find_workers() -> list[Found]:
    """Every worker of this user. Sockets of dead workers are removed."""
    found = []
    for path in place.sockets():
        try:
            link = place.connect(path, HANDSHAKE_S)
        except (SpecgenError, OSError):
            continue
        if link is None:
            path.unlink(missing_ok=True)
            continue
        channel = Channel(link)
        found.append(Found(path, channel.peer(), _status(channel)))
        channel.close()
    return found


def _status(channel: Channel) -> Status | None:
    try:
        channel.send(Hello(PROTOCOL, ""))
        channel.expect(Welcome, HANDSHAKE_S)
        channel.send(AskStatus())
        return channel.expect(Status, HANDSHAKE_S)
    except SpecgenError:
        return None


def stop_worker(found: Found) -> None:
    """End a worker: by asking, else by signals. The process id comes from the system, so it is the socket's owner."""
    link = place.connect(found.path, HANDSHAKE_S)
    if link is None:
        return
    channel = Channel(link)
    try:
        channel.send(Hello(PROTOCOL, ""))
        channel.expect(Welcome, HANDSHAKE_S)
        channel.send(AskStop())
        channel.expect(Stopping, HANDSHAKE_S)
        channel.receive(KILL_AFTER_S)
    except WorkerLeftError:
        return
    except WorkerGoneError:
        pass
    finally:
        channel.close()
    _kill(found.pid)


def _kill(pid: int) -> None:
    """SIGTERM, then SIGKILL; nothing when the process is gone already."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.kill(pid, number)
            for _ in range(int(KILL_AFTER_S / POLL_S)):
                os.kill(pid, 0)
                time.sleep(POLL_S)
        except ProcessLookupError:
            return
