"""The worker: one loaded model behind a unix socket, until nobody has asked it anything for a while.

Two threads: `Door` (asyncio) talks to the clients, the main thread works through their requests one after the other. A
client that goes away, or wants no more, sets the cancel of its request.

Knows: connections, a queue, the idle time-out. Does not know: how answers are made (session).
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

import specgen
from specgen.cancel import Cancel
from specgen.errors import OutOfMemoryError, SpecgenError
from specgen.memory import rss_bytes
from specgen.worker import place
from specgen.worker.client import digest_of
from specgen.worker.codec import decode
from specgen.worker.protocol import (
    MAX_REPLY_BYTES,
    MAX_REQUEST_BYTES,
    PROTOCOL,
    AskAnswer,
    AskPrompt,
    AskStatus,
    AskStop,
    Cancelled,
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
    failure_of,
    from_line,
    to_line,
)

if TYPE_CHECKING:
    from specgen.registry import ModelRef
    from specgen.session import Session

MAX_CLIENTS = 64
LOCK_S = 2.0
"""A predecessor that is leaving holds the lock for some tenths of a second longer than its socket."""

HELLO_S = 10.0
"""Who connects and says nothing for so long is let go."""


@dataclass(slots=True)
class Request:
    """One thing that a client asks of the model."""

    asked: AskPrompt | AskAnswer
    reply: Callable[[Any], None]  # send a message, from any thread
    cancel: Cancel = field(default_factory=Cancel)
    gone: bool = False  # nobody waits for it any more
    done: bool = False

    def finish(self, message: Any) -> None:
        """The last message; the client may then ask for the next thing."""
        self.done = True
        self.reply(message)


@dataclass(slots=True)
class Shared:
    """What both threads look at."""

    order: Order
    keep_alive_minutes: float
    requests: queue.Queue[Request | None] = field(default_factory=queue.Queue)  # None: look whether to go on
    running: Request | None = None
    stopping: bool = False
    loaded: bool = False
    answers: int = 0
    began: float = field(default_factory=time.monotonic)
    active: float = field(default_factory=time.monotonic)  # when somebody last wanted something

    def idle_s(self) -> float:
        return 0.0 if self.running is not None or not self.requests.empty() else time.monotonic() - self.active

    def status(self) -> Status:
        state = "answering" if self.running is not None else "idle" if self.loaded else "loading"
        return Status(
            version=specgen.__version__,
            model=self.order.model.name,
            path=self.order.model.path,
            state=state,
            waiting=self.requests.qsize(),
            answers=self.answers,
            rss_bytes=rss_bytes(),
            age_s=time.monotonic() - self.began,
            idle_s=self.idle_s(),
            keep_alive_minutes=self.keep_alive_minutes,
        )

    def stop(self) -> None:
        self.stopping = True
        if self.running is not None:
            self.running.cancel.set()
        self.requests.put(None)


class Door:
    """Everything that happens on the socket, in a thread of its own."""

    def __init__(self, shared: Shared, path: Path) -> None:
        self._shared = shared
        self._digest = digest_of(shared.order)
        listener = place.listen(path)
        self._loop = asyncio.new_event_loop()
        self._loaded: asyncio.Future[Ready | SpecgenError] = self._loop.create_future()
        self._clients: set[asyncio.Task[None]] = set()
        self._server = self._loop.run_until_complete(
            asyncio.start_unix_server(self._connected, sock=listener, limit=MAX_REQUEST_BYTES)
        )
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def open(self, outcome: Ready | SpecgenError) -> None:
        """Tell all who wait, and who come, that the model is loaded or that it cannot be."""
        self._loop.call_soon_threadsafe(self._loaded.set_result, outcome)

    def close(self) -> None:
        """Let the last messages out, and end the thread."""
        asyncio.run_coroutine_threadsafe(self._leave(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    async def _leave(self) -> None:
        self._server.close()
        if self._clients:
            _, stuck = await asyncio.wait(self._clients, timeout=0.2)
            for task in stuck:
                task.cancel()
            await asyncio.gather(*stuck, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            place.check_peer(writer.get_extra_info("socket"))
            if len(self._clients) < MAX_CLIENTS:
                self._clients.add(task)
                await self._talk(reader, writer)
        except (SpecgenError, OSError, ProtocolError, asyncio.IncompleteReadError, TimeoutError):
            pass  # a stranger, a client that left, or one that speaks nonsense: it is let go
        except asyncio.CancelledError:
            pass  # the worker ends
        finally:
            self._clients.discard(task)
            writer.close()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(HELLO_S):
            hello = await _next(reader)
        if not isinstance(hello, Hello):
            raise ProtocolError("a client begins with Hello")
        writer.write(to_line(Welcome(PROTOCOL, self._digest)))
        if hello.protocol != PROTOCOL or hello.order not in ("", self._digest):
            return
        if not hello.order:
            await self._visit(reader, writer)
            return
        self._shared.active = time.monotonic()
        if hello.keep_alive_minutes:
            self._shared.keep_alive_minutes = hello.keep_alive_minutes
            self._shared.requests.put(None)
        outcome = await asyncio.shield(self._loaded)
        if isinstance(outcome, SpecgenError):
            writer.write(to_line(failure_of(outcome)))
            await writer.drain()
            return
        writer.write(to_line(outcome))
        await self._serve(reader, writer)

    async def _visit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Someone who only looks, or ends the worker."""
        while True:
            message = await _next(reader)
            if isinstance(message, AskStatus):
                writer.write(to_line(self._shared.status()))
            elif isinstance(message, AskStop):
                writer.write(to_line(Stopping()))
                await writer.drain()
                self._shared.stop()
                await asyncio.sleep(HELLO_S)  # the end of the connection is the end of the worker
            else:
                raise ProtocolError("visitors ask for status or to stop")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Requests of one client, one at a time; when it leaves, what it asked for is dropped."""
        request: Request | None = None

        def reply(message: Any) -> None:
            # The answer is not held up by a client that reads slowly or was suspended: it waits in memory.
            self._loop.call_soon_threadsafe(_write, writer, to_line(message))

        try:
            while True:
                try:
                    message = await _next(reader)
                except SpecgenError as error:  # options that no run may have
                    writer.write(to_line(failure_of(error)))
                    continue
                if isinstance(message, Cancelled):
                    if request is not None:
                        request.cancel.set()
                elif isinstance(message, AskPrompt | AskAnswer) and (request is None or request.done):
                    request = Request(message, reply)
                    self._shared.requests.put(request)
                else:
                    raise ProtocolError(f"a client does not send {type(message).__name__} now")
        finally:
            if request is not None:
                request.gone = True
                request.cancel.set()


async def _next(reader: asyncio.StreamReader) -> Any:
    """The next message. IncompleteReadError at the end, ProtocolError for what is none or is too long."""
    try:
        return from_line(await reader.readuntil())
    except asyncio.LimitOverrunError as error:
        raise ProtocolError("a message without end") from error


def _write(writer: asyncio.StreamWriter, line: bytes) -> None:
    if writer.is_closing():
        return
    writer.write(line)
    if writer.transport.get_write_buffer_size() > MAX_REPLY_BYTES:
        writer.transport.abort()  # who never reads cannot fill our memory


def serve(shared: Shared, path: Path, load: Callable[[Order], Session]) -> None:
    """Load, answer, and return when idle for long enough or told to stop. The caller holds the order's lock."""
    door = Door(shared, path)
    try:
        try:
            session = load(shared.order)
        except Exception as error:
            door.open(_told(error))
            return
        shared.loaded = True
        shared.active = time.monotonic()
        door.open(Ready())
        while not shared.stopping and shared.idle_s() < 60 * shared.keep_alive_minutes:
            _work(shared, session)
    finally:
        path.unlink(missing_ok=True)
        door.close()


