"""The loop on a target that reads its prefix back from the cache: whatever is committed wrongly changes the text."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
import torch
from fakes import FakeRunner, ScriptedProposer, fake_cache, hashed_logits

from specgen.accept import RULES, AcceptRule, Coupled, Rejection, Verdict
from specgen.cache import KVCache
from specgen.draft import Draft
from specgen.engine import Answer, Cancel, Engine
from specgen.errors import ContextFullError
from specgen.events import FinishReason
from specgen.kernels.reference import ReferenceKernels
from specgen.options import SamplingOptions
from specgen.propose.base import Proposer
from specgen.propose.ngram import NgramProposer
from specgen.propose.none import NoProposer
from specgen.records import RunRecord
from specgen.sampling import NonFiniteLogitsError, Sampler
from specgen.tune.controller import AutoGamma, FixedGamma

VOCAB = 6
TARGET = hashed_logits(VOCAB, seed=5, scale=1.5, order=2)
PROMPT = [1, 2, 3, 1, 2]
GREEDY = SamplingOptions()
WARM = SamplingOptions(temperature=0.9, seed=7)
PENALISED = SamplingOptions(
    temperature=0.8, repetition_penalty=1.3, frequency_penalty=0.2, presence_penalty=0.1, logit_bias=((0, 0.5),), seed=3
)


def no_cut(tokens: Sequence[int]) -> tuple[int, FinishReason | None]:
    return len(tokens), None


def cut_at(ends: set[int]):
    """EOS as the session does it: the first of `ends` is the last token kept."""

    def cut(tokens: Sequence[int]) -> tuple[int, FinishReason | None]:
        for index, token in enumerate(tokens):
            if token in ends:
                return index + 1, FinishReason.EOS
        return len(tokens), None

    return cut


def liar(rng: random.Random, tree: bool = False) -> ScriptedProposer:
    """Random tokens, as a chain or as a tree."""

    def guess(committed: Sequence[int], limit: int) -> Draft | None:
        count = rng.randint(0, limit)
        if not count:
            return None
        if not tree:
            return Draft.chain([rng.randrange(VOCAB) for _ in range(count)])
        tokens: list[int] = []
        parents: list[int] = []
        for _ in range(count):
            parent = rng.randint(-1, len(tokens) - 1)
            taken = {t for t, p in zip(tokens, parents, strict=True) if p == parent}
            tokens.append(rng.choice([t for t in range(VOCAB) if t not in taken] or [-1]))
            parents.append(parent)
            if tokens[-1] == -1:
                tokens.pop()
                parents.pop()
        return Draft(tuple(tokens), tuple(parents), (None,) * len(tokens)) if tokens else None

    return ScriptedProposer(guess)


def oracle(text: Sequence[int]) -> ScriptedProposer:
    """Knows the whole answer: every draft is accepted in full."""
    whole = [*PROMPT, *text]

    def guess(committed: Sequence[int], limit: int) -> Draft | None:
        right = whole[len(committed) : len(committed) + limit]
        return Draft.chain(right) if right else None

    return ScriptedProposer(guess)


def make(
    proposer: Proposer,
    gamma: int | None = 4,
    *,
    options: SamplingOptions = GREEDY,
    rule: AcceptRule | None = None,
    cut=no_cut,
    max_tokens: int | None = 40,
    cache: KVCache | None = None,
    runner: FakeRunner | None = None,
) -> tuple[Engine, Answer]:
    answer = Answer(
        prompt=PROMPT,
        proposer=proposer,
        policy=AutoGamma() if gamma is None else FixedGamma(gamma),
        rule=rule or Coupled(),
        sampler=Sampler(options, ReferenceKernels(), PROMPT, VOCAB),
        cut=cut,
        max_tokens=max_tokens,
        cancel=Cancel(),
    )
    return Engine(runner or FakeRunner(TARGET), cache or fake_cache()), answer


def run(engine: Engine, answer: Answer) -> tuple[list[int], FinishReason | None, RunRecord]:
    record = RunRecord()
    engine.prefill(answer, record)
    cycles = list(engine.decode(answer, record))
    tokens = [token for cycle in cycles for token in cycle.tokens]
    assert_consistent(engine, answer, tokens, record)
    return tokens, cycles[-1].reason, record


def collect(engine: Engine, answer: Answer, record: RunRecord, tokens: list[int]) -> None:
    """Decode into `tokens`, which keeps what was yielded before an exception."""
    for cycle in engine.decode(answer, record):
        tokens.extend(cycle.tokens)


def assert_consistent(engine: Engine, answer: Answer, tokens: list[int], record: RunRecord) -> None:
    """Text, KV, counters and proposer end at one boundary."""
    assert engine.committed == [*PROMPT, *tokens]
    assert engine.cache.length == len(engine.committed) - 1
    assert engine.cache.reserved == 0
    stored = engine.cache.layers[0].k[0, : engine.cache.length, 0].long().tolist()
    assert stored == engine.committed[:-1]
    assert record.completion_tokens == len(tokens)
    assert all(0 <= cycle.accepted <= cycle.committed <= cycle.depth + 1 for cycle in record.cycles)
    if isinstance(answer.proposer, ScriptedProposer):
        assert answer.proposer.observed == engine.committed[:-1]


def plain(options: SamplingOptions = GREEDY, **changes) -> list[int]:
    return run(*make(NoProposer(), 0, options=options, **changes))[0]


@pytest.mark.parametrize("options", [GREEDY, WARM, PENALISED], ids=["greedy", "warm", "penalised"])
@pytest.mark.parametrize("gamma", [0, 1, 2, 3, 4, 5, 6, 7, 8, None])
def test_same_seed_same_tokens_however_you_speculate(options: SamplingOptions, gamma: int | None) -> None:
    expected = plain(options)
    proposers = [NgramProposer(), liar(random.Random(gamma)), liar(random.Random(9), tree=True), oracle(expected)]
    for proposer in proposers:
        assert run(*make(proposer, gamma, options=options))[0] == expected


class AcceptsFirst(Coupled):
    """Mutant: the first draft token is always accepted."""

    def __call__(self, draft, logits, position, sampler):
        verdict = super().__call__(draft, logits, position, sampler)
        if draft is not None and not verdict.path:
            return Verdict((0,), sampler.token(logits[1], [draft.tokens[0]], position + 1))
        return verdict


class LogitsOffByOne(FakeRunner):
    """Mutant: a row's logits depend on the row before it in a wide step."""

    def step(self, tokens, parents, cache):
        out = super().step(tokens, parents, cache)
        return type(out)(torch.roll(out.logits, 1, 0) if len(tokens) > 2 else out.logits, out.hidden)


