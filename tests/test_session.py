"""A session over a tiny model file: what the options of loading and answering do, end to end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from gguf_files import llama_file

from specgen.engine import Cancel
from specgen.errors import ContextFullError, ModelError, UsageError
from specgen.events import CycleDone, Event, Finished, FinishReason, Piece, Prefilled, Started
from specgen.options import LoadOptions, RunOptions, SamplingOptions
from specgen.registry import load_registry, resolve_model
from specgen.session import Session, load

TEXT = "hello world 12 hello world 12 hello"
WARM = SamplingOptions(temperature=0.9, seed=4)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_file(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture(scope="module")
def session(model_path: Path) -> Session:
    return session_of(model_path)


def session_of(path: Path, **options) -> Session:
    return load(resolve_model(str(path), load_registry()), LoadOptions(threads=1, **options))


def finish(events: Iterator[Event]) -> Finished:
    *_, last = events
    assert isinstance(last, Finished)
    return last


def ask(session: Session, text: str = TEXT, **options) -> Finished:
    options = {"sampling": WARM, "max_tokens": 24, "ignore_eos": True, **options}
    return finish(session.generate(session.prompt_ids(text, raw=True), RunOptions(**options)))


def test_events_come_in_order_and_tell_one_story(session: Session) -> None:
    prompt = session.prompt_ids(TEXT, raw=True)
    events = list(session.generate(prompt, RunOptions(sampling=WARM, max_tokens=20, ignore_eos=True)))
    assert isinstance(events[0], Started)
    assert isinstance(events[1], Prefilled)
    assert isinstance(events[-1], Finished)
    cycles = [event for event in events if isinstance(event, CycleDone)]
    assert [event.record for event in cycles] == events[-1].record.cycles
    assert cycles[-1].length == len(prompt.ids) + 20
    assert "".join(event.text for event in events if isinstance(event, Piece)) == events[-1].text
    assert len(events[-1].record.gaps_ms) == 19, "one gap for each token behind the first"


def test_the_second_answer_reuses_the_prefix_and_says_the_same(session: Session) -> None:
    first = ask(session)
    again = ask(session)
    assert again.token_ids == first.token_ids
    assert again.record.reused_tokens == first.record.prompt_tokens - 1
    assert again.record.prefilled_tokens == 0


def test_a_stop_string_ends_text_ids_and_counters_at_one_boundary(session: Session) -> None:
    whole = ask(session, max_tokens=40)
    for length in (1, 2, 5):
        stop = whole.text[7 : 7 + length]
        cut = whole.text.index(stop)
        for proposer, gamma in (("none", 0), ("ngram", 1), ("ngram", 8), ("auto", None)):
            found = ask(session, max_tokens=40, stop=(stop,), proposer=proposer, gamma=gamma)
            assert found.reason is FinishReason.STOP
            assert found.text == whole.text[:cut]
            assert found.token_ids == whole.token_ids[: len(found.token_ids)]
            assert found.record.completion_tokens == len(found.token_ids)
            assert session.engine.committed[-len(found.token_ids) :] == list(found.token_ids)
            assert session.engine.cache.length == len(session.engine.committed) - 1


def test_a_consumer_that_goes_away_leaves_a_usable_session(session: Session) -> None:
    expected = ask(session).token_ids
    events = session.generate(session.prompt_ids(TEXT, raw=True), RunOptions(sampling=WARM, ignore_eos=True))
    for _ in range(6):
        next(events)
    events.close()
    assert session.engine.cache.reserved == 0
    assert ask(session).token_ids == expected


def test_a_cancelled_answer_keeps_what_was_said(session: Session) -> None:
    expected, cancel, found = ask(session), Cancel(), []
    prompt = session.prompt_ids(TEXT, raw=True)
    for event in session.generate(prompt, RunOptions(sampling=WARM, max_tokens=24, ignore_eos=True), cancel):
        found.append(event)
        if sum(isinstance(seen, CycleDone) for seen in found) == 5:
            cancel.set()
    last = found[-1]
    assert isinstance(last, Finished)
    assert last.reason is FinishReason.CANCELLED
    assert 0 < len(last.token_ids) < 24
    assert last.token_ids == expected.token_ids[: len(last.token_ids)]


def test_what_cannot_be_answered_is_refused_before_any_work(session: Session) -> None:
    with pytest.raises(ContextFullError, match="context holds"):
        session.generate(session.prompt_ids("x" * 5000, raw=True), RunOptions())
    with pytest.raises(UsageError, match="--system"):
        session.prompt_ids("x", system="y", raw=True)
    with pytest.raises(UsageError, match="empty"):
        session.prompt_ids("", raw=True)


@pytest.mark.parametrize("kv", ["f32", "bf16", "int8"])
def test_every_kind_of_cache_keeps_the_promise(model_path: Path, kv: str) -> None:
    session = session_of(model_path, kv=kv)
    expected = ask(session, proposer="none").token_ids
    assert {ask(session, proposer="ngram", gamma=gamma).token_ids for gamma in (1, 3, 8)} == {expected}


@pytest.mark.parametrize("quant", ["int4", "int8", "fp8", "nf4"])
def test_a_dense_model_is_quantised_on_load(model_path: Path, quant: str) -> None:
    session = session_of(model_path, quant=quant)
    dense = session_of(model_path).engine.runner.model.weights.layers[0].mlp.up
    packed = session.engine.runner.model.weights.layers[0].mlp.up
    assert packed.nbytes < dense.nbytes / 2.5, "float32 in, at most a byte and its scales out"
    expected = ask(session, proposer="none").token_ids
    assert ask(session, proposer="ngram", gamma=4).token_ids == expected
    again = session_of(model_path, quant=quant)
    assert ask(again).token_ids == expected, "the second load comes from the cache"


def test_a_packed_model_is_not_quantised_again(tmp_path: Path) -> None:
    packed = llama_file(tmp_path / "packed.gguf", quant="Q8_0")
    with pytest.raises(ModelError, match="quantised already"):
        session_of(packed, quant="int4")


def test_a_tuned_plan_does_not_take_the_place_of_a_draft_model(model_path: Path) -> None:
    class AskedError(Exception):
        pass

    class Book:
        costs, notes = None, ()

        def choice(self, temperature: float, prompt_tokens: int) -> None:
            raise AskedError

    ref = resolve_model(str(model_path), load_registry())
    drafted = load(ref, LoadOptions(threads=1), draft=ref)
    drafted.use_plans(Book())  # type: ignore[arg-type]
    assert ask(drafted).token_ids
    alone = session_of(model_path)
    alone.use_plans(Book())  # type: ignore[arg-type]
    with pytest.raises(AskedError):
        ask(alone)
