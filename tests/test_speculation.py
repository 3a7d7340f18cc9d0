"""The options of an answer become a proposer and a policy; the text never changes, whatever is kept between answers."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
from test_engine import no_cut
from tiny import tiny_decoder, tiny_spec

from specgen.accept import RULES
from specgen.engine import Answer, Cancel, Engine
from specgen.errors import UsageError
from specgen.kernels.reference import ReferenceKernels
from specgen.options import DraftOptions, RunOptions, SamplingOptions
from specgen.propose.model import DraftModel
from specgen.propose.store import NgramStore
from specgen.records import RunRecord
from specgen.sampling import Sampler
from specgen.speculation import LoadedDraft, Speculation
from specgen.step import EagerRunner
from specgen.tune.cost import CostTable
from specgen.tune.skip_search import SkipChoice
from specgen.tune.skip_store import SkipStore

SPEC = tiny_spec()
PROMPT = [1, 5, 9, 13, 5, 9, 13, 5]
SAMPLINGS = (
    SamplingOptions(),
    SamplingOptions(temperature=0.8, seed=3),
    SamplingOptions(temperature=0.7, top_p=0.9, repetition_penalty=1.2, frequency_penalty=0.2, seed=5),
)


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECGEN_DATA", str(tmp_path))
    monkeypatch.setattr("specgen.speculation.SKIP_SEARCH_S", 0.0)
    return tmp_path


def speculation(draft_seed: int | None = 0, store: NgramStore | None = None) -> Speculation:
    """Over a tiny target (seed 0), drafted for by a model of that seed: 0 is the target itself."""
    model = tiny_decoder(SPEC)
    made = Speculation(Engine(EagerRunner(model), model.new_cache(128)), model, "ab" * 32, store=store)
    if draft_seed is not None:
        small = tiny_decoder(SPEC, draft_seed)
        reader = DraftModel(EagerRunner(small), small.new_cache(64), SPEC.vocab)
        made.draft = LoadedDraft("small", reader, 0.2, "cd" * 32)
    return made


def answer(made: Speculation, options: RunOptions, max_tokens: int = 20) -> tuple[list[int], RunRecord]:
    sampler = Sampler(options.sampling, ReferenceKernels(), PROMPT, SPEC.vocab)
    start = made.begin(options, sampler, PROMPT)
    rule = RULES[options.accept]()
    asked = Answer(PROMPT, start.proposer, start.policy, rule, sampler, no_cut, max_tokens, Cancel())
    record = RunRecord()
    made.engine.prefill(asked, record)
    tokens = [token for cycle in made.engine.decode(asked, record) for token in cycle.tokens]
    made.finish(made.engine.committed)
    return tokens, record


PROPOSERS = ("auto", "ngram", "model", "mix", "skip")


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "warm", "penalised"])
def test_same_seed_same_text_across_proposers_trees_and_gammas(sampling: SamplingOptions) -> None:
    plain = answer(speculation(), RunOptions(sampling, proposer="none"))[0]
    made = speculation(draft_seed=1)  # one session, its caches and estimates going from answer to answer
    for proposer, tree, gamma in itertools.product(PROPOSERS, (1, 3), (1, 4, None)):
        options = RunOptions(sampling, proposer=proposer, tree=tree, gamma=gamma, draft=DraftOptions(0.1))
        assert answer(made, options)[0] == plain, (proposer, tree, gamma)


def test_a_session_whose_sampler_forgets_its_seed_is_caught() -> None:
    """The mutant of the test above."""
    plain = answer(speculation(), RunOptions(SAMPLINGS[1], proposer="none"))[0]
    other = replace(SAMPLINGS[1], seed=4)
    assert answer(speculation(), RunOptions(other, proposer="model", gamma=4))[0] != plain


def test_rejection_is_run_by_every_proposer() -> None:
    for proposer, tree in itertools.product(PROPOSERS, (1, 2)):
        options = RunOptions(SAMPLINGS[1], proposer=proposer, tree=tree, gamma=3, accept="rejection")
        tokens, record = answer(speculation(), options)
        assert len(tokens) == 20
        assert record.proposed > 0
        if proposer == "model" and tree == 1:
            # p = q: every draft is accepted, the answer's end aside.
            assert all(cycle.accepted == cycle.proposed for cycle in record.cycles[:-1])


def test_auto_uses_what_there_is() -> None:
    sampler = Sampler(SamplingOptions(), ReferenceKernels(), PROMPT, SPEC.vocab)
    assert speculation(None).begin(RunOptions(), sampler, PROMPT).proposer.name == "ngram"
    assert speculation().begin(RunOptions(), sampler, PROMPT).proposer.name == "mix"


def test_a_draft_that_was_asked_for_and_is_not_there() -> None:
    sampler = Sampler(SamplingOptions(), ReferenceKernels(), PROMPT, SPEC.vocab)
    without = speculation(None)
    for proposer in ("model", "mix"):
        with pytest.raises(UsageError, match=f"--proposer {proposer} needs a draft model"):
            without.begin(RunOptions(proposer=proposer), sampler, PROMPT)
    without.missing_draft = "it did not fit"
    assert without.begin(RunOptions(proposer="model"), sampler, PROMPT).proposer.name == "ngram"


def test_estimates_outlive_an_answer_but_not_a_calibration() -> None:
    made = speculation()
    answer(made, RunOptions(proposer="ngram"))
    policy = made._policies[1]
    answer(made, RunOptions(proposer="mix"))
    assert made._policies == {1: policy}
    assert made.costs.known
    made.use_costs(type(made.costs)(known_ms={1: 1.0, 2: 1.1}))
    assert made._policies == {}


def test_earlier_answers_are_looked_in(data: Path) -> None:
    store = NgramStore(data, "ab" * 32, SPEC.vocab)
    made = speculation(None, store)
    options = RunOptions(SAMPLINGS[0], proposer="ngram", gamma=4)
    first, record = answer(made, options, 60)
    again = answer(speculation(None, NgramStore(data, "ab" * 32, SPEC.vocab)), options, 60)
    assert again[0] == first
    assert (again[1].yield_tokens or 0) > (record.yield_tokens or 0)


def test_a_damaged_store_is_told_once(data: Path) -> None:
    store = NgramStore(data, "ab" * 32, SPEC.vocab)
    store.path.write_text("{")
    made = speculation(None, store)
    sampler = Sampler(SamplingOptions(), ReferenceKernels(), PROMPT, SPEC.vocab)
    assert "ignored" in made.begin(RunOptions(), sampler, PROMPT).notices[0]
    assert made.begin(RunOptions(), sampler, PROMPT).notices == ()


def test_a_skip_set_is_searched_once_and_kept() -> None:
    sampler = Sampler(SamplingOptions(), ReferenceKernels(), PROMPT, SPEC.vocab)
    first = speculation(None).begin(RunOptions(proposer="skip"), sampler, PROMPT)
    assert "of 4 sublayers" in first.notices[0]
    second = speculation(None).begin(RunOptions(proposer="skip"), sampler, PROMPT)
    assert second.notices == ()
    assert SkipStore("ab" * 32, 2).load() is not None


def test_a_search_that_is_cancelled_ends_and_keeps_nothing() -> None:
    sampler = Sampler(SamplingOptions(), ReferenceKernels(), PROMPT, SPEC.vocab)
    made, cancel = speculation(None), Cancel()
    cancel.set()
    start = made.begin(RunOptions(proposer="skip"), sampler, PROMPT, cancel)
    assert start.proposer.name == "none"
    assert "stopped" in " ".join(start.notices)
    assert SkipStore(made.digest, len(SPEC.layers)).load() is None
    assert made.begin(RunOptions(proposer="skip"), sampler, PROMPT).proposer.name == "skip", "searched the next time"


def test_what_the_search_measured_is_where_the_controller_begins() -> None:
    made = speculation(None)
    made.use_costs(CostTable(known_ms={1: 5.0, 2: 5.2, 5: 6.0, 9: 7.0}))
    for agreement, tried in ((0.1, False), (0.95, True)):
        made.use_skips(SkipChoice(frozenset({("mlp", 1), ("attention", 1)}), agreement, 1.0, 0))
        sampler = Sampler(SamplingOptions(), ReferenceKernels(), PROMPT, SPEC.vocab)
        policy = made.begin(RunOptions(proposer="skip"), sampler, PROMPT).policy
        assert (policy.limit("skip") > 0) == tried


GOOD = {"schema": 1, "digest": "ab" * 32, "skipped": [["mlp", 1]], "agreement": 0.9, "speedup": 1.1, "gamma": 2}


def test_a_stored_skip_set_is_read_back() -> None:
    store = SkipStore("ab" * 32, 2)
    choice = SkipChoice(frozenset({("mlp", 1), ("attention", 0)}), 0.75, 1.25, 3)
    store.save(choice)
    assert store.load() == choice
    assert SkipStore("cd" * 32, 2).load() is None


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 2},
        {"digest": "cd" * 32},
        {"skipped": []},
        {"skipped": [["mlp", 2]]},
        {"skipped": [["head", 1]]},
        {"skipped": [["mlp", True]]},
        {"skipped": [[1]]},
        {"agreement": "much"},
        {"extra": 1},
    ],
    ids=str,
)
def test_a_skip_set_that_makes_no_sense_is_none(change: dict) -> None:
    store = SkipStore("ab" * 32, 2)
    store.path.parent.mkdir(parents=True)
    store.path.write_text(json.dumps(GOOD))
    assert store.load() is not None
    store.path.write_text(json.dumps(GOOD | change))
    assert store.load() is None
