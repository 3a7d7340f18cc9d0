"""Recorded steps against the same model launched op by op: every bit, whatever was committed, rolled back or padded."""

from __future__ import annotations

import gc
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from device_ops import CPU, ReferenceOps, device_decoder, device_kernels
from tape import Opaque, TapeGraphs
from test_decoder import broken
from test_engine import no_cut
from tiny import tiny_decoder, tiny_spec, tiny_weights
from torch import Tensor

from specgen import graph
from specgen.accept import Coupled, Rejection
from specgen.cache import KVCache
from specgen.draft import Draft
from specgen.engine import Answer, Cancel, Engine
from specgen.graph import GraphRunner, StepInputs, build_runner
from specgen.kernels.base import Attend, pack_attend
from specgen.kernels.device import DeviceKernels
from specgen.kernels.device_sampling import DeviceNoise
from specgen.kernels.reference import ReferenceKernels
from specgen.model.device import DeviceDecoder
from specgen.model.spec import LayerSpec, MoeSpec, NormNames
from specgen.options import SamplingOptions
from specgen.propose.base import AnyProposer
from specgen.propose.ngram import NgramProposer
from specgen.propose.none import NoProposer
from specgen.records import RunRecord
from specgen.sampling import NonFiniteLogitsError, Sampler
from specgen.step import EagerRunner, StepRunner
from specgen.tune.controller import FixedGamma

WIDTHS = (1, 2, 5, 9)
VOCAB = 90
"""Less than the model's 97: what is behind it is never drawn."""
TREE = (-1, 0, 0, 1, 1, 2)
BASE = tiny_spec()
ROPE = BASE.layers[0].rope
assert ROPE is not None

SPECS = {
    "llama": BASE,
    "tied": replace(BASE, tied_head=True, embedding_scale=3.0, logit_scale=0.25, residual_scale=0.7),
    "window and no rope": replace(BASE, layers=(LayerSpec(window=9), LayerSpec(rope=ROPE)), attention_softcap=5.0),
    "norms per head": replace(BASE, qk_norm="head", activation="gelu_tanh"),
    "norms after": replace(BASE, qk_norm="projection", norms=NormNames(None, "a", None, "b")),
    "sandwich": replace(BASE, norms=NormNames("a", "b", "c", "d"), residual_scale=0.5),
}


def runner_pair(
    model: DeviceDecoder, capacity: int = 96, dtype: torch.dtype = torch.float32
) -> list[tuple[StepRunner, KVCache]]:
    """The oracle and what is tested."""
    caches = [model.new_cache(capacity, dtype) for _ in range(2)]
    return [(EagerRunner(model), caches[0]), (GraphRunner(model, caches[1], TapeGraphs(), VOCAB, WIDTHS), caches[1])]


def stored(cache: KVCache, stop: int | None = None) -> list[Tensor]:
    """All that is cached, up to a slot."""
    tensors = [t for layer in cache.layers for t in (layer.k, layer.v, layer.k_scale, layer.v_scale)]
    return [tensor[:, : cache.length if stop is None else stop].clone() for tensor in tensors if tensor is not None]


def play(runner: StepRunner, cache: KVCache, seed: int, steps: int = 14) -> list[Tensor]:
    """Chains and trees of changing widths, kept in part, dropped, rewound, and to the last slot; everything seen."""
    rng = random.Random(seed)
    seen: list[Tensor] = []
    with cache.transaction(20):
        seen.append(runner.prefill([rng.randrange(97) for _ in range(20)], cache).logits.clone())
        cache.commit(20)
    for _ in range(steps):
        tree = rng.random() < 0.3
        parents = list(TREE) if tree else list(range(-1, rng.randint(1, WIDTHS[-1]) - 1))
        parents = parents[: cache.room()]
        if not parents:
            cache.rollback(rng.randint(15, cache.length))
            continue
        with cache.transaction(len(parents)):
            out = runner.step([rng.randrange(97) for _ in parents], parents, cache)
            seen += [out.logits.clone(), out.hidden.clone()]
            path = [0, 2, 5] if tree and len(parents) == len(TREE) else list(range(len(parents)))
            kept = path[: rng.randint(0, len(path))]
            if kept:
                cache.commit(kept)
        if rng.random() < 0.2:
            cache.rollback(rng.randint(15, cache.length))
    return [*seen, *stored(cache)]