def _work(shared: Shared, session: Session) -> None:
    """The next request, if one comes before it is time to look at the clock."""
    try:
        request = shared.requests.get(timeout=max(0.01, 60 * shared.keep_alive_minutes - shared.idle_s()))
    except queue.Empty:
        return
    if request is None:
        return
    shared.running = request
    try:
        if not request.gone:
            shared.answers += isinstance(request.asked, AskAnswer)
            _answer(request, session)
    except Exception as error:
        request.finish(failure_of(_told(error)))
    finally:
        shared.active = time.monotonic()
        shared.running = None


def _answer(request: Request, session: Session) -> None:
    asked = request.asked
    if isinstance(asked, AskPrompt):
        prompt = session.prompt_ids(asked.text, system=asked.system, raw=asked.raw, think=asked.think)
        request.finish(PromptIs(prompt))
        return
    session.refresh_plans()  # `specgen tune` may have run since
    for event in session.generate(asked.prompt, asked.options, request.cancel):
        request.reply(event)
    request.finish(Report(json.dumps(session.report())))


def _told(error: Exception) -> SpecgenError:
    """The error as a client is told; what is no user's doing is written to the log too."""
    if isinstance(error, SpecgenError):
        return error
    traceback.print_exception(error)
    if isinstance(error, MemoryError):
        return OutOfMemoryError(
            "memory ran out in the worker", hint="use a smaller model, a shorter --ctx or --kv int8"
        )
    return SpecgenError(
        f"internal error in the worker: {type(error).__name__}: {error}",
        hint="this is a bug in specgen; run again with --keep-alive 0 --debug and report what it prints",
    )


def _load(order: Order) -> Session:
    from specgen.session import load

    draft = None if order.draft is None else _ref(order.draft)
    return load(_ref(order.model), order.options, draft=draft)


def _ref(source: Source) -> ModelRef:
    from specgen.registry import Artefact, Entry, LocalSource, ModelRef

    place_on_disk = LocalSource(Path(source.path))
    return ModelRef(source.name, Entry(source.name, Artefact(((place_on_disk,),))), registered=False)


def _terminated(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)


def main() -> None:
    """The worker's process: its order comes on standard input."""
    signal.signal(signal.SIGTERM, _terminated)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the client
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    given = json.load(sys.stdin)
    order = decode(Order, given["order"])
    path = place.socket_path(digest_of(order))
    try:
        with FileLock(path.with_suffix(".lock"), timeout=LOCK_S):
            serve(Shared(order, float(given["keep_alive_minutes"])), path, _load)
    except Timeout:
        return  # another one serves this order already
    log = path.with_suffix(".log")
    if log.exists() and log.stat().st_size == 0:
        log.unlink(missing_ok=True)
    os._exit(0)  # threads of libraries must not hold up the end
