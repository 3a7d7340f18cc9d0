"""A draft model's whole cycle as one replay, against the same cycle step by step: text, records, both caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from device_ops import device_decoder
from tape import TapeGraphs
from test_engine import cut_at, no_cut
from test_graph import (
    BIASED,
    GREEDY,
    NARROW,
    PENALISED,
    PROMPT,
    VOCAB,
    WARM,
    WIDTHS,
    counting_decoder,
    reference_text,
    same,
    stored,
)
from tiny import tiny_spec, tiny_weights

from specgen import fused
from specgen.accept import RULES
from specgen.engine import Answer, Cancel, Cut, Engine
from specgen.events import FinishReason
from specgen.fused import CycleInputs, DeviceProposer, FusedCycles, FusedDraft, RecordedCycle, build_cycles
from specgen.graph import GraphRunner
from specgen.model.device import DeviceDecoder
from specgen.options import DraftOptions, RunOptions, SamplingOptions
from specgen.propose.model import DraftModel
from specgen.records import CycleRecord, RunRecord
from specgen.sampling import Sampler
from specgen.speculation import LoadedDraft, Speculation

SPEC = tiny_spec()
GAMMAS = (1, 2, 4)


@dataclass
class Machine:
    """A target, its draft model, and how often they are replayed."""

    speculation: Speculation
    target: DeviceDecoder
    draft_cache: object
    graphs: TapeGraphs

    @property
    def engine(self) -> Engine:
        return self.speculation.engine


def near_weights(seed: int = 0, share: float = 0.2):
    """The target's weights with a little noise on the head: a draft that is often right."""
    weights = tiny_weights(SPEC)
    noise = torch.randn(weights.head.weight.shape, generator=torch.Generator().manual_seed(seed))
    return replace(weights, head=replace(weights.head, weight=weights.head.weight + share * 0.3 * noise))


def machine(
    *,
    fuse: bool,
    target: DeviceDecoder | None = None,
    draft: DeviceDecoder | None = None,
    capacity: int = 64,
    draft_capacity: int = 64,
) -> Machine:
    graphs = TapeGraphs()
    target, small = target or device_decoder(), draft or device_decoder(weights=near_weights())
    cache, small_cache = target.new_cache(capacity), small.new_cache(draft_capacity)
    runner = GraphRunner(target, cache, graphs, VOCAB, WIDTHS)
    reader = DraftModel(GraphRunner(small, small_cache, graphs, None, (1, 2, 9)), small_cache, small.spec.vocab)
    cycles = None
    if fuse:
        pair = fused.Pair(target, cache, small, small_cache, runner.settings)
        cycles = FusedCycles(pair, graphs, GAMMAS)
    made = Speculation(Engine(runner, cache), target, "ab" * 32)
    made.draft = LoadedDraft("small", reader, 0.2, "cd" * 32, cycles)
    return Machine(made, target, small_cache, graphs)


def options(sampling: SamplingOptions, gamma: int | None, **changes) -> RunOptions:
    return RunOptions(sampling, proposer=changes.pop("proposer", "model"), gamma=gamma, **changes)


def answer(
    made: Machine,
    asked: RunOptions,
    *,
    max_tokens: int | None = 24,
    cut: Cut = no_cut,
    prompt: Sequence[int] = PROMPT,
    cancel_after: int | None = None,
) -> tuple[list[int], FinishReason | None, RunRecord]:
    sampler = Sampler(asked.sampling, made.target.kernels, prompt, VOCAB)
    start = made.speculation.begin(asked, sampler, prompt)
    given = Answer(prompt, start.proposer, start.policy, RULES[asked.accept](), sampler, cut, max_tokens, Cancel())
    record, tokens, reason = RunRecord(), [], None
    made.engine.prefill(given, record)
    for cycle in made.engine.decode(given, record):
        tokens += cycle.tokens
        reason = cycle.reason or reason
        if cancel_after is not None and len(record.cycles) == cancel_after:
            given.cancel.set()
    assert made.engine.committed == [*prompt, *tokens]
    return tokens, reason, record


def timeless(record: CycleRecord) -> CycleRecord:
    """Without times; how sure a draft is may be rounded otherwise."""
    sure = None if record.confidence is None else round(record.confidence, 5)
    return replace(record, propose_ms=0.0, verify_ms=0.0, reconcile_ms=0.0, confidence=sure)


