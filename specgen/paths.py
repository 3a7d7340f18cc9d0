"""Where specgen keeps its files: cache (models, compiled kernels, plans), config (`config.toml`, `models.toml`), data.

Knows: the platform's folders and the variables that move them (SPECGEN_CACHE, SPECGEN_CONFIG, SPECGEN_DATA,
SPECGEN_RUNTIME).
Does not know: what is in them. Nothing is created until it is asked for; our own folders are private (0700), since
a cache holds code that is loaded later.
"""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

from specgen.errors import SpecgenError

CACHE_VARIABLE = "SPECGEN_CACHE"
CONFIG_VARIABLE = "SPECGEN_CONFIG"
DATA_VARIABLE = "SPECGEN_DATA"
RUNTIME_VARIABLE = "SPECGEN_RUNTIME"


def cache_dir() -> Path:
    """Files that can be fetched or built again."""
    return _override(CACHE_VARIABLE) or platformdirs.user_cache_path("specgen", appauthor=False)


def config_dir() -> Path:
    """The user's own `config.toml` and `models.toml`."""
    return _override(CONFIG_VARIABLE) or platformdirs.user_config_path("specgen", appauthor=False)


def data_dir() -> Path:
    """Files that cannot be made again (saved sessions, logs)."""
    return _override(DATA_VARIABLE) or platformdirs.user_data_path("specgen", appauthor=False)


def runtime_dir() -> Path:
    """Sockets of running workers: gone when the user logs out, where the system has such a place."""
    given = _override(RUNTIME_VARIABLE)
    if given is not None:
        return given
    session = os.environ.get("XDG_RUNTIME_DIR")
    return Path(session) / "specgen" if session and os.access(session, os.W_OK) else cache_dir() / "run"


def ensure_dir(path: Path) -> Path:
    """`path`; what is missing of it is created with mode 0700. SpecgenError when that cannot be done."""
    try:
        if not path.parent.exists():
            ensure_dir(path.parent)  # mkdir(parents=True) would ignore the mode
        path.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        reason = error.strerror or str(error)
        hint = f"set {CACHE_VARIABLE}, {CONFIG_VARIABLE} or {DATA_VARIABLE} to a folder you can write to"
        raise SpecgenError(f"cannot create the folder {path}: {reason}", hint) from error
    return path


def user_path(text: str) -> Path:
    """A path as the user wrote it, `~` expanded; of a user that there is not, `~name` stays what it is."""
    path = Path(text)
    try:
        return path.expanduser()
    except RuntimeError:
        return path


def _override(variable: str) -> Path | None:
    value = os.environ.get(variable)
    return user_path(value).absolute() if value else None
