"""Self-speculation on a real (tiny) decoder: the target's cache stays the target's, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from test_engine import no_cut
from tiny import tiny_decoder, tiny_spec

from specgen.accept import Coupled
from specgen.cache import KVCache
from specgen.engine import Answer, Cancel, Engine
from specgen.kernels.reference import ReferenceKernels
from specgen.model.decoder import Decoder
from specgen.model.spec import LayerSpec, Skipped
from specgen.options import DraftOptions, SamplingOptions
from specgen.propose.base import Proposer
from specgen.propose.draw import SharedNoise
from specgen.propose.model import ModelProposer, advance
from specgen.propose.none import NoProposer
from specgen.propose.skip import Agreement, SharedPrefix, draft_share, sublayers_of, without
from specgen.records import RunRecord
from specgen.sampling import Sampler
from specgen.step import EagerRunner
from specgen.tune.controller import FixedGamma
from specgen.tune.skip_search import SkipSearch, expected_speed

PROMPT = [1, 5, 9, 13, 5, 9]
WARM = SamplingOptions(temperature=0.7, seed=4)
NOTHING: Skipped = frozenset()
LAST: Skipped = frozenset({("mlp", 1)})
LAYER: Skipped = frozenset({("mlp", 1), ("attention", 1)})


def deep(layers: int = 4) -> Decoder:
    spec = tiny_spec()
    return tiny_decoder(tiny_spec(layers=(LayerSpec(rope=spec.layers[0].rope),) * layers))


Maker = Callable[[Decoder, KVCache, Sampler], Proposer]


def skipping(skipped: Skipped, reader: type[SharedPrefix] = SharedPrefix) -> Maker:
    def make(model: Decoder, cache: KVCache, sampler: Sampler) -> Proposer:
        shared = reader(EagerRunner(without(model, skipped)), cache, model.spec.vocab)
        return ModelProposer("skip", shared, sampler, SharedNoise(sampler), DraftOptions())

    return make


def generate(
    make: Maker, gamma: int, *, dtype: torch.dtype = torch.float32, capacity: int = 64, max_tokens: int | None = 24
) -> tuple[list[int], KVCache, RunRecord]:
    model = tiny_decoder()
    cache = model.new_cache(capacity, dtype)
    sampler = Sampler(WARM, ReferenceKernels(), PROMPT, model.spec.vocab)
    answer = Answer(
        PROMPT, make(model, cache, sampler), FixedGamma(gamma), Coupled(), sampler, no_cut, max_tokens, Cancel()
    )
    engine, record = Engine(EagerRunner(model), cache), RunRecord()
    engine.prefill(answer, record)
    tokens = [token for cycle in engine.decode(answer, record) for token in cycle.tokens]
    return tokens, cache, record


def plain(**changes) -> tuple[list[int], KVCache, RunRecord]:
    return generate(lambda model, cache, sampler: NoProposer(), 0, **changes)


def stored(cache: KVCache) -> list[torch.Tensor]:
    """All committed K and V."""
    tensors = (t for layer in cache.layers for t in (layer.k, layer.v, layer.k_scale, layer.v_scale) if t is not None)
    return [tensor[:, : cache.length].clone() for tensor in tensors]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("skipped", [NOTHING, LAST, LAYER], ids=["nothing", "mlp", "layer"])
def test_text_and_cache_are_those_of_plain_decoding(skipped: Skipped, dtype: torch.dtype) -> None:
    tokens, cache, _ = plain(dtype=dtype)
    for gamma in (1, 4):
        speculated, other, record = generate(skipping(skipped), gamma, dtype=dtype)
        assert speculated == tokens
        assert all(torch.equal(a, b) for a, b in zip(stored(cache), stored(other), strict=True))
        assert record.proposed > 0


def test_leaving_nothing_out_is_always_right() -> None:
    """The draft reads the target's own prefix: with all its layers it is the target."""
    record = generate(skipping(NOTHING), 4)[2]
    assert record.accepted == record.proposed > 0


class ReadsStale(SharedPrefix):
    """Mutant: the draft goes on behind its own drafts instead of the target's committed slots."""

    def lag(self, committed: Sequence[int], agreed: int) -> int:
        if self._cache.length < len(committed) - 1:
            self._cache.follow(self._target)
        return 1

    def read(self, committed: Sequence[int], count: int) -> torch.Tensor:
        self._cache.rollback(min(self._cache.length, len(committed) - 2))
        return advance(self._runner, self._cache, committed[-1:])