def assert_alike(fast: Machine, slow: Machine, asked: RunOptions, **changes) -> RunRecord:
    """One answer of each, and all that it leaves."""
    found, expected = answer(fast, asked, **changes), answer(slow, asked, **changes)
    assert found[:2] == expected[:2]
    assert [timeless(c) for c in found[2].cycles] == [timeless(c) for c in expected[2].cycles]
    assert same(stored(fast.engine.cache), stored(slow.engine.cache))
    assert fast.draft_cache.length == slow.draft_cache.length
    assert same(stored(fast.draft_cache), stored(slow.draft_cache))
    readers = [made.speculation.draft.reader for made in (fast, slow)]
    assert readers[0]._tokens == readers[1]._tokens
    return found[2]


@pytest.fixture(scope="module")
def machines() -> tuple[Machine, Machine]:
    """Used for answer after answer, as in a session."""
    return machine(fuse=True), machine(fuse=False)


@pytest.mark.parametrize("sampling", [GREEDY, WARM, NARROW], ids=["greedy", "warm", "narrow"])
def test_one_replay_does_what_the_steps_do(sampling: SamplingOptions, machines: tuple[Machine, Machine]) -> None:
    expected = reference_text(sampling)
    for gamma in (*GAMMAS, 3):
        record = assert_alike(*machines, options(sampling, gamma))
        assert machines[0].engine.committed[len(PROMPT) :] == expected
        assert 0 < record.accepted < record.proposed


def test_seeds(machines: tuple[Machine, Machine]) -> None:
    for seed in (0, 1, 2**32, 2**64 - 1):
        assert_alike(*machines, options(replace(WARM, seed=seed), 4), max_tokens=12)


def test_budgets_ends_and_the_last_slot(machines: tuple[Machine, Machine]) -> None:
    for budget in range(1, 9):
        record = assert_alike(*machines, options(WARM, 4), max_tokens=budget)
        assert record.completion_tokens == budget
    text = reference_text(WARM)
    for end in range(6, 12):
        assert_alike(*machines, options(WARM, 4), cut=cut_at({text[end]}))
    for gamma in (1, 2, 4):
        whole = assert_alike(*machines, options(WARM, gamma), max_tokens=None)
        assert whole.kv_tokens == 63


def test_the_drafts_context_ends_first() -> None:
    fast, slow = (machine(fuse=fuse, draft_capacity=20) for fuse in (True, False))
    record = assert_alike(fast, slow, options(WARM, 4))
    assert "model: the draft's context of 20 tokens is full" in record.fallbacks()


def test_an_answer_that_is_cancelled_and_gone_on_with(machines: tuple[Machine, Machine]) -> None:
    for cycles in (1, 2, 3):
        assert_alike(*machines, options(WARM, 4), cancel_after=cycles)
        longer = [*machines[0].engine.committed, 7]
        assert_alike(*machines, options(WARM, 4), prompt=longer, max_tokens=8)


def test_mixed_with_lookup_and_left_to_the_controller(machines: tuple[Machine, Machine]) -> None:
    """With `--gamma auto` measured times decide how deep to draft: the text must not depend on them."""
    assert_alike(*machines, options(GREEDY, 4, proposer="mix"))
    for sampling in (GREEDY, WARM):
        for name in ("model", "mix"):
            found = answer(machines[0], options(sampling, None, proposer=name))[0]
            assert found == reference_text(sampling)


@pytest.mark.parametrize(
    "asked",
    [
        options(PENALISED, 4),
        options(BIASED, 4),
        options(WARM, 2, tree=2),
        options(WARM, 4, draft=DraftOptions(0.3)),
        options(WARM, 4, accept="rejection"),
        options(WARM, 4, accept="typical"),
    ],
    ids=["penalties", "bias", "tree", "stop", "rejection", "typical"],
)
def test_what_the_device_cannot_do_goes_step_by_step(asked: RunOptions, machines: tuple[Machine, Machine]) -> None:
    sampler = Sampler(asked.sampling, machines[0].target.kernels, PROMPT, VOCAB)
    assert not isinstance(machines[0].speculation.begin(asked, sampler, PROMPT).proposer, DeviceProposer)
    assert_alike(*machines, asked)


def test_a_broken_draft_leaves_plain_decoding() -> None:
    weights = near_weights()
    broken = replace(weights, head=replace(weights.head, weight=weights.head.weight * torch.nan))
    fast, slow = (machine(fuse=fuse, draft=device_decoder(weights=broken)) for fuse in (True, False))
    record = assert_alike(fast, slow, options(WARM, 4))
    assert record.proposed == 0
    assert record.fallbacks()["model: the draft's logits are not finite"] == 23


