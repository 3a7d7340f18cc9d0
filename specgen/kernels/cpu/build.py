"""Compiles kernels.cpp for this very machine, once, and finds the result again.

Knows: the system's compiler, the flags, and a cache keyed by everything that the result depends on (source, flags,
CPU, compiler), so that a library made for another CPU is never loaded. Does not know: what is in the library.
Two processes may build at once: a lock lets one compile, and a rename makes the result appear whole.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from specgen.errors import SpecgenError
from specgen.paths import cache_dir, ensure_dir

FOLDER = Path(__file__).parent
SOURCE = FOLDER / "kernels.cpp"

FLAGS = (
    "-std=c++20",
    "-O3",
    "-ffp-contract=off",  # the compiler must not choose where to round: all sums are written as they are to be made
    "-fvisibility=hidden",
    "-Wno-psabi",
    "-fPIC",
    "-shared",
    "-pthread",
)

COMPILE_TIMEOUT_S = 300


class BuildError(SpecgenError):
    """The kernels cannot be compiled here."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C++ compiler that answered `--version`."""

    command: tuple[str, ...]  # e.g. ("ccache", "g++")
    version: str


def build(extra_flags: Sequence[str] = (), cache: Path | None = None) -> Path:
    """The compiled library, from the cache or made now. BuildError says why it cannot be had.

    extra_flags: appended (tests and sanitizers). cache: a folder in place of the user's cache.
    """
    compiler = find_compiler()
    flags = (*FLAGS, _native_flag(), *extra_flags)
    name = f"kernels-{_key(compiler, flags)}.so"
    folder = cache or cache_dir() / "kernels"
    ready = folder / name
    if ready.is_file():
        return ready
    if not _writable(folder):
        folder = _private_folder()
    return _build_once(compiler, flags, folder / name)


def find_compiler() -> Compiler:
    """$CXX, or the first of the usual names. BuildError when there is none or it does not run."""
    chosen = os.environ.get("CXX")
    names = [shlex.split(chosen)] if chosen else [["c++"], ["g++"], ["clang++"]]
    command = next((name for name in names if name and shutil.which(name[0])), None)
    if command is None:
        raise BuildError(
            f"no C++ compiler: {chosen} is not on the path" if chosen else "no C++ compiler is installed",
            hint="install g++ or clang++ (Debian: apt install g++)",
        )
    try:
        answer = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"the C++ compiler {command[0]} does not run: {error}") from error
    return Compiler(tuple(command), answer.stdout)


def cpu_identity() -> str:
    """What this CPU is and can do: part of the cache key."""
    parts = [platform.system(), platform.machine(), platform.processor()]
    return "\n".join([*parts, *_cpuinfo("vendor_id", "cpu family", "model", "model name", "stepping", "CPU part")]) + (
        " ".join(sorted(cpu_flags()))
    )


def cpu_flags() -> frozenset[str]:
    """Instruction set flags as Linux names them; empty where the system does not list them."""
    return frozenset(flag for line in _cpuinfo("flags", "Features") for flag in line.split())


def _cpuinfo(*keys: str) -> list[str]:
    """The first value of each key in /proc/cpuinfo."""
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return []
    found: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        found.setdefault(key.strip(), value.strip())
    return [found[key] for key in keys if key in found]


def _native_flag() -> str:
    return "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"


def _key(compiler: Compiler, flags: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for path in sorted([SOURCE, *FOLDER.glob("*.h")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    for part in (*compiler.command, compiler.version, *flags, cpu_identity()):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:24]


def _writable(folder: Path) -> bool:
    try:
        with tempfile.TemporaryFile(dir=ensure_dir(folder)):
            return True
    except (SpecgenError, OSError):
        return False


def _private_folder() -> Path:
    """A folder of this process alone: a shared one in /tmp could hold somebody else's library."""
    try:
        folder = tempfile.mkdtemp(prefix="specgen-kernels-")
    except OSError as error:
        raise BuildError(f"there is no folder to build the CPU kernels in: {error}") from error
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _build_once(compiler: Compiler, flags: Sequence[str], target: Path) -> Path:
    try:
        with FileLock(target.with_suffix(".lock"), timeout=COMPILE_TIMEOUT_S):
            if not target.is_file():
                _compile(compiler, flags, target)
    except (Timeout, OSError) as error:
        raise BuildError(f"the CPU kernels could not be built in {target.parent}: {error}") from error
    return target


def _compile(compiler: Compiler, flags: Sequence[str], target: Path) -> None:
    partial = target.with_suffix(f".{os.getpid()}.tmp")
    command = [*compiler.command, *flags, str(SOURCE), "-o", str(partial)]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
        if result.returncode != 0:
            lines = [line for line in result.stderr.splitlines() if "error" in line.lower()] or [result.stderr.strip()]
            raise BuildError(
                f"{compiler.command[0]} could not compile the CPU kernels: {lines[0]}",
                hint="a compiler with C++20 is needed: g++ 12 or clang 15, or newer (set CXX to choose one)",
            )
        if not partial.is_file():
            raise BuildError(f"{compiler.command[0]} made no library, though it reports success")
        partial.replace(target)
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{compiler.command[0]} took more than {COMPILE_TIMEOUT_S} s for the CPU kernels") from error
    finally:
        partial.unlink(missing_ok=True)
