"""Which card is taken, and what is said when none can be: on fake systems, and over a fake driver library."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cards import GB, FakeSystem, card, needs_card

from specgen.errors import DeviceError, ExitCode, SpecgenError, UsageError
from specgen.kernels import cuda_system
from specgen.kernels.cpu.build import find_compiler
from specgen.kernels.cuda import Card, Choice, Driver, choose_card, runs_on
from specgen.kernels.cuda_system import NvidiaSystem, launcher_obstacle
from specgen.options import LoadOptions

OLD = card(0, "GTX 1080", (6, 1))
TURING = card(1, "RTX 2080", (7, 5))


def test_auto_takes_the_first_card_that_can_be_used() -> None:
    system = FakeSystem(cards_=(OLD, TURING, card(2)))
    choice = choose_card("auto", system)
    assert choice == Choice(TURING, TURING.total_bytes - GB // 2)
    assert system.opened == [1], "no context is made on a card that is not used"


def test_the_processor_never_asks_the_system() -> None:
    class Untouchable(FakeSystem):
        def driver(self) -> Driver | None:
            raise AssertionError

    assert choose_card("cpu", Untouchable()) == Choice()


@pytest.mark.parametrize(
    "system",
    [
        FakeSystem(driver_=None, cards_=()),
        FakeSystem(cards_=()),
        FakeSystem(driver_=Driver(None, (0, 0), "error 34"), cards_=()),
    ],
    ids=["no driver", "no card", "a library without its kernel module"],
)
def test_auto_says_nothing_where_there_is_no_card(system: FakeSystem) -> None:
    assert choose_card("auto", system) == Choice()


CLOSED = Card(0, "Card", (8, 9), GB, prohibited=True)
REFUSALS: dict[str, tuple[FakeSystem, str]] = {
    "too old": (FakeSystem(cards_=(OLD,)), "compute capability 6.1"),
    "closed": (FakeSystem(cards_=(CLOSED,)), "closed for computing"),
    "torch without CUDA": (FakeSystem(built=None), "built without CUDA"),
    "old driver": (FakeSystem(driver_=Driver("470.82", (11, 4))), "470.82 (CUDA 11.4) is too old for torch"),
    "no code": (FakeSystem(cards_=(card(0, "New", (13, 0)),), archs=("sm_90",)), "no code for sm_130"),
    "no Triton": (FakeSystem(triton_=None), "Triton is not installed"),
    "no compiler": (FakeSystem(obstacle=("Triton needs a C compiler", "install gcc")), "needs a C compiler"),
    "busy": (FakeSystem(free_bytes={0: "all CUDA-capable devices are busy"}), "are busy"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_auto_declines_in_one_line(name: str) -> None:
    system, words = REFUSALS[name]
    choice = choose_card("auto", system)
    assert choice.card is None
    assert choice.notice is not None
    assert words in choice.notice
    assert "running on the processor" in choice.notice
    assert "\n" not in choice.notice


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
@pytest.mark.parametrize("name", REFUSALS)
def test_a_card_that_was_asked_for_is_an_error_with_a_hint(name: str, device: str) -> None:
    system, words = REFUSALS[name]
    with pytest.raises(DeviceError) as caught:
        choose_card(device, system)
    assert words in caught.value.message
    assert caught.value.message.startswith(f"--device {device}: ")
    assert caught.value.hint
    assert caught.value.code == ExitCode.ERROR


@pytest.mark.parametrize(
    ("system", "words"),
    [
        (FakeSystem(driver_=None, cards_=()), "no NVIDIA driver"),
        (FakeSystem(cards_=()), "shows no card"),
        (FakeSystem(driver_=Driver("570.1", (12, 8), "error 999"), cards_=()), "does not start: error 999"),
    ],
)
def test_cuda_without_a_card(system: FakeSystem, words: str) -> None:
    with pytest.raises(DeviceError, match=words):
        choose_card("cuda", system)


def test_a_driver_that_fails_beside_its_module_is_told_of() -> None:
    notice = choose_card("auto", FakeSystem(driver_=Driver("570.1", (12, 8), "error 999"), cards_=())).notice
    assert notice == "running on the processor: the NVIDIA driver does not start: error 999 (`nvidia-smi` may say more)"


def test_cuda_takes_the_next_card_when_the_first_is_busy_and_an_index_does_not() -> None:
    system = FakeSystem(cards_=(card(0), card(1)), free_bytes={0: "busy"})
    assert choose_card("cuda", system).card == card(1)
    with pytest.raises(DeviceError, match="busy"):
        choose_card("cuda:0", system)


def test_a_torch_that_does_not_say_what_it_was_made_for_is_tried() -> None:
    assert choose_card("cuda", FakeSystem(archs=())).card == card()


def test_no_such_index() -> None:
    with pytest.raises(UsageError, match="no such card") as caught:
        choose_card("cuda:3", FakeSystem())
    assert caught.value.hint == "known: cuda:0 (Card)"


@pytest.mark.parametrize(
    ("capability", "archs", "expected"),
    [
        ((8, 9), ["sm_80", "sm_90"], True),  # machine code of its own generation
        ((8, 0), ["sm_86"], False),  # of a later step
        ((12, 0), ["sm_90"], False),
        ((12, 0), ["sm_90", "compute_90"], True),  # compiled when it is used
        ((9, 0), ["sm_90a"], True),
        ((7, 5), ["compute_80"], False),
        ((8, 9), ["nonsense", ""], False),
    ],
)
def test_what_torch_can_run_on(capability: tuple[int, int], archs: list[str], expected: bool) -> None:
    assert runs_on(capability, archs) is expected


@pytest.mark.parametrize("name", ["auto", "cpu", "cuda", "cuda:0", "cuda:12"])
def test_names_of_devices(name: str) -> None:
    assert LoadOptions(device=name).device == name


@pytest.mark.parametrize("name", ["cpuu", "cuda:", "cuda:x", "cuda:-1", "CUDA", "gpu", "", "cuda:1000", "cuda:1\n"])
def test_a_name_that_is_no_device_is_refused_before_work_begins(name: str) -> None:
    with pytest.raises(UsageError, match="is not known") as caught:
        LoadOptions(device=name)
    assert caught.value.hint == "it must be auto, cpu, cuda or cuda:N"


def test_triton_builds_its_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("CC", "CPATH", "C_INCLUDE_PATH"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(cuda_system.shutil, "which", lambda name: None)
    missing = launcher_obstacle(tmp_path)
    assert missing is not None
    assert "C compiler" in missing[0]
    monkeypatch.setattr(cuda_system.shutil, "which", lambda name: f"/usr/bin/{name}")
    missing = launcher_obstacle(tmp_path)
    assert missing is not None
    assert "Python.h" in missing[0]
    (tmp_path / "Python.h").touch()
    assert launcher_obstacle(tmp_path) is None


# over a driver's library

FAKE_DRIVER = r"""
#include <string.h>
#include <stddef.h>
extern "C" {
int cuInit(unsigned) { return INIT; }
int cuDriverGetVersion(int *version) { *version = 12080; return 0; }
int cuDeviceGetCount(int *count) { *count = 2; return INIT; }
int cuDeviceGet(int *device, int index) { *device = 7 + index; return 0; }
int cuDeviceGetName(char *name, int size, int device) {
  strncpy(name, device == 7 ? "First Card" : "Second", size); return 0; }
int cuDeviceTotalMem_v2(size_t *size, int device) { *size = device == 7 ? 25757220864ull : 5; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  *value = attribute == 75 ? 8 : attribute == 76 ? 9 : attribute == 20 && device == 8 ? 2 : 0; return 0; }
}
"""


def fake_library(folder: Path, init: int) -> str:
    try:
        compiler = find_compiler()
    except SpecgenError as error:
        pytest.skip(f"no library can be built: {error.message}")
    (folder / "fake.cpp").write_text(FAKE_DRIVER.replace("INIT", str(init)))
    path = folder / f"libfake{init}.so"
    subprocess.run([*compiler.command, "-shared", "-fPIC", "-o", path, folder / "fake.cpp"], check=True)
    return str(path)


def test_the_driver_is_asked_by_its_own_library(tmp_path: Path) -> None:
    first_line = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.133.20  Sun Mar 23 10:00:00 UTC 2025"
    (tmp_path / "version").write_text(f"{first_line}\nGCC version:  12.2.0\n")
    system = NvidiaSystem([fake_library(tmp_path, 0)], tmp_path / "version")
    assert system.driver() == Driver("570.133.20", (12, 8))
    first, second = system.cards()
    assert first == card(0, "First Card", (8, 9), 25757220864)
    assert (second.name, second.prohibited) == ("Second", True)


def test_a_driver_that_does_not_start(tmp_path: Path) -> None:
    system = NvidiaSystem([fake_library(tmp_path, 803)], tmp_path / "nowhere")
    driver = system.driver()
    assert driver is not None
    assert driver.version is None
    assert driver.failure is not None
    assert "different versions" in driver.failure
    assert NvidiaSystem([fake_library(tmp_path, 100)], tmp_path).driver() == Driver(None, (12, 8)), (
        "no card, no failure"
    )


def test_without_a_driver_nothing_else_is_asked(tmp_path: Path) -> None:
    system = NvidiaSystem([str(tmp_path / "libnone.so")], tmp_path)
    assert (system.driver(), system.cards()) == (None, ())


def test_looking_for_a_card_imports_no_triton() -> None:
    look = "from specgen.kernels.cuda import choose_card; choose_card('auto')"
    subprocess.run([sys.executable, "-c", f"import sys; {look}; assert 'triton' not in sys.modules"], check=True)


@pytest.mark.cuda
@needs_card
def test_the_card_of_this_machine_answers() -> None:
    choice = choose_card("cuda")
    assert choice.card is not None
    assert choice.card.capability == torch.cuda.get_device_capability(choice.card.index)
    assert choice.card.name == torch.cuda.get_device_name(choice.card.index)
    assert choice.free_bytes is not None
    assert 0 < choice.free_bytes <= choice.card.total_bytes
