"""Every Triton kernel compiles for every card and fits it: no card is needed, but Triton without its interpreter."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton, which compiles for graphics cards, is not installed")

from specgen import kernels
from specgen.cache import KV_DTYPES
from specgen.errors import UsageError
from specgen.kernels.aot import (
    CACHE_DTYPES,
    CAPABILITIES,
    MOST_SPILL_BYTES,
    SHARED_BYTES,
    TYPES,
    AotResult,
    all_cases,
    case_modules,
    judged,
)
from specgen.measure.aot import failures, table


def compiling(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Python with these arguments, in which Triton compiles instead of interpreting."""
    environ = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, *arguments], env=environ, capture_output=True, text=True, timeout=900)


@pytest.fixture(scope="module", params=["2", pytest.param("1", marks=pytest.mark.slow)])
def results(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Each second case, then each, for one of its cards; `python -m specgen.measure.aot` does all pairs, in minutes.
    Triton keeps what it has compiled."""
    options = ("--in-turn", "--every", request.param, "--json", "--processes", "2")
    done = compiling("-m", "specgen.measure.aot", *options)
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


def test_every_kernel_fits_its_card(results: list[dict[str, Any]]) -> None:
    assert [result for result in results if result["failures"]] == []
    assert {result["capability"] for result in results} == set(CAPABILITIES)


def test_every_module_with_kernels_is_compiled(results: list[dict[str, Any]]) -> None:
    files = Path(kernels.__file__).parent.glob("triton_*.py")
    with_kernels = {file.stem for file in files if "@triton.jit" in file.read_text(encoding="utf-8")}
    assert with_kernels - {"triton_math"} == {result["module"] for result in results}  # functions of other kernels


def test_names_of_cases_are_unique() -> None:
    for name, module in case_modules():
        names = [case.name for case in module.aot_cases()]
        assert len(names) == len(set(names)), name


def test_every_kind_of_cache_is_compiled_for_every_card() -> None:
    assert set(CACHE_DTYPES) == set(KV_DTYPES.values())
    modules = dict(case_modules())
    for module, argument in (("triton_attention", "k"), ("triton_rows", "k_cache")):
        cases = [case for case in modules[module].aot_cases() if argument in case.signature]
        for capability in CAPABILITIES:
            caches = {case.signature[argument] for case in cases if capability in case.capabilities}
            assert caches == {TYPES[dtype] for dtype in CACHE_DTYPES}, (module, capability)


SUMS = """
from specgen.kernels import triton_rank

cases = [case for case in triton_rank.aot_cases() if "mass_kernel" in case.name]
print(len(cases), [case.name for case in cases if "stride" in case.aligned])
"""


def test_a_sum_of_logits_has_one_order_wherever_its_rows_stand() -> None:
    """A stride that the compiler knows to be a multiple of 16 lets a thread read, and add up, neighbours."""
    assert compiling("-c", SUMS).stdout.split(maxsplit=1) == ["6", "[]\n"]


INSTRUCTIONS = """
import json, sys
from dataclasses import replace
from specgen.kernels import triton_linear
from specgen.kernels.aot import compile_case

cases = [case for case in triton_linear.aot_cases() if "int8 g32 bf16" in case.name and "linear" in case.name]
for capability in (86, 90):
    print(json.dumps([compile_case("", case, capability).instructions for case in cases]))
case = cases[1]
for mutant in (replace(case, num_stages=20), replace(case, constexprs={**case.constexprs, "ROWS": 128}),
               replace(case, constexprs={**case.constexprs, "ROWS": 12})):
    print(json.dumps(compile_case("", mutant, 86).failures))
# With four warps and enough rows, Hopper's compiler takes an instruction whose shape follows the rows.
many = [replace(case, num_warps=4, constexprs={**case.constexprs, "ROWS": rows}) for rows in (8, 32)]
print(json.dumps([compile_case("", case, 90).instructions for case in many]))
"""


def test_all_row_counts_use_one_instruction_and_what_does_not_fit_is_seen() -> None:
    done = compiling("-c", INSTRUCTIONS)
    assert done.returncode == 0, done.stderr
    ampere, hopper, shared, spilling, broken, mutant = (json.loads(line) for line in done.stdout.splitlines())
    for used in (ampere, hopper):
        assert len(used) == 3
        assert len({tuple(names) for names in used}) == 1, "a row's bits would depend on the number of rows"
        assert sum(name.startswith("mma.sync") for name in used[0]) == 1
    assert len({tuple(names) for names in mutant}) == 2
    assert "shared memory" in shared[0]
    assert "spills" in spilling[0]
    assert broken == ["does not compile"]


def test_nothing_compiles_under_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(UsageError, match="interpreter"):
        all_cases()


FITTING = AotResult("triton_x", "case", 86, 4, registers=128, shared_bytes=SHARED_BYTES[86])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"spill_bytes": MOST_SPILL_BYTES + 8}, "spills 24 bytes"),
        ({"shared_bytes": SHARED_BYTES[86] + 1}, "shared memory"),
        ({"registers": 256}, "256 registers"),
        ({"registers": 168, "num_warps": 16}, "168 registers in each of 512 threads"),
    ],
)
def test_limits(change: dict[str, int], words: str) -> None:
    assert judged(FITTING).ok
    result = judged(replace(FITTING, **change))
    assert not result.ok
    assert words in failures([result])[0]
    assert "!" in table([result])
    assert "!" not in table([judged(FITTING)])


def test_aot_needs_no_card_and_no_triton_to_be_imported() -> None:
    code = "import sys; sys.modules['triton'] = None; import specgen.kernels.aot, specgen.measure.aot"
    assert compiling("-c", code).returncode == 0
    importlib.import_module("specgen.measure.aot")