class CommitsItsOwn(SharedPrefix):
    """Mutant: what the draft wrote counts as the target's."""

    def extend(self, token: int) -> torch.Tensor:
        logits = super().extend(token)
        self._target._length += 1
        return logits


def test_mutants_are_caught() -> None:
    record = generate(skipping(NOTHING, ReadsStale), 4)[2]
    assert record.accepted < record.proposed
    with pytest.raises(AssertionError):
        generate(skipping(LAST, CommitsItsOwn), 4)


def test_the_context_edge() -> None:
    for capacity in range(12, 17):
        tokens, cache, _ = plain(capacity=capacity, max_tokens=None)
        speculated, other, _ = generate(skipping(LAST), 5, capacity=capacity, max_tokens=None)
        assert speculated == tokens
        assert len(PROMPT) + len(tokens) == capacity
        assert all(torch.equal(a, b) for a, b in zip(stored(cache), stored(other), strict=True))


def test_a_draft_step_costs_what_it_still_reads() -> None:
    model = deep()
    assert draft_share(model, NOTHING) == 1.0
    everything = frozenset(sublayers_of(model))
    assert 0 < draft_share(model, everything) < draft_share(model, frozenset({("mlp", 2)})) < 1
    assert ("mlp", 0) not in everything


def test_agreement_is_that_of_two_greedy_passes() -> None:
    model, text = deep(), [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
    agreement = Agreement(model, text, max_rows=5)
    assert agreement(NOTHING) == 1.0
    skipped = frozenset({("mlp", 3), ("attention", 2)})
    hits = 0
    for end in range(1, len(text) + 1):
        chosen = []
        for one in (model, without(model, skipped)):
            logits = advance(EagerRunner(one, 64), one.new_cache(64), text[:end])
            chosen.append(int(logits.argmax()))
        hits += chosen[0] == chosen[1]
    assert agreement(skipped) == pytest.approx(hits / len(text))
    assert agreement(skipped) < 1.0


# The search, on synthetic models: each sublayer does a known harm.


def harmful(harm: dict[tuple[str, int], float]):
    return lambda skipped: max(0.0, 1.0 - sum(harm[one] for one in skipped))


def search(harm, budget: int = 100, share: float = 0.06):
    calls: list[Skipped] = []

    def agreement(skipped: Skipped) -> float:
        calls.append(skipped)
        return harmful(harm)(skipped)

    found = SkipSearch(
        list(harm), agreement, lambda skipped: 1 - share * len(skipped), lambda rows: 1 + 0.02 * (rows - 1), budget
    ).run()
    return found, calls


def test_harmless_sublayers_are_left_out_and_harmful_ones_kept() -> None:
    harm = {("mlp", index): 0.004 if index % 2 else 0.3 for index in range(1, 17)}
    found, _ = search(harm)
    assert found.skipped == {one for one, value in harm.items() if value < 0.1}
    assert found.agreement == pytest.approx(1 - 0.004 * 8)
    assert found.speedup > 1.1
    assert found.gamma >= 1


def test_a_search_that_finds_nothing_says_so() -> None:
    found, _ = search({("mlp", index): 0.5 for index in range(1, 9)})
    assert (found.speedup, found.gamma) == (1.0, 0)
    assert len(found.skipped) == 1, "the least harmful set all the same"


@pytest.mark.parametrize("budget", [1, 5, 16, 20])
def test_the_budget_is_kept(budget: int) -> None:
    _, calls = search({("mlp", index): 0.01 for index in range(1, 17)}, budget)
    assert len(calls) <= budget


def test_expected_speed_is_the_formula() -> None:
    speed, gamma = expected_speed(0.9, 0.3, lambda rows: 1 + 0.05 * (rows - 1))
    by_gamma = {g: sum(0.9**k for k in range(g + 1)) / (0.3 * g + 1 + 0.05 * g) for g in range(1, 17)}
    assert gamma == max(by_gamma, key=lambda g: by_gamma[g])
    assert speed == pytest.approx(by_gamma[gamma])
    assert expected_speed(0.4, 0.9, lambda rows: 1.0 * rows) == (1.0, 0)
