"""`specgen doctor` on graphics cards: fake ones, and none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cards import GB, FakeSystem, card, needs_card
from gguf_files import llama_file
from typer.testing import CliRunner

from specgen.cli.app import app
from specgen.kernels.cuda import Card, Driver
from specgen.measure import doctor
from specgen.measure.doctor_cards import CardPatient, card_sections
from specgen.measure.findings import Fact, Section
from specgen.model.describe import describe


class Speed:
    what = "copy"

    def __init__(self, gbps: float = 900.0, error: Exception | None = None) -> None:
        self._gbps = gbps
        self._error = error

    def gbps(self) -> float:
        if self._error is not None:
            raise self._error
        return self._gbps


def look(system: FakeSystem, model: Path | None = None, **changes) -> dict[str, dict[str, Fact]]:
    patient = CardPatient(system, model, bandwidth=lambda card: Speed(card.index * 100 + 900.0))
    found: Iterator[Section] = card_sections(replace(patient, **changes))
    return {section.name: {fact.name: fact for fact in section.facts} for section in found}


def problems(sections: dict[str, dict[str, Fact]]) -> dict[str, str]:
    return {name: fact.problem for facts in sections.values() for name, fact in facts.items() if fact.problem}


def test_a_card_with_everything(tmp_path: Path) -> None:
    path = llama_file(tmp_path / "tiny.gguf", "Q4_1")
    found = look(FakeSystem(cards_=(card(), card(1, "Second", (7, 5)))), path)
    assert list(found) == ["graphics", "card cuda:0", "card cuda:1"]
    assert problems(found) == {}
    shared, first, second = found.values()
    assert shared["driver"].shown == "570.1 (CUDA 12.8)"
    assert (shared["cards"].value, shared["device"].value) == (2, "cuda:0")
    assert (shared["torch cuda"].value, shared["triton"].value) == ("12.8", "3.6.0")
    assert (first["name"].value, first["compute capability"].value) == ("Card", "8.9")
    assert (first["total"].value, first["free"].value) == (8 * GB, 8 * GB - GB // 2)
    assert (first["kernels"].value, second["kernels"].value) == ("triton bfloat16", "triton float16")
    assert "not bfloat16: it needs compute capability 8.0" in str(second["why"].value)
    size = describe(path).read_bytes_per_token
    assert first["bytes per token"].value == size
    assert first["speed limit"].value == pytest.approx(900e9 / size, rel=1e-3)
    assert second["copy bandwidth"].value == 1000.0


def test_a_machine_without_a_card_is_one_line_each() -> None:
    found = look(FakeSystem(driver_=None, cards_=(), built=None, triton_=None))
    assert list(found) == ["graphics"]
    assert [fact.shown for fact in found["graphics"].values()] == [
        "none",
        "none: there is no NVIDIA driver",
        "none: torch was built without it",
        "none: it is not installed",
        "cpu",
    ]
    assert problems(found) == {}, "nothing is wrong with having no card"


def test_a_declined_card_says_why_and_takes_no_measurement() -> None:
    def untouchable(card: Card) -> Speed:
        raise AssertionError(card)

    system = FakeSystem(driver_=Driver("470.82", (11, 4)))
    found = look(system, bandwidth=untouchable)
    assert found["card cuda:0"]["kernels"].value is None
    assert "too old for torch" in str(found["card cuda:0"]["kernels"].problem)
    assert "running on the processor" in str(found["graphics"]["device"].problem)
    assert system.opened == []


def test_a_card_that_is_asked_for_and_cannot_be_had() -> None:
    found = look(FakeSystem(triton_=None), device="cuda:0")
    assert found["graphics"]["device"].value is None
    assert "--device cuda:0: Triton is not installed" in str(found["graphics"]["device"].problem)


def test_a_busy_card_and_a_full_one() -> None:
    busy = look(FakeSystem(free_bytes={0: "all CUDA-capable devices are busy"}))
    assert "busy" in str(busy["card cuda:0"]["memory"].problem)
    full = look(FakeSystem(), bandwidth=lambda card: Speed(error=torch.OutOfMemoryError("CUDA out of memory. Tried")))
    assert full["card cuda:0"]["copy bandwidth"].problem == "CUDA out of memory. Tried"
    assert "kernels" in full["card cuda:0"], "the rest is told all the same"


def test_a_driver_that_fails() -> None:
    found = look(FakeSystem(driver_=Driver("570.1", (12, 8), "error 999")))
    assert list(found) == ["graphics"]
    assert "does not start: error 999" in str(found["graphics"]["device"].problem)


def test_the_command_shows_cards(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPECGEN_CONFIG", str(tmp_path))
    monkeypatch.setattr(doctor, "bandwidth_of", lambda kernels: Speed(20.0))
    real = CardPatient
    monkeypatch.setattr(doctor, "CardPatient", lambda *given: replace(real(*given), bandwidth=lambda card: Speed()))
    monkeypatch.setattr(doctor, "NvidiaSystem", FakeSystem)
    shown = CliRunner().invoke(app, ["doctor", "--device", "cuda:1"])
    assert shown.exit_code == 0
    assert "card cuda:0" in shown.stdout
    assert "warning: device: --device cuda:1: there is no such card" in shown.stderr
    said = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)
    assert said["sections"]["card cuda:0"]["copy_bandwidth"] == 900.0
    assert said["sections"]["graphics"]["device"] == "cuda:0"
    wrong = CliRunner().invoke(app, ["doctor", "--device", "gpu"])
    assert (wrong.exit_code, "'gpu' is not known" in wrong.stderr) == (2, True)


@pytest.mark.cuda
@needs_card
def test_this_machine_s_card_copies() -> None:
    from specgen.kernels.cuda_system import NvidiaSystem

    found = {section.name: section for section in card_sections(CardPatient(NvidiaSystem()))}
    facts = {fact.name: fact.value for fact in found["card cuda:0"].facts}
    assert isinstance(facts["copy bandwidth"], float)
    assert facts["copy bandwidth"] > 50, "GB/s"
