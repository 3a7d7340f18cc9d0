"""The CPU kernels for tests: built once for the session, skipped with the builder's own reason where they cannot be."""

from __future__ import annotations

from functools import cache

import pytest

from specgen.kernels.cpu import load_cpu_kernels
from specgen.kernels.cpu.build import BuildError, find_compiler
from specgen.kernels.cpu.ops import CpuKernels


@cache
def _missing_compiler() -> str | None:
    try:
        find_compiler()
    except BuildError as error:
        return error.message
    return None


@cache
def cpu_kernels(threads: int) -> CpuKernels:
    """A compiler that is there and fails is no reason to skip."""
    reason = _missing_compiler()
    if reason is not None:
        pytest.skip(reason)
    return load_cpu_kernels(threads)
