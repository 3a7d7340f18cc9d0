"""Where a model goes and what becomes of memory that runs out: a fake card, with real tiny models."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cards import GB, FakeSystem, card
from cpu import cpu_kernels
from device_ops import ReferenceOps
from tape import Opaque, TapeGraphs
from tiny_session import FREE, tiny_file
from typer.testing import CliRunner

from specgen import placement, session
from specgen.cache import KVCache
from specgen.cli.app import app
from specgen.cli.console import explain
from specgen.errors import DeviceError, ExitCode, ModelError, OutOfMemoryError
from specgen.events import Finished
from specgen.graph import GraphRunner
from specgen.kernels.base import Kernels
from specgen.kernels.card_memory import is_out_of_memory, release, shortage, shortage_told
from specgen.kernels.cuda import Card
from specgen.kernels.device import DeviceKernels
from specgen.memory import LEAST_CONTEXT_TOKENS, MemoryPlan, Need, Request
from specgen.options import LoadOptions, RunOptions
from specgen.placement import GRAPH_BYTES, Placement, first_that_holds, placements
from specgen.registry import load_registry, resolve_model

SAID = (
    "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 8.00 GiB of which 512.00 MiB is "
    "free. Including non-PyTorch memory, this process has 6.10 GiB memory in use. Of the allocated memory 5.00 GiB is "
    "allocated by PyTorch. See documentation for Memory Management  (https://pytorch.org/docs/stable/notes/cuda.html)"
)
TARGET = Need(weights_bytes=GB, slot_bytes=100_000, workspace_bytes=GB // 100, context_tokens=8192)
DRAFT = Need(weights_bytes=GB // 4, slot_bytes=10_000, workspace_bytes=GB // 200, context_tokens=8192)


def oom() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError(SAID)


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch) -> FakeSystem:
    """A machine with one card, whose kernels are the processor's."""
    found = FakeSystem()
    monkeypatch.setattr(placement, "NvidiaSystem", lambda: found)

    def select(card: Card | None, threads: int | None) -> tuple[Kernels, str | None]:
        return cpu_kernels(1), None

    monkeypatch.setattr(placement, "select_kernels", select)
    return found


