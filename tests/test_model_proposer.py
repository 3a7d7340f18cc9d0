"""Drafting with a model: same text, exact distribution, a cache that follows, limits that are honoured."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from fakes import FakeRunner, Logits, fake_cache, hashed_logits
from scipy.stats import chisquare
from test_engine import GREEDY, PENALISED, PROMPT, TARGET, VOCAB, WARM, make, plain, run

from specgen.accept import Rejection
from specgen.draft import ROOT, Draft
from specgen.engine import Answer, Cancel, Engine
from specgen.events import FinishReason
from specgen.kernels.reference import ReferenceKernels
from specgen.options import DraftOptions, SamplingOptions
from specgen.propose.draw import Child, OwnNoise, SharedNoise
from specgen.propose.model import CATCH_UP_TOKENS, DraftModel, ModelProposer
from specgen.propose.none import NoProposer
from specgen.records import RunRecord
from specgen.sampling import Sampler
from specgen.tune.controller import FixedGamma


def near(logits: Logits, share: float = 0.6, seed: int = 77) -> Logits:
    """A draft that is often right: the target's logits with some of its own mixed in."""
    other = hashed_logits(len(logits((1,))), seed=seed, scale=1.5, order=2)
    return lambda prefix: share * logits(prefix) + (1 - share) * other(prefix)


def draft_model(logits: Logits, capacity: int = 256, vocab: int = VOCAB) -> DraftModel:
    return DraftModel(FakeRunner(logits), fake_cache(capacity), vocab)


def drafting(
    options: SamplingOptions,
    logits: Logits = TARGET,
    *,
    width: int = 1,
    reader: DraftModel | None = None,
    chooser=SharedNoise,
    draft: DraftOptions | None = None,
    **changes,
) -> tuple[Engine, Answer]:
    """An engine and an answer whose proposer shares the answer's sampler, as in a session."""
    engine, answer = make(NoProposer(), **changes, options=options)
    reader = reader or draft_model(logits)
    answer.proposer = ModelProposer(
        "model", reader, answer.sampler, chooser(answer.sampler), draft or DraftOptions(), width
    )
    return engine, answer


CASES = [GREEDY, WARM, PENALISED]


@pytest.mark.parametrize("options", CASES, ids=["greedy", "warm", "penalised"])
@pytest.mark.parametrize("width", [1, 2, 3])
def test_same_seed_same_tokens(options: SamplingOptions, width: int) -> None:
    expected = plain(options)
    for gamma, draft in itertools.product((1, 3, 8, None), (DraftOptions(), DraftOptions(0.4))):
        engine, answer = drafting(options, near(TARGET), width=width, gamma=gamma, draft=draft)
        assert run(engine, answer)[0] == expected


@pytest.mark.parametrize("options", CASES, ids=["greedy", "warm", "penalised"])
@pytest.mark.parametrize("width", [1, 2])
def test_a_draft_equal_to_the_target_is_accepted_whole(options: SamplingOptions, width: int) -> None:
    engine, answer = drafting(options, width=width, gamma=4, max_tokens=41)
    tokens, _, record = run(engine, answer)
    assert tokens == plain(options, max_tokens=41)
    levels = 4 // width
    assert {cycle.ending for cycle in record.cycles[:-1]} == {"bonus"}
    assert {cycle.accepted for cycle in record.cycles[:-1]} == {levels}


def test_the_bonus_token_at_the_boundary_of_the_budget() -> None:
    for budget in range(1, 14):
        engine, answer = drafting(WARM, gamma=4, max_tokens=budget)
        tokens, reason, record = run(engine, answer)
        assert tokens == plain(WARM, max_tokens=budget)
        assert reason == FinishReason.LENGTH
        assert sum(cycle.committed for cycle in record.cycles) == budget


class ForgetsPath(Sampler):
    """Mutant: the draft's penalties do not see the draft tokens before a place."""

    def adjust(self, logits, path=()):
        return super().adjust(logits, ())


class OffByOnePosition(SharedNoise):
    """Mutant: the noise of the position before."""

    def __call__(self, logits, path, position, width):
        return super().__call__(logits, path, position - 1, width)


class NeverRollsBack(DraftModel):
    """Mutant: what a rejected draft wrote stays in the cache."""

    def lag(self, committed, agreed):
        return max(1, len(committed) - len(self._tokens))

    def read(self, committed, count):
        return self._advance(committed[-count:])


def share_accepted(options: SamplingOptions, logits: Logits = TARGET, **changes) -> float:
    engine, answer = drafting(options, logits, gamma=4, max_tokens=120, **changes)
    record = run(engine, answer)[2]
    return record.accepted / record.proposed


