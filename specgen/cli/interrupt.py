"""Ctrl-C and SIGTERM while an answer is made: the first asks the engine to stop, the second leaves at once.

Python runs its signal handlers between bytecodes, so a handler would wait for a long step in native code. The
interpreter does write each signal's number to a pipe at once; a thread reads it there.

Knows: signals. Does not know: what is being cancelled.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def exit_code(signum: int) -> int:
    """The code a shell reports for a process that a signal ended: 130 for Ctrl-C, 143 for SIGTERM."""
    return 128 + signum


class Interrupts:
    """Signals that came so far."""

    def __init__(self, cancel: Callable[[], None], tidy: Callable[[], None]) -> None:
        self.received: list[int] = []
        self._cancel = cancel
        self._tidy = tidy

    def arrived(self, signum: int) -> None:
        self.received.append(signum)
        if len(self.received) == 1:
            self._cancel()
            return
        try:
            self._tidy()
        finally:
            os._exit(exit_code(signum))


@contextmanager
def interrupts(cancel: Callable[[], None], tidy: Callable[[], None]) -> Iterator[Interrupts]:
    """While the block runs, `cancel` is called at the first signal; at the second `tidy`, and the process ends."""
    caught = Interrupts(cancel, tidy)
    if threading.current_thread() is not threading.main_thread():
        yield caught  # only the main thread may set handlers
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    thread = threading.Thread(target=_watch, args=(reader, caught), daemon=True)
    thread.start()
    # A signal that our parent had ignored (nohup, a script's background job) stays ignored.
    ours = [signum for signum in SIGNALS if signal.getsignal(signum) is not signal.SIG_IGN]
    before = {signum: signal.signal(signum, _nothing) for signum in ours}
    old_fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        yield caught
    finally:
        signal.set_wakeup_fd(old_fd)
        for signum, handler in before.items():
            signal.signal(signum, handler)
        writer.close()
        thread.join()
        reader.close()


def _watch(reader: socket.socket, caught: Interrupts) -> None:
    while numbers := reader.recv(16):
        for signum in numbers:
            if signum in SIGNALS:
                caught.arrived(signum)


def _nothing(signum: int, frame: FrameType | None) -> None:
    pass  # the thread does the work; without a handler Python would raise KeyboardInterrupt


def terminate_politely() -> None:
    """SIGTERM ends the process by an exception, so that temporary files are removed on the way out."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _leave)


def _leave(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(exit_code(signum))
