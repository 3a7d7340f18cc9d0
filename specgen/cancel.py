"""A request to stop an answer, from any thread.

Knows: nothing but whether it was made. Does not know: who asks, or what stops.
"""

from __future__ import annotations

import threading


class Cancel:
    """Checked once per cycle and per prefill chunk. Safe to set from a signal handler."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        self._event.set()

    def is_set(self) -> bool:
        return self._event.is_set()
