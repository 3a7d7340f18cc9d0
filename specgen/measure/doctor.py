"""What this machine and this installation are like, as far as they decide how fast a model runs.

Knows: where each fact of the processor comes from. Does not know: how facts are shown, graphics cards (doctor_cards). A
section is a function in SECTIONS that returns its facts.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

import specgen
from specgen.errors import SpecgenError
from specgen.kernels.base import Kernels
from specgen.kernels.cpu.build import cpu_flags, find_compiler
from specgen.kernels.cpu.library import NEEDS
from specgen.kernels.cpu.ops import CpuKernels
from specgen.kernels.cpu.threads import cgroup_quota, default_threads
from specgen.kernels.cuda import CudaSystem
from specgen.kernels.cuda_system import NvidiaSystem
from specgen.machine import processor_name
from specgen.measure.doctor_cards import CardPatient, card_sections
from specgen.measure.findings import Fact, Section, plain
from specgen.measure.limits import limit_facts
from specgen.measure.roofline import bandwidth_of
from specgen.memory import budget_bytes, megabytes
from specgen.paths import (
    CACHE_VARIABLE,
    DATA_VARIABLE,
    RUNTIME_VARIABLE,
    cache_dir,
    config_dir,
    data_dir,
    runtime_dir,
)

PATHS_BY_MACHINE = {
    "x86_64": ("avx512 vnni", "avx2 vnni", "avx2", "portable"),
    "AMD64": ("avx512 vnni", "avx2 vnni", "avx2", "portable"),
    "aarch64": ("neon dot", "portable"),
    "arm64": ("neon dot", "portable"),
}
"""The kernels' ways through a CPU, the fastest first."""


@dataclass(frozen=True, slots=True)
class Patient:
    """What is looked at."""

    kernels: Kernels
    notice: str | None  # why these are not the intended kernels
    threads: int | None = None  # asked for
    model: Path | None = None
    device: str = "auto"  # asked for
    system: CudaSystem | None = None  # None: this machine's


def examine(patient: Patient) -> Iterator[Section]:
    """Every section, one after the other: measuring takes a second."""
    for name, look in SECTIONS.items():
        facts = tuple(look(patient))
        if facts:
            yield Section(name, facts)
    yield from card_sections(CardPatient(patient.system or NvidiaSystem(), patient.model, patient.device))


def _installation(patient: Patient) -> Iterator[Fact]:
    yield plain("specgen", specgen.__version__)
    yield plain("python", platform.python_version())
    yield plain("torch", torch.__version__)
    yield _folder("cache", cache_dir(), CACHE_VARIABLE)
    yield _folder("data", data_dir(), DATA_VARIABLE)
    yield _folder("run", runtime_dir(), RUNTIME_VARIABLE)
    yield plain("config folder", str(config_dir()))


def _folder(name: str, folder: Path, variable: str) -> Fact:
    there = next(place for place in (folder, *folder.parents) if place.exists())
    problem = None if os.access(there, os.W_OK | os.X_OK) else f"cannot be written: set {variable} to another folder"
    return Fact(f"{name} folder", str(folder), str(folder), problem)


def _processor(patient: Patient) -> Iterator[Fact]:
    yield plain("processor", processor_name())
    yield plain("cpus", os.cpu_count())
    if hasattr(os, "sched_getaffinity"):
        allowed = len(os.sched_getaffinity(0))
        yield Fact("affinity", allowed, f"{allowed} of them may be used by this process")
    quota = cgroup_quota()
    yield Fact("cgroup quota", quota, "none" if quota is None else f"{quota:g} CPUs")
    threads = patient.threads or default_threads()
    why = "--threads" if patient.threads else "what affinity and quota allow"
    problem = None
    if threads > default_threads():
        problem = f"more than the {default_threads()} that this process may keep busy: they take turns"
    yield Fact("threads", threads, f"{threads} ({why})", problem)


def _kernels(patient: Patient) -> Iterator[Fact]:
    try:
        compiler = find_compiler()
        first = compiler.version.splitlines()[0] if compiler.version else ""
        yield Fact("compiler", " ".join(compiler.command), f"{' '.join(compiler.command)}: {first}")
    except SpecgenError as error:
        yield Fact("compiler", None, error.message, error.hint)
    yield Fact("kernels", patient.kernels.name, patient.kernels.name, patient.notice)
    if isinstance(patient.kernels, CpuKernels):
        reasons = "; ".join(_reasons(patient.kernels.name.removeprefix("cpu ")))
        yield Fact("why", reasons, reasons)


def _reasons(taken: str) -> Iterator[str]:
    """Why this way through the CPU and not a faster one."""
    flags = cpu_flags()
    for path in PATHS_BY_MACHINE.get(platform.machine(), ("portable",)):
        missing = sorted(NEEDS[path] - flags)
        if path == taken:
            yield f"{path}: " + (f"the CPU has {', '.join(sorted(NEEDS[path]))}" if NEEDS[path] else "runs anywhere")
            return
        yield f"not {path}: " + (f"the CPU lacks {', '.join(missing)}" if missing else "the compiler does not offer it")


def _memory(patient: Patient) -> Iterator[Fact]:
    free = budget_bytes(None)
    yield Fact("free", free, "unknown" if free is None else megabytes(free))
    yield from limit_facts(bandwidth_of(patient.kernels), patient.model)


SECTIONS: dict[str, Callable[[Patient], Iterator[Fact]]] = {
    "installation": _installation,
    "processor": _processor,
    "kernels": _kernels,
    "memory": _memory,
}