def same(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def replays_as_it_runs(model: DeviceDecoder, capacity: int = 96, dtype: torch.dtype = torch.float32) -> bool:
    eager, replayed = (
        [play(runner, cache, seed) for seed in range(3) if not cache.rollback(0)]
        for runner, cache in runner_pair(model, capacity, dtype)
    )
    return all(same(first, second) for first, second in zip(eager, replayed, strict=True))


@pytest.mark.parametrize("name", SPECS)
def test_a_replayed_step_is_the_launched_one(name: str) -> None:
    assert replays_as_it_runs(device_decoder(SPECS[name], quant="int4"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8], ids=str)
def test_packed_caches(dtype: torch.dtype) -> None:
    assert replays_as_it_runs(device_decoder(), dtype=dtype)


@pytest.mark.parametrize("capacity", [24, 27, 30])
def test_padding_behind_the_last_slot(capacity: int) -> None:
    assert replays_as_it_runs(device_decoder(), capacity)


def test_the_model_that_is_recorded_is_the_reference() -> None:
    """Fused ops against `Decoder`, op by op, for every family."""
    for spec in SPECS.values():
        weights = tiny_weights(spec, quant="int4")
        device, plain = device_decoder(spec, weights=weights), tiny_decoder(spec, quant="int4")
        tokens, attend = [3, 1, 4, 1, 5, 9], Attend.tree(0, TREE)
        outs = [model.forward(tokens, attend, model.new_cache(16), False) for model in (device, plain)]
        torch.testing.assert_close(outs[0].logits, outs[1].logits, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(outs[0].hidden, outs[1].hidden, rtol=1e-4, atol=1e-4)
        for attention, mlp in (({0}, set()), (set(), {1}), ({1}, {0})):
            first, second = (
                model.skipping(attention, mlp).forward(tokens, attend, model.new_cache(16), True).logits
                for model in (device, plain)
            )
            torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-4)


# Mutants


WRITE = StepInputs.write


def baked_in_place(self: StepInputs, tokens: Sequence[int], attend: Attend) -> None:
    """Only the tokens reach the device: the step stays where it was first."""
    before = self.attend.packed.clone()
    WRITE(self, tokens, attend)
    if int(before[1]):
        self.attend.packed.copy_(before)


def forgotten_tree(self: StepInputs, tokens: Sequence[int], attend: Attend) -> None:
    """A tree's paths are those of the chain before it."""
    if not attend.is_chain:
        self._path_of = attend.parents
    WRITE(self, tokens, attend)


def rows_of_padding(self: StepInputs, tokens: Sequence[int], attend: Attend) -> None:
    """All rows of the step are called real."""
    WRITE(self, tokens, attend)
    self.attend.rows.fill_(self.width)


@pytest.mark.parametrize("mutant", [baked_in_place, forgotten_tree])
def test_a_place_that_is_baked_in_is_caught(mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepInputs, "write", mutant)
    assert not replays_as_it_runs(device_decoder())


def test_padding_that_writes_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def slots_behind(cache: KVCache, runner: StepRunner) -> bool:
        before = [tensor.fill_(7) for layer in cache.layers for tensor in (layer.k, layer.v)]
        with cache.transaction(3):
            runner.step([1, 2, 3], [-1, 0, 1], cache)
        return all(bool((tensor[:, 3:] == 7).all()) for tensor in before)

    model = device_decoder()
    cache = model.new_cache(32)
    runner = GraphRunner(model, cache, TapeGraphs(), None, WIDTHS)
    assert slots_behind(cache, runner)
    monkeypatch.setattr(StepInputs, "write", rows_of_padding)
    assert not slots_behind(cache, runner)


class Interrupted(np.ndarray):
    """^C right behind the write of a tree's paths."""

    def __setitem__(self, key, value) -> None:
        super().__setitem__(key, value)
        if isinstance(key, slice) and key.stop is None:
            raise KeyboardInterrupt


def test_a_write_that_is_interrupted_leaves_no_paths_behind() -> None:
    inputs, chain = StepInputs(5, CPU), Attend.chain(0, 3)
    inputs.write([1, 2, 3], chain)
    staging, numbers = inputs._staging, inputs._staging._numbers
    staging._numbers = numbers.view(Interrupted)
    with pytest.raises(KeyboardInterrupt):
        inputs.write([1, 2, 3], Attend.tree(0, (-1, 0, 0)))
    staging._numbers = numbers
    inputs.write([1, 2, 3], chain)
    assert torch.equal(inputs.attend.packed, pack_attend(chain, 5))


class ReadsItsLength(DeviceDecoder):
    """Mutant: asks the device for a number in the middle of a step."""

    def run(self, tokens, attend, layers, wanted=None):
        assert int(attend.start) >= 0
        return super().run(tokens, attend, layers, wanted)


def test_a_step_that_cannot_be_recorded_runs_eagerly_and_says_so() -> None:
    model = ReadsItsLength(BASE, tiny_weights(BASE), device_kernels())
    runner, notice = build_runner(model, model.new_cache(64), TapeGraphs(), VOCAB)
    assert isinstance(runner, EagerRunner)
    assert notice is not None
    assert "capturing" in notice


def test_what_runs_by_graphs_and_what_does_not() -> None:
    moe = tiny_spec(layers=(LayerSpec(rope=ROPE, moe=MoeSpec(4, 2, 32, True)), LayerSpec(rope=ROPE)))
    experts = device_decoder(moe)
    runner, notice = build_runner(experts, experts.new_cache(64), TapeGraphs(), VOCAB)
    assert isinstance(runner, EagerRunner)
    assert "experts" in (notice or "")
    tokens, attend = [3, 1, 4], Attend.chain(0, 3)
    expected = tiny_decoder(moe).forward(tokens, attend, tiny_decoder(moe).new_cache(8), False).logits
    got = experts.forward(tokens, attend, experts.new_cache(8), False).logits
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    model = device_decoder()
    for built, kind in (
        (build_runner(model, model.new_cache(64), TapeGraphs(), VOCAB), GraphRunner),
        (build_runner(model, model.new_cache(64), None, VOCAB), EagerRunner),
        (build_runner(tiny_decoder(), model.new_cache(64), TapeGraphs(), VOCAB), EagerRunner),
    ):
        assert isinstance(built[0], kind)
        assert built[1] is None


def test_another_cache_and_a_shadow() -> None:
    model = device_decoder()
    cache, other = model.new_cache(32), model.new_cache(32)
    graphs = TapeGraphs()
    runner = GraphRunner(model, cache, graphs, None, WIDTHS)
    for used, replays in ((cache, 1), (cache.shadow(), 2), (other, 2)):
        with used.transaction(2):
            logits = runner.step([5, 6], [-1, 0], used).logits.clone()
        with other.transaction(2):
            assert torch.equal(logits, EagerRunner(model).step([5, 6], [-1, 0], other).logits)
        assert len(graphs.replays) == replays


@pytest.mark.parametrize(("part", "name"), [("attention", "model.layers.1.self_attn"), ("mlp", "model.layers.0.mlp")])
def test_a_broken_model_is_named(part: str, name: str) -> None:
    weights = broken(part).weights
    model = device_decoder(weights=weights)
    cache = model.new_cache(64)
    engine = Engine(GraphRunner(model, cache, TapeGraphs(), VOCAB, WIDTHS), cache)
    with pytest.raises(NonFiniteLogitsError, match=name):
        generate(engine, NoProposer(), 0, SamplingOptions())


# The loop


PROMPT = [1, 5, 9, 13, 5, 9, 13, 5]
GREEDY, WARM = SamplingOptions(), SamplingOptions(temperature=0.8, seed=3)
NARROW = SamplingOptions(temperature=0.9, top_k=20, top_p=0.9, min_p=0.02, seed=2**63 + 11)
PENALISED = SamplingOptions(temperature=0.7, repetition_penalty=1.2, frequency_penalty=0.2, seed=5)
BIASED = SamplingOptions(temperature=0.7, logit_bias=((3, 2.0), (4, -float("inf"))), seed=6)
SAMPLINGS = {"greedy": GREEDY, "warm": WARM, "narrow": NARROW, "penalised": PENALISED, "biased": BIASED}


def generate(
    engine: Engine,
    proposer: AnyProposer,
    gamma: int,
    sampling: SamplingOptions,
    kernels=None,
    *,
    max_tokens: int | None = 24,
    rule=None,
) -> tuple[list[int], RunRecord]:
    """A fresh answer on `engine`."""
    sampler = Sampler(sampling, kernels or device_kernels(), PROMPT, VOCAB)
    answer = Answer(PROMPT, proposer, FixedGamma(gamma), rule or Coupled(), sampler, no_cut, max_tokens, Cancel())
    record = RunRecord()
    engine.prefill(answer, record)
    tokens = [token for cycle in engine.decode(answer, record) for token in cycle.tokens]
    assert engine.cache.length == len(engine.committed) - 1
    return tokens, record


def reference_text(sampling: SamplingOptions, **changes) -> list[int]:
    """The same model op by op on the CPU, plainly."""
    model = tiny_decoder()
    engine = Engine(EagerRunner(model), model.new_cache(64))
    return generate(engine, NoProposer(), 0, sampling, ReferenceKernels(), **changes)[0]


class Knowing(NoProposer):
    """Knows the answer, but for every `wrong`th token."""

    name = "knowing"

    def __init__(self, text: Sequence[int], wrong: int) -> None:
        self._whole = [*PROMPT, *text]
        self._wrong = wrong

    def propose(self, committed: Sequence[int], limit: int) -> Draft | None:
        span = range(len(committed), min(len(self._whole), len(committed) + limit))
        tokens = [(self._whole[place] + (place % self._wrong == 0)) % VOCAB for place in span]
        return Draft.chain(tokens) if tokens else None


@pytest.fixture(scope="module")
def recorded() -> tuple[Engine, TapeGraphs]:
    model, graphs = device_decoder(), TapeGraphs()
    cache = model.new_cache(64)
    return Engine(GraphRunner(model, cache, graphs, VOCAB, WIDTHS), cache), graphs


@pytest.mark.parametrize("name", SAMPLINGS)
def test_same_text_by_graphs(name: str, recorded: tuple[Engine, TapeGraphs]) -> None:
    expected = reference_text(SAMPLINGS[name])
    for gamma in (0, 1, 4, 8):
        tokens, record = generate(recorded[0], Knowing(expected, 7), gamma, SAMPLINGS[name])
        assert tokens == expected
        assert (record.accepted > 0) == (gamma > 0)
    whole = reference_text(SAMPLINGS[name], max_tokens=None)
    assert generate(recorded[0], NgramProposer(), 4, SAMPLINGS[name], max_tokens=None)[0] == whole


def test_same_text_on_device_kernels_without_graphs() -> None:
    model = device_decoder()
    for sampling in SAMPLINGS.values():
        engine, expected = Engine(EagerRunner(model), model.new_cache(64)), reference_text(sampling)
        assert generate(engine, Knowing(expected, 5), 4, sampling)[0] == expected


class WrongPlace(graph.DrawSettings):
    """Mutant: the noise of the position behind."""

    def noise(self, positions: Tensor) -> DeviceNoise:
        return super().noise(positions + 1)


def test_top_k_is_recorded_when_it_is_first_wanted() -> None:
    model, graphs = device_decoder(), TapeGraphs()
    cache = model.new_cache(64)
    engine = Engine(GraphRunner(model, cache, graphs, VOCAB, WIDTHS), cache)
    for sampling, captured in ((WARM, 4), (NARROW, 8), (WARM, 8), (NARROW, 8)):
        assert generate(engine, NgramProposer(), 4, sampling)[0] == reference_text(sampling)
        assert graphs.captured == captured


def test_where_top_k_cannot_be_recorded_the_sampler_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    model = device_decoder()
    cache = model.new_cache(64)
    engine = Engine(GraphRunner(model, cache, TapeGraphs(), VOCAB, WIDTHS), cache)

    def refuses(self, launch):
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(TapeGraphs, "capture", refuses)
    for sampling in (NARROW, WARM, NARROW):
        assert generate(engine, NgramProposer(), 4, sampling)[0] == reference_text(sampling)


def test_a_step_wider_than_all_recordings() -> None:
    model, graphs = device_decoder(), TapeGraphs()
    caches = [model.new_cache(64) for _ in range(2)]
    tokens = [(7 * i) % 97 for i in range(20)]
    outs = []
    for runner, cache in zip(
        (GraphRunner(model, caches[0], graphs, VOCAB, WIDTHS), EagerRunner(model)), caches, strict=True
    ):
        with cache.transaction(20):
            outs.append(runner.step(tokens, range(-1, 19), cache).logits)
    assert torch.equal(*outs)
    assert not graphs.replays


def test_noise_of_another_position_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "DrawSettings", WrongPlace)
    model = device_decoder()
    cache = model.new_cache(64)
    engine = Engine(GraphRunner(model, cache, TapeGraphs(), VOCAB, WIDTHS), cache)
    assert generate(engine, NgramProposer(), 4, WARM)[0] != reference_text(WARM)


