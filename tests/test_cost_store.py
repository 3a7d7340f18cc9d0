"""What answers teach of t(R) is kept for the next start, and damaged files are no table."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import pytest
from test_speculation import answer, speculation
from tiny_session import tiny_file, tiny_session

from specgen import steptime
from specgen.options import RunOptions
from specgen.speculation import Speculation
from specgen.steptime import QUICK_ROWS, quick_costs
from specgen.tune.cost_store import CostStore, Learned
from specgen.tune.plan import Scope
from specgen.tune.predict import Costs
from specgen.tune.skip_search import SkipChoice

SCOPE = Scope("ab" * 32, "a processor, 2 threads", "specgen 0")
OTHER = Scope("ab" * 32, "a processor, 1 thread", "specgen 0")
TABLE = {1: (4.0,), 2: (4.5, 4.25, 5.0), 9: (13.25,)}
DRAFT = f"model {'cd' * 32}"
"""The draft model of `speculation`."""
CHEAP = {rows: (ms,) for rows, ms in {1: 5.0, 2: 5.05, 3: 5.1, 5: 5.2, 9: 5.4, 17: 5.8}.items()}
LEARNED = Learned(TABLE, {DRAFT: 0.25})


@pytest.fixture
def store(tmp_path: Path) -> CostStore:
    return CostStore(SCOPE, tmp_path)


def test_a_table_comes_back(store: CostStore, tmp_path: Path) -> None:
    assert store.load() is None
    store.save(LEARNED)
    assert store.load() == LEARNED
    assert CostStore(OTHER, tmp_path).load() is None


def damaged() -> Iterator[object]:
    good = {"schema": 4, "scope": asdict(SCOPE), "step_ms": {"1": [4.0]}, "agreement": {}}
    yield {**good, "schema": 3}
    yield {**good, "scope": asdict(OTHER)}
    yield {**good, "more": 1}
    yield {key: value for key, value in good.items() if key != "scope"}
    for table in ([], {"0": [1.0]}, {"one": [1.0]}, {"100000": [1.0]}):
        yield {**good, "step_ms": table}
    for times in (1.0, None, [], [-1.0], ["four"], [None], [1e300], [4.0, 0.0], [4.0] * 10):
        yield {**good, "step_ms": {"1": times}}
    for shares in ([], {"model": 1.5}, {"model": -0.1}, {"model": "half"}, {"skip": None}):
        yield {**good, "agreement": shares}
    yield []


@pytest.mark.parametrize("value", list(damaged()), ids=str)
def test_a_damaged_file_is_no_table(store: CostStore, value: object) -> None:
    store.save(LEARNED)
    store.path.write_text(json.dumps(value))
    assert store.load() is None


def measured_never() -> dict[int, list[float]]:
    raise AssertionError("there is a table already")


def test_answers_teach_and_the_next_session_begins_with_it(store: CostStore) -> None:
    first = speculation(draft_seed=None)
    first.recall_costs(store, lambda: dict(TABLE))
    assert store.load() == Learned(TABLE)
    answer(first, RunOptions(proposer="ngram"))
    first.finish([1, 2, 3])
    kept = store.load()
    assert kept is not None
    assert kept.step_ms != TABLE
    second = speculation(draft_seed=None)
    second.recall_costs(store, measured_never)
    assert second.costs.known == pytest.approx({rows: median(times) for rows, times in kept.step_ms.items()})
    assert second.learned == kept


def test_a_draft_that_was_worthless_is_not_read_into_the_next_prompt(store: CostStore) -> None:
    options = RunOptions(proposer="model")
    first = speculation(draft_seed=5)
    first.recall_costs(store, lambda: CHEAP)
    assert answer(first, options)[1].proposed, "without experience it is tried"
    first.finish([1, 2, 3])
    kept = store.load()
    assert kept is not None
    assert kept.agreement[DRAFT] < 0.5
    store.save(Learned(CHEAP, {DRAFT: 0.02}))
    second = speculation(draft_seed=5)
    second.recall_costs(store, measured_never)
    assert not answer(second, options)[1].proposed
    other = speculation(draft_seed=5)
    assert other.draft is not None
    other.draft = replace(other.draft, digest="ef" * 32)
    other.recall_costs(store, measured_never)
    assert answer(other, options)[1].proposed, "another draft model is not judged by it"
    other.finish([1, 2, 3])
    both = store.load()
    assert both is not None
    assert both.agreement.keys() == {DRAFT, f"model {'ef' * 32}"}


def test_what_one_skip_set_taught_is_not_held_against_the_next(
    store: CostStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SPECGEN_DATA", str(tmp_path))
    made = speculation(draft_seed=None)
    made.recall_costs(store, lambda: CHEAP)
    options = RunOptions(proposer="skip")
    made.use_skips(SkipChoice(frozenset({("mlp", 1)}), 0.9, 1.0, 0))
    assert answer(made, options)[1].proposed
    made.finish([1, 2, 3])
    (first,) = made.learned.agreement
    made.use_skips(SkipChoice(frozenset({("mlp", 0)}), 0.9, 1.0, 0))
    answer(made, options)
    made.finish([1, 2, 3])
    assert len(made.learned.agreement) == 2
    assert first in made.learned.agreement


def test_a_folder_that_cannot_be_written_costs_nothing(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    made: Speculation = speculation(draft_seed=None)
    made.recall_costs(CostStore(SCOPE, blocked / "folder"), lambda: dict(TABLE))
    answer(made, RunOptions(proposer="ngram"))
    made.finish([1, 2, 3])
    assert made.costs.known


def test_a_first_start_measures_and_leaves_no_trace(tmp_path: Path) -> None:
    session = tiny_session(tiny_file(tmp_path))
    engine = session.engine
    found = quick_costs(engine, session.loaded.spec.vocab, budget_s=60.0)
    assert set(found) == set(QUICK_ROWS)
    assert all(ms > 0.0 for times in found.values() for ms in times)
    assert engine.cache.length == engine.cache.reserved == 0
    assert engine.committed == []
    assert quick_costs(engine, session.loaded.spec.vocab, budget_s=-1.0) == {}, "nothing is begun behind the budget"


@pytest.mark.parametrize("stopped", range(20))
def test_a_process_that_was_stopped_does_not_learn_that_drafts_are_hopeless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped: int
) -> None:
    session = tiny_session(tiny_file(tmp_path))
    clock, steps = [0.0], itertools.count()

    def step_task(engine: object, rows: int, vocab: int) -> Callable[[], float]:
        def step() -> float:
            ms = 3.6e6 if next(steps) == stopped else 4.0 + rows
            clock[0] += 1e-3 * ms
            return ms

        return step

    monkeypatch.setattr(steptime, "step_task", step_task)
    monkeypatch.setattr(steptime, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    found = quick_costs(session.engine, session.loaded.spec.vocab)
    assert all(4.0 + rows <= ms <= 2 * rows * 5.0 for rows, times in found.items() for ms in times)
    assert found.get(1, [5.0]) == [5.0]


def test_a_session_recalls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_file(tmp_path)
    monkeypatch.setenv("SPECGEN_DATA", str(tmp_path / "data"))
    first = tiny_session(path)
    kept = CostStore(first.scope).load()
    assert kept is not None
    for rows, times in first.speculation.learned.step_ms.items():
        assert kept.step_ms[rows] == pytest.approx(times, abs=1e-5)
    monkeypatch.setattr("specgen.session.quick_costs", lambda *_: measured_never())
    assert tiny_session(path).speculation.learned == kept


def test_a_tuned_model_is_not_measured_at_its_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Book:
        plans = ()
        costs = Costs({128: {1: 4.0, 2: 4.5}})

    monkeypatch.setenv("SPECGEN_DATA", str(tmp_path / "data"))
    monkeypatch.setattr("specgen.session.PlanStore.book", lambda store, scope: Book())
    monkeypatch.setattr("specgen.session.quick_costs", lambda *_: measured_never())
    assert tiny_session(tiny_file(tmp_path)).speculation.costs.known == pytest.approx({1: 4.0, 2: 4.5})
