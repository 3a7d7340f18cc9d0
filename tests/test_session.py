"""A session over a tiny model file: what the options of loading and answering do, end to end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from gguf_files import llama_file

from specgen.engine import Cancel
from specgen.errors import ContextFullError, ModelError, UsageError
from specgen.events import CycleDone, Event, Finished, FinishReason, Piece, Prefilled, Started
from specgen.options import LoadOptions, RunOptions, SamplingOptions
from specgen.registry import load_registry, resolve_model
from specgen.session import Session, load
from specgen.tune.plan import Plan, PlanBook, PlanStore
from specgen.tune.predict import Costs
from specgen.tune.setting import Setting

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


def planned(session: Session, setting: Setting, draft: str | None) -> PlanBook:
    """What the session finds where a tune with this draft model has chosen `setting`."""
    scope = replace(session.scope, draft=draft)
    store = PlanStore()
    store.save(
        Plan(
            scope=scope,
            model="tiny",
            temperature="sampled",
            context="short",
            setting=setting,
            fixed_gamma=2,
            speedup=(1.1, 1.2, 1.3),
            by_kind={},
            costs=Costs({0: {1: 1.0}}),
            objective="tok/s",
            created="2026-01-02T03:04:05+00:00",
            why="measured",
        )
    )
    book = store.book(session.scope)
    store.forget(scope.digest)
    return book


def notices(session: Session) -> str:
    first = next(iter(session.generate(session.prompt_ids(TEXT, raw=True), RunOptions(sampling=WARM, max_tokens=1))))
    assert isinstance(first, Started)
    return f"{first.proposer} {first.gamma}; " + "; ".join(first.notices)


def test_a_plan_holds_with_the_draft_model_that_it_was_tuned_with(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECGEN_DATA", str(tmp_path))
    ref = resolve_model(str(model_path), load_registry())
    drafted, alone = load(ref, LoadOptions(threads=1), draft=ref), session_of(model_path)
    mine = drafted.scope.draft
    assert mine is not None
    assert alone.scope.draft is None
    lookup, model = Setting("ngram", 3), Setting("model", 3)
    for session, setting, draft, word in (
        (drafted, model, mine, "model 3; tuned: model γ 3"),
        (drafted, lookup, mine, "ngram 3; tuned: ngram"),
        (drafted, lookup, None, "without this draft model"),
        (drafted, model, "another", "with a draft model"),
        (alone, lookup, None, "ngram 3; tuned: ngram"),
        (alone, lookup, mine, "ngram 3; tuned: ngram"),  # it won beside the draft: it wins without
        (alone, model, mine, "with a draft model"),
    ):
        session.use_plans(planned(session, setting, draft))
        assert word in notices(session), (setting, draft)
        assert ("tuned: " in notices(session)) == word.startswith(setting.proposer)