class ForgetsPath(Sampler):
    """Mutant: penalties do not see the draft tokens before a row."""

    def adjust(self, logits, path=()):
        return super().adjust(logits, ())


def test_mutants_change_the_text() -> None:
    expected = plain(WARM)
    assert run(*make(liar(random.Random(1)), options=WARM, rule=AcceptsFirst()))[0] != expected
    engine, answer = make(oracle(expected), options=WARM, runner=LogitsOffByOne(TARGET))
    assert run(engine, answer)[0] != expected
    penalised = plain(PENALISED)
    engine, answer = make(oracle(penalised), 8, options=PENALISED)
    answer.sampler = ForgetsPath(PENALISED, ReferenceKernels(), PROMPT, VOCAB)
    assert run(engine, answer)[0] != penalised


def test_mutant_commit_of_a_branch_without_compaction_is_caught() -> None:
    class Careless(KVCache):
        def commit(self, rows):
            super().commit(rows if isinstance(rows, int) else len(rows))

    cache = Careless(1, 1, 1, 256, torch.float32)
    with pytest.raises(AssertionError):
        run(*make(liar(random.Random(9), tree=True), 8, options=WARM, cache=cache))


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_is_greedy_at_temperature_0(rule: str) -> None:
    expected = plain(GREEDY)
    assert run(*make(liar(random.Random(3)), rule=RULES[rule]()))[0] == expected
    assert run(*make(oracle(expected), rule=RULES[rule]()))[0] == expected


