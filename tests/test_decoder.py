"""The decoder's promises, bit for bit: rows, history, trees, rollbacks; and what it says when something breaks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from tiny import Quant, tiny_decoder, tiny_spec, tiny_weights
from torch import Tensor

from specgen.cache import KVCache
from specgen.kernels import reference
from specgen.kernels.base import Attend
from specgen.kernels.reference import ReferenceKernels
from specgen.model.decoder import Decoder, TappedOut
from specgen.model.spec import LayerSpec, MoeSpec
from specgen.model.weights import MlpWeights
from specgen.step import EagerRunner
from specgen.weights.packed import Dense

PROMPT = [(index * 31 + index // 7) % 97 for index in range(70)]
MAX_ROWS = 17


def run(model: Decoder, tokens: Sequence[int], sizes: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Logits of `tokens`, computed in steps of the given sizes (the last one repeated)."""
    cache, runner, parts = model.new_cache(128, dtype), EagerRunner(model), []
    while cache.length < len(tokens):
        size = min(sizes[min(len(parts), len(sizes) - 1)], len(tokens) - cache.length)
        cache.reserve(size)
        rows = tokens[cache.length : cache.length + size]
        parts.append(runner.step(rows, range(-1, size - 1), cache).logits)
        cache.commit(size)
    return torch.cat(parts)


def prefilled(model: Decoder, tokens: Sequence[int]) -> KVCache:
    cache = model.new_cache(128)
    cache.reserve(len(tokens))
    EagerRunner(model).prefill(tokens, cache)
    cache.commit(len(tokens))
    return cache


def siblings(model: Decoder, rows: Sequence[int]) -> Tensor:
    """Logits of `rows` as alternatives for the token after PROMPT[:20]."""
    cache = prefilled(model, PROMPT[:20])
    attend = Attend(20, (-1,) * len(rows), (20,) * len(rows))
    return model.forward(rows, attend, cache, last_only=False).logits


@pytest.mark.parametrize("quant", ["dense", "int4", "int8"])
def test_a_row_does_not_see_its_neighbours(quant: Quant) -> None:
    """R = 1 … 17 rows, in three orders."""
    model = tiny_decoder(quant=quant)
    rows = PROMPT[30 : 30 + MAX_ROWS]
    alone = {row: siblings(model, [row])[0] for row in rows}
    for count in range(1, MAX_ROWS + 1):
        for order in (rows[:count], rows[:count][::-1], sorted(rows[:count])):
            got = siblings(model, order)
            assert all(torch.equal(got[index], alone[row]) for index, row in enumerate(order))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("sizes", [[1], [17], [64], [5, 1, 9, 33], [69, 1]])
def test_history_does_not_matter(sizes: list[int], dtype: torch.dtype) -> None:
    model = tiny_decoder(quant="int4")
    assert torch.equal(run(model, PROMPT, sizes, dtype), run(model, PROMPT, [len(PROMPT)], dtype))


def test_prefill_gives_the_last_row() -> None:
    model = tiny_decoder()
    cache = model.new_cache(128)
    cache.reserve(len(PROMPT))
    out = EagerRunner(model, prefill_rows=16).prefill(PROMPT, cache)
    assert out.logits.shape == (1, 97)
    assert out.hidden.shape == (1, 64)
    assert torch.equal(out.logits[0], run(model, PROMPT, [1])[-1])


def test_a_tree_gives_each_path_its_own_logits() -> None:
    model = tiny_decoder()
    parents = (-1, 0, 0, 1, 1, 2, 5, 6, 6)
    nodes = PROMPT[40:49]
    cache = prefilled(model, PROMPT[:20])
    cache.reserve(len(nodes))
    tree = EagerRunner(model).step(nodes, parents, cache).logits
    for node in range(len(nodes)):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        chain = PROMPT[:20] + [nodes[index] for index in path]
        assert torch.equal(tree[node], run(model, chain, [len(chain)])[-1])


