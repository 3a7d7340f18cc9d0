"""`specgen doctor`: every fact is there, and what is wrong is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cpu import cpu_kernels
from gguf_files import llama_file
from typer.testing import CliRunner

from specgen.cli.app import app
from specgen.kernels.cpu.build import BuildError
from specgen.kernels.torch_cpu import TorchKernels
from specgen.measure import doctor
from specgen.measure.doctor import Patient, examine
from specgen.measure.findings import Section
from specgen.model.describe import describe


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Read a few megabytes, not hundreds."""
    monkeypatch.setattr(doctor, "bandwidth_of", lambda kernels: _Speed())
    monkeypatch.setenv("SPECGEN_CONFIG", str(tmp_path))


class _Speed:
    what = "read"

    def __init__(self) -> None:
        self._readings = iter([10.0, 30.0, 20.0] * 10)

    def gbps(self) -> float:
        return next(self._readings)


def _facts(sections: list[Section]) -> dict[str, tuple[object, str | None]]:
    return {fact.name: (fact.value, fact.problem) for section in sections for fact in section.facts}


def test_all_is_said_of_this_machine() -> None:
    facts = _facts(list(examine(Patient(cpu_kernels(1), None, threads=1))))
    for name in ("specgen", "torch", "processor", "affinity", "cgroup quota", "compiler", "kernels", "why", "free"):
        assert name in facts
    assert facts["threads"][0] == 1
    assert facts["read bandwidth"][0] == 20.0, "the median"
    assert "bytes per token" not in facts


def test_the_limit_of_a_model_follows_from_its_bytes(tmp_path: Path) -> None:
    path = llama_file(tmp_path / "tiny.gguf", "Q4_1")
    facts = _facts(list(examine(Patient(cpu_kernels(1), None, model=path))))
    size = describe(path).read_bytes_per_token
    assert facts["bytes per token"][0] == size
    assert facts["speed limit"][0] == pytest.approx(20e9 / size, rel=1e-3)


@pytest.mark.parametrize(
    ("flags", "taken", "words"),
    [
        ({"avx2", "f16c", "fma"}, "avx2", ["not avx512 vnni: the CPU lacks avx512_vnni", "not avx2 vnni", "; avx2: "]),
        (set(), "portable", ["not avx2: the CPU lacks avx2, f16c, fma", "portable: runs anywhere"]),
        (doctor.NEEDS["avx2 vnni"], "avx2", ["not avx2 vnni: the compiler does not offer it"]),
    ],
)  # fmt: skip
def test_the_reason_names_what_is_missing(
    flags: set[str], taken: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "cpu_flags", lambda: frozenset(flags))
    monkeypatch.setattr(doctor.platform, "machine", lambda: "x86_64")
    reasons = "; ".join(doctor._reasons(taken))
    for word in words:
        assert word.split(" lacks ")[0] in reasons
        assert all(flag in reasons for flag in word.partition(" lacks ")[2].split(", "))


def test_problems_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> None:
        raise BuildError("no C++ compiler is installed", hint="install g++")

    monkeypatch.setattr(doctor, "find_compiler", none)
    monkeypatch.setattr(doctor, "default_threads", lambda: 2)
    facts = _facts(list(examine(Patient(TorchKernels(), "running on torch's own ops", threads=9))))
    assert facts["compiler"] == (None, "install g++")
    assert facts["kernels"] == ("torch", "running on torch's own ops")
    assert "more than the 2" in str(facts["threads"][1])
    assert "why" not in facts


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECGEN_CACHE", str(tmp_path / "a" / "b"))
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: False)
    facts = _facts([Section("s", tuple(doctor._installation(Patient(TorchKernels(), None))))])
    assert facts["cache folder"] == (
        str(tmp_path / "a" / "b"),
        "cannot be written: set SPECGEN_CACHE to another folder",
    )


def test_the_command(tmp_path: Path) -> None:
    path = llama_file(tmp_path / "tiny.gguf", "Q4_1")
    shown = CliRunner().invoke(app, ["doctor", "-m", str(path), "--threads", "1"])
    assert shown.exit_code == 0, shown.output
    assert "read bandwidth" in shown.stdout
    assert "tokens per second" in shown.stdout
    said = json.loads(CliRunner().invoke(app, ["doctor", "--json", "--threads", "1"]).stdout)
    assert said["schema_version"] == 1
    assert said["sections"]["processor"]["threads"] == 1
    assert said["sections"]["memory"]["read_bandwidth"] == 20.0
    wrong = CliRunner().invoke(app, ["doctor", "--threads", "0"])
    assert (wrong.exit_code, "threads is 0" in wrong.stderr) == (2, True)