# how it looks when memory runs out


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (oom(), True),
        (RuntimeError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_errors_that_less_would_have_avoided(error: BaseException, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def test_the_message_keeps_the_numbers_and_drops_the_advice() -> None:
    told = shortage("loading", oom())
    assert told.message == (
        "memory ran out while loading: Tried to allocate 1.50 GiB; GPU 0 has a total capacity of 8.00 GiB of which "
        "512.00 MiB is free; Including non-PyTorch memory, this process has 6.10 GiB memory in use"
    )
    assert told.code == ExitCode.MEMORY
    assert shortage("loading", MemoryError()).message == "memory ran out while loading: nothing is left"


def test_where_nobody_knows_what_was_being_done_the_numbers_are_told() -> None:
    code, lines = explain(oom())
    assert code == 4
    assert lines is not None
    assert lines[0].startswith("memory ran out: Tried to allocate 1.50 GiB; GPU 0 has")
    assert explain(MemoryError()) == (4, ("memory ran out", "use a smaller model, a shorter --ctx or --kv int8"))


def test_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match="illegal"), shortage_told("answering"):
        raise RuntimeError("illegal memory access")


def test_a_card_that_is_lost_has_nothing_to_release(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "empty_cache", lost)
    release()


# the budget


def test_a_plan_may_use_what_the_card_has_free(system: FakeSystem) -> None:
    place = next(placements(LoadOptions()))
    system.free_bytes[0] = 4 * GB  # another process took the other half meanwhile
    left = 4 * GB - GRAPH_BYTES - 8 * GB // 64
    assert place.budget_bytes(None) == left
    assert place.budget_bytes(GB) == GB
    system.free_bytes[0] = 1000
    assert place.budget_bytes(None) == 0
    system.free_bytes[0] = "unspecified launch failure"
    with pytest.raises(DeviceError, match="does not answer: unspecified launch failure"):
        place.budget_bytes(None)


def test_names_of_places(system: FakeSystem) -> None:
    on_card, on_processor = placements(LoadOptions(device="auto"))
    assert (on_card.device, on_card.name) == ("cuda:0", "Card sm_89")
    assert (on_processor.device, on_processor.card) == ("cpu", None)
    assert [place.device for place in placements(LoadOptions(device="cuda"))] == ["cuda:0"]
    assert [place.device for place in placements(LoadOptions(device="cpu"))] == ["cpu"]


def test_kernels_that_cannot_be_imported(system: FakeSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    def select(card: Card | None, threads: int | None) -> tuple[Kernels, str | None]:
        if card is not None:
            raise DeviceError("Triton cannot be imported: no libz")
        return cpu_kernels(1), None

    monkeypatch.setattr(placement, "select_kernels", select)
    (place,) = placements(LoadOptions())
    assert place.notices == ("running on the processor, not on the Card: Triton cannot be imported: no libz",)
    with pytest.raises(DeviceError, match="no libz"):
        list(placements(LoadOptions(device="cuda")))


# the next step of a plan


class Loader:
    """Loads what needs no more than `limits` allows on each device; else memory runs out in the middle."""

    def __init__(self, **limits: int) -> None:
        self.limits = limits
        self.tried: list[tuple[str, int, bool]] = []

    def __call__(self, place: Placement, plan: MemoryPlan) -> tuple[Placement, MemoryPlan]:
        self.tried.append((place.device, plan.context_tokens, plan.with_draft))
        if plan.needed_bytes > self.limits[place.device.partition(":")[0]]:
            raise oom()
        return place, plan


def test_first_a_shorter_context_then_no_draft(system: FakeSystem) -> None:
    loader = Loader(cuda=TARGET.fixed_bytes + 1000 * TARGET.slot_bytes)
    _, plan = first_that_holds(LoadOptions(device="cuda"), Request(TARGET, DRAFT), loader)
    contexts = [context for _, context, _ in loader.tried]
    drafts = [draft for _, _, draft in loader.tried]
    assert contexts[0] == 8192, "all fits by the plan"
    assert drafts == sorted(drafts, reverse=True), "a draft that is left out does not come back"
    assert min(contexts[: drafts.index(False)]) < 8192, "the context was cut before"
    assert LEAST_CONTEXT_TOKENS <= plan.context_tokens <= 1000
    assert not plan.with_draft
    assert any("running without the draft" in notice for notice in plan.notices)


def test_when_no_step_is_left_the_error_has_all_numbers(system: FakeSystem) -> None:
    loader = Loader(cuda=0)
    with pytest.raises(OutOfMemoryError) as caught:
        first_that_holds(LoadOptions(device="cuda:0"), Request(TARGET, DRAFT), loader)
    assert caught.value.code == 4
    for words in ("loading on cuda:0", "512.00 MiB is free", "weights 1,000 MB", "KV of 512 tokens"):
        assert words in caught.value.message
    assert len(loader.tried) < 20


def test_a_context_that_was_asked_for_is_not_cut(system: FakeSystem) -> None:
    loader = Loader(cuda=TARGET.fixed_bytes + 4096 * TARGET.slot_bytes)
    _, plan = first_that_holds(LoadOptions(device="cuda"), Request(TARGET, DRAFT, 4096), loader)
    assert loader.tried == [("cuda:0", 4096, True), ("cuda:0", 4096, False)]
    assert plan.context_tokens == 4096


def test_auto_goes_on_to_the_processor(system: FakeSystem) -> None:
    loader = Loader(cuda=0, cpu=10 * GB)
    place, _ = first_that_holds(LoadOptions(max_memory_bytes=9 * GB), Request(TARGET), loader)
    assert place.device == "cpu"
    assert "running on the processor, not on the Card: memory ran out while loading on cuda:0" in place.notices[0]


def test_auto_goes_to_the_processor_when_the_plan_says_no(system: FakeSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "budget_bytes", lambda limit: 10 * GB)
    system.free_bytes[0] = GB // 2
    loader = Loader(cuda=10 * GB, cpu=10 * GB)
    place, _ = first_that_holds(LoadOptions(), Request(TARGET), loader)
    assert loader.tried == [("cpu", 8192, False)]
    assert "the model does not fit: weights 1,000 MB" in place.notices[0]


class CompilationError(Exception):
    """As Triton's is: of no class that torch knows."""


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            CompilationError("at 3:4: no such instruction\nmore"),
            "does not run on the Card: CompilationError: at 3:4: no",
        ),
        (RuntimeError("CUDA error: an illegal memory access"), "RuntimeError: CUDA error: an illegal memory access"),
        (ModelError("groups of 24 have no kernel"), "groups of 24 have no kernel"),
    ],
)
def test_a_model_that_does_not_run_on_the_card(system: FakeSystem, error: Exception, words: str) -> None:
    def load(place: Placement, plan: MemoryPlan) -> Placement:
        if place.card is not None:
            raise error
        return place

    notices = first_that_holds(LoadOptions(), Request(TARGET, asked_tokens=512), load).notices
    assert len(notices) == 1
    assert notices[0].startswith("running on the processor, not on the Card: ")
    assert words in notices[0]
    assert "\n" not in notices[0]
    with pytest.raises((DeviceError, ModelError), match=words):
        first_that_holds(LoadOptions(device="cuda"), Request(TARGET, asked_tokens=512), load)


