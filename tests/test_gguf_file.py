"""GGUF names, row order and metadata become those of Hugging Face."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf_files import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INTER,
    KV_HEADS,
    VOCAB,
    llama_file,
    model_keys,
    permuted,
    tokenizer_keys,
    weights,
    write_gguf,
)

from specgen.errors import ModelError
from specgen.weights import gguf_file
from specgen.weights.gguf_file import GgufCheckpoint
from specgen.weights.gguf_names import INTERLEAVED, hf_name

Q, K = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"


def config_of(tmp_path: Path, arch: str, extra: dict[str, np.ndarray] | None = None, **changes: Any) -> dict[str, Any]:
    path = tmp_path / "model.gguf"
    keys = {**model_keys(arch, **changes), **tokenizer_keys()}
    return dict(GgufCheckpoint(write_gguf(path, {**weights(), **(extra or {})}, arch=arch, keys=keys)).config)


def test_names_shapes_and_values(tmp_path: Path) -> None:
    checkpoint = GgufCheckpoint(llama_file(tmp_path / "model.gguf"))
    stored = weights()
    expected = {
        "model.embed_tokens.weight": stored["token_embd.weight"],
        "model.norm.weight": stored["output_norm.weight"],
        Q: stored["blk.0.attn_q.weight"],
        K: stored["blk.0.attn_k.weight"],
        "model.layers.0.self_attn.v_proj.weight": stored["blk.0.attn_v.weight"],
        "model.layers.0.self_attn.o_proj.weight": stored["blk.0.attn_output.weight"],
        "model.layers.0.mlp.gate_proj.weight": stored["blk.0.ffn_gate.weight"],
        "model.layers.0.mlp.up_proj.weight": stored["blk.0.ffn_up.weight"],
        "model.layers.0.mlp.down_proj.weight": stored["blk.0.ffn_down.weight"],
        "model.layers.0.input_layernorm.weight": stored["blk.0.attn_norm.weight"],
        "model.layers.0.post_attention_layernorm.weight": stored["blk.0.ffn_norm.weight"],
    }
    assert set(checkpoint.names()) == set(expected)
    for name, values in expected.items():
        assert torch.equal(checkpoint.tensor(name), torch.from_numpy(values)), name


def test_mutant_without_the_permutation_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_file, "_undo_interleaving", lambda rows, heads: rows)
    checkpoint = GgufCheckpoint(llama_file(tmp_path / "model.gguf"))
    stored = weights()
    assert not torch.equal(checkpoint.tensor(Q), torch.from_numpy(stored["blk.0.attn_q.weight"]))
    assert not torch.equal(checkpoint.tensor(K), torch.from_numpy(stored["blk.0.attn_k.weight"]))


def test_biases_are_permuted_like_their_rows(tmp_path: Path) -> None:
    bias = np.arange(HEADS * HEAD_DIM, dtype=np.float32)
    tensors = {**weights(), "blk.0.attn_q.bias": permuted(bias, HEADS)}
    checkpoint = GgufCheckpoint(write_gguf(tmp_path / "model.gguf", tensors))
    assert checkpoint.tensor(Q.replace("weight", "bias")).tolist() == bias.tolist()
    assert checkpoint.config["attention_bias"]


@pytest.mark.parametrize("arch", ["qwen2", "qwen3", "gemma", "gemma3", "phi3", "olmo2"])
def test_other_families_keep_their_rows(arch: str, tmp_path: Path) -> None:
    keys = {**model_keys(arch), **tokenizer_keys()}
    checkpoint = GgufCheckpoint(write_gguf(tmp_path / "model.gguf", weights(), arch=arch, keys=keys))
    assert torch.equal(checkpoint.tensor(Q), torch.from_numpy(weights()["blk.0.attn_q.weight"]))


def test_packed_rows_move_whole(tmp_path: Path) -> None:
    plain = write_gguf(tmp_path / "plain.gguf", weights(), quant="Q8_0", arch="qwen2", keys={
        **model_keys("qwen2"), **tokenizer_keys()
    })  # fmt: skip
    kind, shape, rows = GgufCheckpoint(llama_file(tmp_path / "llama.gguf", "Q8_0")).packed(Q)
    assert (kind, shape, tuple(rows.shape)) == ("Q8_0", (64, 64), (64, 68))
    assert torch.equal(rows, GgufCheckpoint(plain).packed(Q)[2])


def test_llama_config(tmp_path: Path) -> None:
    config = GgufCheckpoint(llama_file(tmp_path / "model.gguf")).config
    expected = {
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INTER,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 128,
        "rope_theta": 1000.0,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "hidden_act": "silu",
    }
    assert {key: config[key] for key in expected} == expected
    assert math.isclose(config["rms_norm_eps"], 1e-5, rel_tol=1e-6)
    assert config["eos_token_id"] == [tokenizer_keys()["tokenizer.ggml.eos_token_id"]]


def test_an_output_matrix_unties_the_head(tmp_path: Path) -> None:
    extra = {"output.weight": weights(1)["token_embd.weight"]}
    assert not config_of(tmp_path, "llama", extra)["tie_word_embeddings"]


def test_llama3_scaling_is_given_as_factors(tmp_path: Path) -> None:
    factors = np.linspace(1, 8, HEAD_DIM // 2, dtype=np.float32)
    scaling = config_of(tmp_path, "llama", {"rope_freqs.weight": factors})["rope_scaling"]
    assert scaling["long_factor"] == scaling["short_factor"] == factors.tolist()
    assert (scaling["rope_type"], scaling["attention_factor"], scaling["factor"]) == ("longrope", 1.0, 1.0)


def test_phi3_longrope_and_fused_names(tmp_path: Path) -> None:
    lists = {f"rope_factors_{kind}.weight": np.full(HEAD_DIM // 2, size, np.float32) for kind, size in
             (("short", 1), ("long", 4))}  # fmt: skip
    changes = {"rope.scaling.original_context_length": 32, "rope.scaling.attn_factor": 1.25}
    config = config_of(tmp_path, "phi3", lists, **changes)
    assert config["rope_scaling"]["long_factor"] == [4.0] * (HEAD_DIM // 2)
    assert config["rope_scaling"]["attention_factor"] == 1.25
    assert config["original_max_position_embeddings"] == 32
    assert hf_name("blk.3.ffn_up.weight", "phi3") == "model.layers.3.mlp.gate_up_proj.weight"
    assert hf_name("blk.3.attn_qkv.weight", "phi3") == "model.layers.3.self_attn.qkv_proj.weight"


@pytest.mark.parametrize(("kind", "keys"), [("linear", {"factor": 2.0}), ("yarn", {"factor": 4.0})])
def test_named_scalings(kind: str, keys: dict[str, float], tmp_path: Path) -> None:
    config = config_of(tmp_path, "qwen2", **{"rope.scaling.type": kind, "rope.scaling.factor": keys["factor"]})
    assert config["rope_scaling"]["rope_type"] == kind
    assert config["rope_scaling"]["factor"] == keys["factor"]


def test_gemma2_defaults_and_windows(tmp_path: Path) -> None:
    config = config_of(tmp_path, "gemma2", block_count=4)
    assert config["norm_offset_folded"] is True
    assert (config["attn_logit_softcapping"], config["final_logit_softcapping"]) == (50.0, 30.0)
    assert config["layer_types"] == ["sliding_attention", "full_attention"] * 2
    assert (config["sliding_window"], config["query_pre_attn_scalar"]) == (4096, HEAD_DIM)
    assert hf_name("blk.0.ffn_norm.weight", "gemma2") == "model.layers.0.pre_feedforward_layernorm.weight"


def test_gemma3_pattern(tmp_path: Path) -> None:
    config = config_of(tmp_path, "gemma3", block_count=7, **{"attention.sliding_window": 16})
    assert config["model_type"] == "gemma3_text"
    assert [kind == "full_attention" for kind in config["layer_types"]] == [False] * 5 + [True, False]
    assert config["rope_local_base_freq"] == 10000.0


def test_granite_multipliers(tmp_path: Path) -> None:
    scales = {"attention.scale": 0.5, "embedding_scale": 12.0, "residual_scale": 0.25, "logit_scale": 8.0}
    config = config_of(tmp_path, "granite", **scales)
    names = ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling")
    assert [config[name] for name in names] == [0.5, 12.0, 0.25, 8.0]


def test_smollm3_layers_without_rope(tmp_path: Path) -> None:
    assert config_of(tmp_path, "smollm3", block_count=4)["no_rope_layers"] == [1, 1, 1, 0]
    assert "smollm3" in INTERLEAVED


@pytest.mark.parametrize(
    ("arch", "family", "names"),
    [
        ("llama", "mixtral", ["block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w2"]),
        ("qwen3moe", "qwen3_moe", ["mlp.experts.{}.gate_proj", "mlp.experts.{}.down_proj"]),
    ],
)
def test_experts_are_slices_of_a_stack(arch: str, family: str, names: list[str], tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    stacks = {
        "blk.0.ffn_gate_exps.weight": random.standard_normal((3, INTER, HIDDEN)).astype(np.float32),
        "blk.0.ffn_down_exps.weight": random.standard_normal((3, HIDDEN, INTER)).astype(np.float32),
    }
    experts = {"expert_count": 3, "expert_used_count": 2, "expert_feed_forward_length": INTER}
    keys = {**model_keys(arch, **experts), **tokenizer_keys()}
    checkpoint = GgufCheckpoint(write_gguf(tmp_path / "m.gguf", {**weights(), **stacks}, arch=arch, keys=keys))
    assert checkpoint.config["model_type"] == family
    assert checkpoint.config["num_experts_per_tok"] == 2
    for name, stack in zip(names, stacks.values(), strict=True):
        for expert in range(3):
            whole = f"model.layers.0.{name.format(expert)}.weight"
            assert torch.equal(checkpoint.tensor(whole), torch.from_numpy(stack[expert]))
            kind, shape, _ = checkpoint.packed(whole)
            assert (kind, shape) == ("F32", stack.shape[1:])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention.head_count": None}, "llama.attention.head_count is missing"),
        ({"attention.head_count": 0}, "llama.attention.head_count is 0"),
        ({"block_count": 1 << 30}, "llama.block_count is"),
        ({"context_length": "long"}, "llama.context_length is 'long'"),
        ({"rope.freq_base": float("nan")}, "llama.rope.freq_base is nan"),
        ({"attention.head_count_kv": [2, 3]}, "head_count_kv"),
        ({"rope.scaling.type": "magic", "rope.scaling.factor": 2.0}, "RoPE scaling 'magic'"),
    ],
)
def test_metadata_that_makes_no_sense(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        config_of(tmp_path, "llama", **changes)
    assert message in caught.value.message


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="'qwen9'") as caught:
        config_of(tmp_path, "qwen9")
    assert "qwen2" in (caught.value.hint or "")


def test_absent_and_packed_tensors_are_named(tmp_path: Path) -> None:
    checkpoint = GgufCheckpoint(llama_file(tmp_path / "model.gguf", "Q4_0"))
    with pytest.raises(ModelError, match=r"tensor lm_head\.weight is missing"):
        checkpoint.tensor("lm_head.weight")
    with pytest.raises(ModelError, match="packed as Q4_0"):
        checkpoint.tensor(Q)
    with pytest.raises(ModelError, match="a matrix is needed"):
        checkpoint.packed("model.norm.weight")


def test_rows_that_heads_do_not_divide(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="64 rows for 5 heads"):
        config_of(tmp_path, "llama", **{"attention.head_count": 5})


def test_split_models_are_refused(tmp_path: Path) -> None:
    keys = {**model_keys(), **tokenizer_keys(), "split.count": 3}
    with pytest.raises(ModelError, match="one of 3 parts"):
        GgufCheckpoint(write_gguf(tmp_path / "model.gguf", weights(), keys=keys))


def test_the_digest_follows_the_weights(tmp_path: Path) -> None:
    first = GgufCheckpoint(llama_file(tmp_path / "a.gguf"))
    same = GgufCheckpoint(llama_file(tmp_path / "b.gguf"))
    other_weights = GgufCheckpoint(write_gguf(tmp_path / "c.gguf", weights(seed=7)))
    other_keys = GgufCheckpoint(llama_file(tmp_path / "d.gguf", context_length=64))
    assert first.digest() == same.digest()
    assert len({checkpoint.digest() for checkpoint in (first, other_weights, other_keys)}) == 3


def test_release_gives_pages_back_and_keeps_values(tmp_path: Path) -> None:
    checkpoint = GgufCheckpoint(llama_file(tmp_path / "model.gguf"))
    view = checkpoint.tensor("model.embed_tokens.weight")
    before = view.clone()
    checkpoint.release()
    assert torch.equal(view, before)
