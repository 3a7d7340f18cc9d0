"""Lookup first, a model otherwise; the text is the target's in any case."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from fakes import ScriptedProposer
from test_engine import GREEDY, PENALISED, PROMPT, TARGET, WARM, liar, make, plain, run
from test_model_proposer import draft_model, near

from specgen.draft import Draft
from specgen.options import DraftOptions, SamplingOptions
from specgen.propose.draw import SharedNoise
from specgen.propose.mix import LONG_MATCH, MixProposer
from specgen.propose.model import ModelProposer
from specgen.propose.ngram import NgramProposer
from specgen.tune.controller import AutoGamma, DraftCost, FixedGamma
from specgen.tune.survival import all_of


@pytest.mark.parametrize("options", [GREEDY, WARM, PENALISED], ids=["greedy", "warm", "penalised"])
@pytest.mark.parametrize("gamma", [2, 5, None])
@pytest.mark.parametrize("width", [1, 2])
def test_same_seed_same_tokens(options: SamplingOptions, gamma: int | None, width: int) -> None:
    engine, answer = make(liar(random.Random(1)), options=options)
    policy = AutoGamma(width=width, drafting={"model": DraftCost(0.1)}) if gamma is None else FixedGamma(gamma, width)
    chooser = SharedNoise(answer.sampler)
    model = ModelProposer("model", draft_model(near(TARGET)), answer.sampler, chooser, DraftOptions(), width)
    answer.policy, answer.proposer = policy, MixProposer(NgramProposer(width=width), model, policy)
    tokens, _, record = run(engine, answer)
    assert tokens == plain(options)
    assert {cycle.source for cycle in record.cycles} - {"none"}


def chain(source: str, match: int = 0) -> ScriptedProposer:
    def guess(committed: Sequence[int], limit: int) -> Draft:
        return Draft.chain([1] * limit, source=source, match=match)

    proposer = ScriptedProposer(guess)
    proposer.name = source
    return proposer


def nothing(reason: str | None = None) -> ScriptedProposer:
    proposer = ScriptedProposer(lambda committed, limit: None)
    proposer.name, proposer.reason = "model", reason
    return proposer


@pytest.mark.parametrize(("match", "source"), [(LONG_MATCH, "ngram"), (LONG_MATCH - 1, "model")])
def test_a_long_match_is_preferred(match: int, source: str) -> None:
    draft = MixProposer(chain("ngram", match), chain("model"), FixedGamma(4)).propose(PROMPT, 4)
    assert draft is not None
    assert draft.source == source


def test_a_lookup_that_does_not_pay_gives_way() -> None:
    policy = AutoGamma(drafting={"model": DraftCost(0.1)})
    policy.worth = lambda draft: False  # type: ignore[method-assign]
    policy._since_plain = 0
    draft = MixProposer(chain("ngram", 9), chain("model"), policy).propose(PROMPT, 8)
    assert draft is not None
    assert draft.source == "model"


def test_what_the_lookup_had_is_better_than_nothing() -> None:
    draft = MixProposer(chain("ngram", 2), nothing(), FixedGamma(4)).propose(PROMPT, 4)
    assert draft is not None
    assert draft.source == "ngram"
    empty = MixProposer(nothing(), nothing("model: its context is full"), FixedGamma(4))
    assert empty.propose(PROMPT, 4) is None
    assert empty.reason == "model: its context is full"
    parked = MixProposer(nothing(), chain("model"), FixedGamma(0))
    assert parked.propose(PROMPT, 4) is None
    assert parked.reason == "gamma is 0"


def test_a_model_that_had_nothing_is_not_judged_by_what_the_lookup_did() -> None:
    policy = AutoGamma(drafting={"model": DraftCost(0.1)})
    engine, answer = make(NgramProposer(), options=WARM, max_tokens=30)
    answer.policy, answer.proposer = policy, MixProposer(chain("ngram", 2), nothing("model: full"), policy)
    run(engine, answer)
    assert policy._propose["model"].is_empty
    assert policy.survival.drafts(all_of("model")) == 0


def test_both_are_told_of_every_change() -> None:
    lookup, model = chain("ngram"), chain("model")
    mix = MixProposer(lookup, model, FixedGamma(2))
    mix.observe([1, 2, 3], None, 0)
    mix.rollback(2)
    assert lookup.observed == model.observed == [1, 2]
