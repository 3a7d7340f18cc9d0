"""The predictor against the engine: on the same answers it must count the same, cycle by cycle."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from fakes import FakeRunner, ScriptedProposer, fake_cache, hashed_logits
from tiny import tiny_decoder

from specgen.accept import Coupled
from specgen.draft import Draft
from specgen.engine import Answer, Cancel, Engine
from specgen.events import FinishReason
from specgen.kernels.reference import ReferenceKernels
from specgen.options import NgramOptions, SamplingOptions
from specgen.propose.base import Proposer
from specgen.propose.ngram import NgramProposer
from specgen.propose.none import NoProposer
from specgen.records import CycleRecord, RunRecord
from specgen.sampling import Sampler
from specgen.step import EagerRunner, StepRunner
from specgen.tune import replay as replay_module
from specgen.tune.controller import FixedGamma
from specgen.tune.predict import Costs, ProposeMs
from specgen.tune.replay import Drafter, GuessProposer, Trace, replay, teacher_forced

VOCAB = 6
PROMPT = (1, 2, 3, 1, 2)
COSTS = Costs({0: {1: 10.0, 3: 12.0, 17: 26.0}}, token_ms=0.5, cycle_ms=0.25, propose={"ngram": ProposeMs(0.125)})
GREEDY, WARM = SamplingOptions(), SamplingOptions(temperature=0.9, seed=7)
Target = Callable[[], tuple[StepRunner, object, int]]


def fake_target() -> tuple[StepRunner, object, int]:
    return FakeRunner(hashed_logits(VOCAB, seed=5, scale=1.5, order=2)), fake_cache(), VOCAB


def narrow_target() -> tuple[StepRunner, object, int]:
    """Steps of at most 4 rows: longer drafts have no room."""
    return FakeRunner(hashed_logits(VOCAB, seed=5, scale=1.5, order=2), max_rows=4), fake_cache(), VOCAB


def small_target() -> tuple[StepRunner, object, int]:
    """A cache that is full before the budget is."""
    return FakeRunner(hashed_logits(VOCAB, seed=5, scale=1.5, order=2)), fake_cache(30), VOCAB


def tiny_target() -> tuple[StepRunner, object, int]:
    model = tiny_decoder(quant="int4")
    return EagerRunner(model), model.new_cache(128), model.spec.vocab


def run_engine(
    target: Target, proposer: Proposer, gamma: int, options: SamplingOptions, end: int | None, max_tokens: int | None
) -> tuple[Trace, RunRecord]:
    """The engine's answer and its record; `end`: the token that ends it."""

    def cut(tokens: Sequence[int]) -> tuple[int, FinishReason | None]:
        return (tokens.index(end) + 1, FinishReason.EOS) if end in tokens else (len(tokens), None)

    runner, cache, vocab = target()
    engine = Engine(runner, cache)  # type: ignore[arg-type]
    sampler = Sampler(options, ReferenceKernels(), PROMPT, vocab)
    answer = Answer(PROMPT, proposer, FixedGamma(gamma), Coupled(), sampler, cut, max_tokens, Cancel())
    record = RunRecord()
    engine.prefill(answer, record)
    tokens = [token for cycle in engine.decode(answer, record) for token in cycle.tokens]
    capacity, widest = cache.capacity, runner.widths[-1]  # type: ignore[attr-defined]
    return Trace(PROMPT, tuple(tokens), max_tokens, capacity, widest), record


def counts(record: RunRecord) -> list[tuple[object, ...]]:
    """All of a cycle but its times and the words for a fallback."""

    def of(cycle: CycleRecord) -> tuple[object, ...]:
        shape = (cycle.proposed, cycle.depth, cycle.source, cycle.match, cycle.confidence)
        return (*shape, cycle.accepted, cycle.committed, cycle.ending)

    return [of(cycle) for cycle in record.cycles]