def test_mutants_lose_acceptance() -> None:
    assert share_accepted(WARM) == share_accepted(PENALISED) == 1.0
    assert share_accepted(WARM, chooser=OffByOnePosition) < 0.8
    assert share_accepted(WARM, chooser=OwnNoise) < 0.8, "independent draws agree less"
    forgetful = Sampler(PENALISED, ReferenceKernels(), PROMPT, VOCAB)
    forgetful.__class__ = ForgetsPath
    assert share_accepted(PENALISED, chooser=lambda _: SharedNoise(forgetful)) < 1.0
    good, bad = (
        share_accepted(WARM, near(TARGET), reader=kind(FakeRunner(near(TARGET)), fake_cache(600), VOCAB))
        for kind in (DraftModel, NeverRollsBack)
    )
    assert bad < good


def test_siblings_raise_acceptance() -> None:
    one = run(*drafting(WARM, near(TARGET, 0.4), gamma=2, max_tokens=200))[2]
    two = run(*drafting(WARM, near(TARGET, 0.4), gamma=4, width=2, max_tokens=200))[2]
    assert two.survival()[0] > one.survival()[0] + 0.05


# The cache follows.


def test_each_cycle_begins_with_one_step_over_what_was_accepted() -> None:
    reader = draft_model(near(TARGET))
    engine, answer = drafting(WARM, reader=reader, gamma=3)
    run(engine, answer)
    steps = reader._runner.steps  # type: ignore[attr-defined]
    assert steps[0] == len(PROMPT)
    assert max(steps[1:]) <= 2, "the corrected token, or the last of the draft and the bonus"


def test_a_new_answer_keeps_what_the_caches_share() -> None:
    reader = draft_model(TARGET)
    engine, answer = drafting(WARM, reader=reader, gamma=4)
    first = run(engine, answer)[0]
    runner = reader._runner
    runner.steps.clear()  # type: ignore[attr-defined]
    _, again = drafting(WARM, reader=reader, gamma=4)
    again.prompt = [*PROMPT, *first[:9], (first[9] + 1) % VOCAB]
    record = RunRecord()
    engine.prefill(again, record)
    tokens = [token for cycle in engine.decode(again, record) for token in cycle.tokens]
    assert runner.steps[0] <= 2  # type: ignore[attr-defined]
    fresh_engine, fresh = make(NoProposer(), 0, options=WARM)
    fresh.prompt = again.prompt
    fresh_engine.prefill(fresh, RunRecord())
    assert tokens == [token for cycle in fresh_engine.decode(fresh, RunRecord()) for token in cycle.tokens]
    assert all(cycle.accepted == cycle.proposed for cycle in record.cycles if cycle.proposed)


def test_what_is_unread_is_what_the_cache_does_not_share() -> None:
    reader = draft_model(TARGET)
    tokens = [3, 1, 4, 1, 5]
    assert reader.unread(tokens) == 5
    reader.read(tokens, reader.lag(tokens, 0))
    assert reader.unread([*tokens, 9, 2]) == 2
    assert reader.unread([3, 1, 7, 7]) == 2
    assert reader.unread(tokens) == 1, "the last token is always read, for what follows it"
    assert reader.cache.length == 5, "asking changes nothing"


def test_a_long_prompt_is_read_over_several_cycles() -> None:
    reader = draft_model(TARGET, capacity=2000)
    prompt = [index % VOCAB for index in range(2 * CATCH_UP_TOKENS + 10)]
    engine, answer = drafting(GREEDY, reader=reader, gamma=4, cache=fake_cache(2000), max_tokens=20)
    answer.prompt = prompt
    record = RunRecord()
    engine.prefill(answer, record)
    list(engine.decode(answer, record))
    assert [cycle.fallback for cycle in record.cycles[:3]] == ["model: the draft is still reading"] * 2 + [None]
    assert record.cycles[2].accepted == 4


def test_the_drafts_context_ends_before_the_targets() -> None:
    reader = draft_model(TARGET, capacity=20)
    engine, answer = drafting(WARM, reader=reader, gamma=6, max_tokens=40)
    tokens, _, record = run(engine, answer)
    assert tokens == plain(WARM)
    assert "model: the draft's context of 20 tokens is full" in record.fallbacks()
    assert max(cycle.accepted for cycle in record.cycles) == 6


def test_a_draft_rejected_at_the_context_edge() -> None:
    for capacity in range(18, 27):
        expected = plain(WARM, max_tokens=None, cache=fake_cache(capacity))
        engine, answer = drafting(WARM, near(TARGET, 0.2), gamma=6, max_tokens=None, cache=fake_cache(capacity))
        tokens, reason, _ = run(engine, answer)
        assert tokens == expected
        assert reason == FinishReason.CONTEXT


