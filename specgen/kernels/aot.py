"""Kernels compiled ahead of time, on any machine: does each fit each card?

Knows: how to compile one variant of a Triton kernel for a card that is not there, what the result needs (registers,
spills, shared memory), and what each compute capability has. Does not know: the kernels; every `triton_*` module of
this package names its variants in `aot_cases()`. Needs Triton, without its interpreter, but no card.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specgen import kernels
from specgen.errors import UsageError

SHARED_BYTES = {75: 64 << 10, 80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 120: 99 << 10}
"""Compute capability → shared memory that one block may have (CUDA C++ programming guide, table of capabilities)."""

CAPABILITIES = tuple(SHARED_BYTES)
BF16_CAPABILITIES = tuple(capability for capability in CAPABILITIES if capability >= 80)

CACHE_DTYPES = (torch.bfloat16, torch.int8, torch.float32)
"""Of K and V, on every card: for Turing, which multiplies no bfloat16, the compiler writes it out."""

REGISTERS = 255
"""Per thread; also, all the threads of a block share 65536."""

REGISTER_FILE = 65536

MOST_SPILL_BYTES = 16
"""Per thread: a value or two that wait outside the loop, where the compiler prefers more blocks to them."""


@dataclass(frozen=True, slots=True)
class AotCase:
    """One variant of a kernel, as a launch would make it (with `launch_options`)."""

    name: str  # "linear int4 g128 min rows8 bf16": what the table calls it, unique in its module
    kernel: Any  # the function under @triton.jit
    signature: Mapping[str, str]  # argument → "*bf16", "*i8", "i32", "fp32" …, all but the constexprs
    constexprs: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 1
    aligned: tuple[str, ...] = ()  # pointers on 16 bytes and integers divisible by 16, as a launch would find them
    capabilities: tuple[int, ...] = CAPABILITIES  # bf16 kernels: BF16_CAPABILITIES

    @classmethod
    def of_launch(
        cls,
        name: str,
        kernel: Any,
        arguments: Mapping[str, Any],
        constexprs: Mapping[str, Any],
        options: tuple[int, int, tuple[int, ...]],
    ) -> AotCase:
        """The variant that a launch with these arguments (tensors, integers, floats, None) would compile.

        options: num_warps, num_stages, capabilities.
        """
        types = {key: _type_of(value) for key, value in arguments.items() if value is not None}
        absent = dict.fromkeys(arguments.keys() - types.keys())
        parameters = getattr(kernel, "params", ())  # the interpreter's kernels have none, and are not compiled
        varied = {parameter.name for parameter in parameters if parameter.do_not_specialize}
        aligned = tuple(key for key in types if key not in varied and _is_aligned(arguments[key]))
        return cls(name, kernel, types, {**constexprs, **absent}, options[0], options[1], aligned, options[2])


TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
}


def _type_of(value: Any) -> str:
    """The name that Triton gives an argument's type."""
    if isinstance(value, Tensor):
        return TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def _is_aligned(value: Any) -> bool:
    """What a launch would find divisible by 16; a tensor of torch's allocator is."""
    return isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0)


@dataclass(frozen=True, slots=True)
class AotResult:
    """What ptxas made of one case for one card."""

    module: str
    case: str
    capability: int
    num_warps: int
    registers: int = 0  # per thread
    spill_bytes: int = 0  # per thread: its stack, which holds spilled registers
    shared_bytes: int = 0  # per block
    instructions: tuple[str, ...] = ()  # the matrix instructions used, and how inputs are dealt out to them
    error: str | None = None  # the compiler's own words
    failures: tuple[str, ...] = field(default=())

    @property
    def ok(self) -> bool:
        return not self.failures


def case_modules() -> Iterator[tuple[str, Any]]:
    """The modules of this package that have `aot_cases`, by short name."""
    for found in sorted(module.name for module in pkgutil.iter_modules(kernels.__path__)):
        if found.startswith("triton_"):
            module = importlib.import_module(f"{kernels.__name__}.{found}")
            if hasattr(module, "aot_cases"):
                yield found, module


def all_cases() -> list[tuple[str, AotCase]]:
    """(module, case) for every variant. UsageError without Triton, or under its interpreter."""
    require_compiler()
    return [(name, case) for name, module in case_modules() for case in module.aot_cases()]


