"""Texts of earlier runs, on disk, for the n-gram proposer to look in (`--ngram-store`).

Knows: one file per model, bounded, shared by processes: read whole, merged under a lock, replaced atomically. Does not
know: how texts are searched. The file holds what was prompted and answered, as token ids in JSON, so it is private to
the user and only kept when asked for. A file that is damaged or another model's is ignored, never trusted.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from specgen.errors import SpecgenError
from specgen.paths import ensure_dir

SCHEMA = 1
MAX_TOKENS = 65_536
"""Tokens kept per model; the oldest texts go first. Indexing them takes about 0.2 s."""
MAX_FILE_BYTES = 16 * MAX_TOKENS
"""More than MAX_TOKENS ids of any vocabulary need; a longer file is not ours."""
LOCK_TIMEOUT_S = 2.0
MIN_TOKENS = 8
"""A shorter text has nothing to look up."""


class NgramStore:
    """The texts of one model in `folder`. `notice` says why an existing file was ignored."""

    def __init__(self, folder: Path, digest: str, vocab: int) -> None:
        self.path = folder / f"{digest[:32]}.json"
        self.notice: str | None = None
        self._digest = digest
        self._vocab = vocab

    def read(self) -> list[list[int]]:
        """The stored texts, oldest first; none when there is no file or it cannot be used."""
        self.notice = None
        try:
            texts = self._checked(self._load())
        except FileNotFoundError:
            return []
        except OSError as error:
            self.notice = f"the n-gram store cannot be read: {error.strerror or error}"
            return []
        except (ValueError, RecursionError) as error:
            self.notice = f"the n-gram store {self.path} is ignored: {error}"
            return []
        return texts

    def add(self, text: Sequence[int]) -> None:
        """Keep one more text. What other processes stored meanwhile stays; a failure to write is only noticed."""
        if len(text) < MIN_TOKENS:
            return
        try:
            ensure_dir(self.path.parent)
            with FileLock(self.path.with_suffix(".lock"), timeout=LOCK_TIMEOUT_S):
                # A text that goes on with an earlier one (a conversation) takes its place.
                others = [known for known in self.read() if list(text[: len(known)]) != known]
                self._write(_bounded([*others, list(text)]))
        except Timeout:
            self.notice = "the n-gram store is in use by another process; this answer is not in it"
        except (OSError, SpecgenError) as error:
            self.notice = f"the n-gram store cannot be written: {error}"

    def _load(self) -> Any:
        with self.path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
        if len(raw) > MAX_FILE_BYTES:
            raise ValueError("it is too long")
        return json.loads(raw)

    def _checked(self, value: Any) -> list[list[int]]:
        if not isinstance(value, dict) or value.get("schema") != SCHEMA:
            raise ValueError("it is of another version")
        if value.get("model") != self._digest:
            raise ValueError("it belongs to another model")
        texts = value.get("texts")
        if not isinstance(texts, list) or not all(isinstance(text, list) for text in texts):
            raise ValueError("it has no texts")
        if not all(type(token) is int and 0 <= token < self._vocab for text in texts for token in text):
            raise ValueError("it holds something that is no token")
        return _bounded(texts)

    def _write(self, texts: Sequence[Sequence[int]]) -> None:
        value = {"schema": SCHEMA, "model": self._digest, "texts": texts}
        handle, name = tempfile.mkstemp(dir=self.path.parent, prefix=self.path.stem)  # mode 0600
        try:
            with os.fdopen(handle, "w", encoding="ascii") as file:
                json.dump(value, file, separators=(",", ":"))
            os.replace(name, self.path)
        except BaseException:
            os.unlink(name)
            raise


def _bounded(texts: Sequence[list[int]]) -> list[list[int]]:
    """The latest texts with MAX_TOKENS together, without copies of one text; a text of its own that is longer keeps its
    end."""
    kept: list[list[int]] = []
    room = MAX_TOKENS
    seen: set[tuple[int, ...]] = set()
    for text in reversed(texts):
        if room == 0:
            break
        text = text[-room:]
        if tuple(text) in seen:
            continue
        seen.add(tuple(text))
        kept.append(text)
        room -= len(text)
    return kept[::-1]