def test_full_acceptance_commits_gamma_and_a_bonus() -> None:
    expected = plain()
    _, _, record = run(*make(oracle(expected), 4))
    assert [cycle.committed for cycle in record.cycles] == [5] * 8
    assert {cycle.ending for cycle in record.cycles} == {"bonus"}
    assert record.survival() == [1.0] * 4
    assert record.yield_tokens == 5.0


def test_a_draft_that_always_lies_costs_no_token() -> None:
    expected = plain()
    whole = [*PROMPT, *expected]
    wrong = ScriptedProposer(lambda c, limit: Draft.chain([(whole[len(c)] + 1) % VOCAB] * limit))
    tokens, _, record = run(*make(wrong, 4))
    assert tokens == expected
    assert record.accepted == 0
    assert {cycle.ending for cycle in record.cycles} <= {"corrected", "plain"}


def test_max_tokens_is_exact_at_every_place_of_a_block() -> None:
    expected = plain()
    for budget, gamma in itertools.product(range(1, 13), (0, 1, 4, 8)):
        tokens, reason, _ = run(*make(oracle(expected), gamma, max_tokens=budget))
        assert tokens == expected[:budget]
        assert reason == FinishReason.LENGTH


def test_eos_is_cut_inside_a_block_at_its_edge_and_on_the_bonus_token() -> None:
    expected = plain()
    endings = set()
    for end in range(1, 12):
        # A private marker token at position `end` of the answer: the answer must end exactly there.
        seen = {"count": 0}

        def cut(tokens: Sequence[int], end: int = end, seen: dict = seen) -> tuple[int, FinishReason | None]:
            left = end - seen["count"]
            if left <= len(tokens):
                return left, FinishReason.EOS
            seen["count"] += len(tokens)
            return len(tokens), None

        tokens, reason, record = run(*make(oracle(expected), 4, cut=cut))
        assert tokens == expected[:end]
        assert reason == FinishReason.EOS
        endings.add((record.cycles[-1].ending, record.cycles[-1].committed))
    assert ("bonus", 5) in endings, "on the bonus token"
    assert ("cut", 4) in endings, "at the edge of the block"
    assert ("cut", 1) in endings, "inside the block"


def test_eos_token_ends_the_answer_for_every_proposer() -> None:
    stop = plain(WARM)[17]
    expected = plain(WARM, cut=cut_at({stop}))
    assert expected[-1] == stop
    for proposer in (NgramProposer(), liar(random.Random(4)), oracle(plain(WARM))):
        tokens, reason, _ = run(*make(proposer, 6, options=WARM, cut=cut_at({stop})))
        assert tokens == expected
        assert reason == FinishReason.EOS


def test_context_edge() -> None:
    capacity = 20
    expected = plain(max_tokens=None, cache=fake_cache(capacity))
    assert len(PROMPT) + len(expected) == capacity
    for proposer in (oracle(expected + [0] * 9), liar(random.Random(2)), liar(random.Random(5), tree=True)):
        tokens, reason, record = run(*make(proposer, 8, max_tokens=None, cache=fake_cache(capacity)))
        assert tokens == expected
        assert reason == FinishReason.CONTEXT
        assert record.kv_tokens < capacity


def test_prompt_longer_than_the_context_is_refused() -> None:
    engine, answer = make(NoProposer(), cache=fake_cache(3))
    with pytest.raises(ContextFullError):
        engine.prefill(answer, RunRecord())