def test_a_kept_path_and_a_rollback_leave_the_cache_of_plain_decoding() -> None:
    model = tiny_decoder()
    cache = prefilled(model, PROMPT[:20])
    runner = EagerRunner(model)
    cache.reserve(4)
    runner.step([PROMPT[20], 3, PROMPT[21], PROMPT[22]], [-1, 0, 0, 2], cache)
    cache.commit([0, 2, 3])
    cache.reserve(5)
    runner.step([9, 8, 7, 6, 5], range(-1, 4), cache)
    cache.rollback()
    cache.rollback(21)
    cache.reserve(2)
    out = runner.step(PROMPT[21:23], [-1, 0], cache)
    assert torch.equal(out.logits, run(model, PROMPT[:23], [1])[21:])


class _BySize(ReferenceKernels):
    """Mutant: sums in another order when there are several rows, as a tuned matrix product does."""

    def linear(self, x: Tensor, weight: Dense) -> Tensor:
        return super().linear(x, weight) if len(x) == 1 else super().linear(x.flip(1), Dense(weight.weight.flip(1)))


class _ByStep(ReferenceKernels):
    """Mutant: attention folds the rows of the step apart from the cached ones, so that chunks show."""

    def attention(self, q: Tensor, layer, attend: Attend, scale: float, window, softcap) -> Tensor:  # type: ignore[no-untyped-def]
        rows = []
        for row in range(len(q)):
            k, v = layer.k[:, : attend.start + row + 1], layer.v[:, : attend.start + row + 1]
            scores = q[row].view(len(k), -1, q.shape[-1]) @ k.transpose(1, 2) * scale
            weights = (scores - scores.amax()).exp()
            cut = attend.start
            mixed = weights[..., cut:] @ v[:, cut:] + weights[..., :cut] @ v[:, :cut]
            rows.append((mixed / weights.sum(-1, keepdim=True)).view(q.shape[1:]))
        return torch.stack(rows)


