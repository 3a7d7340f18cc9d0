"""`specgen bench --shape`: sizes, random weights, what is measured of them, and the yardstick."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cards import card, needs_card
from cpu import cpu_kernels
from device_ops import ReferenceOps
from tape import Opaque, TapeGraphs
from torch import Tensor
from typer.testing import CliRunner

from specgen.cli.app import app
from specgen.errors import ModelError, UsageError
from specgen.kernels.base import Attend
from specgen.kernels.device import DeviceKernels
from specgen.kernels.reference import ReferenceKernels
from specgen.measure import compiled, shape_bench, shapes
from specgen.measure.compiled import CompiledSpeed, CpuInt4, Yardstick, measure_compiled, timed, unfair
from specgen.measure.random_weights import PACKINGS, Place, Source, find_packing, group_of, random_weights
from specgen.measure.shape_bench import CYCLES, ShapeBench, ShapeRequest, ShapeResult
from specgen.measure.shapes import SHAPES, Shape, find_shape
from specgen.measure.synthetic import GAMMAS, CycleCost, expected_yield, synthetic_table
from specgen.model.build import make_decoder
from specgen.model.decoder import Decoder
from specgen.model.spec import MoeSpec
from specgen.model.weights import LayerWeights, MlpWeights, ModelWeights
from specgen.placement import Placement
from specgen.weights.packed import Dense

CPU = torch.device("cpu")
TINY = Shape(
    "tiny",
    {
        **SHAPES["llama-3.2-1b"].config,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 300,
    },
    draft="tiny",
)
PARAMETERS = {  # as published, in thousands of millions
    "llama-3.1-8b": 8.03,
    "llama-3.2-3b": 3.21,
    "llama-3.2-1b": 1.236,
    "mistral-7b": 7.25,
    "qwen2.5-7b": 7.62,
    "qwen2.5-0.5b": 0.494,
    "qwen3-4b": 4.02,
    "qwen3-0.6b": 0.596,
    "smollm2-1.7b": 1.71,
    "smollm2-135m": 0.1345,
}


# shapes


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_have_the_published_number_of_parameters(name: str) -> None:
    spec = find_shape(name).spec(512)
    attention = 2 * spec.hidden * spec.head_dim * (spec.heads + spec.kv_heads)
    layers = len(spec.layers) * (attention + 3 * spec.hidden * spec.intermediate)
    total = layers + spec.vocab * spec.hidden * (1 if spec.tied_head else 2)
    assert total / 1e9 == pytest.approx(PARAMETERS[name], rel=0.005)
    assert spec.context == 512


def test_drafts_are_shapes_of_the_same_family() -> None:
    for shape in SHAPES.values():
        if shape.draft is not None:
            assert SHAPES[shape.draft].config["model_type"] == shape.config["model_type"]


def test_a_shape_that_is_not_known() -> None:
    with pytest.raises(UsageError, match=r"llama-3\.1-9b") as caught:
        find_shape("llama-3.1-9b")
    assert "llama-3.1-8b" in str(caught.value.hint)


# weights

BITS = {"awq": 4.19, "gptq": 4.19, "int8": 8.02, "fp8": 8.04, "nf4": 4.5, "q4_k_m": 4.63, "bf16": 16.0}


@pytest.mark.parametrize("name", PACKINGS)
def test_packed_weights_have_the_size_and_the_spread_of_real_ones(name: str) -> None:
    weight = find_packing(name).linear(Source(CPU), 512, 768, Place("q", 9, 32))
    dense = weight.dequantize()
    assert dense.shape == weight.shape == (512, 768)
    assert dense.isfinite().all()
    assert float(dense.std()) * 768**0.5 == pytest.approx(1.0, abs=0.12)
    assert abs(float(dense.mean())) * 768**0.5 < 0.15
    assert 8 * weight.nbytes / dense.numel() == pytest.approx(BITS[name], abs=0.05)


def test_the_same_seed_gives_the_same_weights() -> None:
    first, again, other = (
        PACKINGS["awq"].linear(Source(CPU, seed), 64, 256, Place("q")).dequantize() for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_q4_k_m_gives_more_bits_to_half_of_the_sensitive_ones() -> None:
    assert sum(Place("v", layer, 32).more_bits for layer in range(32)) == 16
    assert not any(Place("q", layer, 32).more_bits for layer in range(32))
    assert Place("head").more_bits
    assert find_packing("q4_k_m").linear(Source(CPU), 32, 512, Place("head")).nbytes * 8 / (32 * 512) > 8
    # 576 inputs are no multiple of 256
    assert find_packing("q4_k_m").linear(Source(CPU), 32, 576, Place("q")).shape == (32, 576)


def test_groups_divide_the_inputs() -> None:
    assert [group_of(k, 128) for k in (4096, 576, 192, 36)] == [128, 64, 64, 4]


class Counting:
    """A packing that says how often it was asked."""

    name = "counting"

    def __init__(self) -> None:
        self.made = 0

    def linear(self, source: Source, n: int, k: int, place: Place) -> Dense:
        self.made += 1
        return Dense(torch.zeros(n, k))


def test_layers_are_made_one_at_a_time() -> None:
    packing = Counting()
    weights = random_weights(TINY.spec(64), packing, CPU)
    assert packing.made == 1, "the tied embedding alone"
    layers = iter(weights.layers)
    next(layers)
    assert packing.made == 1 + 7
    next(layers)
    assert packing.made == 1 + 14


def test_biases_and_norms_of_a_family() -> None:
    spec = replace(TINY.spec(64), qk_norm="head", tied_head=False)
    weights = random_weights(spec, PACKINGS["fp8"], CPU, biased=True)
    layer = weights.layers[2]
    assert weights.head is not weights.embedding
    assert layer.q.bias is not None
    assert layer.o.bias is None
    assert layer.q_norm is not None
    assert layer.q_norm.shape == (64,)
    assert layer.after_mlp is None


def test_experts_are_refused() -> None:
    spec = TINY.spec(64)
    moe = replace(spec, layers=(replace(spec.layers[0], moe=MoeSpec(4, 2, 64, True)),))
    with pytest.raises(ModelError):
        random_weights(moe, PACKINGS["awq"], CPU)


@pytest.mark.parametrize("name", PACKINGS)
def test_every_packing_runs(name: str) -> None:
    spec = TINY.spec(64)
    model = make_decoder(spec, random_weights(spec, PACKINGS[name], CPU), cpu_kernels(1))
    out = model.forward([3, 5, 7], Attend.chain(0, 3), model.new_cache(64), last_only=False)
    assert out.logits.isfinite().all()
    assert 0.3 < float(out.logits.std()) < 30
    roles = [role for role, _ in model.linears()]
    assert roles == ["q", "k", "v", "o", "gate", "up", "down"] * 3 + ["head"]


# made-up acceptance


@pytest.mark.parametrize(("acceptance", "gamma"), [(0.3, 4), (0.8, 1), (0.8, 8), (0.9, 16)])
def test_expected_yield_is_what_dice_give(acceptance: float, gamma: int) -> None:
    dice = random.Random(5)
    runs = 20_000

    def accepted() -> int:
        return next((k for k in range(gamma) if dice.random() >= acceptance), gamma)

    assert sum(1 + accepted() for _ in range(runs)) / runs == pytest.approx(expected_yield(acceptance, gamma), rel=0.03)


def test_the_table_takes_the_fastest_depth() -> None:
    cost = CycleCost(lambda rows: 10.0 + 0.2 * rows, draft_ms=1.0, rest_ms=0.1)
    for row in synthetic_table(cost, plain_ms=10.3):
        speeds = [1e3 * sum(row.acceptance**k for k in range(g + 1)) / (g + 10.3 + 0.2 * g) for g in GAMMAS]
        assert row.tok_s == pytest.approx(max(speeds))
        assert row.gamma == GAMMAS[speeds.index(max(speeds))]
        assert row.speedup == pytest.approx(row.tok_s * 10.3e-3)
        assert row.yield_tokens == pytest.approx(expected_yield(row.acceptance, row.gamma))


def test_where_drafts_do_not_pay_it_is_plain_decoding() -> None:
    dear = CycleCost(lambda rows: 10.0 * rows)
    assert [(row.gamma, row.speedup, row.yield_tokens) for row in synthetic_table(dear, 10.0)] == [(0, 1.0, 1.0)] * 7


# measuring


@pytest.fixture(scope="module")
def measured() -> ShapeResult:
    request = ShapeRequest(TINY, PACKINGS["awq"], TINY, context_tokens=40, gamma=3, repeats=2)
    return ShapeBench(request, Placement(cpu_kernels(1))).run()


def test_everything_is_measured(measured: ShapeResult) -> None:
    assert [step.rows for step in measured.steps] == list(range(1, 18))
    assert all(step.ms.middle > 0 for step in measured.steps)
    assert (measured.bandwidth, measured.device, measured.notices) == ("read", "cpu", [])
    assert measured.draft_step is not None
    assert {linear.role: linear.count for linear in measured.linears} == {
        **dict.fromkeys(("q", "k", "v", "o", "gate", "up", "down"), 3),
        "head": 1,
    }
    assert all(speed > 0 for linear in measured.linears for speed in linear.gbps.values())
    assert measured.weights_bytes == sum(linear.nbytes for linear in measured.linears)
    assert measured.reading_ms is not None
    assert measured.reading_ms > 0


def test_cycles_are_those_of_the_engine(measured: ShapeResult) -> None:
    plain, fixed, drafted = measured.cycles
    assert [(cycle.label, cycle.gamma) for cycle in measured.cycles] == [
        ("plain", 0),
        ("fixed draft", 3),
        ("draft model", 3),
    ]
    ms = {step.rows: step.ms.middle for step in measured.steps}
    assert plain.parts_ms == ms[1]
    assert fixed.parts_ms == ms[4]
    assert measured.draft_step is not None
    assert drafted.parts_ms == pytest.approx(3 * measured.draft_step.ms.middle + ms[4])
    for cycle in measured.cycles:
        assert cycle.ms >= cycle.verify_ms > 0
        assert 0 <= cycle.host_ms < cycle.ms
    assert drafted.propose_ms > fixed.propose_ms, "a draft model computes"
    assert len(measured.with_draft) == len(measured.free_drafts) == 7
    assert measured.free_drafts[-1].tok_s >= measured.with_draft[-1].tok_s * 0.5


def test_capacity_holds_every_cycle_even_when_all_is_accepted() -> None:
    request = ShapeRequest(TINY, PACKINGS["awq"], None, context_tokens=40, gamma=16, repeats=1)
    assert request.capacity >= 40 + CYCLES * 17 + 17


def test_on_a_device_steps_and_cycles_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device's decoder over the reference's ops, and graphs that play a tape."""
    graphs = TapeGraphs()
    monkeypatch.setattr(shape_bench, "device_graphs", lambda device, wanted: graphs if wanted else None)
    asked = ShapeRequest(TINY, PACKINGS["gptq"], TINY, context_tokens=8, gamma=2, repeats=1)
    place = Placement(DeviceKernels(Opaque(ReferenceOps()), CPU), card())
    found = ShapeBench(asked, place).run()
    assert found.notices == []
    assert graphs.captured > 0
    assert found.notices == []
    assert (found.device, found.place) == ("cuda:0", "Card sm_89")
    assert [linear.role for linear in found.linears] == ["qkv", "o", "gate_up", "down", "head"]
    assert [cycle.gamma for cycle in found.cycles] == [0, 2, 2]
    before = graphs.captured
    ShapeBench(replace(asked, graphs=False), place)
    assert graphs.captured == before, "--no-graphs"


