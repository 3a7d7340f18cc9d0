"""Gemma 3 270M (Q4_K_M: four formats, a window of 512 tokens, 262,144 tokens) against transformers in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specgen.errors import SpecgenError
from specgen.kernels.reference import ReferenceKernels
from specgen.model.decoder import Decoder
from specgen.model.families import spec_from_config
from specgen.model.weights import load_weights
from specgen.options import LoadOptions, RunOptions
from specgen.registry import load_registry, pull, resolve_model
from specgen.session import load
from specgen.step import EagerRunner
from specgen.text.tokenizer import load_tokenizer
from specgen.weights.checkpoint import open_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.network]

PROMPT = "The capital of France is Paris, and the capital of Italy is"
TOKENS = 24
NAMES = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@pytest.fixture(scope="module")
def gemma_path() -> Path:
    try:
        return pull(load_registry().get("gemma3-270m")).target
    except SpecgenError as error:
        pytest.skip(f"Gemma 3 270M is not cached and cannot be fetched: {error.message}")


def oracle(path: Path) -> torch.nn.Module:
    """transformers' Gemma 3 with the weights as gguf-py dequantises them (the file's norms hold the added 1)."""
    from gguf import GGUFReader, dequantize
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        vocab_size=262144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        query_pre_attn_scalar=256,
        sliding_window=512,
        max_position_embeddings=32768,
        rms_norm_eps=1e-6,
        layer_types=["full_attention" if (index + 1) % 6 == 0 else "sliding_attention" for index in range(18)],
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    state = {}
    for tensor in GGUFReader(path).tensors:
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        *block, kind, _ = tensor.name.split(".")
        if kind.endswith("norm"):
            weight = weight - 1.0
        stem = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}.get(kind) or NAMES[kind]
        state[f"model.layers.{block[1]}.{stem}.weight" if block else f"{stem}.weight"] = weight
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model = Gemma3ForCausalLM(config).eval()
    model.load_state_dict(state)
    return model


def test_logits_and_greedy_tokens_equal_transformers(gemma_path: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(gemma_path)
    ids = load_tokenizer(checkpoint, tmp_path).encode(PROMPT, add_special=True)
    assert ids[0] == 2, "Gemma texts begin with BOS"
    with torch.no_grad():
        model = oracle(gemma_path)
        greedy = model.generate(torch.tensor([ids]), max_new_tokens=TOKENS, do_sample=False)[0].tolist()
        expected = model(torch.tensor([greedy[:-1]])).logits[0, len(ids) - 1 :]
    del model
    spec = spec_from_config(checkpoint.config)
    ours = Decoder(spec, load_weights(checkpoint, spec, torch.device("cpu")), ReferenceKernels())
    cache = ours.new_cache(64)
    with cache.transaction(len(greedy) - 1):
        out = EagerRunner(ours).step(greedy[:-1], range(-1, len(greedy) - 2), cache).logits[len(ids) - 1 :]
    assert float((out - expected).abs().max()) < 5e-3
    assert torch.equal(out.argmax(-1), expected.argmax(-1))


def test_speculation_across_the_window_changes_nothing(gemma_path: Path) -> None:
    """600 tokens of prompt, so that every sliding layer has let go of some, with drafts that are rejected."""
    session = load(resolve_model(str(gemma_path), load_registry()), LoadOptions(context_tokens=1024))
    text = "Once there was a fox who counted: " + ", ".join(f"{number} and {number + 1}" for number in range(1, 101))
    prompt = session.prompt_ids(text, raw=True)
    assert len(prompt.ids) > 512
    texts = set()
    for proposer, gamma in (("none", 0), ("ngram", 3), ("ngram", 7), ("ngram", None)):
        *_, last = session.generate(prompt, RunOptions(max_tokens=40, proposer=proposer, gamma=gamma))
        texts.add(last.token_ids)
    assert len(texts) == 1
