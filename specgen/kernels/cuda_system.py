"""What this machine says of its graphics cards: the driver by its own library, torch, Triton.

Knows: where each answer is found. Does not know: what follows from it (`cuda`). On a machine without a driver the first
question ends it all, in microseconds. Triton is looked for, not imported.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import re
import shutil
import sysconfig
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from specgen.kernels.cuda import Card, CardLostError, Driver, Version

LIBRARIES = ("libcuda.so.1", "nvcuda.dll")
DRIVER_FILE = Path("/proc/driver/nvidia/version")
TRITON_PACKAGES = ("triton", "pytorch-triton", "triton-windows")

# Names and numbers of the driver's interface (cuda.h).
_NAME_BYTES = 128
_MAJOR, _MINOR, _COMPUTE_MODE = 75, 76, 20
_PROHIBITED = 2
_NO_DEVICE = 100
_FAILURES = {3: "it was shut down", 803: "its library and its kernel module are of different versions"}


class NvidiaSystem:
    """Answers once and remembers, but for free memory."""

    def __init__(self, libraries: Sequence[str] = LIBRARIES, driver_file: Path = DRIVER_FILE) -> None:
        self._libraries = libraries
        self._driver_file = driver_file

    def driver(self) -> Driver | None:
        return self._driver

    def cards(self) -> Sequence[Card]:
        return self._cards

    def torch_cuda(self) -> Version | None:
        import torch

        built = torch.version.cuda
        return None if built is None else _version(built)

    def torch_archs(self) -> Sequence[str]:
        import torch

        return torch.cuda.get_arch_list()

    def triton(self) -> str | None:
        if importlib.util.find_spec("triton") is None:
            return None
        for package in TRITON_PACKAGES:
            try:
                return importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                continue
        return "of unknown version"

    def triton_obstacle(self) -> tuple[str, str] | None:
        return launcher_obstacle(Path(sysconfig.get_paths()["include"]))

    def memory(self, card: Card) -> tuple[int, int]:
        import torch

        try:
            free_bytes, total_bytes = torch.cuda.mem_get_info(card.index)
            unused = torch.cuda.memory_reserved(card.index) - torch.cuda.memory_allocated(card.index)
        except (RuntimeError, AssertionError, torch.cuda.DeferredCudaCallError) as error:
            # torch asserts that it was built with CUDA, and has an error of its own for a start that failed
            raise CardLostError(str(error).splitlines()[0] if str(error) else type(error).__name__) from error
        return free_bytes + unused, total_bytes  # torch will hand out again what it keeps unused

    @cached_property
    def _library(self) -> ctypes.CDLL | None:
        for name in self._libraries:
            try:
                return ctypes.CDLL(name)
            except OSError:
                continue
        return None

    @cached_property
    def _driver(self) -> Driver | None:
        library = self._library
        if library is None:
            return None
        code = library.cuInit(0)
        number = ctypes.c_int()
        cuda = (0, 0)
        if library.cuDriverGetVersion(ctypes.byref(number)) == 0:
            cuda = (number.value // 1000, number.value % 1000 // 10)
        failure = None if code in (0, _NO_DEVICE) else _FAILURES.get(code, f"error {code}")
        return Driver(_package_version(self._driver_file), cuda, failure)

    @cached_property
    def _cards(self) -> tuple[Card, ...]:
        library, count = self._library, ctypes.c_int()
        if library is None or library.cuDeviceGetCount(ctypes.byref(count)) != 0:
            return ()
        return tuple(_card(library, index) for index in range(count.value))


def _card(library: ctypes.CDLL, index: int) -> Card:
    device, total = ctypes.c_int(), ctypes.c_size_t()
    name = ctypes.create_string_buffer(_NAME_BYTES)
    library.cuDeviceGet(ctypes.byref(device), index)
    library.cuDeviceGetName(name, _NAME_BYTES, device)
    library.cuDeviceTotalMem_v2(ctypes.byref(total), device)

    def attribute(number: int) -> int:
        value = ctypes.c_int()
        library.cuDeviceGetAttribute(ctypes.byref(value), number, device)
        return value.value

    capability = (attribute(_MAJOR), attribute(_MINOR))
    shown = name.value.decode("utf-8", "replace")
    return Card(index, shown, capability, total.value, attribute(_COMPUTE_MODE) == _PROHIBITED)


def launcher_obstacle(include: Path) -> tuple[str, str] | None:
    """Triton compiles the code that starts its kernels, once: it looks for `CC`, gcc and clang, and for Python.h."""
    if not os.environ.get("CC") and shutil.which("gcc") is None and shutil.which("clang") is None:
        return "Triton needs a C compiler, and there is none", "install gcc or clang, or set CC"
    elsewhere = os.environ.get("CPATH") or os.environ.get("C_INCLUDE_PATH")
    if not elsewhere and not (include / "Python.h").exists():
        return f"Triton needs Python's headers, and {include} has no Python.h", "install python3-dev or python3-devel"
    return None


def _package_version(file: Path) -> str | None:
    try:
        found = re.search(r"\b\d{3,}\.\d+(?:\.\d+)?\b", file.read_text(errors="replace"))
    except OSError:
        return None
    return found[0] if found else None


def _version(text: str) -> Version:
    numbers = re.findall(r"\d+", text)
    return int(numbers[0]), int(numbers[1]) if len(numbers) > 1 else 0
