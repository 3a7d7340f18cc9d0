"""A whole session on this machine's card: `pytest -m cuda`. Without one everything here is skipped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cards import needs_card
from gguf_files import llama_file
from tiny_session import CONTEXT, COPY, tiny_cases
from typer.testing import CliRunner

from specgen.cli.app import app
from specgen.events import Finished
from specgen.kernels.cuda_system import NvidiaSystem
from specgen.measure import verify as verify_module
from specgen.measure.verify import Promise, promise, verify
from specgen.options import LoadOptions, RunOptions, SamplingOptions
from specgen.registry import load_registry, resolve_model
from specgen.session import Session, load

pytestmark = [pytest.mark.cuda, needs_card]

DEVICE = "cuda"
WARM = SamplingOptions(temperature=0.9, top_p=0.9, seed=3)
TURNS = 200
SLACK_BYTES = 1 << 20


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_file(tmp_path_factory.mktemp("card") / "tiny.gguf", "Q4_1", context_length=CONTEXT)


@pytest.fixture(scope="module")
def session(path: Path) -> Session:
    return open_session(path)


def open_session(path: Path, device: str = DEVICE, **options) -> Session:
    return load(resolve_model(str(path), load_registry()), LoadOptions(device=device, **options))


def answer(loaded: Session, text: str = COPY, **options) -> tuple[int, ...]:
    asked = RunOptions(**{"max_tokens": 32, "ignore_eos": True, **options})
    *_, last = loaded.generate(loaded.prompt_ids(text, raw=True), asked)
    assert isinstance(last, Finished)
    return last.token_ids


def test_every_promise_holds(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_module, "DRAWS", 500)
    claims = list(verify(session, tiny_cases(session, 24)))
    assert [claim.failures for claim in claims if not claim.passed] == []
    assert promise(claims) is Promise.TOKENS


def test_recorded_steps_say_what_single_launches_say(session: Session, path: Path) -> None:
    assert session.loaded.notices == (), "everything was recorded"
    eager = open_session(path, graphs=False)
    for sampling in (SamplingOptions(), WARM):
        for gamma in (0, 1, 4, 8):
            asked = {"sampling": sampling, "proposer": "ngram", "gamma": gamma}
            assert answer(session, **asked) == answer(eager, **asked)


def test_the_card_computes_what_the_processor_computes(session: Session, path: Path) -> None:
    ids = session.prompt_ids(COPY, raw=True).ids
    logits = []
    for loaded in (session, open_session(path, "cpu")):
        engine = loaded.engine
        engine.rewind(0)
        with engine.cache.transaction(len(ids)):
            logits.append(engine.runner.prefill(ids, engine.cache).logits[-1].float().cpu().clone())
    card, processor = logits
    similarity = torch.nn.functional.cosine_similarity(card, processor, dim=0)
    assert float(similarity) > 0.995, "activations are rounded differently, and no more"


def test_memory_is_flat_over_many_answers(session: Session) -> None:
    device = session.kernels.device
    seen = []
    for turn in range(TURNS):
        answer(session, f"{turn} {COPY}", max_tokens=8, sampling=WARM)
        if turn in (TURNS // 4, TURNS - 1):
            torch.cuda.synchronize(device)
            seen.append(torch.cuda.memory_allocated(device))
    assert seen[1] - seen[0] <= SLACK_BYTES


def test_a_card_that_others_have_filled(path: Path) -> None:
    system = NvidiaSystem()
    first = system.cards()[0]
    free, _ = system.memory(first)
    taken = torch.empty(max(1, free - (192 << 20)), dtype=torch.uint8, device=first.device)
    done = CliRunner().invoke(app, ["run", "-m", str(path), "-p", COPY, "--raw", "-n", "4", "--device", "cuda:0"])
    assert done.exit_code == 4, done.stderr
    assert "MB" in done.stderr
    assert "Traceback" not in done.stderr
    by_itself = CliRunner().invoke(app, ["run", "-m", str(path), "-p", COPY, "--raw", "-n", "4"])
    assert by_itself.exit_code == 0, by_itself.stderr
    assert "running on the processor, not on the" in by_itself.stderr
    del taken
    torch.cuda.empty_cache()


def test_an_index_that_is_not_there(path: Path) -> None:
    count = torch.cuda.device_count()
    done = CliRunner().invoke(app, ["run", "-m", str(path), "-p", COPY, "--device", f"cuda:{count}"])
    assert done.exit_code == 2
    assert "there is no such card" in done.stderr