def test_a_target_that_fails_in_the_middle_leaves_both_caches_usable() -> None:
    expected = plain(WARM)
    runner = FakeRunner(TARGET, fail_at=12)
    reader = draft_model(near(TARGET))
    engine, answer = drafting(WARM, reader=reader, gamma=4, runner=runner)
    record = RunRecord()
    engine.prefill(answer, record)
    with pytest.raises(RuntimeError):
        list(engine.decode(answer, record))
    runner.fail_at = None
    _, again = drafting(WARM, reader=reader, gamma=4)
    assert run(engine, again)[0] == expected


# Vocabularies and bad drafts.


@pytest.mark.parametrize("rows", [VOCAB - 2, VOCAB + 5])
@pytest.mark.parametrize("chooser", [SharedNoise, OwnNoise])
def test_a_vocabulary_padded_otherwise(rows: int, chooser) -> None:
    """The draft's head is smaller or larger than the tokenizer: padding is never proposed, probs are of one size."""

    def resized(prefix: tuple[int, ...]) -> torch.Tensor:
        return torch.cat((TARGET(prefix), torch.full((5,), 50.0)))[:rows]

    forbidden = replace(WARM, logit_bias=tuple((token, -float("inf")) for token in range(rows, VOCAB)))
    expected = plain(forbidden)
    engine, answer = drafting(forbidden, reader=draft_model(resized, vocab=rows), chooser=chooser, gamma=4, width=2)
    assert run(engine, answer)[0] == expected
    draft = answer.proposer.propose([*PROMPT, 0], 4)
    assert draft is not None
    assert all(token < min(rows, VOCAB) for token in draft.tokens)
    assert all(probs is None or probs.shape == (VOCAB,) for probs in draft.probs)


def test_a_token_that_the_draft_cannot_read() -> None:
    engine, answer = drafting(GREEDY, reader=draft_model(TARGET, vocab=3), gamma=4)
    tokens, _, record = run(engine, answer)
    assert tokens == plain()
    assert "model: the draft does not know token 3" in record.fallbacks()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_broken_draft_does_not_end_the_answer(bad: float) -> None:
    engine, answer = drafting(WARM, lambda prefix: torch.full((VOCAB,), bad), gamma=4)
    tokens, _, record = run(engine, answer)
    assert tokens == plain(WARM)
    assert record.fallbacks()["model: the draft's logits are not finite"] == 39


def test_a_doubtful_token_ends_the_draft() -> None:
    flat = lambda prefix: torch.zeros(VOCAB)  # noqa: E731
    draft = drafting(WARM, flat, draft=DraftOptions(0.5))[1].proposer.propose(PROMPT, 6)
    assert draft is not None
    assert len(draft) == 1
    assert draft.confidence == pytest.approx(1 / VOCAB)
    sure = lambda prefix: torch.nn.functional.one_hot(torch.tensor(len(prefix) % VOCAB), VOCAB) * 20.0  # noqa: E731
    draft = drafting(WARM, sure, draft=DraftOptions(0.5))[1].proposer.propose(PROMPT, 6)
    assert draft is not None
    assert len(draft) == 6


def test_the_shape_of_a_tree() -> None:
    draft = drafting(WARM, width=2)[1].proposer.propose(PROMPT, 5)
    assert draft is not None
    assert draft.parents == (ROOT, ROOT, 0, 0, 2)
    assert draft.depths == [1, 1, 2, 2, 3]
    for node in (ROOT, 0):
        first, second = (draft.tokens[child] for child in draft.children(node))
        assert first != second


# The distribution under `rejection`.

SMALL, LENGTH, RUNS = 4, 2, 500
SMALL_PROMPT = [1, 3]
SMALL_TARGET = hashed_logits(SMALL, seed=11, scale=1.2)
T1 = SamplingOptions(temperature=1.0)


def sample(seed: int, options: SamplingOptions, chooser, draft: DraftOptions, width: int, proposer) -> tuple[int, ...]:
    sampler = Sampler(replace(options, seed=seed), ReferenceKernels(), SMALL_PROMPT, SMALL)
    reader = DraftModel(FakeRunner(near(SMALL_TARGET, 0.3, seed=5)), fake_cache(), SMALL)
    answer = Answer(
        prompt=SMALL_PROMPT,
        proposer=proposer("model", reader, sampler, chooser(sampler), draft, width),
        policy=FixedGamma(2 * width),
        rule=Rejection(),
        sampler=sampler,
        cut=lambda tokens: (len(tokens), None),
        max_tokens=LENGTH + 8,
        cancel=Cancel(),
    )
    engine, record = Engine(FakeRunner(SMALL_TARGET), fake_cache()), RunRecord()
    engine.prefill(answer, record)
    tokens: list[int] = []
    for cycle in engine.decode(answer, record):
        tokens.extend(cycle.tokens)
        if len(tokens) >= LENGTH:
            break
    return tuple(tokens[:LENGTH])


