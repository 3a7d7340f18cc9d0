"""The whole-step plan against `Decoder` over the same kernels, op by op: every bit, for every shape a plan covers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cpu import cpu_kernels
from tiny import Quant, tiny_spec, tiny_weights
from torch import Tensor

from specgen.cache import KVCache
from specgen.graph import build_runner
from specgen.kernels.base import NON_FINITE, Attend, Truncation
from specgen.kernels.cpu.ops import CpuKernels, Prepared
from specgen.model.decoder import Decoder
from specgen.model.planned import PlannedDecoder, PlannedRunner, plan_refusal
from specgen.model.spec import LayerSpec, ModelSpec, MoeSpec, NormNames
from specgen.sampling import Drawing
from specgen.step import DrawsRows

TOKENS = [(7 * i + 3) % 97 for i in range(150)]
TREE = (-1, 0, 0, 1, 2, 2, 3, 0, 7)


@pytest.fixture(scope="module", params=[1, 2], ids=["1 thread", "2 threads"])
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    return cpu_kernels(request.param)


def _layers(spec: ModelSpec, **changes: object) -> tuple[LayerSpec, ...]:
    return (replace(spec.layers[0], **changes), *spec.layers[1:])  # type: ignore[arg-type]


BASE = tiny_spec()
ROPE = BASE.layers[0].rope
assert ROPE is not None

SPECS = {
    "llama": BASE,
    "tied": replace(BASE, tied_head=True, embedding_scale=3.0, logit_scale=0.25, residual_scale=0.7),
    "window and no rope": replace(BASE, layers=_layers(BASE, window=17, rope=None)),
    "softcaps": replace(BASE, attention_softcap=5.0, final_softcap=7.0, activation="gelu_tanh"),
    "partial rope": replace(BASE, layers=(LayerSpec(rope=replace(ROPE, dims=8, inv_freq=ROPE.inv_freq[:4])),) * 2),
    "norms per head": replace(BASE, qk_norm="head"),
    "norms after": replace(BASE, qk_norm="projection", norms=NormNames(None, "a", None, "b")),
    "sandwich": replace(BASE, norms=NormNames("a", "b", "c", "d"), residual_scale=0.5),
    "odd sizes": replace(BASE, hidden=96, intermediate=160, heads=3, kv_heads=1, head_dim=32, vocab=101),
}


def _run(model: Decoder, dtype: torch.dtype) -> dict[str, Tensor]:
    """Logits and hidden states of a prefill, single steps, a wide chain and a tree, and the cache they leave."""
    cache = model.new_cache(256, dtype)
    found: dict[str, Tensor] = {}

    def step(name: str, tokens: list[int], attend: Attend, last_only: bool, keep: int) -> None:
        cache.reserve(len(tokens))
        out = model.forward(tokens, attend, cache, last_only)
        cache.commit(keep)
        found[f"{name} logits"], found[f"{name} hidden"] = out.logits, out.hidden

    step("prefill", TOKENS[:60], Attend.chain(0, 60), True, 60)
    step("single", TOKENS[60:61], Attend.chain(60, 1), False, 1)
    step("tree", TOKENS[61 : 61 + len(TREE)], Attend.tree(61, TREE), False, 2)
    step("chain", TOKENS[70:87], Attend.chain(63, 17), False, 17)
    step("wide", TOKENS[87:137], Attend.chain(80, 50), False, 50)
    found |= _cached(cache)
    return found


def _cached(cache: KVCache) -> dict[str, Tensor]:
    return {
        f"layer {index} {name}": getattr(layer, name)[:, : cache.length].clone()
        for index, layer in enumerate(cache.layers)
        for name in ("k", "v", "k_scale", "v_scale")
        if getattr(layer, name) is not None
    }


def _assert_same(planned: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert planned.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(planned[name], value), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_plan_is_bitwise_the_decoder(name: str, dtype: torch.dtype, kernels: CpuKernels) -> None:
    spec = SPECS[name]
    weights = tiny_weights(spec, quant="int4")
    planned = _run(PlannedDecoder(spec, weights, kernels), dtype)
    assert all(value.float().isfinite().all() for value in planned.values())
    _assert_same(planned, _run(Decoder(spec, weights, kernels), dtype))


@pytest.mark.parametrize("quant", ["dense", "int8"])
def test_plan_of_other_weights(quant: Quant, kernels: CpuKernels) -> None:
    weights = tiny_weights(BASE, quant=quant)
    _assert_same(
        _run(PlannedDecoder(BASE, weights, kernels), torch.float32),
        _run(Decoder(BASE, weights, kernels), torch.float32),
    )


def test_a_plan_that_forgets_a_norm_is_caught(kernels: CpuKernels) -> None:
    weights = tiny_weights(BASE, quant="int4")
    planned = PlannedDecoder(BASE, weights, kernels)
    planned._layers[1].before_mlp = planned._layers[0].before_mlp
    with pytest.raises(AssertionError, match="logits"):
        _assert_same(_run(planned, torch.float32), _run(Decoder(BASE, weights, kernels), torch.float32))


def test_skipping_layers(kernels: CpuKernels) -> None:
    weights = tiny_weights(BASE, quant="int4")
    planned, plain = PlannedDecoder(BASE, weights, kernels), Decoder(BASE, weights, kernels)
    for attention, mlp in (([0], []), ([], [1]), ([1], [0, 1])):
        tokens, attend = TOKENS[:5], Attend.chain(0, 5)
        outs = [
            model.skipping(attention, mlp).forward(tokens, attend, model.new_cache(8), False)
            for model in (planned, plain)
        ]
        assert torch.equal(outs[0].logits, outs[1].logits)
        whole = planned.forward(tokens, attend, planned.new_cache(8), False)
        assert not torch.equal(outs[0].logits, whole.logits)


def test_taps_are_honoured(kernels: CpuKernels) -> None:
    weights = tiny_weights(BASE, quant="int4")
    outs = [
        kind(BASE, weights, kernels, taps=[1]).forward(TOKENS[:3], Attend.chain(0, 3), cache, False)
        for kind in (PlannedDecoder, Decoder)
        for cache in [Decoder(BASE, weights, kernels).new_cache(8)]
    ]
    assert torch.equal(outs[0].taps[0], outs[1].taps[0])  # type: ignore[attr-defined]


def _decode(model: Decoder, chunks: list[int], dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits of every token of TOKENS, fed in chunks of these sizes."""
    cache, rows = model.new_cache(256, dtype), []
    for size in chunks:
        start = cache.reserve(size)
        rows.append(model.forward(TOKENS[start : start + size], Attend.chain(start, size), cache, False).logits)
        cache.commit(size)
    return torch.cat(rows), _cached(cache)


