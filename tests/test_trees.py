"""Trees through a real (tiny) decoder: text, K and V are those of plain decoding, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from cpu import cpu_kernels
from fakes import ScriptedProposer
from test_engine import no_cut
from tiny import tiny_decoder, tiny_spec

from specgen.accept import Coupled
from specgen.cache import KV_DTYPES, KVCache
from specgen.draft import Draft
from specgen.engine import Answer, Cancel, Engine
from specgen.kernels.base import Attend, Kernels
from specgen.kernels.reference import ReferenceKernels
from specgen.kernels.torch_cpu import TorchKernels
from specgen.model.decoder import Decoder
from specgen.options import DraftOptions, SamplingOptions
from specgen.propose.base import Proposer
from specgen.propose.draw import SharedNoise
from specgen.propose.model import DraftModel, ModelProposer
from specgen.propose.ngram import NgramProposer
from specgen.propose.none import NoProposer
from specgen.records import RunRecord
from specgen.sampling import Sampler
from specgen.step import EagerRunner, StepOut
from specgen.tune.controller import FixedGamma

PROMPT = [7, 8, 9, 7, 8, 10, 7, 8, 9, 7, 8]
WARM = SamplingOptions(temperature=0.6, seed=11, repetition_penalty=1.1)
SPEC = tiny_spec(tied_head=True)

Maker = Callable[[Sampler], Proposer]


def lookup(width: int) -> Maker:
    return lambda sampler: NgramProposer(width=width)


def drafting(width: int, seed: int = 0) -> Maker:
    """Drafted by a model with the target's weights (seed 0) or with others."""

    def make(sampler: Sampler) -> Proposer:
        model = tiny_decoder(SPEC, seed)
        reader = DraftModel(EagerRunner(model), model.new_cache(128), SPEC.vocab)
        return ModelProposer("model", reader, sampler, SharedNoise(sampler), DraftOptions(), width)

    return make


def knowing(text: Sequence[int]) -> Maker:
    """Knows the answer, and hides it in the second of two branches."""
    whole = [*PROMPT, *text]

    def guess(committed: Sequence[int], limit: int) -> Draft | None:
        right = whole[len(committed) : len(committed) + limit // 2]
        if not right:
            return None
        wrong = [(token + 1) % SPEC.vocab for token in right]
        tokens = [token for pair in zip(wrong, right, strict=True) for token in pair]
        return Draft(tuple(tokens), (-1, -1, *range(len(tokens) - 2)), (None,) * len(tokens))

    return lambda sampler: ScriptedProposer(guess)


def generate(
    make: Maker,
    gamma: int,
    width: int = 1,
    *,
    kernels: Kernels | None = None,
    runner: type[EagerRunner] = EagerRunner,
    cache_type: type[KVCache] = KVCache,
    dtype: torch.dtype = torch.float32,
) -> tuple[list[int], list[torch.Tensor], RunRecord]:
    model = tiny_decoder(SPEC, 0, "int4", kernels or ReferenceKernels())
    cache = cache_type(len(SPEC.layers), SPEC.kv_heads, SPEC.head_dim, 128, dtype)
    sampler = Sampler(WARM, ReferenceKernels(), PROMPT, SPEC.vocab)
    answer = Answer(PROMPT, make(sampler), FixedGamma(gamma, width), Coupled(), sampler, no_cut, 40, Cancel())
    engine, record = Engine(runner(model), cache), RunRecord()
    engine.prefill(answer, record)
    tokens = [token for cycle in engine.decode(answer, record) for token in cycle.tokens]
    stored = [t for layer in cache.layers for t in (layer.k, layer.v, layer.k_scale, layer.v_scale) if t is not None]
    return tokens, [tensor[:, : cache.length].clone() for tensor in stored], record


def same(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


BACKENDS: dict[str, Callable[[], Kernels]] = {
    "reference": ReferenceKernels,
    "torch": lambda: TorchKernels(1),
    "cpu": lambda: cpu_kernels(1),
}


@pytest.mark.parametrize("kv", KV_DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_trees_change_neither_text_nor_cache(backend: str, kv: str) -> None:
    kernels = BACKENDS[backend]()
    expected, stored, _ = generate(lambda sampler: NoProposer(), 0, kernels=kernels, dtype=KV_DTYPES[kv])
    trees = ((lookup(3), 4, 3), (drafting(2), 3, 2), (drafting(3, seed=1), 2, 3), (knowing(expected), 4, 2))
    for make, gamma, width in trees:
        tokens, other, record = generate(make, gamma, width, kernels=kernels, dtype=KV_DTYPES[kv])
        assert tokens == expected
        assert same(stored, other)
        assert record.proposed > record.accepted
    assert record.accepted >= 30, "of a branch that has to move"


class ByRow(EagerRunner):
    """Mutant: a row's position is its place in the step, not its depth in the tree."""

    def step(self, tokens: Sequence[int], parents: Sequence[int], cache: KVCache) -> StepOut:
        start, rows = cache.length, len(tokens)
        attend = Attend(start, tuple(parents), tuple(range(start, start + rows)))
        return self.model.forward(tokens, attend, cache, last_only=False)


class SeesSiblings(EagerRunner):
    """Mutant: a row sees every row before it."""

    def step(self, tokens: Sequence[int], parents: Sequence[int], cache: KVCache) -> StepOut:
        positions = Attend.tree(cache.length, tuple(parents)).positions
        attend = Attend(cache.length, tuple(range(-1, len(tokens) - 1)), positions)
        return self.model.forward(tokens, attend, cache, last_only=False)


class Uncompacted(KVCache):
    """Mutant: an accepted branch stays where it was written."""

    def commit(self, rows: int | Sequence[int]) -> None:
        super().commit(rows if isinstance(rows, int) else len(rows))


@pytest.mark.parametrize("mutant", [{"runner": ByRow}, {"runner": SeesSiblings}, {"cache_type": Uncompacted}], ids=str)
def test_mutants_are_caught(mutant: dict) -> None:
    expected, stored, _ = generate(lambda sampler: NoProposer(), 0)
    _, other, record = generate(knowing(expected), 4, 2, **mutant)
    assert record.accepted > 0
    assert not all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(stored, other, strict=True))


@pytest.mark.parametrize("kv", KV_DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_are_invariant_with_every_kind_of_cache(backend: str, kv: str) -> None:
    """Logits of a row do not depend on how many rows are in its step, nor on how its prefix was computed."""
    model = tiny_decoder(SPEC, 0, "int4", BACKENDS[backend]())
    text = [(7 * index) % SPEC.vocab for index in range(70)]
    single = _logits(model, text, [1] * 70, KV_DTYPES[kv])
    for sizes in ([70], [3] * 23 + [1], [17, 1, 2, 33, 16, 1]):
        assert torch.equal(_logits(model, text, sizes, KV_DTYPES[kv]), single)


def _logits(model: Decoder, text: Sequence[int], sizes: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """(tokens, V), the text read in steps of the given sizes."""
    runner, cache = EagerRunner(model, 128), model.new_cache(128, dtype)
    rows, begin = [], 0
    for size in sizes:
        with cache.transaction(size):
            rows.append(runner.step(text[begin : begin + size], range(-1, size - 1), cache).logits)
            cache.commit(size)
        begin += size
    return torch.cat(rows)