@pytest.mark.parametrize("fail_at", [4, 9, 15])
def test_a_target_that_raises_leaves_a_usable_session(fail_at: int) -> None:
    expected = plain()
    runner = FakeRunner(TARGET, fail_at=fail_at)
    engine, answer = make(oracle(expected), 4, runner=runner)
    record = RunRecord()
    engine.prefill(answer, record)
    tokens: list[int] = []
    with pytest.raises(RuntimeError):
        collect(engine, answer, record, tokens)
    assert_consistent(engine, answer, tokens, record)
    runner.fail_at = None
    _, again = make(answer.proposer, 4)
    assert run(engine, again)[0] == expected, "the same engine goes on"


def test_cancel_during_verification_keeps_the_cycle_and_stops() -> None:
    expected = plain()
    runner = FakeRunner(TARGET)
    engine, answer = make(oracle(expected), 4, runner=runner)
    runner.on_step = lambda: answer.cancel.set() if len(runner.steps) == 3 else None
    tokens, reason, _ = run(engine, answer)
    assert reason == FinishReason.CANCELLED
    assert tokens == expected[:10], "the prompt's step, then two cycles of 5"


def test_cancel_during_prefill_keeps_what_was_computed() -> None:
    engine, answer = make(NoProposer(), 0)
    answer.cancel.set()
    assert not engine.prefill(answer, RunRecord())
    assert engine.cache.length == 0
    answer.cancel = Cancel()
    assert run(engine, answer)[0] == plain()


def test_a_consumer_that_goes_away() -> None:
    expected = plain()
    engine, answer = make(oracle(expected), 4)
    record = RunRecord()
    engine.prefill(answer, record)
    cycles = engine.decode(answer, record)
    tokens = [*next(cycles).tokens, *next(cycles).tokens]
    cycles.close()
    assert_consistent(engine, answer, tokens, record)
    _, again = make(NoProposer(), 0)
    assert run(engine, again)[0] == expected


def test_prefix_is_reused_and_never_changes_the_text() -> None:
    engine, answer = make(NgramProposer(), 4, options=WARM)
    first = run(engine, answer)[0]
    _, again = make(NgramProposer(), 4, options=WARM)
    again.prompt = [*PROMPT, *first[:6], 5]
    record = RunRecord()
    engine.prefill(again, record)
    assert record.reused_tokens >= len(PROMPT) + 6 - (first[6] == 5)
    reused = [t for c in engine.decode(again, record) for t in c.tokens]
    fresh_engine, fresh = make(NoProposer(), 0, options=WARM)
    fresh.prompt = again.prompt
    fresh_engine.prefill(fresh, RunRecord())
    assert reused == [t for c in fresh_engine.decode(fresh, RunRecord()) for t in c.tokens]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_logits_stop_the_run_with_the_place(bad: float) -> None:
    def logits(prefix: tuple[int, ...]) -> torch.Tensor:
        row = TARGET(prefix).clone()
        if len(prefix) > 9:
            row[2] = bad
        return row

    for rule in (Coupled(), Rejection()):
        engine, answer = make(liar(random.Random(6)), options=WARM, rule=rule, runner=FakeRunner(logits))
        record = RunRecord()
        engine.prefill(answer, record)
        tokens: list[int] = []
        with pytest.raises(NonFiniteLogitsError, match="layer 7"):
            collect(engine, answer, record, tokens)
        assert_consistent(engine, answer, tokens, record)


def test_reasons_for_a_cycle_without_a_draft_are_recorded() -> None:
    _, _, record = run(*make(NgramProposer(), 4, max_tokens=6, options=WARM))
    assert record.cycles[-1].fallback in ("no room for a draft before the end", None)
    never = ScriptedProposer(lambda committed, limit: None)
    _, _, record = run(*make(never, 4, max_tokens=6))
    assert record.fallbacks()["scripted: nothing to propose"] == 5
    _, _, record = run(*make(NoProposer(), 4, max_tokens=6))
    assert set(record.fallbacks()) == {"no room for a draft before the end"}
