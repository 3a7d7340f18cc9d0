"""The CPU backend of the ops: one C++ source, compiled for this machine at first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specgen.kernels.cpu.ops import CpuKernels


def load_cpu_kernels(threads: int | None = None) -> CpuKernels:
    """The CPU kernels on `threads` threads (None: all that the affinity mask and the cgroup allow).

    Compiles for some seconds the first time. SpecgenError says why when they cannot be had here: no compiler, or one
    that fails.
    """
    import torch

    from specgen.kernels.cpu.build import build, cpu_flags
    from specgen.kernels.cpu.library import open_library
    from specgen.kernels.cpu.ops import CpuKernels
    from specgen.kernels.cpu.threads import default_threads

    library = open_library(build(), cpu_flags())
    # The few torch ops beside the kernels are small. A second pool of threads that spins between them takes the cores
    # from ours: 48 tokens with a repetition penalty took 8.9 s instead of 0.28 s on two busy cores.
    torch.set_num_threads(1)
    return CpuKernels(library, threads or default_threads())