CASES = pytest.mark.parametrize(
    ("target", "end", "max_tokens"),
    [
        (fake_target, None, 60),
        (fake_target, None, 1),
        (fake_target, None, 2),
        (fake_target, 0, 60),
        (fake_target, 4, 60),
        (narrow_target, None, 40),
        (small_target, None, None),
        (small_target, 5, 24),
        (tiny_target, None, 24),
        (tiny_target, 2, 40),
    ],
)


@CASES
@pytest.mark.parametrize("options", [GREEDY, WARM], ids=["greedy", "warm"])
def test_ngram_replay_counts_what_the_engine_counts(
    target: Target, end: int | None, max_tokens: int | None, options: SamplingOptions
) -> None:
    for n_min, n_max in ((1, 2), (2, 4)):
        for gamma in (0, 1, 3, 8, 16):
            sizes = NgramOptions(n_max, n_min)
            trace, measured = run_engine(target, NgramProposer(sizes), gamma, options, end, max_tokens)
            predicted = replay(trace, NgramProposer(sizes), FixedGamma(gamma), COSTS)
            assert counts(predicted) == counts(measured)
            assert predicted.yield_tokens == measured.yield_tokens
            assert predicted.survival() == measured.survival()
            assert predicted.kv_tokens == measured.kv_tokens


def test_cases_cover_every_ending() -> None:
    seen = set()
    for target, end in ((fake_target, None), (fake_target, 0), (tiny_target, 2)):
        for gamma in (1, 3, 8):
            _, record = run_engine(target, NgramProposer(NgramOptions(2, 1)), gamma, GREEDY, end, 60)
            seen |= {cycle.ending for cycle in record.cycles}
    trace, _ = run_engine(fake_target, NoProposer(), 0, WARM, None, 30)
    _, record = run_engine(fake_target, oracle([*trace.answer]), 8, WARM, trace.answer[10], 30)
    seen |= {cycle.ending for cycle in record.cycles}
    assert seen == {"plain", "corrected", "bonus", "cut"}


def oracle(text: list[int]) -> ScriptedProposer:
    """Right about the whole answer, and beyond its end."""
    whole = [*PROMPT, *text, *text]
    return ScriptedProposer(lambda committed, limit: Draft.chain(whole[len(committed) : len(committed) + limit]))


def guesser(seed: int, hits: float, text: Sequence[int]) -> ScriptedProposer:
    """A draft model: its guess for a position is a function of the tokens before it alone, often right."""

    def token(prefix: tuple[int, ...]) -> int:
        right = text[len(prefix) - len(PROMPT)] if prefix == (*PROMPT, *text)[: len(prefix)] else None
        rng = random.Random(hash((seed, prefix)))
        return right if right is not None and rng.random() < hits else rng.randrange(VOCAB)

    def guess(committed: Sequence[int], limit: int) -> Draft:
        tokens: list[int] = []
        while len(tokens) < limit:
            prefix = (*committed, *tokens)
            tokens.append(token(prefix) if len(prefix) < len(PROMPT) + len(text) else 0)
        return Draft.chain(tokens, source="scripted")

    return ScriptedProposer(guess)


@pytest.mark.parametrize("end", [None, 0, 4])
@pytest.mark.parametrize("hits", [0.0, 0.5, 0.9, 1.0])
def test_one_teacher_forced_pass_serves_every_gamma(hits: float, end: int | None) -> None:
    trace, _ = run_engine(fake_target, NoProposer(), 0, WARM, end, 50)
    guesses = teacher_forced(guesser(3, hits, trace.answer), trace)
    for gamma in (1, 2, 3, 5, 16):
        _, measured = run_engine(fake_target, guesser(3, hits, trace.answer), gamma, WARM, end, 50)
        played = GuessProposer("scripted", len(PROMPT), Drafter(guesses))
        assert counts(replay(trace, played, FixedGamma(gamma), COSTS)) == counts(measured)


