"""What happens in a conversation, one record for each event, and how a record is a line of JSON.

Knows: names, types and bounds of fields. Does not know: files, what a record does (`conversation`). A line may come
from an untrusted file: everything in it is checked, nothing is guessed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from specgen.errors import UsageError

SCHEMA = 1
MAX_TOKEN = 2**31


class TranscriptError(UsageError):
    """A saved conversation that cannot be used."""


@dataclass(frozen=True, slots=True)
class Opened:
    """The first line of every transcript."""

    schema: int
    model: str
    digest: str


@dataclass(frozen=True, slots=True)
class ModelChanged:
    model: str
    digest: str


@dataclass(frozen=True, slots=True)
class SystemSet:
    text: str | None


@dataclass(frozen=True, slots=True)
class SettingChanged:
    name: str
    value: str  # JSON


@dataclass(frozen=True, slots=True)
class Asked:
    """A message, and the tokens that the context grew by; with `fresh` they are the whole context, rendered anew."""

    user: str
    ids: tuple[int, ...]
    fresh: bool
    seed: int


@dataclass(frozen=True, slots=True)
class Said:
    """Tokens of the reply, as they were committed."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Replied:
    """The reply is complete."""

    text: str
    thinking: str
    reason: str


@dataclass(frozen=True, slots=True)
class Undone:
    """The last exchange is gone."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """The oldest exchanges are not read any more; a summary may stand for them."""

    count: int
    summary: str | None


@dataclass(frozen=True, slots=True)
class Cleared:
    """All exchanges are gone."""


Record = (
    Opened | ModelChanged | SystemSet | SettingChanged | Asked | Said | Replied | Undone | Dropped | Cleared
)  # fmt: skip

_KINDS: dict[str, type[Record]] = {
    "opened": Opened,
    "model": ModelChanged,
    "system": SystemSet,
    "set": SettingChanged,
    "asked": Asked,
    "said": Said,
    "replied": Replied,
    "undone": Undone,
    "dropped": Dropped,
    "cleared": Cleared,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}


def to_line(record: Record) -> bytes:
    """One line of JSON. ASCII only, so that a lone surrogate in a text is no trouble."""
    value = {"kind": _NAMES[type(record)], **asdict(record)}
    return json.dumps(value, separators=(",", ":")).encode("ascii") + b"\n"


def from_line(line: bytes) -> Record:
    """TranscriptError (without a place) for anything that `to_line` would not write."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        raise TranscriptError("it is not JSON") from None
    if not isinstance(value, dict):
        raise TranscriptError("it is no JSON object")
    kind = value.pop("kind", None)
    record = _KINDS.get(kind) if isinstance(kind, str) else None
    if record is None:
        raise TranscriptError("it is of an unknown kind", hint="a newer specgen may have written it")
    return _checked(record, value)


def _checked(kind: type[Record], value: Mapping[str, Any]) -> Record:
    known = {field.name: str(field.type) for field in fields(kind)}
    if set(value) != set(known):
        raise TranscriptError(f"a {_NAMES[kind]} record has other fields")
    read: dict[str, Any] = {}
    for name, type_name in known.items():
        if not _CHECKS[type_name](value[name]):
            raise TranscriptError(f"its {name} is no {type_name}")
        read[name] = tuple(value[name]) if isinstance(value[name], list) else value[name]
    return kind(**read)


_CHECKS = {
    "str": lambda value: isinstance(value, str),
    "str | None": lambda value: value is None or isinstance(value, str),
    "bool": lambda value: isinstance(value, bool),
    "int": lambda value: type(value) is int and 0 <= value < 2**64,
    "tuple[int, ...]": lambda value: (
        isinstance(value, list) and all(type(token) is int and 0 <= token < MAX_TOKEN for token in value)
    ),
}