def _assert_history_is_forgotten(model: Decoder, dtype: torch.dtype) -> None:
    """One prefill, single steps, and chunks of every width from 1 to 17: same logits, same cache."""
    whole, cached = _decode(model, [150], dtype)
    for chunks in ([1] * 150, [*range(17, 0, -1)][:-2], [*range(1, 17), 14], [64, 64, 22], [63, 2, 85]):
        assert sum(chunks) == 150
        logits, again = _decode(model, chunks, dtype)
        assert torch.equal(logits, whole), "logits"
        _assert_same(again, cached)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_history_does_not_change_a_bit(dtype: torch.dtype, kernels: CpuKernels) -> None:
    _assert_history_is_forgotten(PlannedDecoder(BASE, tiny_weights(BASE, quant="int4"), kernels), dtype)


def test_rows_that_share_a_scale_are_caught(kernels: CpuKernels) -> None:
    class Sharing(CpuKernels):
        """The mutant: one activation scale for all rows of a call."""

        def __init__(self) -> None:
            self.__dict__.update(kernels.__dict__)

        def linear(self, x: Tensor, weight: Prepared) -> Tensor:
            scale = x.abs().max() / 127
            return super().linear((x / scale).round() * scale, weight)

    with pytest.raises(AssertionError, match="logits"):
        _assert_history_is_forgotten(Decoder(BASE, tiny_weights(BASE, quant="int4"), Sharing()), torch.float32)


def test_threads_do_not_change_a_bit() -> None:
    results = []
    for threads in (1, 2, 3):
        model = PlannedDecoder(BASE, tiny_weights(BASE, quant="int4"), cpu_kernels(threads))
        results.append(_run(model, torch.bfloat16))
    _assert_same(results[0], results[1])
    _assert_same(results[0], results[2])


def test_a_tree_row_is_the_row_of_its_own_path(kernels: CpuKernels) -> None:
    """Each node's logits are those of decoding its path alone, token by token."""
    model = PlannedDecoder(BASE, tiny_weights(BASE, quant="int4"), kernels)
    rows = TOKENS[61 : 61 + len(TREE)]

    def steps(token_chunks: list[list[int]], attends: list[Attend]) -> Tensor:
        cache = model.new_cache(256, torch.bfloat16)
        for tokens, attend in zip(token_chunks, attends, strict=True):
            cache.reserve(len(tokens))
            logits = model.forward(tokens, attend, cache, False).logits
            cache.commit(len(tokens))
        return logits

    # Start at 60: the tree crosses the boundary of a KV block, where slots and positions differ most.
    tree = steps([TOKENS[:60], rows], [Attend.chain(0, 60), Attend.tree(60, TREE)])
    for node in range(len(TREE)):
        path = [node]
        while TREE[path[-1]] >= 0:
            path.append(TREE[path[-1]])
        tokens = [[rows[n]] for n in reversed(path)]
        alone = steps(
            [TOKENS[:60], *tokens], [Attend.chain(0, 60), *(Attend.chain(60 + d, 1) for d in range(len(path)))]
        )
        assert torch.equal(alone[0], tree[node]), node
        if node != len(TREE) - 1:
            assert not torch.equal(alone[0], tree[node + 1])  # the check tells rows apart


