"""Models on the Hugging Face hub, through `huggingface_hub` (imported only here, and only when a hub source is used).

Knows: which files of a repository are wanted (never pickles, never code) and when a snapshot is whole. Whole
repositories stay in Hugging Face's own cache, which other programs share, so that nothing is downloaded twice.
"""

from __future__ import annotations

import glob
import json
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from specgen.registry.progress import FetchError, Progress, watch_folder
from specgen.registry.sources import HubSource

WANTED = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "*.tiktoken", "merges.txt", "vocab.txt")
UNWANTED = ("original/*", "onnx/*", "openvino/*", "*/*.safetensors")  # the same weights again, in other layouts
_CONNECT_S = 10.0


def cached(source: HubSource) -> Path | None:
    """The snapshot folder or file in Hugging Face's cache if all of it is there; never touches the network."""
    if not _cache_root(source).is_dir():
        return None
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return _checked(source, _snapshot(source, local_files_only=True))
    except (LocalEntryNotFoundError, FetchError, OSError, ValueError):
        return None


def is_whole(folder: Path) -> bool:
    """Whether a snapshot has its config and every weight file that its index names (a download may have stopped)."""
    if not (folder / "config.json").is_file():
        return False
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return any(folder.glob("*.safetensors"))
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return False
    return bool(names) and all(isinstance(name, str) and (folder / name).is_file() for name in names)


def download(source: HubSource, total_bytes: int | None, progress: Progress, folder: Path | None = None) -> Path:
    """The snapshot folder or file: inside Hugging Face's cache, or inside `folder`. FetchError says why not."""
    _check_reachable()
    watched = folder or _cache_root(source)
    with _reasons(source), watch_folder(watched, total_bytes, f"downloading {source}", progress):
        snapshot = _snapshot(source, local_dir=folder)
    return _checked(source, snapshot)


def _check_reachable() -> None:
    """Without a network the library retries in silence for half a minute; one connection attempt tells at once."""
    from urllib.request import getproxies  # half of the time that a warm run takes to import the registry

    from huggingface_hub.constants import ENDPOINT, HF_HUB_OFFLINE

    url = urlsplit(ENDPOINT)
    if HF_HUB_OFFLINE or url.hostname is None or url.scheme in getproxies():
        return  # offline is the library's to refuse; a proxy is asked, not the host
    try:
        with socket.create_connection((url.hostname, url.port or 443), timeout=_CONNECT_S):
            return
    except OSError as error:
        raise FetchError(f"cannot reach {url.hostname}: {error.strerror or error}") from error


def _snapshot(source: HubSource, **options: Any) -> Path:
    from huggingface_hub import snapshot_download

    wanted = [glob.escape(source.file)] if source.file else list(WANTED)
    unwanted = None if source.file else list(UNWANTED)
    found = snapshot_download(
        source.repo, revision=source.revision, allow_patterns=wanted, ignore_patterns=unwanted, **options
    )
    return Path(found)


def _checked(source: HubSource, snapshot: Path) -> Path:
    """The part of a snapshot that was asked for; FetchError when it is not there."""
    if source.file is None:
        if not is_whole(snapshot):
            raise FetchError("the repository has no config.json with safetensors weights")
        return snapshot
    if not (snapshot / source.file).is_file():
        raise FetchError(f"the repository has no file {source.file}")
    return snapshot / source.file


def _cache_root(source: HubSource) -> Path:
    """Where Hugging Face's cache keeps this repository (the layout is documented in its guide to the cache)."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE) / ("models--" + source.repo.replace("/", "--"))


@contextmanager
def _reasons(source: HubSource) -> Iterator[None]:
    """Quiet bars of the library (we have our own) and turn its errors into reasons."""
    from huggingface_hub.errors import GatedRepoError, OfflineModeIsEnabled, RepositoryNotFoundError
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it prints every retry
    try:
        yield
    except GatedRepoError as error:
        page = f"https://huggingface.co/{source.repo}"
        raise FetchError(f"accept the licence at {page}, then log in with `hf auth login` or set HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise FetchError("no such repository (or it is private and needs HF_TOKEN)") from error
    except OfflineModeIsEnabled as error:
        raise FetchError("HF_HUB_OFFLINE is set") from error
    except Exception as error:  # the library lets its HTTP and storage clients' own errors through
        raise FetchError(_first_line(error)) from error


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]