def test_an_answer_that_the_device_cannot_draw_forgets_the_one_before(recorded: tuple[Engine, TapeGraphs]) -> None:
    generate(recorded[0], NgramProposer(), 4, WARM)
    again = generate(recorded[0], NgramProposer(), 4, WARM, rule=Rejection())[0]
    model = device_decoder()
    eager = Engine(EagerRunner(model), model.new_cache(64))
    assert again == generate(eager, NgramProposer(), 4, WARM, rule=Rejection())[0]


class Reads:
    """How often a tensor's values are asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        for name in ("tolist", "item", "__bool__", "__int__", "__float__"):
            monkeypatch.setattr(Tensor, name, self._counting(getattr(Tensor, name)))

    def _counting(self, read):
        def counted(tensor: Tensor):
            self.count += 1
            return read(tensor)

        return counted


class Silent:
    """Ops whose own look at their arguments is not counted: a kernel's does not reach the host."""

    def __init__(self, ops, reads: Reads) -> None:
        self._ops, self._reads = ops, reads
        self.name, self.compute, self.prepare = ops.name, ops.compute, ops.prepare

    def __getattr__(self, name: str):
        def call(*args):
            before = self._reads.count
            out = getattr(self._ops, name)(*args)
            self._reads.count = before
            return out

        return call


