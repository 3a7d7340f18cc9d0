"""What can be changed in the middle of a conversation, by name, and how it is kept.

Knows: names, words and JSON of settings, as fields of RunOptions and SamplingOptions. Does not know: flags, terminals.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from typing import Any, get_args

from specgen.chat.records import TranscriptError
from specgen.errors import SpecgenError, UsageError, nearest
from specgen.options import AcceptName, ConstraintOptions, ProposerName, RunOptions, SamplingOptions, ThinkName

AUTO = "auto"
_SAMPLING = tuple(field.name for field in fields(SamplingOptions) if field.name != "logit_bias")
_WHOLE = ("top_k", "seed", "max_tokens", "gamma", "tree")
_WORDS: dict[str, tuple[str, ...]] = {
    "proposer": get_args(ProposerName),
    "accept": get_args(AcceptName),
    "think": get_args(ThinkName),
}
NAMES = (*_SAMPLING, "max_tokens", "gamma", "proposer", "accept", "tree", "think")
"""What /set knows."""
KEPT = (*NAMES, "stop", "ignore_eos", "logit_bias", "constraint")
"""What a resumed conversation goes on with."""


def words_of(name: str) -> tuple[str, ...]:
    """The words that a setting may have, where they are words."""
    return _WORDS.get(name, ())


def value_of(options: RunOptions, name: str) -> Any:
    return getattr(options.sampling if name in (*_SAMPLING, "logit_bias") else options, name)


def shown(options: RunOptions, name: str) -> str:
    value = value_of(options, name)
    return AUTO if value is None else str(value)


def known(name: str) -> str:
    """The setting's own name. UsageError with the nearest for one that is none."""
    name = name.replace("-", "_")
    if name not in NAMES:
        raise UsageError(f"there is no setting {name!r}", hint=nearest(name, NAMES) or f"known: {', '.join(NAMES)}")
    return name


def changed(options: RunOptions, name: str, text: str) -> RunOptions:
    """`options` with the setting that a user wrote. UsageError for a name or a value that makes no sense."""
    name = known(name)
    return with_value(options, name, _parsed(name, text))


def with_value(options: RunOptions, name: str, value: Any) -> RunOptions:
    if name in (*_SAMPLING, "logit_bias"):
        return replace(options, sampling=replace(options.sampling, **{name: value}))
    return replace(options, **{name: value})


def _parsed(name: str, text: str) -> Any:
    if name in _WORDS:
        return text
    if text == AUTO and name in ("gamma", "max_tokens"):
        return None
    try:
        return int(text) if name in _WHOLE else float(text)
    except ValueError:
        kind = "a whole number" if name in _WHOLE else "a number"
        raise UsageError(f"{name} is {text!r}", hint=f"it must be {kind}") from None


def to_json(options: RunOptions, name: str) -> str:
    value = value_of(options, name)
    return json.dumps(asdict(value) if isinstance(value, ConstraintOptions) else value)


def differing(options: RunOptions, known: Mapping[str, str]) -> dict[str, str]:
    """The settings (name → JSON) that `known` does not have so."""
    now = {name: to_json(options, name) for name in KEPT}
    return {name: value for name, value in now.items() if known.get(name) != value}


def from_json(options: RunOptions, settings: Mapping[str, str]) -> RunOptions:
    """`options` with what a transcript says. TranscriptError for what `to_json` would not have written."""
    for name, text in settings.items():
        if name not in KEPT:
            raise TranscriptError(f"it has an unknown setting {name!r}", hint="a newer specgen may have written it")
        try:
            options = with_value(options, name, _typed(name, json.loads(text)))
        except (ValueError, TypeError, RecursionError, SpecgenError) as error:
            raise TranscriptError(f"its setting {name} cannot be used: {error}") from error
    return options


def _typed(name: str, value: Any) -> Any:
    """JSON's value as the field wants it; TypeError where it is of another type."""
    if name == "constraint":
        return None if value is None else ConstraintOptions(**value)
    if name == "stop":
        return tuple(_is(str, text) for text in _is(list, value))
    if name == "logit_bias":
        return tuple((_is(int, token), float(_is((int, float), bias))) for token, bias in _is(list, value))
    if name == "ignore_eos":
        return _is(bool, value)
    if name in _WORDS:
        return _is(str, value)
    if value is None and name in ("gamma", "max_tokens"):
        return None
    return _is(int if name in _WHOLE else (int, float), value)


def _is(kind: type | tuple[type, ...], value: Any) -> Any:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"{value!r} is of another type")
    return value