def p_value(
    options: SamplingOptions = T1,
    chooser=OwnNoise,
    draft: DraftOptions | None = None,
    *,
    width: int = 1,
    proposer=ModelProposer,
    runs: int = RUNS,
) -> float:
    """Chi-square of the first LENGTH tokens against the product of the target's probabilities."""
    draft = draft or DraftOptions()
    counts = Counter(sample(seed, options, chooser, draft, width, proposer) for seed in range(runs))
    observed, wanted = [], []
    for sequence in itertools.product(range(SMALL), repeat=LENGTH):
        share = 1.0
        for index, token in enumerate(sequence):
            sampler = Sampler(options, ReferenceKernels(), SMALL_PROMPT, SMALL)
            prefix = sequence[:index]
            share *= float(sampler.probs(SMALL_TARGET((*SMALL_PROMPT, *prefix)), prefix)[token])
        observed.append(counts[sequence])
        wanted.append(share * runs)
    big = [index for index, count in enumerate(wanted) if count >= 5]
    observed = [observed[i] for i in big] + [sum(o for i, o in enumerate(observed) if i not in big)]
    wanted = [wanted[i] for i in big] + [sum(w for i, w in enumerate(wanted) if i not in big)]
    if wanted[-1] < 1e-3:
        observed, wanted = observed[:-1], wanted[:-1]
    scale = sum(observed) / sum(wanted)
    return float(chisquare(observed, [w * scale for w in wanted]).pvalue)


PENALTIES = SamplingOptions(temperature=0.9, repetition_penalty=1.3, presence_penalty=0.3, top_p=0.95)


@pytest.mark.parametrize("options", [T1, PENALTIES], ids=["t1", "penalties"])
@pytest.mark.parametrize("width", [1, 2])
def test_rejection_has_the_targets_distribution(options: SamplingOptions, width: int) -> None:
    assert p_value(options, width=width) > 1e-3


def test_rejection_with_a_confidence_stop_has_the_targets_distribution() -> None:
    assert p_value(draft=DraftOptions(0.5)) > 1e-3


class DropsTheDoubtful(ModelProposer):
    """Mutant: a doubtful token is left out of the draft, so whether a token is checked depends on which was drawn."""

    def propose(self, committed: Sequence[int], limit: int) -> Draft | None:
        draft = super().propose(committed, limit)
        assert draft is not None
        probs = draft.probs[0]
        assert probs is not None
        return None if float(probs[draft.tokens[0]]) < 0.5 else draft


class SiblingsFromTheWhole(OwnNoise):
    """Mutant: a second child claims to be drawn from all of q."""

    def __call__(self, logits, path, position, width):
        children = super().__call__(logits, path, position, width)
        return [Child(child.token, children[0].probs) for child in children]


class ReportsAnotherTemperature(OwnNoise):
    """Mutant: says it drew from a flatter distribution than it did."""

    def __call__(self, logits, path, position, width):
        children = super().__call__(logits, path, position, width)
        return [Child(child.token, child.probs.sqrt() / child.probs.sqrt().sum()) for child in children]


def test_mutants_are_caught_by_the_distribution() -> None:
    assert p_value(proposer=DropsTheDoubtful, runs=2 * RUNS) < 1e-3
    assert p_value(chooser=ReportsAnotherTemperature) < 1e-3


def siblings_p_value(chooser, runs: int = 1500) -> float:
    """One place, three children: chi-square of the token that comes out."""
    p_logits, q_logits = SMALL_TARGET((1, 3)), hashed_logits(SMALL, seed=5, scale=1.5)((1, 3))
    counts: Counter[int] = Counter()
    for seed in range(runs):
        sampler = Sampler(replace(T1, seed=seed), ReferenceKernels(), SMALL_PROMPT, SMALL)
        children = chooser(sampler)(q_logits, (), 2, 3)
        tokens, probs = tuple(child.token for child in children), tuple(child.probs for child in children)
        draft = Draft(tokens, (ROOT,) * len(tokens), probs)
        verdict = Rejection()(draft, p_logits.repeat(len(tokens) + 1, 1), 2, sampler)
        counts[tokens[verdict.path[0]] if verdict.path else verdict.next_token] += 1
    wanted = torch.softmax(p_logits.double(), -1) * runs
    return float(chisquare([counts[token] for token in range(SMALL)], wanted.tolist()).pvalue)


def test_siblings_are_drawn_without_replacement() -> None:
    assert siblings_p_value(OwnNoise) > 1e-3
    assert siblings_p_value(SiblingsFromTheWhole) < 1e-3