def counting_decoder(monkeypatch: pytest.MonkeyPatch, seed: int = 0) -> tuple[DeviceDecoder, Reads]:
    reads = Reads(monkeypatch)
    kernels = DeviceKernels(Opaque(Silent(ReferenceOps(), reads)), CPU)
    return device_decoder(seed=seed, kernels=kernels), reads


@pytest.mark.parametrize("gamma", [0, 4])
def test_one_replay_and_one_read_a_cycle(gamma: int, monkeypatch: pytest.MonkeyPatch) -> None:
    (model, reads), graphs = counting_decoder(monkeypatch), TapeGraphs()
    cache = model.new_cache(64)
    engine = Engine(GraphRunner(model, cache, graphs, VOCAB, WIDTHS), cache)
    text = generate(engine, NoProposer(), 0, WARM, model.kernels)[0]
    graphs.replays.clear()
    reads.count = 0
    _, record = generate(engine, Knowing(text, 5), gamma, WARM, model.kernels)
    assert record.reused_tokens == len(PROMPT) - 1
    assert len(graphs.replays) == reads.count == len(record.cycles)


def test_without_graphs_the_rows_of_a_cycle_are_drawn_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, reads = counting_decoder(monkeypatch)
    engine = Engine(EagerRunner(model), model.new_cache(64))
    text = generate(engine, NoProposer(), 0, WARM, model.kernels)[0]
    reads.count = 0
    _, record = generate(engine, Knowing(text, 5), 4, WARM, model.kernels)
    assert record.accepted
    assert reads.count == len(record.cycles)


def test_nothing_is_kept_from_turn_to_turn() -> None:
    model, graphs = device_decoder(tiny_spec(hidden=32, intermediate=32, layers=BASE.layers[:1])), TapeGraphs()
    cache = model.new_cache(48)
    engine = Engine(GraphRunner(model, cache, graphs, VOCAB, (1, 2, 5)), cache)
    held = []
    for turn in range(200):
        sampling = SamplingOptions(temperature=0.8, seed=turn)
        generate(engine, NgramProposer(), 4, sampling, model.kernels, max_tokens=4)
        if turn % 50 == 9:
            gc.collect()
            held.append(sum(type(thing) is Tensor for thing in gc.get_objects()))
    assert len(set(held)) == 1
    assert graphs.captured == 3