def test_a_draft_that_fails_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    made = machine(fuse=True)
    answer(made, options(WARM, 4), max_tokens=6)
    run = RecordedCycle.run

    def fails(self, start):
        run(self, start)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RecordedCycle, "run", fails)
        with pytest.raises(KeyboardInterrupt):
            answer(made, options(WARM, 4))
    assert made.engine.cache.reserved == made.draft_cache.reserved == 0
    assert answer(made, options(WARM, 4))[0] == reference_text(WARM)


@pytest.mark.parametrize("vocab", [60, 97, 120])
def test_a_draft_with_another_vocabulary(vocab: int) -> None:
    """One that knows fewer tokens than the target says so when it meets one of the others, and proposes none."""
    small = device_decoder(tiny_spec(vocab=vocab), seed=1)
    fast, slow = (machine(fuse=fuse, draft=small) for fuse in (True, False))
    for sampling in (GREEDY, NARROW):
        assert_alike(fast, slow, options(sampling, 4))


def test_one_replay_and_one_read_a_cycle(monkeypatch: pytest.MonkeyPatch) -> None:
    target, reads = counting_decoder(monkeypatch)
    made = machine(fuse=True, target=target, draft=DeviceDecoder(SPEC, near_weights(), target.kernels))
    answer(made, options(WARM, 4), max_tokens=6)
    for gamma in (1, 2):  # whatever is left before the budget ends is recorded too
        made.graphs.replays.clear()
        reads.count = 0
        _, _, record = answer(made, options(WARM, gamma))
        assert record.reused_tokens == len(PROMPT) - 1
        assert len(made.graphs.replays) == reads.count == len(record.cycles) < record.completion_tokens
    # The mutant: step by step the same cycles take a replay and a read for every token.
    slow = machine(fuse=False, target=target, draft=DeviceDecoder(SPEC, near_weights(), target.kernels))
    answer(slow, options(WARM, 4), max_tokens=6)
    slow.graphs.replays.clear()
    _, _, record = answer(slow, options(WARM, 2))
    assert len(slow.graphs.replays) > 2 * len(record.cycles)


# Mutants


def test_mutants_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def differs(name: str, mutant, owner: object = RecordedCycle) -> bool:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, mutant)
            try:
                for sampling in (GREEDY, WARM):
                    assert_alike(machine(fuse=True), machine(fuse=False), options(sampling, 4))
            except AssertionError:
                return True
        return False

    write, token, check = CycleInputs.write, RecordedCycle._token, FusedDraft.check

    def starts_one_late(self, start):
        write(self, replace(start, draft_start=start.draft_start + 1))

    def noise_behind(self, out, position):
        return token(self, out, position + 1)

    def forgets_to_keep(self, cache):
        length = self.reader.cache.length
        checked = check(self, cache)
        self.reader._tokens.pop()
        self.reader.cache.rollback(max(length, self.reader.cache.length - 1))
        return checked

    def reads_last_twice(self, start):
        write(self, replace(start, unread=(start.unread[-1],) * len(start.unread)))

    assert differs("write", starts_one_late, CycleInputs)
    assert differs("write", reads_last_twice, CycleInputs)
    assert differs("_token", noise_behind)
    assert differs("check", forgets_to_keep, FusedDraft)
    assert not differs("write", write, CycleInputs)


def test_what_is_recorded(machines: tuple[Machine, Machine]) -> None:
    target, small = device_decoder(), device_decoder(weights=near_weights())
    cache, small_cache = target.new_cache(64), small.new_cache(64)
    graphs = TapeGraphs()
    drawing = GraphRunner(target, cache, graphs, VOCAB, (1, 5))
    undrawn = GraphRunner(target, cache, graphs, None, (1, 5))
    cycles, notice = build_cycles(drawing, cache, small, small_cache, graphs)
    assert cycles is not None
    assert notice is None
    assert all((gamma in cycles) == (gamma in fused.GAMMAS) for gamma in range(20))
    assert build_cycles(undrawn, cache, small, small_cache, graphs) == (None, None)
    assert build_cycles(drawing, cache, small, small_cache, None) == (None, None)

    class Refuses(TapeGraphs):
        def capture(self, launch):
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore")

    none, notice = build_cycles(drawing, cache, small, small_cache, Refuses())
    assert none is None
    assert notice is not None
    assert "step by step" in notice
    assert "more" not in notice