# the command


@pytest.fixture
def tiny_shapes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPECGEN_CONFIG", str(tmp_path))
    monkeypatch.setitem(shapes.SHAPES, "tiny", TINY)


def bench(*arguments: str) -> tuple[int, str, str]:
    fixed = ["bench", "--shape", "tiny", "--device", "cpu", "--threads", "1", "--rounds", "1", "--ctx", "16"]
    done = CliRunner().invoke(app, [*fixed, *arguments])
    return done.exit_code, done.stdout, done.stderr


def test_tables(tiny_shapes: None) -> None:
    code, shown, said = bench("--quant", "q4_k_m", "--gamma", "2")
    assert code == 0, said
    for words in (
        "tiny in q4_k_m, random weights, draft tiny",
        "Linear kernels",
        "Steps after 16 tokens",
        "a step of the draft",
        "draft model γ 2",
        "Tokens per second if each draft token is right this often, with tiny as draft",
        "t(5) against t(1)",
        "host time of a cycle",
        "torch.compile, int4: not measured: it is for graphics cards",
    ):
        assert words in shown
    assert "goal" not in shown, "goals are for cards"


def test_json(tiny_shapes: None) -> None:
    code, shown, said = bench("--draft", "none", "--json")
    assert code == 0, said
    found = json.loads(shown)
    assert found["schema_version"] == 1
    assert found["result"]["packing"] == "awq"
    assert found["result"]["draft"] is None
    assert found["result"]["with_draft"] == []
    assert len(found["result"]["steps"]) == 17
    assert found["compiled"]["tok_s"] is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--quant", "int5"], "no packing of --shape"),
        (["--draft", "nobody"], "--draft is 'nobody'"),
        (["--gamma", "0"], "--gamma is 0"),
        (["--gamma", "many"], "--gamma is 'many'"),
        (["--rounds", "0"], "--rounds is 0"),
        (["-m", "smollm2-135m"], "--model means nothing with --shape"),
        (["--prompts", "x"], "--prompts means nothing with --shape"),
        (["--csv"], "--csv means nothing with --shape"),
        (["--ngram-store"], "--ngram-store means nothing with --shape"),
    ],
)
def test_what_a_shape_has_not_is_refused(arguments: list[str], words: str, tiny_shapes: None) -> None:
    code, shown, said = bench(*arguments)
    assert (code, shown) == (2, "")
    assert words in said


