"""What client and worker say to each other: one JSON object per line, over a unix socket.

The client begins with a Hello and gets a Welcome, then Ready once the model is loaded. After that it asks, one thing at
a time: AskPrompt → PromptIs; AskAnswer → the events of `specgen.events`, then Report; AskStatus → Status; AskStop →
Stopping, and the worker ends. Failure may come instead of any of them. Cancel ends an answer early and has no reply;
so does closing the connection.

Knows: the messages, their bounds, their spelling. Does not know: sockets. Anything that is not as it should be is a
ProtocolError. Imports no torch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from specgen.errors import ContextFullError, ModelError, OutOfMemoryError, SpecgenError, UsageError
from specgen.events import CycleDone, Finished, Piece, Prefilled, Started
from specgen.options import LoadOptions, RunOptions, ThinkName
from specgen.prompt import Prompt
from specgen.worker.codec import CodecError, decode, encode

PROTOCOL = 1

MAX_REQUEST_BYTES = 256 << 20
"""A prompt may have 32 MiB, and JSON spells a control character with six bytes."""

MAX_REPLY_BYTES = 512 << 20
"""The last event of an answer holds a record of every cycle: some 300 bytes for each."""


class ProtocolError(ValueError):
    """The other side sent something that is no message."""


@dataclass(frozen=True, slots=True)
class Source:
    """A model's files, and what tells that they were changed."""

    name: str
    path: str
    stamp: str


@dataclass(frozen=True, slots=True)
class Order:
    """What a worker holds, and all that it depends on: a worker serves exactly the clients with an equal order."""

    protocol: int
    version: str  # of specgen
    code: str  # a stamp of its files
    model: Source
    draft: Source | None
    options: LoadOptions
    folders: tuple[str, ...]  # cache, configuration, data
    cpus: tuple[int, ...]  # affinity mask


@dataclass(frozen=True, slots=True)
class Hello:
    protocol: int
    order: str  # digest of the order; "" for a visitor who only asks for status or to stop
    keep_alive_minutes: float | None = None  # None: as it was


@dataclass(frozen=True, slots=True)
class Welcome:
    protocol: int
    order: str


@dataclass(frozen=True, slots=True)
class Ready:
    """The model is in memory."""


@dataclass(frozen=True, slots=True)
class AskPrompt:
    text: str
    system: str | None
    raw: bool
    think: ThinkName


@dataclass(frozen=True, slots=True)
class PromptIs:
    prompt: Prompt


@dataclass(frozen=True, slots=True)
class AskAnswer:
    prompt: Prompt
    options: RunOptions


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The client wants no more of its answer."""


@dataclass(frozen=True, slots=True)
class Report:
    """`Session.report()` after an answer, as JSON: its keys are the session's affair."""

    json: str


@dataclass(frozen=True, slots=True)
class AskStatus:
    pass


@dataclass(frozen=True, slots=True)
class Status:
    version: str
    model: str
    path: str
    state: str  # "loading", "idle", "answering"
    waiting: int  # requests behind the one that is being answered
    answers: int  # given so far
    rss_bytes: int
    age_s: float
    idle_s: float
    keep_alive_minutes: float


@dataclass(frozen=True, slots=True)
class AskStop:
    pass


@dataclass(frozen=True, slots=True)
class Stopping:
    pass


@dataclass(frozen=True, slots=True)
class Failure:
    kind: str  # a key of ERRORS
    message: str
    hint: str | None


MESSAGES: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        *(Hello, Welcome, Ready, AskPrompt, PromptIs, AskAnswer, Cancelled, Report),
        *(AskStatus, Status, AskStop, Stopping, Failure),
        *(Started, Prefilled, CycleDone, Piece, Finished),
    )
}

ERRORS: dict[str, type[SpecgenError]] = {
    kind.__name__: kind for kind in (SpecgenError, UsageError, ModelError, OutOfMemoryError, ContextFullError)
}


def to_line(message: Any) -> bytes:
    """A message as a line."""
    assert type(message).__name__ in MESSAGES
    return json.dumps({"is": type(message).__name__, **encode(message)}).encode() + b"\n"


def from_line(line: bytes) -> Any:
    """The message of a line. ProtocolError when it is none."""
    try:
        value = json.loads(line)
        if not isinstance(value, dict):
            raise ProtocolError("a message is an object")
        kind = MESSAGES.get(str(value.pop("is", None)))
        if kind is None:
            raise ProtocolError("a message says what it is")
        return decode(kind, value)
    except (CodecError, RecursionError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ProtocolError(f"no message: {error}") from error


def failure_of(error: SpecgenError) -> Failure:
    """An error as it travels: the nearest class that the other side knows."""
    kind = next(base.__name__ for base in type(error).__mro__ if base.__name__ in ERRORS)
    return Failure(kind, error.message, error.hint)


def error_of(failure: Failure) -> SpecgenError:
    return ERRORS.get(failure.kind, SpecgenError)(failure.message, failure.hint)
