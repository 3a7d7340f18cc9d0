"""Dataclasses ↔ plain JSON values, strictly by their type hints.

Knows: dataclasses, tuples, lists, optional values, literals, enumerations, numbers, text. Does not know: messages.
Nothing but the named type is ever made of what comes in, and every field must have its type.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import StrEnum
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


class CodecError(ValueError):
    """A value that is not of the type it should be."""


def encode(value: Any) -> Any:
    """What `json.dumps` takes."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: encode(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    return str(value) if isinstance(value, StrEnum) else value


def decode(hint: Any, value: Any) -> Any:
    """`value` (of `json.loads`) as a `hint`. CodecError when it is none."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return _one_of(hint, value)
    if origin is Literal:
        return _checked(value in arguments and isinstance(value, str), hint, value)
    if origin in (tuple, list):
        return _sequence(hint, value)
    if isinstance(hint, type) and is_dataclass(hint):
        return _dataclass(hint, value)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return hint(_checked(value in set(hint), hint, value))
    if hint is float:
        return _checked(isinstance(value, int | float) and not isinstance(value, bool), hint, value)
    assert hint in (int, str, bool, NoneType), hint
    return _checked(isinstance(value, hint) and (hint is bool or not isinstance(value, bool)), hint, value)


def _checked(good: bool, hint: Any, value: Any) -> Any:
    if not good:
        shown = repr(value)
        raise CodecError(f"{shown[:60]}{'…' if len(shown) > 60 else ''} is no {getattr(hint, '__name__', hint)}")
    return value


def _one_of(hint: Any, value: Any) -> Any:
    for option in get_args(hint):
        try:
            return decode(option, value)
        except CodecError:
            continue
    return _checked(False, hint, value)


def _sequence(hint: Any, value: Any) -> Any:
    kind, arguments = get_origin(hint), get_args(hint)
    _checked(isinstance(value, list), hint, value)
    if kind is list or arguments[1:] == (...,):
        return kind(decode(arguments[0], item) for item in value)
    _checked(len(value) == len(arguments), hint, value)
    return tuple(decode(item_hint, item) for item_hint, item in zip(arguments, value, strict=True))


@cache
def _hints(kind: type) -> dict[str, tuple[Any, bool]]:
    """Field → (type, whether it must be given)."""
    hints = get_type_hints(kind)
    return {
        field.name: (hints[field.name], field.default is MISSING and field.default_factory is MISSING)
        for field in fields(kind)
    }


def _dataclass(kind: type, value: Any) -> Any:
    hints = _hints(kind)
    _checked(isinstance(value, dict), kind, value)
    for name, (_, needed) in hints.items():
        _checked(name in value or not needed, kind, value)
    for name in value:
        _checked(name in hints, kind, name)
    return kind(**{name: decode(hints[name][0], item) for name, item in value.items()})
