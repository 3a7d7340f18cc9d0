"""From tensors by name to a model's weights: fused, tied, biased, missing and contradictory ones."""

from __future__ import annotations

import pytest
import torch
from test_kernels_reference import packed_weights
from tiny import MemoryCheckpoint, tiny_spec
from torch import Tensor

from specgen.errors import ModelError
from specgen.model.spec import LayerSpec, ModelSpec, MoeSpec
from specgen.model.weights import MoeWeights, load_weights
from specgen.weights.packed import GroupedInt4, Nested
from specgen.weights.reorder import reorder_outputs

CPU = torch.device("cpu")


def tensors(spec: ModelSpec) -> dict[str, Tensor]:
    """A complete llama checkpoint with distinct values."""
    q, kv, h, i = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.hidden, spec.intermediate
    shapes = {"model.embed_tokens": (spec.vocab, h), "lm_head": (spec.vocab, h), "model.norm": (h,)}
    for layer in range(len(spec.layers)):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm": (h,),
            prefix + "post_attention_layernorm": (h,),
            prefix + "self_attn.q_proj": (q, h),
            prefix + "self_attn.k_proj": (kv, h),
            prefix + "self_attn.v_proj": (kv, h),
            prefix + "self_attn.o_proj": (h, q),
            prefix + "mlp.gate_proj": (i, h),
            prefix + "mlp.up_proj": (i, h),
            prefix + "mlp.down_proj": (h, i),
        }
    generator = torch.Generator().manual_seed(3)
    return {f"{name}.weight": torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def test_separate_weights_and_biases() -> None:
    spec = tiny_spec()
    stored = tensors(spec)
    stored["model.layers.1.self_attn.k_proj.bias"] = torch.arange(32.0)
    checkpoint = MemoryCheckpoint(stored)
    weights = load_weights(checkpoint, spec, CPU)
    layer = weights.layers[1]
    assert torch.equal(layer.k.dequantize(), stored["model.layers.1.self_attn.k_proj.weight"])
    assert torch.equal(layer.k.bias, torch.arange(32.0))
    assert layer.q.bias is None
    assert torch.equal(weights.head.dequantize(), stored["lm_head.weight"])
    assert torch.equal(weights.norm, stored["model.norm.weight"])
    assert layer.after_attention is None


def test_layers_are_read_one_at_a_time_and_given_back() -> None:
    checkpoint = MemoryCheckpoint(tensors(tiny_spec()))
    weights = load_weights(checkpoint, tiny_spec(), CPU)
    assert len(weights.layers) == 2
    assert checkpoint.released == 0
    for count, _ in enumerate(weights.layers, start=1):
        assert checkpoint.released == count
    assert len(weights.layers[:1]) == 1
    with pytest.raises(IndexError):
        weights.layers[2]


def test_fused_modules_are_cut_in_order() -> None:
    spec = tiny_spec()
    stored = tensors(spec)
    plain = dict(stored)
    for layer in range(2):
        attention, mlp = f"model.layers.{layer}.self_attn.", f"model.layers.{layer}.mlp."
        parts = [stored.pop(f"{attention}{name}_proj.weight") for name in "qkv"]
        stored[attention + "qkv_proj.weight"] = torch.cat(parts)
        stored[attention + "qkv_proj.bias"] = torch.arange(128.0)
        parts = [stored.pop(f"{mlp}{name}_proj.weight") for name in ("gate", "up")]
        stored[mlp + "gate_up_proj.weight"] = torch.cat(parts)
    layer = load_weights(MemoryCheckpoint(stored), spec, CPU).layers[1]
    for name, linear in (("q", layer.q), ("k", layer.k), ("v", layer.v)):
        assert torch.equal(linear.dequantize(), plain[f"model.layers.1.self_attn.{name}_proj.weight"])
    assert layer.v.bias.tolist() == list(range(96, 128))
    assert torch.equal(layer.mlp.up.dequantize(), plain["model.layers.1.mlp.up_proj.weight"])


def test_a_tied_head_is_the_embedding_even_when_one_is_stored() -> None:
    weights = load_weights(MemoryCheckpoint(tensors(tiny_spec())), tiny_spec(tied_head=True), CPU)
    assert weights.head is weights.embedding
    prepared: list[object] = []
    mapped = weights.map(lambda linear: prepared.append(linear) or linear)
    assert mapped.head is mapped.embedding
    assert len(prepared) == 1 + 2 * 7


def test_norms_get_the_offset_of_their_family() -> None:
    stored = tensors(tiny_spec())
    weights = load_weights(MemoryCheckpoint(stored), tiny_spec(norm_offset=1.0), CPU)
    assert torch.equal(weights.norm, stored["model.norm.weight"] + 1.0)


@pytest.mark.parametrize(
    ("root", "head"),
    [
        ("model.", "lm_head"),
        ("language_model.model.", "language_model.lm_head"),
        ("model.language_model.", "lm_head"),
    ],
)
def test_the_language_model_inside_a_larger_one(root: str, head: str) -> None:
    stored = {
        name.replace("model.", root).replace("lm_head", head): tensor for name, tensor in tensors(tiny_spec()).items()
    }
    stored["vision_tower.patch_embed.weight"] = torch.zeros(3)
    weights = load_weights(MemoryCheckpoint(stored), tiny_spec(), CPU)
    assert torch.equal(weights.head.dequantize(), stored[f"{head}.weight"])
    assert weights.layers[0].o.shape == (64, 64)


def test_experts_and_their_router() -> None:
    moe = MoeSpec(3, 2, 32, True, "block_sparse_moe", ("w1", "w3", "w2"))
    spec = tiny_spec(layers=(LayerSpec(moe=moe),))
    stored = tensors(spec)
    stored["model.layers.0.block_sparse_moe.gate.weight"] = torch.randn(3, 64)
    for expert in range(3):
        for name, shape in (("w1", (32, 64)), ("w2", (64, 32)), ("w3", (32, 64))):
            key = f"model.layers.0.block_sparse_moe.experts.{expert}.{name}.weight"
            stored[key] = torch.full(shape, float(expert) + int(name[1]) / 10)
    mlp = load_weights(MemoryCheckpoint(stored), spec, CPU).layers[0].mlp
    assert isinstance(mlp, MoeWeights)
    assert mlp.router.shape == (3, 64)
    assert float(mlp.experts[2].up.dequantize()[0, 0]) == pytest.approx(2.3)
    assert float(mlp.experts[1].down.dequantize()[0, 0]) == pytest.approx(1.2)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("model.layers.1.mlp.down_proj.weight", None, "model.layers.1.mlp.down_proj.weight is missing"),
        ("lm_head.weight", None, "lm_head.weight is missing"),
        ("model.embed_tokens.weight", None, "no tensor model.embed_tokens.weight"),
        ("model.norm.weight", None, "model.norm.weight is missing"),
        ("model.layers.0.input_layernorm.weight", None, "model.layers.0.input_layernorm.weight is missing"),
        ("model.norm.weight", torch.zeros(63), "model.norm.weight"),
        ("model.norm.weight", torch.full((64,), torch.nan), "not finite"),
        ("model.layers.0.self_attn.q_proj.weight", torch.zeros(64, 60), "model.layers.0.self_attn.q_proj.weight"),
        ("model.embed_tokens.weight", torch.zeros(96, 64), "model.embed_tokens.weight"),
    ],
)
def test_a_bad_tensor_is_named(name: str, change: Tensor | None, message: str) -> None:
    stored = tensors(tiny_spec())
    if change is None:
        del stored[name]
    else:
        stored[name] = change
    with pytest.raises(ModelError) as error:
        list(load_weights(MemoryCheckpoint(stored), tiny_spec(), CPU).layers)
    assert message in error.value.message
    assert "memory.safetensors" in error.value.message


@pytest.mark.parametrize("kind", packed_weights())
def test_outputs_can_be_reordered_without_decoding(kind: str) -> None:
    weight = packed_weights()[kind]
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    moved = reorder_outputs(weight, order)
    assert type(moved) is type(weight)
    assert torch.equal(moved.dequantize(), weight.dequantize()[order])
    assert weight.bias is None or torch.equal(moved.bias, weight.bias[order])


def test_nested_scales_move_with_their_outputs() -> None:
    scale = Nested(torch.arange(1, 9).view(4, 2).to(torch.uint8), torch.arange(1.0, 5.0).view(4, 1))
    nibbles = torch.arange(4 * 32).view(4, 32).to(torch.uint8)
    weight = GroupedInt4(nibbles, scale, scale, 32)
    order = torch.tensor([2, 0, 3, 1])
    assert torch.equal(reorder_outputs(weight, order).dequantize(), weight.dequantize()[order])
