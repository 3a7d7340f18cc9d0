"""How a download tells what it is doing. Knows no terminal: a caller passes a function (or nothing)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

Progress = Callable[[int, int | None, str], None]  # (bytes done, bytes in all if known, what)

_POLL_S = 0.2


class FetchError(Exception):
    """Why one source could not be used; the next one is tried."""


def silent(done_bytes: int, total_bytes: int | None, what: str) -> None:
    """A Progress for when nobody is watching."""


@contextmanager
def watch_folder(folder: Path, total_bytes: int | None, what: str, progress: Progress) -> Iterator[None]:
    """Report how much `folder` grows while the body runs: works for every downloader, whatever it prints.

    `total_bytes` may be a guess (a wheel is a little smaller than what is in it); the last report has the true size.
    """
    before_bytes = _size(folder)
    done = threading.Event()

    def poll() -> None:
        last_bytes = 0
        while not done.wait(_POLL_S):
            grown_bytes = _size(folder) - before_bytes
            if grown_bytes > last_bytes:
                progress(min(grown_bytes, total_bytes or grown_bytes), total_bytes, what)
                last_bytes = grown_bytes

    progress(0, total_bytes, what)
    thread = threading.Thread(target=poll, name="specgen-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    grown_bytes = max(0, _size(folder) - before_bytes)
    progress(grown_bytes, grown_bytes, what)


def _size(folder: Path) -> int:
    """Bytes of the files in `folder`; files that vanish while we look do not count."""
    total = 0
    for path in folder.rglob("*"):
        try:
            if not path.is_symlink() and path.is_file():
                total += path.stat().st_size
        except OSError:
            continue
    return total