def test_mutants_break_the_promises() -> None:
    rows = PROMPT[30 : 30 + MAX_ROWS]
    by_size = tiny_decoder(kernels=_BySize())
    assert not torch.equal(siblings(by_size, rows)[0], siblings(by_size, rows[:1])[0])
    by_step = tiny_decoder(kernels=_ByStep())
    assert not torch.equal(run(by_step, PROMPT, [33]), run(by_step, PROMPT, [70]))
    # Both are right up to rounding: it is the bits that the tests above look at.
    torch.testing.assert_close(run(by_size, PROMPT, [70]), run(tiny_decoder(), PROMPT, [70]), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(run(by_step, PROMPT, [70]), run(tiny_decoder(), PROMPT, [70]), rtol=1e-3, atol=1e-3)


def interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Mutant: RoPE over neighbouring pairs."""
    even, odd = x[..., 0::2], x[..., 1::2]
    cos, sin = cos[:, None], sin[:, None]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)


def unrotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x


@pytest.mark.parametrize("mutant", [interleaved, unrotated])
def test_the_layout_of_rope_matters(mutant: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """What test_families compares with transformers would see either."""
    right = run(tiny_decoder(), PROMPT, [70])
    monkeypatch.setattr(reference, "rotate", mutant)
    assert not torch.allclose(run(tiny_decoder(), PROMPT, [70]), right, atol=0.1)


def test_heads_share_keys_in_order() -> None:
    """Mutant: query heads spread over the KV heads by turns in place of in groups."""
    model = tiny_decoder()
    right = run(model, PROMPT, [70])
    layers = list(model.weights.layers)
    turned = layers[0].q.weight.view(2, 2, 16, 64).transpose(0, 1).reshape(64, 64)
    layers[0] = replace(layers[0], q=Dense(turned))
    model.weights = replace(model.weights, layers=tuple(layers))
    assert not torch.allclose(run(model, PROMPT, [70]), right, atol=0.1)


def test_experts_run_once_for_all_rows_that_want_them(monkeypatch: pytest.MonkeyPatch) -> None:
    rope = tiny_spec().layers[0].rope
    moe = MoeSpec(experts=6, active=2, intermediate=32, renormalise=True)
    model = tiny_decoder(tiny_spec(layers=(LayerSpec(rope=rope, moe=moe), LayerSpec(rope=rope))))
    whole = run(model, PROMPT, [70])
    assert torch.equal(run(model, PROMPT, [1]), whole)
    ran: list[MlpWeights] = []
    dense = Decoder._dense
    monkeypatch.setattr(Decoder, "_dense", lambda self, h, mlp: (ran.append(mlp), dense(self, h, mlp))[1])
    run(model, PROMPT, [70])
    assert len(ran) <= 6 + 1
    assert len({id(mlp) for mlp in ran}) == len(ran)


# taps, skipped layers, diagnosis


def test_taps_are_the_inputs_of_their_layers() -> None:
    spec, weights = tiny_spec(), tiny_weights(tiny_spec())
    plain, tapped = (Decoder(spec, weights, ReferenceKernels(), taps) for taps in ((), (0, 1)))
    attend = Attend.chain(0, 5)
    expected = plain.forward(PROMPT[:5], attend, plain.new_cache(8), last_only=False)
    out = tapped.forward(PROMPT[:5], attend, tapped.new_cache(8), last_only=True)
    assert isinstance(out, TappedOut)
    assert torch.equal(out.logits[0], expected.logits[-1])
    assert torch.equal(out.taps[0], plain.kernels.embedding(torch.tensor(PROMPT[:5]), plain.weights.embedding))
    without_second = plain.skipping({1}, {1})
    hidden = without_second.forward(PROMPT[:5], attend, plain.new_cache(8), last_only=False).hidden
    assert torch.equal(out.taps[1], hidden)


def test_skipping_leaves_sublayers_out_and_the_model_alone() -> None:
    model = tiny_decoder()
    before = run(model, PROMPT, [70])
    for attention, mlp in (({0}, set()), (set(), {1}), ({0, 1}, {0, 1})):
        view = model.skipping(attention, mlp)
        assert view.weights is model.weights
        assert not torch.allclose(run(view, PROMPT, [70]), before, atol=0.1)
        assert torch.equal(run(view, PROMPT, [1]), run(view, PROMPT, [70]))
    assert torch.equal(run(model.skipping((), ()), PROMPT, [70]), before)
    assert torch.equal(run(model, PROMPT, [70]), before)


def broken(part: str) -> Decoder:
    """A model with one infinite weight."""
    weights = tiny_weights(tiny_spec())
    layers = list(weights.layers)

    def spoil(linear: Dense) -> Dense:
        values = linear.weight.clone()
        values[:, 3] = torch.inf
        return Dense(values)

    if part == "embedding":
        weights = replace(weights, embedding=spoil(weights.embedding))
    elif part == "head":
        weights = replace(weights, head=spoil(weights.head))
    elif part == "attention":
        layers[1] = replace(layers[1], v=spoil(layers[1].v))
    elif part == "mlp":
        layers[0] = replace(layers[0], mlp=replace(layers[0].mlp, down=spoil(layers[0].mlp.down)))
    elif part == "norm":
        weights = replace(weights, norm=weights.norm * torch.nan)
    return Decoder(tiny_spec(), replace(weights, layers=tuple(layers)), ReferenceKernels())


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("nothing", None),
        ("embedding", "model.embed_tokens"),
        ("attention", "model.layers.1.self_attn"),
        ("mlp", "model.layers.0.mlp"),
        ("norm", "model.norm"),
        ("head", "lm_head"),
    ],
)
def test_non_finite_values_are_traced_to_their_module(part: str, name: str | None) -> None:
    model = broken(part)
    cache = model.new_cache(8)
    cache.reserve(3)
    out = EagerRunner(model).step([1, 2, 3], [-1, 0, 1], cache)
    assert bool(out.logits.isfinite().all()) == (name is None)
    assert model.find_non_finite([1, 2, 3], Attend.chain(0, 3), cache) == name


def test_a_diagnosis_changes_nothing() -> None:
    model = tiny_decoder()
    cache = prefilled(model, PROMPT[:20])
    cache.reserve(2)
    before = EagerRunner(model).step(PROMPT[20:22], [-1, 0], cache).logits
    assert model.find_non_finite(PROMPT[20:22], Attend.chain(20, 2), cache) is None
    cache.commit(1)
    cache.reserve(1)
    assert torch.equal(EagerRunner(model).step([PROMPT[21]], [-1], cache).logits, before[1:])
