"""Prompts to measure with: nine kinds of text, written for this project, and the user's own.

Knows: the files beside this module, and what `--prompts` may point at. Does not know: models, tokens, speeds.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from specgen.errors import UsageError, nearest
from specgen.options import RunOptions, SamplingOptions

KINDS = (
    "chat",
    "reasoning",
    "code_writing",
    "code_editing",
    "summarising",
    "grounded",
    "structured",
    "rewriting",
    "story",
)
HARD_KIND = "story"
"""Little of it can be guessed: what a setting must survive."""
LONG_KIND = "long"
"""Questions on one document of more than 2048 tokens: another class of plans. Only where it is asked for, because each
answer begins with a long wait."""
MAX_TOKENS = 192
SAMPLED = 0.8
"""Temperature of the user's own prompts where they do not say otherwise."""
MOST_BYTES = 16 << 20
_KEYS = ("text", "name", "kind", "system", "temperature", "top_p", "top_k", "min_p", "max_tokens")


@dataclass(frozen=True, slots=True)
class Workload:
    """One prompt and how it wants to be answered."""

    kind: str
    name: str
    text: str
    sampling: SamplingOptions  # with a temperature above 0 for the sampled class
    max_tokens: int = MAX_TOKENS
    system: str | None = None

    @property
    def id(self) -> str:
        return f"{self.kind}/{self.name}"

    def options(self, temperature: float | None = None) -> RunOptions:
        """How to answer it: greedily with temperature 0, its own way with None."""
        if temperature is None:
            return RunOptions(self.sampling, self.max_tokens)
        return RunOptions(replace(self.sampling, temperature=temperature), self.max_tokens)


def load_workloads(kinds: Sequence[str] = (), prompts: Path | None = None) -> list[Workload]:
    """The shipped prompts (of `kinds`), or those of the user's file or folder. UsageError for what cannot be read."""
    found = read_prompts(prompts) if prompts is not None else shipped((*KINDS, LONG_KIND) if kinds else KINDS)
    known = list(dict.fromkeys(load.kind for load in found))
    for kind in kinds:
        if kind not in known:
            raise UsageError(
                f"there is no kind {kind!r} of prompts", nearest(kind, known) or f"known: {', '.join(known)}"
            )
    return [load for load in found if load.kind in kinds] if kinds else found


def shipped(kinds: Sequence[str] = KINDS) -> list[Workload]:
    """The prompts of this package, kind by kind."""
    found: list[Workload] = []
    for kind in kinds:
        raw = tomllib.loads((files(__package__) / f"{kind}.toml").read_text(encoding="utf-8"))
        defaults = {key: raw[key] for key in _KEYS if key in raw}
        found += [_workload({**defaults, **prompt, "kind": kind}, kind, kind) for prompt in raw["prompt"]]
    return found


def digest(workloads: Iterable[Workload]) -> str:
    """Changes when any prompt or the way it is answered changes."""
    return hashlib.sha256(repr(list(workloads)).encode()).hexdigest()


def kinds_in_turn(workloads: Sequence[Workload]) -> list[Workload]:
    """The first prompt of every kind, then the second of every kind, …: wherever one stops, no kind is missing."""
    by_kind: dict[str, list[Workload]] = {}
    for load in workloads:
        by_kind.setdefault(load.kind, []).append(load)
    deepest = max((len(loads) for loads in by_kind.values()), default=0)
    return [loads[turn] for turn in range(deepest) for loads in by_kind.values() if turn < len(loads)]


def read_prompts(path: Path) -> list[Workload]:
    """The user's prompts: a folder of text files (a sub-folder's name is the kind), a JSONL file (`text` and any of
    kind, name, system, temperature, top_p, top_k, min_p, max_tokens), or a text file that is one prompt."""
    if not path.exists():
        raise UsageError(f"--prompts {path} does not exist")
    if path.is_dir():
        found = _folder(path)
        if not found:
            raise UsageError(f"{path} holds no prompts", hint="put *.txt, *.md or *.jsonl files into it")
        return found
    return _file(path, path.parent)


def _folder(path: Path) -> list[Workload]:
    names = sorted(file for file in path.rglob("*") if file.suffix in (".txt", ".md", ".jsonl") and file.is_file())
    return [load for file in names for load in _file(file, path)]


def _file(path: Path, root: Path) -> list[Workload]:
    text = _text(path)
    kind = path.parent.name if path.parent != root else "own"
    if path.suffix == ".jsonl":
        return _lines(path, text, path.stem if path.parent == root else kind)
    return [_workload({"text": text, "name": path.stem}, str(path), kind)]


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > MOST_BYTES:
            raise UsageError(f"{path} is too large for a file of prompts", hint=f"the limit is {MOST_BYTES >> 20} MiB")
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise UsageError(f"{path}, line {line}: not UTF-8", hint="save the file as UTF-8 text") from error
    if not text.strip():
        raise UsageError(f"{path} is empty", hint="write a prompt into it")
    return text


def _lines(path: Path, text: str, kind: str) -> list[Workload]:
    found: list[Workload] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{where}: no JSON: {error}", hint='one object a line: {"text": "…"}') from error
        if isinstance(value, str):
            value = {"text": value}
        if not isinstance(value, dict):
            raise UsageError(f"{where}: neither an object nor a text", hint='for example {"text": "…"}')
        found.append(_workload({"name": str(number), **value}, where, kind))
    return found


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_CHECKS: dict[str, tuple[Callable[[object], bool], str]] = {
    **dict.fromkeys(("text", "name", "kind", "system"), (_is_text, "text that is not empty")),
    **dict.fromkeys(("temperature", "top_p", "min_p"), (_is_number, "a number")),
    **dict.fromkeys(("top_k", "max_tokens"), (_is_count, "a whole number")),
}
assert set(_CHECKS) == set(_KEYS)


def _workload(value: Mapping[str, Any], where: str, kind: str) -> Workload:
    """UsageError names the place and the key that is wrong."""
    for key, item in value.items():
        if key not in _CHECKS:
            raise UsageError(f"{where}: unknown key {key!r}", nearest(key, _KEYS) or f"known keys: {', '.join(_KEYS)}")
        fits, wanted = _CHECKS[key]
        if not fits(item):
            raise UsageError(f"{where}: {key} is {item!r}", hint=f"it must be {wanted}")
    if "text" not in value:
        raise UsageError(f"{where}: there is no text", hint='for example {"text": "…"}')
    sampling = {key: value[key] for key in ("temperature", "top_p", "top_k", "min_p") if key in value}
    try:
        chosen = SamplingOptions(**{"temperature": SAMPLED, **sampling})
        load = Workload(
            kind=value.get("kind", kind),
            name=value.get("name", ""),
            text=value["text"].strip("\n"),
            sampling=chosen,
            max_tokens=value.get("max_tokens", MAX_TOKENS),
            system=value.get("system"),
        )
        load.options()
    except UsageError as error:
        raise UsageError(f"{where}: {error.message}", error.hint) from error
    return load
