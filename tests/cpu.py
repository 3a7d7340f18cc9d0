"""The CPU kernels for tests: built once for the session, skipped with the builder's own reason where they cannot be.

test_cpu_build.py runs the op tests again on other paths and under sanitizers: SPECGEN_TEST_CPU_FLAGS holds their flags.
"""

from __future__ import annotations

import os
from functools import cache

import pytest

from specgen.kernels.cpu.build import BuildError, build, cpu_flags, find_compiler
from specgen.kernels.cpu.library import open_library
from specgen.kernels.cpu.ops import CpuKernels


@cache
def _missing_compiler() -> str | None:
    try:
        find_compiler()
    except BuildError as error:
        return error.message
    return None


@cache
def cpu_kernels(threads: int, flags: str | None = None) -> CpuKernels:
    """On the best path, or compiled with extra flags. A compiler that is there and fails is no reason to skip."""
    reason = _missing_compiler()
    if reason is not None:
        pytest.skip(reason)
    flags = os.environ.get("SPECGEN_TEST_CPU_FLAGS", "") if flags is None else flags
    return CpuKernels(open_library(build(flags.split()), cpu_flags()), threads)
