"""Building, caching and loading the CPU library, its other instruction sets, sanitizers, threads and forks."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from cpu import cpu_kernels
from test_cpu_kernels import WEIGHTS, inputs

from specgen.errors import SpecgenError
from specgen.kernels.cpu import build as building
from specgen.kernels.cpu import library, threads
from specgen.kernels.cpu.build import BuildError, build, cpu_flags

TESTS = Path(__file__).parent
SIMDE = Path("/usr/include/simde/x86/avx512.h")

PORTABLE = "-DSG_MAX_PATH=0 -O1"
PATHS = {
    "portable": PORTABLE,
    "avx2 over simde": "-DSG_SIMDE -DSG_MAX_PATH=1 -O1",
    "avx2 vnni over simde": "-DSG_SIMDE -DSG_MAX_PATH=2 -O1",
    "avx512 vnni over simde": "-DSG_SIMDE -DSG_MAX_PATH=3 -O1",
}


def script(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "compiler"
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o700)
    return [str(path)]


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": f"{TESTS.parent}:{TESTS}", **environment}
    return subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300, check=False
    )


# ---- other paths ----


@pytest.fixture(params=PATHS)
def path_flags(request: pytest.FixtureRequest) -> str:
    if "simde" in request.param and not SIMDE.exists():
        pytest.skip("SIMDe is not installed (Debian: libsimde-dev), so this CPU cannot run the path")
    return PATHS[request.param]


def test_linears_of_every_path_have_the_same_bits(path_flags: str) -> None:
    """Integer sums are exact, and the order of the float adds does not depend on the path; only the portable one may
    round a · b + c twice."""
    ours, other = cpu_kernels(2), cpu_kernels(2, path_flags)
    assert ours.name != other.name or ours.library.sg_path() == other.library.sg_path()
    for name, weight in WEIGHTS.items():
        x = inputs(weight)
        found, expected = (kernels.linear(x, kernels.prepare(weight)) for kernels in (other, ours))
        if path_flags == PORTABLE:
            terms = x.abs() @ weight.dequantize().abs().T
            assert float(((found - expected).abs() / terms.clamp(min=1e-20)).max()) < 2e-6, name
        else:
            assert torch.equal(found, expected), name


@pytest.mark.slow
def test_op_tests_pass_on_every_path(path_flags: str) -> None:
    run_op_tests(path_flags, {})


SANITIZERS = "-fsanitize=address,undefined -fno-sanitize-recover=all -g1 -O1"


@pytest.mark.slow
def test_op_tests_pass_under_sanitizers() -> None:
    cpu_kernels(1)  # skips where there is no compiler
    compiler = building.find_compiler()
    runtime = subprocess.run(
        [*compiler.command, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    )
    if not Path(runtime.stdout.strip()).is_file():
        pytest.skip("the compiler has no AddressSanitizer that can be preloaded")
    # Python itself never frees everything, and torch allocates through what the sanitizer does not know.
    options = {
        "LD_PRELOAD": runtime.stdout.strip(),
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    run_op_tests(SANITIZERS, options)
    broken = python(OVERRUN, SPECGEN_TEST_CPU_FLAGS=SANITIZERS, **options)
    assert broken.returncode != 0
    assert "AddressSanitizer" in broken.stderr


OVERRUN = """
import ctypes, torch
from cpu import cpu_kernels
k = cpu_kernels(1)
x = (ctypes.c_float * 4).from_buffer(bytearray(16))
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
short = libc.malloc(16)
k.library.sg_rms_norm(k.context, short, short, 1.0, 1, 64, short)
"""


def run_op_tests(flags: str, environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "test_cpu_kernels.py"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "SPECGEN_TEST_CPU_FLAGS": flags, **environment}
    result = subprocess.run(command, cwd=TESTS, env=env, capture_output=True, text=True, timeout=900, check=False)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert " passed" in result.stdout


def test_a_path_that_the_cpu_lacks_is_refused() -> None:
    path = build()
    needs = library.NEEDS[cpu_kernels(1).library.sg_path().decode()]
    assert library.open_library(path, cpu_flags())
    if not needs:
        pytest.skip("the portable path runs here, which needs nothing")
    with pytest.raises(SpecgenError, match="which this CPU lacks"):
        library.open_library(path, cpu_flags() - needs | {"fpu"})


def test_another_cpu_has_another_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cpu_kernels(1)
    mine = build(cache=tmp_path)
    monkeypatch.setattr(building, "cpu_identity", lambda: "another CPU")
    other = build(cache=tmp_path)
    assert other != mine
    assert other.is_file()
    assert mine.is_file()


# ---- the cache ----

BUILD_TWICE = """
import sys
from pathlib import Path
from specgen.kernels.cpu.build import build
print(build(["-O0"], Path(sys.argv[1] if len(sys.argv) > 1 else {folder!r})))
"""


def test_two_processes_build_at_once_and_one_compiles(tmp_path: Path) -> None:
    cpu_kernels(1)
    log = tmp_path / "log"
    real = building.find_compiler().command[0]
    wrapper = script(tmp_path, f'case "$1" in --version) ;; *) echo compile >> {log} ;; esac\nexec {real} "$@"\n')[0]
    cache = tmp_path / "cache"
    code = BUILD_TWICE.format(folder=str(cache))
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda _: python(code, CXX=wrapper), range(2)))
    assert [result.returncode for result in results] == [0, 0], results
    assert results[0].stdout == results[1].stdout
    assert log.read_text() == "compile\n"
    assert [path.suffix for path in cache.iterdir() if path.suffix != ".lock"] == [".so"]


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_kernels(1)
    # Root may write anywhere, so the folder's place is taken by a file.
    (tmp_path / "file").write_text("")
    path = build(["-O0"], tmp_path / "file" / "cache")
    assert path.is_file()
    assert tmp_path not in path.parents
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert library.open_library(path, cpu_flags()).sg_lanes() in (8, 16)


def test_a_library_that_is_there_is_not_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_kernels(1)
    path = build(["-O0"], tmp_path)
    before = path.stat().st_mtime_ns

    def fail(*_: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(building, "_compile", fail)
    assert build(["-O0"], tmp_path) == path
    assert path.stat().st_mtime_ns == before
    with pytest.raises(AssertionError, match="compiled again"):
        build(["-O0", "-DOTHER"], tmp_path)


def test_a_library_that_is_damaged_is_named(tmp_path: Path) -> None:
    path = tmp_path / "broken.so"
    path.write_bytes(b"no library")
    with pytest.raises(SpecgenError, match="do not load"):
        library.open_library(path, cpu_flags())


# ---- compilers that fail ----


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match=r"no C\+\+ compiler is installed"):
        build(cache=tmp_path)
    monkeypatch.setenv("CXX", "no-such-compiler -x")
    with pytest.raises(BuildError, match="no-such-compiler -x is not on the path"):
        build(cache=tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("exit 1\n", "does not run"),
        (
            '[ "$1" = --version ] && exit 0\necho "x.cpp:1: error: too old" >&2\nexit 1\n',
            "could not compile .* too old",
        ),
        ('[ "$1" = --version ] && exit 0\nexit 1\n', "could not compile"),
        ('[ "$1" = --version ] && exit 0\nexit 0\n', "made no library"),
    ],
)
def test_a_compiler_that_fails(text: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", script(tmp_path, text)[0])
    cache = tmp_path / "cache"
    with pytest.raises(BuildError, match=message):
        build(cache=cache)
    assert [path for path in cache.glob("*") if path.suffix != ".lock"] == []


# ---- threads ----

FORK = """
import os, torch
from cpu import cpu_kernels
from test_cpu_kernels import WEIGHTS, inputs
k = cpu_kernels(2)
weight = WEIGHTS["int4 32"]
prepared, x = k.prepare(weight), inputs(weight)
before = k.linear(x, prepared)
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(k.linear(x, prepared), before) else 3)
assert torch.equal(k.linear(x, prepared), before)
_, status = os.waitpid(child, 0)
raise SystemExit(os.waitstatus_to_exitcode(status))
"""


def test_a_forked_child_computes_and_both_exit_cleanly() -> None:
    cpu_kernels(2)
    result = python(FORK)
    assert (result.returncode, result.stderr) == (0, "")


def test_calls_from_two_python_threads_take_turns() -> None:
    kernels = cpu_kernels(2)
    weight = WEIGHTS["int4 128"]
    prepared, x = kernels.prepare(weight), inputs(weight)
    expected = kernels.linear(x, prepared)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: kernels.linear(x, prepared), range(200)))
    assert all(torch.equal(result, expected) for result in results)


def test_threads_follow_the_affinity_mask_and_the_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "CGROUP", tmp_path)
    monkeypatch.setattr(threads, "OWN_CGROUP", tmp_path / "self")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)), raising=False)
    assert threads.default_threads() == 6
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert threads.default_threads() == 6
    (tmp_path / "cpu.max").write_text("350000 100000\n")
    assert threads.default_threads() == 3
    (tmp_path / "self").write_text("0::/a/b\n")
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "cpu.max").write_text("50000 100000\n")
    assert threads.default_threads() == 1
    (tmp_path / "a" / "cpu.max").write_text("rubbish\n")
    assert threads.default_threads() == 3


def test_threads_of_the_first_cgroup_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "CGROUP", tmp_path)
    monkeypatch.setattr(threads, "OWN_CGROUP", tmp_path / "self")
    (tmp_path / "self").write_text("4:cpu,cpuacct:/job\n1:memory:/job\n")
    folder = tmp_path / "cpu" / "job"
    folder.mkdir(parents=True)
    (folder / "cpu.cfs_quota_us").write_text("200000")
    (folder / "cpu.cfs_period_us").write_text("100000")
    assert threads.cgroup_quota() == 2.0
    (folder / "cpu.cfs_quota_us").write_text("-1")
    assert threads.cgroup_quota() is None