def test_nan_in_a_weight_reaches_its_logits(kernels: CpuKernels) -> None:
    weights = tiny_weights(BASE, quant="int4")
    weights.norm[3] = float("nan")
    model = PlannedDecoder(BASE, weights, kernels)
    out = model.forward(TOKENS[:4], Attend.chain(0, 4), model.new_cache(8), False)
    assert out.logits.isnan().all()
    assert kernels.argmax(out.logits) == [-1] * 4


def _drawn(model: PlannedDecoder, vocab: int, rows: int = len(TREE)) -> tuple[list[int], Tensor]:
    """Tokens and logits of a tree after 20 tokens, by a runner of a greedy answer."""
    runner, _ = build_runner(model, cache := model.new_cache(64), None)
    assert isinstance(runner, DrawsRows)
    runner.draw_with(Drawing(Truncation(0.0), 1, vocab))
    cache.reserve(20)
    runner.prefill(TOKENS[:20], cache)
    cache.commit(20)
    cache.reserve(rows)
    out = runner.step(TOKENS[40 : 40 + rows], TREE[:rows], cache)
    assert out.drawn is not None
    return list(out.drawn), out.logits


@pytest.mark.parametrize("vocab", [1, 7, 8, 33, 64, 90, 97, 200])
@pytest.mark.parametrize("rows", [1, 2, 5, len(TREE)])
def test_greedy_tokens_come_with_the_logits(kernels: CpuKernels, vocab: int, rows: int) -> None:
    model = PlannedDecoder(BASE, tiny_weights(BASE, quant="int4"), kernels)
    drawn, logits = _drawn(model, vocab, rows)
    assert drawn == kernels.argmax(logits[:, :vocab].contiguous()) == logits[:, :vocab].argmax(-1).tolist()
    if vocab == 97 and rows == len(TREE):
        assert len(set(drawn)) > 2, "the check tells rows apart"


def test_of_equal_logits_the_lowest_id_is_drawn_whichever_thread_saw_it(kernels: CpuKernels) -> None:
    weights = tiny_weights(BASE, quant="int4")
    weights.norm[:] = 0.0
    drawn, logits = _drawn(PlannedDecoder(BASE, weights, kernels), 97)
    assert not logits.any()
    assert drawn == [0] * len(TREE)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_no_token_is_drawn_from_broken_logits(kernels: CpuKernels, value: float) -> None:
    weights = tiny_weights(BASE, quant="int4")
    weights.norm[3] = value
    drawn, logits = _drawn(PlannedDecoder(BASE, weights, kernels), 97)
    assert not logits.isfinite().all(-1).any()
    assert drawn == [NON_FINITE] * len(TREE)


def test_only_greedy_answers_are_drawn_within_the_step(kernels: CpuKernels) -> None:
    model = PlannedDecoder(BASE, tiny_weights(BASE, quant="int4"), kernels)
    cache = model.new_cache(8)
    runner, _ = build_runner(model, cache, None)
    assert isinstance(runner, PlannedRunner)
    cache.reserve(1)
    for drawing in (None, Drawing(Truncation(0.7), 1, 97)):
        runner.draw_with(Drawing(Truncation(0.0), 1, 97))
        runner.draw_with(drawing)
        assert runner.step([1], [-1], cache).drawn is None
    for name in ("tied", "softcaps"):
        scaled = PlannedDecoder(SPECS[name], tiny_weights(SPECS[name], quant="int4"), kernels)
        runner, _ = build_runner(scaled, scaled.new_cache(8), None)
        assert not isinstance(runner, DrawsRows), "what follows the head may make logits equal"


def test_what_a_plan_does_not_cover_runs_op_by_op(kernels: CpuKernels) -> None:
    moe = replace(BASE, layers=_layers(BASE, moe=MoeSpec(4, 2, 64, True)))
    weights = tiny_weights(BASE, quant="int4")
    q = weights.layers[0].q
    perm = torch.randperm(64, generator=torch.Generator().manual_seed(1)).int()
    ordered = replace(weights, layers=(replace(weights.layers[0], q=replace(q, perm=perm)), weights.layers[1]))
    cases = [(moe, tiny_weights(moe, quant="int4"), "mixture"), (BASE, ordered, "order")]
    for spec, case, reason in cases:
        model = PlannedDecoder(spec, case, kernels)
        assert model.refusal is not None
        assert reason in model.refusal
        assert plan_refusal(spec, model.weights) == model.refusal
        _assert_same(_run(model, torch.float32), _run(Decoder(spec, case, kernels), torch.float32))
    assert PlannedDecoder(BASE, weights, kernels).refusal is None