def test_errors_on_the_processor_are_no_card_s(system: FakeSystem) -> None:
    def load(place: Placement, plan: MemoryPlan) -> Placement:
        raise ZeroDivisionError

    for device in ("auto", "cpu"):
        with pytest.raises(ZeroDivisionError):
            first_that_holds(LoadOptions(device=device), Request(TARGET, asked_tokens=512), load)


@pytest.mark.parametrize("device", ["cuda", "auto"])
def test_what_was_loaded_is_let_go_before_the_next_try(system: FakeSystem, device: str) -> None:
    held: list[weakref.ref[Any]] = []

    class Weights:
        pass

    def load(place: Placement, plan: MemoryPlan) -> int:
        weights = Weights()
        alive = sum(ref() is not None for ref in held)
        held.append(weakref.ref(weights))
        assert alive == 0, "two loads at once would need twice the memory"
        if len(held) < 3:
            raise oom()
        if place.card is not None and device == "auto":
            raise ModelError("no kernel")
        return plan.context_tokens

    gc.disable()  # nothing but our own `release` collects
    try:
        first_that_holds(LoadOptions(device=device), Request(replace(TARGET, weights_bytes=GB // 10)), load)
    finally:
        gc.enable()
    assert len(held) == (3 if device == "cuda" else 4)


# a whole session


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_file(tmp_path_factory.mktemp("tiny"))


def load(path: Path, **options: Any) -> session.Session:
    return session.load(resolve_model(str(path), load_registry()), LoadOptions(**options))


def failing(times: int, real: Callable[..., Any]) -> Callable[..., Any]:
    """`real`, out of memory for the first calls."""
    calls: Iterator[int] = iter(range(times))

    def call(*arguments: Any, **named: Any) -> Any:
        if next(calls, None) is not None:
            raise oom()
        return real(*arguments, **named)

    return call


def test_a_session_on_a_card(system: FakeSystem, model_file: Path) -> None:
    loaded = load(model_file, device="cuda")
    assert loaded.report()["device"] == "cuda:0"
    assert loaded.scope.device.startswith("Card sm_89, ")
    assert system.opened, "the plan asked the card for its free memory"


def test_a_cache_that_does_not_fit_after_all(
    system: FakeSystem, model_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KVCache, "__init__", failing(1, KVCache.__init__))
    monkeypatch.setattr(session._Opened, "need", lambda self, kv: KV_NEED)
    loaded = load(model_file, device="cuda")
    assert loaded.engine.cache.capacity < 640
    assert any("context cut to" in notice for notice in loaded.loaded.notices)


@pytest.fixture
def recorded(system: FakeSystem, monkeypatch: pytest.MonkeyPatch) -> TapeGraphs:
    """The card computes with the reference's ops, and graphs play a tape."""
    graphs = TapeGraphs()

    def select(card: Card | None, threads: int | None) -> tuple[Kernels, str | None]:
        return (cpu_kernels(1) if card is None else DeviceKernels(Opaque(ReferenceOps()), torch.device("cpu"))), None

    monkeypatch.setattr(placement, "select_kernels", select)
    monkeypatch.setattr(session, "device_graphs", lambda device, wanted: graphs if wanted else None)
    return graphs


def answer(loaded: session.Session) -> tuple[int, ...]:
    last = list(loaded.generate(loaded.prompt_ids(FREE, raw=True), RunOptions(max_tokens=12)))[-1]
    assert isinstance(last, Finished)
    return last.token_ids


def test_steps_on_a_card_are_recorded_unless_told_otherwise(recorded: TapeGraphs, model_file: Path) -> None:
    with_graphs, captured = load(model_file, device="cuda"), recorded.captured
    assert captured > 0
    assert with_graphs.loaded.notices == ()
    without = load(model_file, device="cuda", graphs=False)
    assert recorded.captured == captured
    assert answer(with_graphs) == answer(without)


def test_recordings_that_find_no_memory_take_the_plan_a_step_further(
    recorded: TapeGraphs, model_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session._Opened, "need", lambda self, kv: KV_NEED)
    monkeypatch.setattr(TapeGraphs, "capture", failing(1, TapeGraphs.capture))
    loaded = load(model_file, device="cuda")
    assert loaded.engine.cache.capacity == LEAST_CONTEXT_TOKENS
    assert isinstance(loaded.engine.runner, GraphRunner)
    assert any("context cut to 512 of 640" in notice for notice in loaded.loaded.notices)


def test_what_does_not_run_shows_while_it_is_loaded(
    recorded: TapeGraphs, model_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attention(self: ReferenceOps, q: torch.Tensor, *arguments: Any) -> torch.Tensor:
        raise CompilationError("out of resource: shared memory")

    monkeypatch.setattr(ReferenceOps, "attention", attention)
    with pytest.raises(DeviceError, match="does not run on the Card: CompilationError: out of resource"):
        load(model_file, device="cuda", graphs=False)
    by_itself = load(model_file)
    assert by_itself.loaded.device == "cpu"
    assert any("not on the Card" in notice for notice in by_itself.loaded.notices)


def test_recordings_that_fail_otherwise_are_done_without(
    recorded: TapeGraphs, model_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: TapeGraphs, launch: Callable[[], Any]) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(TapeGraphs, "capture", refuse)
    loaded = load(model_file, device="cuda")
    assert [notice for notice in loaded.loaded.notices if "running without CUDA graphs" in notice]
    assert len(answer(loaded)) == 12


KV_NEED = Need(weights_bytes=1000, slot_bytes=1000, workspace_bytes=1000, context_tokens=640)


def test_memory_that_runs_out_while_answering(
    system: FakeSystem, model_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load(model_file, device="cuda")
    prompt = loaded.prompt_ids(FREE, raw=True)
    expected = list(loaded.generate(prompt, RunOptions(max_tokens=12)))[-1]
    runner = loaded.engine.runner
    steps = iter([None, None, oom()])

    def step(*arguments: Any) -> Any:
        error = next(steps, None)
        if error is not None:
            raise error
        return type(runner).step(runner, *arguments)

    monkeypatch.setattr(runner, "step", step)
    with pytest.raises(OutOfMemoryError, match=r"while answering: .*512\.00 MiB is free"):
        list(loaded.generate(prompt, RunOptions(max_tokens=12)))
    again = list(loaded.generate(prompt, RunOptions(max_tokens=12)))[-1]
    assert again.token_ids == expected.token_ids, "the session is as good as new"  # type: ignore[union-attr]


@pytest.mark.parametrize("command", ["run", "bench", "verify", "profile"])
def test_every_command_ends_with_code_4_and_no_traceback(
    command: str, system: FakeSystem, model_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "build_model", failing(1000, session.build_model))
    prompt = ["-p", FREE] if command == "run" else []
    done = CliRunner().invoke(app, [command, "-m", str(model_file), "--device", "cuda", *prompt])
    assert done.exit_code == 4
    assert "error: memory ran out while loading on cuda:0" in done.stderr
    assert "512.00 MiB is free" in done.stderr
    assert "hint: " in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--device", "cuda"], 1, "there is no NVIDIA driver"),
        (["--device", "cuda:5"], 1, "there is no NVIDIA driver"),
        (["--device", "gpu"], 2, "'gpu' is not known"),
    ],
)
def test_devices_that_cannot_be_had(
    arguments: list[str],
    code: int,
    words: str,
    system: FakeSystem,
    model_file: Path,
) -> None:
    system.driver_, system.cards_ = None, ()
    done = CliRunner().invoke(app, ["run", "-m", str(model_file), "-p", FREE, *arguments])
    assert done.exit_code == code
    assert f"error: {words}" in done.stderr or f": {words}" in done.stderr or words in done.stderr
    assert len(done.stderr.splitlines()) == 2, "an error and a hint"


def test_a_declined_card_is_one_note(system: FakeSystem, model_file: Path) -> None:
    system.cards_ = (card(0, "GTX 1080", (6, 1)),)
    done = CliRunner().invoke(app, ["run", "-m", str(model_file), "-p", FREE, "-n", "2", "--raw"])
    assert done.exit_code == 0
    notes = [line for line in done.stderr.splitlines() if line.startswith("note: ")]
    assert len([note for note in notes if "running on the processor, not on the GTX 1080" in note]) == 1
