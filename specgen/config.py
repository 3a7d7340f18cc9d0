"""The user's standing choices, resolved once: defaults ← `config.toml` ← SPECGEN_* variables ← options.

Knows: every setting that outlives one command, under the name of its option. Does not know: how an option is written
on a command line, nor what a model needs (its sampling defaults are in `models.toml`). Nothing is dropped in silence:
an unknown key of the file is refused, and so is a variable that looks like a misspelt one.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from specgen.errors import SpecgenError, UsageError, nearest
from specgen.options import (
    WEIGHT_CACHE,
    AcceptName,
    DraftOptions,
    KVName,
    LoadOptions,
    ProposerName,
    QuantName,
    RunOptions,
    WorkerOptions,
    check_choice,
    parse_size,
)
from specgen.paths import CACHE_VARIABLE, CONFIG_VARIABLE, DATA_VARIABLE, RUNTIME_VARIABLE, config_dir, user_path

FILE_NAME = "config.toml"
PREFIX = "SPECGEN_"
ColorName = Literal["auto", "always", "never"]
_OTHER_VARIABLES = {CACHE_VARIABLE, CONFIG_VARIABLE, DATA_VARIABLE, RUNTIME_VARIABLE}
_LOOKS_ALIKE = 0.8  # difflib ratio above which an unknown variable is taken for a misspelt setting


@dataclass(frozen=True, slots=True)
class Settings:
    """What is used where a command does not say otherwise. Raises UsageError for a value that makes no sense."""

    model: str | None = None  # None: the registry's default
    models: Path | None = None  # a models.toml laid over the others
    device: str = "auto"
    threads: int | None = None  # None: what the machine allows
    ctx: int | None = None  # tokens; None: the model's own
    kv: KVName = "auto"
    quant: QuantName | None = None
    max_memory: str | None = None  # a size; None: what is free
    draft: str | None = None  # a model's name or path; None: the target's own
    draft_quant: QuantName | None = None
    draft_stop: float = 0.0
    ngram_store: bool = False
    tree: int = 1
    proposer: ProposerName = "auto"
    gamma: int | None = None  # None: chosen each cycle
    accept: AcceptName = "coupled"
    color: ColorName = "auto"
    quiet: bool = False
    weight_cache: str = WEIGHT_CACHE
    keep_alive: float | None = None  # minutes

    def __post_init__(self) -> None:
        LoadOptions(self.device, self.threads, self.ctx, self.kv, self.quant, self.draft_quant)
        if self.max_memory is not None:
            parse_size("max_memory", self.max_memory)
        parse_size("weight_cache", self.weight_cache)
        WorkerOptions(self.keep_alive)
        RunOptions(proposer=self.proposer, gamma=self.gamma, accept=self.accept, tree=self.tree)
        DraftOptions(self.draft_stop)
        check_choice("color", self.color, get_args(ColorName))


def resolve_settings(
    options: Mapping[str, object] | None = None,  # name → value; None means that the option was not given
    environ: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> Settings:
    """The one place where the layers meet. UsageError names the file or variable, the key and the nearest key."""
    values = standing_choices(environ, file)
    values.update({name: value for name, value in (options or {}).items() if value is not None})
    unknown = set(values) - set(_READERS)
    assert not unknown, unknown
    return Settings(**values)


def standing_choices(environ: Mapping[str, str] | None = None, file: Path | None = None) -> dict[str, Any]:
    """Only what the file or a variable sets, checked; e.g. for the defaults of a command line."""
    path = file or config_dir() / FILE_NAME
    chosen = _read_file(path) if file or path.is_file() else {}
    return chosen | _read_environ(os.environ if environ is None else environ)


def flag_defaults(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The standing choices as the defaults of a command line's flags, where "auto" is a word or simply not given."""
    return {
        name: str(value) if name == "gamma" else value
        for name, value in standing_choices(environ).items()
        if value is not None
    }


def _read_file(path: Path) -> dict[str, Any]:
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UsageError(f"cannot read {path}: {reason}") from error
    for key in raw:
        if key not in _READERS:
            hint = nearest(key, _READERS) or f"known keys: {', '.join(sorted(_READERS))}"
            raise UsageError(f"{path}: unknown key {key!r}", hint)
    values = {key: _checked(f"{path}: {key}", key, value) for key, value in raw.items()}
    if "models" in values:
        values["models"] = path.absolute().parent / values["models"]  # relative to the file that says so
    return values


def _read_environ(environ: Mapping[str, str]) -> dict[str, Any]:
    known = {PREFIX + name.upper(): name for name in _READERS}
    for variable in environ:
        if variable.startswith(PREFIX) and variable not in known and variable not in _OTHER_VARIABLES:
            word = variable.removeprefix(PREFIX)
            words = [name.removeprefix(PREFIX) for name in (*known, *_OTHER_VARIABLES)]
            alike = difflib.get_close_matches(word, words, n=1, cutoff=_LOOKS_ALIKE)
            if alike:
                raise UsageError(f"unknown variable {variable}", f"did you mean {PREFIX}{alike[0]}?")
    return {name: _checked(var, name, _typed(name, environ[var])) for var, name in known.items() if environ.get(var)}


def _typed(key: str, text: str) -> object:
    """A variable is text; where a number or true/false is wanted it is read as TOML would."""
    if _READERS[key] in (_text, _path):
        return text
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _checked(where: str, key: str, value: object) -> Any:
    """The value as its field wants it, alone in a Settings so that its range is checked where it was said."""
    try:
        read = _READERS[key](value)
        Settings(**{key: read})
    except SpecgenError as error:
        raise UsageError(f"{where}: {error.message}", error.hint) from error
    except TypeError as error:
        raise UsageError(f"{where} is {value!r}", str(error)) from error
    return read


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise TypeError("it must be text in quotes")
    return value


def _path(value: object) -> Path:
    return user_path(_text(value))


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError("it must be a whole number")
    return value


def _count(value: object) -> int | None:
    if value == "auto":
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError('it must be a whole number or "auto"')
    return value


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError("it must be a number")
    return value


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError("it must be true or false")
    return value


_READERS: dict[str, Callable[[object], Any]] = {
    "models": _path,
    "threads": _count,
    "ctx": _count,
    "gamma": _count,
    "quiet": _flag,
    "ngram_store": _flag,
    "tree": _whole,
    "keep_alive": _number,
    "draft_stop": _number,
    **{field.name: _text for field in fields(Settings) if field.type in ("str", "str | None")},
    **dict.fromkeys(("kv", "quant", "draft_quant", "proposer", "accept", "color"), _text),
}
assert set(_READERS) == {field.name for field in fields(Settings)}