def tree_liar(seed: int, text: Sequence[int]) -> ScriptedProposer:
    """Trees that hold the right token at some places: a function of the position, so that both sides see the same."""

    def guess(committed: Sequence[int], limit: int) -> Draft | None:
        rng = random.Random(seed * 1000 + len(committed))
        ahead = [*text, *[0] * 20][len(committed) - len(PROMPT) :]
        tokens: list[int] = []
        parents: list[int] = []
        depths: list[int] = []
        for _ in range(rng.randint(0, limit)):
            parent = rng.randint(-1, len(tokens) - 1)
            depth = 0 if parent < 0 else depths[parent] + 1
            token = ahead[depth] if rng.random() < 0.7 else rng.randrange(VOCAB)
            if any(t == token and p == parent for t, p in zip(tokens, parents, strict=True)):
                continue
            tokens.append(token)
            parents.append(parent)
            depths.append(depth)
        return Draft(tuple(tokens), tuple(parents), (None,) * len(tokens), "scripted") if tokens else None

    return ScriptedProposer(guess)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("end", [None, 4])
def test_trees_count_alike(seed: int, end: int | None) -> None:
    trace, _ = run_engine(fake_target, NoProposer(), 0, WARM, end, 50)
    _, measured = run_engine(fake_target, tree_liar(seed, trace.answer), 8, WARM, end, 50)
    proposer = tree_liar(seed, trace.answer)
    assert counts(replay(trace, proposer, FixedGamma(8), COSTS)) == counts(measured)
    assert proposer.observed == [*PROMPT, *trace.answer][:-1]


def mutant_budget(self: Trace, produced: int) -> int:
    """Mutant: the budget's last token is not kept for the target."""
    return len(self.answer) - produced + 1


def mutant_accept(draft: Draft | None, upcoming: Sequence[int]) -> tuple[int, str]:
    """Mutant: a draft that ends with the answer is taken for a bonus."""
    accepted, ending = replay_accept(draft, upcoming)
    return accepted, "bonus" if ending == "cut" else ending


replay_accept = replay_module._accept


@pytest.mark.parametrize(
    ("where", "name", "mutant"),
    [(Trace, "budget", mutant_budget), (replay_module, "_accept", mutant_accept)],
)
def test_mutants_count_differently(monkeypatch: pytest.MonkeyPatch, where: object, name: str, mutant: object) -> None:
    whole, _ = run_engine(fake_target, NoProposer(), 0, WARM, None, 20)
    end = whole.answer[10]
    ended, _ = run_engine(fake_target, NoProposer(), 0, WARM, end, 20)
    same = {False: [], True: []}
    for mutated in (False, True):
        if mutated:
            monkeypatch.setattr(where, name, mutant)
        for trace, last in ((whole, None), (ended, end)):
            _, measured = run_engine(fake_target, oracle([*trace.answer]), 8, WARM, last, 20)
            predicted = replay(trace, oracle([*trace.answer]), FixedGamma(8), COSTS)
            same[mutated].append(counts(predicted) == counts(measured))
    assert all(same[False])
    assert not all(same[True])


def test_times_follow_the_costs() -> None:
    trace = Trace(PROMPT, (0, 1, 2, 3), 4, 256)
    played = oracle([0, 1, 2, 3])
    record = replay(trace, played, FixedGamma(2), COSTS)
    # Cycle one: two drafts of three rows; what is left is one token.
    assert [cycle.committed for cycle in record.cycles] == [3, 1]
    assert [cycle.verify_ms for cycle in record.cycles] == [12.0, 10.0]
    assert [cycle.reconcile_ms for cycle in record.cycles] == [1.5, 0.5]
    assert record.ttft_ms == 12.0 + 1.5 + 0.25
    assert record.decode_ms == 10.0 + 0.5 + 0.25
    assert record.gaps_ms == [0.0, 0.0, 10.75]


def test_costs_interpolate_between_contexts() -> None:
    costs = Costs({0: {1: 10.0, 9: 18.0}, 1024: {1: 20.0, 9: 36.0}})
    assert costs.step_ms(1, 512) == 15.0
    assert costs.step_ms(5, 0) == pytest.approx(14.0)
    assert costs.step_ms(9, 5000) == 36.0
    assert costs.at(256).step_ms(9) == pytest.approx(18.0 + 0.25 * 18.0)