def test_an_unknown_shape_and_one_that_does_not_fit(tiny_shapes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert bench("--shape", "tinny")[0] == 2

    def full(*arguments: object, **named: object) -> ModelWeights:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB. GPU 0 has 1.00 GiB free.")

    monkeypatch.setattr(shape_bench, "random_weights", full)
    code, _, said = bench()
    assert code == 4
    assert "memory ran out while measuring tiny on cpu: Tried to allocate 9.00 GiB" in said
    assert "Traceback" not in said


def test_standing_choices_of_the_user_are_no_options_of_the_command(tiny_shapes: None, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('model = "smollm2-135m"\nproposer = "ngram"\n')
    assert bench()[0] == 0


# the yardstick


class Remembering(CpuInt4):
    def __init__(self) -> None:
        self.nibbles: list[Tensor] = []

    def pack(self, nibbles: Tensor) -> Tensor:
        self.nibbles.append(nibbles)
        return super().pack(nibbles)


def same_model(step: Yardstick, op: Remembering) -> Decoder:
    """The yardstick's own weights in specgen's decoder."""
    spec = TINY.spec(64)
    made = iter(op.nibbles)

    def dense() -> Tensor:
        nibbles = next(made)
        q = torch.stack((nibbles & 15, nibbles >> 4), -1).flatten(-2).float()
        scale = torch.tensor(q.shape[1] ** -0.5 / 4.6).bfloat16().float()
        return (q - 8) * scale

    def layer() -> LayerWeights:
        q, k, v = dense().split([256, 128, 128])
        o, gate, up, down = (Dense(dense()) for _ in range(4))
        ones = torch.ones(spec.hidden)
        mlp = MlpWeights(gate, up, down)
        return LayerWeights(Dense(q), Dense(k), Dense(v), o, mlp, ones, None, ones, None)

    layers = tuple(layer() for _ in spec.layers)
    embedding = Dense(step._embedding.float())
    return Decoder(spec, ModelWeights(embedding, layers, torch.ones(spec.hidden), embedding), ReferenceKernels())


def test_the_yardstick_decodes_as_the_model_does() -> None:
    torch.manual_seed(11)
    op = Remembering()
    with torch.inference_mode():
        step = Yardstick(TINY.spec(64), op, CPU)
        model = same_model(step, op)
        cache = model.new_cache(64)
        token = 17
        for position in range(12):
            ours = model.forward([token], Attend.chain(position, 1), cache, last_only=True).logits[0]
            theirs = int(step(torch.tensor([token]), torch.tensor([position])))
            assert float(ours.max() - ours[theirs]) < 0.15, "but for bfloat16's rounding the likeliest"
            token = int(ours.argmax())


def test_the_yardstick_is_timed() -> None:
    seen: list[int] = []

    def step(token: Tensor, position: Tensor) -> Tensor:
        seen.append(int(position))
        return token + 1

    speed = timed(step, 40, CPU)
    assert seen == list(range(40, 40 + compiled.WARM_TOKENS + compiled.TOKENS))
    assert speed.tok_s is not None
    assert speed.tok_s > 0


def request(packing: str, shape: Shape = TINY) -> ShapeRequest:
    return ShapeRequest(shape, PACKINGS[packing], None, 16, 2, 1)


@pytest.mark.parametrize(
    ("asked", "place", "words"),
    [
        (request("awq"), Placement(cpu_kernels(1)), "for graphics cards"),
        (request("awq"), Placement(cpu_kernels(1), card(0, "Old", (7, 5))), "compute capability 8.0"),
        (request("fp8"), Placement(cpu_kernels(1), card()), "--quant awq or gptq"),
        (request("awq", SHAPES["smollm2-135m"]), Placement(cpu_kernels(1), card()), "multiples of 128"),
        (request("awq", SHAPES["qwen3-4b"]), Placement(cpu_kernels(1), card()), "is a Llama"),
    ],
)
def test_when_the_comparison_would_not_be_fair(asked: ShapeRequest, place: Placement, words: str) -> None:
    assert words in str(measure_compiled(asked, place).skipped)


def test_a_yardstick_that_breaks_or_finds_no_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Placement(cpu_kernels(1), card())
    assert unfair(request("awq"), place) is None

    def broken(*arguments: object) -> Yardstick:
        raise RuntimeError("no kernel\nmore")

    monkeypatch.setattr(compiled, "Yardstick", broken)
    assert measure_compiled(request("awq"), place) == CompiledSpeed(
        skipped="torch.compile failed: RuntimeError: no kernel"
    )

    def full(*arguments: object) -> Yardstick:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.")

    monkeypatch.setattr(compiled, "Yardstick", full)
    assert measure_compiled(request("awq"), place) == CompiledSpeed(
        skipped="memory ran out: Tried to allocate 9.00 GiB"
    )


@pytest.mark.cuda
@needs_card
def test_a_shape_on_this_machine_s_card() -> None:
    done = CliRunner().invoke(app, ["bench", "--shape", "smollm2-1.7b", "--device", "cuda", "--rounds", "3", "--json"])
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)["result"]
    assert found["bandwidth"] == "copy"
    assert all(step["device_ms"] > 0 for step in found["steps"])
    assert found["notices"] == [], "steps are recorded"
