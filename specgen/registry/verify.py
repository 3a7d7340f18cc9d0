"""Whether a file is the one that the registry means: its size and sha256.

Knows: that hashing gigabytes at every start is too slow, so it remembers good files by size, inode and time of change
in `verified/` of the cache. A file that changes afterwards is hashed again.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path

from specgen.errors import SpecgenError
from specgen.paths import cache_dir, ensure_dir
from specgen.registry.entries import Artefact
from specgen.registry.progress import Progress, silent

_CHUNK_BYTES = 1 << 20


def mismatch(path: Path, artefact: Artefact, progress: Progress = silent) -> str | None:
    """What is wrong with a file (its size, its sha256), or None. About a folder nothing is known."""
    if not path.is_file():
        return None
    stat = path.stat()
    if artefact.size_bytes is not None and stat.st_size != artefact.size_bytes:
        return f"it has {stat.st_size} bytes instead of {artefact.size_bytes}"
    if artefact.sha256 is None or _read_stamp(path) == _stamp(stat, artefact.sha256):
        return None
    actual = _hash_file(path, stat.st_size, progress)
    if actual != artefact.sha256:
        return f"its sha256 is {actual} instead of {artefact.sha256}"
    remember(path, artefact.sha256)
    return None


def remember(path: Path, sha256: str) -> None:
    """Note that the file was checked. A cache that cannot be written to is no failure: it is checked again."""
    stamp_path = _stamp_path(path)
    temporary = stamp_path.with_suffix(f".{os.getpid()}.tmp")
    with suppress(OSError, SpecgenError):
        ensure_dir(stamp_path.parent)
        temporary.write_text(json.dumps(_stamp(path.stat(), sha256)), encoding="utf-8")
        temporary.replace(stamp_path)


def forget(path: Path) -> None:
    _stamp_path(path).unlink(missing_ok=True)


def _stamp(stat: os.stat_result, sha256: str) -> dict[str, str | int]:
    return {"sha256": sha256, "bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns, "inode": stat.st_ino}


def _read_stamp(path: Path) -> object:
    try:
        return json.loads(_stamp_path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _stamp_path(path: Path) -> Path:
    return cache_dir() / "verified" / (hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32] + ".json")


def _hash_file(path: Path, total_bytes: int, progress: Progress) -> str:
    sha, done_bytes = hashlib.sha256(), 0
    with path.open("rb") as stream:
        while piece := stream.read(_CHUNK_BYTES):
            sha.update(piece)
            done_bytes += len(piece)
            progress(done_bytes, total_bytes, f"checking {path.name}")
    return sha.hexdigest()