def require_compiler() -> None:
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise UsageError("kernels cannot be compiled under Triton's interpreter", hint="unset TRITON_INTERPRET")
    try:
        importlib.import_module("triton")
    except ImportError as error:
        raise UsageError(f"kernels cannot be compiled: {error}", hint="install triton (Linux only)") from error


def launch_options(num_warps: int, num_stages: int) -> dict[str, Any]:
    """What every launch passes. Products and sums are fused only where a kernel says `tl.fma`: a compiler that fuses
    as it likes may do so in one variant of a kernel and not in another, and a row's bits would depend on its step."""
    return {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": False}


def compile_case(module: str, case: AotCase, capability: int) -> AotResult:
    """Compile `case` for `capability` and hold what it needs against what such a card has."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = case.kernel.arg_names
    signature = {name: case.signature.get(name, "constexpr") for name in names}
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in case.aligned}
    source = ASTSource(fn=case.kernel, signature=signature, constexprs=dict(case.constexprs), attrs=attrs)
    target = GPUTarget("cuda", capability, 32)
    options = launch_options(case.num_warps, case.num_stages)
    try:
        compiled = triton.compile(source, target=target, options=options)
    except Exception as error:  # whatever a compiler may raise is this case's result, and the others' go on
        text = f"{type(error).__name__}: {error}"
        return AotResult(module, case.name, capability, case.num_warps, error=text, failures=("does not compile",))
    registers, stack, static = resource_usage(compiled.asm["cubin"])
    return judged(
        AotResult(
            module,
            case.name,
            capability,
            case.num_warps,
            registers,
            stack,
            compiled.metadata.shared + static,
            tuple(sorted({*MATRIX.findall(compiled.asm["ptx"]), *ORDER_OF_K.findall(compiled.asm["ttgir"])})),
        )
    )


MATRIX = re.compile(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)[\w.:]*")
ORDER_OF_K = re.compile(r"\bkWidth = \d+")
"""Neighbours along K that a thread holds: which inputs meet in one matrix instruction follows from it."""

USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)")


def resource_usage(cubin: bytes) -> tuple[int, int, int]:
    """Registers per thread, stack bytes per thread and static shared bytes per block, as cuobjdump reads them."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        done = subprocess.run([tool, "-res-usage", file], capture_output=True, text=True, check=True, timeout=60)
    found = USAGE.search(done.stdout)
    assert found, done.stdout
    return int(found[1]), int(found[2]), int(found[3])


def judged(result: AotResult) -> AotResult:
    """`result` with the limits that it breaks."""
    limit = SHARED_BYTES[result.capability]
    threads = 32 * result.num_warps
    failures = []
    if result.spill_bytes > MOST_SPILL_BYTES:
        failures.append(f"spills {result.spill_bytes} bytes a thread")
    if result.registers > REGISTERS or result.registers * threads > REGISTER_FILE:
        failures.append(f"needs {result.registers} registers in each of {threads} threads")
    if result.shared_bytes > limit:
        failures.append(f"needs {result.shared_bytes} bytes of shared memory, and a block may have {limit}")
    return replace(result, failures=tuple(failures))


@dataclass(frozen=True, slots=True)
class Selection:
    """Which cases are compiled for which cards."""

    capabilities: tuple[int, ...] = CAPABILITIES
    only: str = ""  # cases whose "module case" holds this
    in_turn: bool = False  # each case for one of its cards, so that all kernels and all cards are seen, not all pairs
    every: int = 1  # and only every so manyth case


def compile_all(selection: Selection, processes: int = 1) -> list[AotResult]:
    """The selected cases, in a fixed order."""
    jobs = list(_selected(selection))
    if processes == 1:
        return [_compile_named(job) for job in jobs]
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        return list(pool.map(_compile_named, jobs, chunksize=4))


def _selected(selection: Selection) -> Iterator[tuple[str, str, int]]:
    for index, (module, case) in enumerate(all_cases()):
        if index % selection.every == 0 and selection.only in f"{module} {case.name}":
            meant = [capability for capability in selection.capabilities if capability in case.capabilities]
            for capability in [meant[index % len(meant)]] if selection.in_turn and meant else meant:
                yield module, case.name, capability


def _compile_named(job: tuple[str, str, int]) -> AotResult:
    """Kernels cannot be sent between processes, their names can."""
    name, case_name, capability = job
    module = importlib.import_module(f"{kernels.__name__}.{name}")
    case = next(case for case in module.aot_cases() if case.name == case_name)
    return compile_case(name, case, capability)
