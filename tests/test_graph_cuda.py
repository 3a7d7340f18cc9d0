"""What only a card can show of recorded steps: `pytest -m cuda`. The same checks run on every machine, in test_graph
and test_fused, with recordings that are played by the processor."""

from __future__ import annotations

import statistics
import time
from dataclasses import fields, replace

import pytest
import torch
from test_graph import Knowing, generate, replays_as_it_runs, same, stored
from tiny import tiny_spec, tiny_weights
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from specgen.engine import Engine
from specgen.fused import DeviceProposer, FusedCycles, Pair
from specgen.graph import CudaGraphs, GraphRunner
from specgen.kernels.triton_ops import TritonKernels
from specgen.model.device import DeviceDecoder
from specgen.model.weights import ModelWeights
from specgen.options import DraftOptions, SamplingOptions
from specgen.propose.base import AnyProposer
from specgen.propose.draw import SharedNoise
from specgen.propose.model import DraftModel, ModelProposer
from specgen.propose.none import NoProposer
from specgen.sampling import Sampler
from specgen.step import EagerRunner

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA card here"),
]

VOCAB = 90
SPEC = tiny_spec(hidden=128, intermediate=256, heads=4, kv_heads=2, head_dim=32, attention_scale=32**-0.5)
SAMPLINGS = [
    SamplingOptions(),
    SamplingOptions(temperature=0.8, seed=3),
    SamplingOptions(temperature=0.9, top_k=20, top_p=0.9, min_p=0.02, seed=2**63 + 11),
]


@pytest.fixture(scope="module")
def kernels() -> TritonKernels:
    return TritonKernels(torch.device("cuda", torch.cuda.current_device()))


def on_card(weights: ModelWeights, device: torch.device) -> ModelWeights:
    """Norms are used as they are; linears go to the card when they are laid out."""

    def moved(layer):
        norms = {f.name: getattr(layer, f.name) for f in fields(layer)}
        return replace(layer, **{name: t.to(device) for name, t in norms.items() if isinstance(t, Tensor)})

    return replace(weights, layers=tuple(map(moved, weights.layers)), norm=weights.norm.to(device))


def decoder(kernels: TritonKernels, seed: int = 0) -> DeviceDecoder:
    return DeviceDecoder(SPEC, on_card(tiny_weights(SPEC, seed, "int4"), kernels.device), kernels)


class Rig:
    """A target and a draft model by graphs, and the target eagerly."""

    def __init__(self, kernels: TritonKernels, capacity: int = 256) -> None:
        self.kernels = kernels
        graphs = CudaGraphs(kernels.device)
        self.target, self.draft = decoder(kernels), decoder(kernels, seed=1)
        cache, self.draft_cache = (model.new_cache(capacity, torch.bfloat16) for model in (self.target, self.draft))
        runner = GraphRunner(self.target, cache, graphs, VOCAB)
        assert runner.settings is not None
        self.cycles = FusedCycles(Pair(self.target, cache, self.draft, self.draft_cache, runner.settings), graphs)
        self.engine = Engine(runner, cache)
        self.eager = Engine(EagerRunner(self.target), self.target.new_cache(capacity, torch.bfloat16))
        self.draft_runner = GraphRunner(self.draft, self.draft_cache, graphs, None, (1, 2))

    def drafting(self, sampling: SamplingOptions, *, fuse: bool) -> AnyProposer:
        sampler = Sampler(sampling, self.kernels, [1], VOCAB)
        reader = DraftModel(self.draft_runner, self.draft_cache, SPEC.vocab)
        self.draft_cache.rollback(0)
        inner = ModelProposer("model", reader, sampler, SharedNoise(sampler), DraftOptions())
        assert sampler.drawing is not None
        assert self.cycles.use(sampler.drawing)
        return DeviceProposer(inner, reader, self.cycles) if fuse else inner


@pytest.fixture(scope="module")
def rig(kernels: TritonKernels) -> Rig:
    return Rig(kernels)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8], ids=str)
def test_a_replayed_step_is_the_launched_one(
    dtype: torch.dtype, kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = CudaGraphs(kernels.device)
    monkeypatch.setattr("test_graph.TapeGraphs", lambda: graphs)
    assert replays_as_it_runs(decoder(kernels), dtype=dtype)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "warm", "narrow"])
def test_same_text_by_every_way(sampling: SamplingOptions, rig: Rig) -> None:
    plain = generate(rig.eager, NoProposer(), 0, sampling, rig.kernels, max_tokens=60)[0]
    for gamma in (1, 4, 8):
        for proposer in (
            Knowing(plain, 5),
            rig.drafting(sampling, fuse=False),
            rig.drafting(sampling, fuse=True),
        ):
            found, record = generate(rig.engine, proposer, gamma, sampling, rig.kernels, max_tokens=60)
            assert found == plain
            assert record.proposed
            assert same(stored(rig.engine.cache), stored(rig.eager.cache))


def test_memory_stays_flat(rig: Rig) -> None:
    held = []
    for turn in range(200):
        sampling = replace(SAMPLINGS[1 + turn % 2], seed=turn)
        generate(rig.engine, rig.drafting(sampling, fuse=True), 4, sampling, rig.kernels, max_tokens=8)
        if turn >= 20:
            torch.cuda.synchronize()
            held.append(torch.cuda.memory_allocated(rig.kernels.device))
    assert len(set(held)) == 1
    print(f"\n{held[0] / 1e6:.1f} MB held in every one of {len(held)} turns")


def test_host_time_of_a_cycle(rig: Rig) -> None:
    """Printed, not judged: a model of a few thousand weights leaves little but the host's own time."""
    for name, proposer, gamma in (
        ("plain", NoProposer(), 0),
        ("a given draft of 4", Knowing([1] * 200, 3), 4),
        ("a draft model's 4, fused", rig.drafting(SAMPLINGS[1], fuse=True), 4),
    ):
        generate(rig.engine, proposer, gamma, SAMPLINGS[1], rig.kernels, max_tokens=8)
        begin = time.perf_counter()
        _, record = generate(rig.engine, proposer, gamma, SAMPLINGS[1], rig.kernels, max_tokens=100)
        whole = 1e6 * (time.perf_counter() - begin) / len(record.cycles)
        step = statistics.median(cycle.propose_ms + cycle.verify_ms for cycle in record.cycles) * 1e3
        print(f"\n{name}: {whole:.0f} µs a cycle, of which {step:.0f} µs from the first launch to what was read back")
