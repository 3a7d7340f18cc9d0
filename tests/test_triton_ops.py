"""A model on the Triton kernels, under their interpreter: near the reference, and every promise bit for bit.

The model is tiny and attention has few splits, for the interpreter takes milliseconds for what a card does in less than
one of its microseconds; what a kernel does with many is looked at in the kernels' own tests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from tape import Tape, TapeGraphs, record_triton
from test_decoder import run
from test_graph import Knowing, generate, same, stored
from test_triton_linear import ascending
from tiny import Quant, tiny_decoder, tiny_spec, tiny_weights
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from specgen.cache import KVCache
from specgen.engine import Engine
from specgen.fused import DeviceProposer, FusedCycles, Pair
from specgen.graph import GraphRunner
from specgen.kernels import triton_attention
from specgen.kernels.base import Attend, Noise, Truncation
from specgen.kernels.reference import ReferenceKernels
from specgen.kernels.triton_ops import TritonKernels, TritonOps
from specgen.model.decoder import Decoder
from specgen.model.device import DeviceDecoder
from specgen.model.spec import LayerSpec, ModelSpec, MoeSpec, NormNames
from specgen.options import DraftOptions, SamplingOptions
from specgen.propose.draw import SharedNoise
from specgen.propose.model import DraftModel, ModelProposer
from specgen.propose.none import NoProposer
from specgen.sampling import Sampler
from specgen.step import EagerRunner, StepRunner

VOCAB = 90
ROPE = tiny_spec().layers[0].rope
SMALL = tiny_spec(hidden=32, intermediate=64, heads=2, kv_heads=1, layers=(LayerSpec(rope=ROPE),))
TOKENS = [(index * 31 + index // 7) % 97 for index in range(70)]
NEAR, NEAR_BF16 = {"rtol": 0.0, "atol": 0.03}, {"rtol": 0.0, "atol": 0.4}
"""Logits have a spread of 3. Activations are rounded to 11 bits before each of the six products; K and V to 8 bits,
which the interpreter cuts off where a card rounds."""


@pytest.fixture(autouse=True)
def few_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_attention, "split_count", lambda kv_heads: 2)


@pytest.fixture(autouse=True)
def _recordable() -> Iterator[None]:
    if torch.cuda.is_available():
        pytest.skip("Triton's interpreter is for machines without a card; there `-m cuda` runs the same on it")
    with record_triton(), ascending():
        yield


@pytest.fixture(scope="module")
def kernels() -> TritonKernels:
    return TritonKernels(torch.device("cpu"))


def decoder(kernels: TritonKernels, spec: ModelSpec = SMALL, quant: Quant = "int4", seed: int = 0) -> DeviceDecoder:
    return DeviceDecoder(spec, tiny_weights(spec, seed, quant), kernels)


SPECS = {
    "llama": SMALL,
    "tied, no rope, window": replace(
        SMALL, tied_head=True, layers=(LayerSpec(window=3),), embedding_scale=3.0, logit_scale=0.25, final_softcap=9.0
    ),
    "norms per head": replace(SMALL, qk_norm="head", activation="gelu_tanh", attention_softcap=5.0),
    "norms after": replace(SMALL, qk_norm="projection", norms=NormNames(None, "a", None, "b"), residual_scale=0.7),
}


@pytest.mark.parametrize(
    ("name", "quant"), [*((name, "int4") for name in SPECS), ("llama", "int8"), ("llama", "dense")]
)
def test_near_the_reference(name: str, quant: Quant, kernels: TritonKernels) -> None:
    spec = SPECS[name]
    tokens, attend = TOKENS[:5], Attend.tree(0, (-1, 0, 0, 1, 2))
    reference = tiny_decoder(spec, quant=quant)
    models = decoder(kernels, spec, quant), Decoder(spec, tiny_weights(spec, 0, quant), kernels)
    for dtype, near in ((torch.float32, NEAR), (torch.bfloat16, NEAR_BF16)):
        expected = reference.forward(tokens, attend, reference.new_cache(8, dtype), False)
        for model in models:
            out = model.forward(tokens, attend, model.new_cache(8, dtype), False)
            torch.testing.assert_close(out.logits, expected.logits, **near)
            torch.testing.assert_close(out.hidden, expected.hidden, **near)


def test_experts_run_op_by_op(kernels: TritonKernels) -> None:
    spec = replace(SMALL, layers=(LayerSpec(rope=ROPE, moe=MoeSpec(4, 2, 32, True)),))
    reference, model = tiny_decoder(spec, quant="int8"), decoder(kernels, spec, "int8")
    assert model.refusal is not None
    expected, found = (run(one, TOKENS[:3], [3]) for one in (reference, model))
    torch.testing.assert_close(found, expected, **NEAR)


def rows_alone_and_together(model: Decoder) -> bool:
    """Whether a row, as one of several alternatives for one place, is what it is alone."""
    cache = model.new_cache(16)
    with cache.transaction(4):
        model.forward(TOKENS[:4], Attend.chain(0, 4), cache, True)
        cache.commit(4)

    def logits(rows: Sequence[int]) -> Tensor:
        attend = Attend(4, (-1,) * len(rows), (4,) * len(rows))
        return model.forward(rows, attend, cache, False).logits

    wanted = [9, 50, 3, 77, 9]
    alone = {row: logits([row])[0] for row in set(wanted)}
    return all(
        torch.equal(found, alone[row])
        for order in (wanted, wanted[::-1], wanted[:2])
        for row, found in zip(order, logits(order), strict=True)
    )


def test_a_row_does_not_see_its_neighbours(kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rows_alone_and_together(decoder(kernels))
    assert rows_alone_and_together(Decoder(SMALL, tiny_weights(SMALL, quant="int8"), kernels))
    # The mutant: another order of sums when there are several rows.
    linear = TritonOps.linear

    def by_size(self, x, weight):
        return linear(self, x, weight) if len(x) == 1 else linear(self, x / 3, weight) * 3

    monkeypatch.setattr(TritonOps, "linear", by_size)
    assert not rows_alone_and_together(decoder(kernels))


@pytest.mark.parametrize(("dtype", "steps"), [(torch.bfloat16, [33, 1, 2, 34]), (torch.int8, [5, 1])], ids=str)
def test_history_does_not_matter(dtype: torch.dtype, steps: list[int], kernels: TritonKernels) -> None:
    """Steps of decoding, and a prefill of more than 64 rows, which other kernels take."""
    model, rows = decoder(kernels), sum(steps)
    whole = run(model, TOKENS, [70], dtype)
    assert torch.equal(run(model, TOKENS[:rows], steps, dtype), whole[:rows])
    assert torch.equal(run(model, TOKENS[:3], [1], dtype), whole[:3])


def test_a_replayed_step_is_the_launched_one(kernels: TritonKernels) -> None:
    model = decoder(kernels)

    def play(runner: StepRunner, cache: KVCache) -> list[Tensor]:
        seen = []
        for rows, kept in ((3, 2), (1, 1), (3, 0), (2, 2), (1, 1)):
            parents = [-1, 0, 0] if kept == 0 else range(-1, rows - 1)
            with cache.transaction(rows):
                seen.append(runner.step(TOKENS[cache.length : cache.length + rows], parents, cache).logits.clone())
                if kept:
                    cache.commit(kept)
        return [*seen, *stored(cache)]

    caches = [model.new_cache(7, torch.bfloat16) for _ in range(2)]
    graphs = TapeGraphs()
    replayed = play(GraphRunner(model, caches[0], graphs, VOCAB, (1, 3)), caches[0])
    assert same(replayed, play(EagerRunner(model), caches[1]))
    assert len(graphs.replays) == 5


def test_launches_of_a_step(kernels: TritonKernels) -> None:
    """Per layer: q|k|v, rotation with its write, attention and its merge, o, sum and norm, gate|up, activation, down,
    sum and norm."""
    graphs, launches = TapeGraphs(), []
    for layers in (1, 2):
        model = decoder(kernels, replace(SMALL, layers=SMALL.layers * layers))
        graph = GraphRunner(model, model.new_cache(8), graphs, None, (1,))._steps[False][1].graph
        assert isinstance(graph.tape, Tape)  # type: ignore[attr-defined]
        launches.append(len(graph.tape.entries))  # type: ignore[attr-defined]
    assert launches[1] - launches[0] == 10
    assert launches[0] - 10 == 3, "embedding, the first norm, head"
    print(f"{launches[1] - launches[0]} launches for each layer and {2 * launches[0] - launches[1]} for the rest")


@pytest.mark.slow
def test_same_text_by_every_way(kernels: TritonKernels) -> None:
    """Plain and eager; replayed, with a draft given, and with a draft model whose cycles are one replay."""
    target, draft, graphs = decoder(kernels), decoder(kernels, seed=1), TapeGraphs()
    caches = [model.new_cache(24, torch.bfloat16) for model in (target, draft)]
    runner = GraphRunner(target, caches[0], graphs, VOCAB, (1, 3))
    assert runner.settings is not None
    cycles = FusedCycles(Pair(target, caches[0], draft, caches[1], runner.settings), graphs, (2,))
    engine, eager = Engine(runner, caches[0]), Engine(EagerRunner(target), target.new_cache(24, torch.bfloat16))
    sampling = SamplingOptions(temperature=0.8, seed=3)
    plain = generate(eager, NoProposer(), 0, sampling, kernels, max_tokens=6)[0]
    sampler = Sampler(sampling, kernels, [1], VOCAB)
    drawing = sampler.drawing
    assert drawing is not None
    assert cycles.use(drawing)
    reader = DraftModel(EagerRunner(draft), caches[1], draft.spec.vocab)
    inner = ModelProposer("model", reader, sampler, SharedNoise(sampler), DraftOptions())
    for asked in (Knowing(plain, 4), DeviceProposer(inner, reader, cycles)):
        tokens, record = generate(engine, asked, 2, sampling, kernels, max_tokens=6)
        assert tokens == plain
        assert record.proposed
    assert len(graphs.replays) > 4


def test_sampling_ops_answer_as_the_reference(kernels: TritonKernels) -> None:
    logits = torch.randn(3, 97, generator=torch.Generator().manual_seed(0)) * 3
    cuts = (Truncation(), Truncation(1.0), Truncation(0.8, top_k=20, top_p=0.9, min_p=0.02))
    reference = ReferenceKernels()
    assert kernels.argmax(logits) == reference.argmax(logits)
    for cut, position in ((cut, position) for cut in cuts for position in (0, 41)):
        alone = [kernels.gumbel_argmax(row, cut, Noise(7, position)) for row in logits[:2]]
        assert alone == [reference.gumbel_argmax(row, cut, Noise(7, position)) for row in logits[:2]]
        together = kernels.gumbel_argmax_rows(logits, cut, 7, [position, position + 1, position])
        assert together[0] == alone[0]
        assert together[1] == reference.gumbel_argmax(logits[1], cut, Noise(7, position + 1))
    purposes = [kernels.gumbel_argmax(logits[0], Truncation(5.0), Noise(7, 3, purpose)) for purpose in range(4)]
    assert purposes == [reference.gumbel_argmax(logits[0], Truncation(5.0), Noise(7, 3, p)) for p in range(4)]
