"""Every model family against transformers on a tiny random model, and the bitwise promises on each of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny import MemoryCheckpoint
from torch import Tensor

from specgen.errors import ModelError
from specgen.kernels.reference import ReferenceKernels
from specgen.model.decoder import Decoder
from specgen.model.families import spec_from_config
from specgen.model.spec import ModelSpec, NormNames
from specgen.model.weights import load_weights
from specgen.step import EagerRunner

transformers = pytest.importorskip("transformers")

TOKENS = [5, 17, 3, 80, 41, 5, 17, 9, 96, 0, 33, 64, 2, 71, 5, 17, 3, 28, 55, 90, 12, 7, 7, 43]
WINDOW = 6
POST = "post_attention_layernorm"

BASE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.25,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

LONG_FACTORS = {"short_factor": [1.0, 1.1, 1.3], "long_factor": [2.0, 4.0, 8.0]}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "llama3": (
        "LlamaConfig",
        {
            "head_dim": 16,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "mistral": ("MistralConfig", {"sliding_window": WINDOW}),
    "mistral without window": ("MistralConfig", {"sliding_window": None, "head_dim": 16}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2 with window": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen2 yarn": (
        "Qwen2Config",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}, "max_position_embeddings": 64},
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "phi3": ("Phi3Config", {"sliding_window": WINDOW}),
    "phi4-mini": (
        "Phi3Config",
        {
            "head_dim": 8,
            "num_attention_heads": 6,
            "original_max_position_embeddings": 64,
            "partial_rotary_factor": 0.75,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.75,
                **LONG_FACTORS,
            },
        },
    ),
    "gemma": ("GemmaConfig", {"head_dim": 16}),
    "gemma2": ("Gemma2Config", {"head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 24}),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "num_hidden_layers": 4,
            "query_pre_attn_scalar": 24,
            "sliding_window_pattern": 3,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
    "smollm3": ("SmolLM3Config", {"num_hidden_layers": 4}),
    "granite": (
        "GraniteConfig",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
            "logits_scaling": 2.0,
        },
    ),
    "olmo2": ("Olmo2Config", {}),
    "glm": ("GlmConfig", {"head_dim": 16, "partial_rotary_factor": 0.5, "attention_bias": True}),
    "glm4": ("Glm4Config", {"head_dim": 16, "partial_rotary_factor": 0.5, "attention_bias": True}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3_moe unnormalised": (
        "Qwen3MoeConfig",
        {"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32},
    ),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}

EXPERTS = {
    "qwen3_moe": ("mlp", ("gate_proj", "up_proj", "down_proj")),
    "mixtral": ("block_sparse_moe", ("w1", "w3", "w2")),
}
_MADE: dict[str, tuple[Any, MemoryCheckpoint]] = {}


def published(model_type: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """transformers' fused experts under the names that checkpoints use."""
    if model_type not in EXPERTS:
        return tensors
    module, (gate, up, down) = EXPERTS[model_type]
    result = {}
    for name, tensor in tensors.items():
        prefix = name.split(".mlp.")[0] + f".{module}."
        if name.endswith("experts.gate_up_proj"):
            for expert, pair in enumerate(tensor):
                halves = pair.chunk(2)
                result[f"{prefix}experts.{expert}.{gate}.weight"] = halves[0]
                result[f"{prefix}experts.{expert}.{up}.weight"] = halves[1]
        elif name.endswith("experts.down_proj"):
            for expert, one in enumerate(tensor):
                result[f"{prefix}experts.{expert}.{down}.weight"] = one
        else:
            result[name.replace(".mlp.gate.weight", f".{module}.gate.weight")] = tensor
    return result


def made(case: str) -> tuple[Any, MemoryCheckpoint]:
    """A transformers model with random weights, and the same weights as a checkpoint."""
    if case not in _MADE:
        kind, changes = CASES[case]
        config = getattr(transformers, kind)(**{**BASE, **changes}, attn_implementation="eager")
        torch.manual_seed(11)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for name, parameter in model.named_parameters():
            # Norms and biases start as constants, which would hide one that is left out.
            if parameter.ndim == 1:
                torch.nn.init.normal_(parameter, 0.0 if name.endswith("bias") or "gemma" in case else 1.0, 0.3)
            elif "experts." in name or name.endswith("gate.weight"):
                torch.nn.init.normal_(parameter, 0.0, 0.25)
        tensors = published(config.model_type, {key: value.detach() for key, value in model.state_dict().items()})
        _MADE[case] = model, MemoryCheckpoint(tensors, config.to_dict())
    return _MADE[case]


def decoder(case: str, spec: ModelSpec | None = None, longest: int | None = None) -> Decoder:
    checkpoint = made(case)[1]
    spec = spec or spec_from_config(checkpoint.config, longest)
    return Decoder(spec, load_weights(checkpoint, spec, torch.device("cpu")), ReferenceKernels())


def logits(model: Decoder, chunks: list[int]) -> Tensor:
    """Logits of all TOKENS, computed in steps of the given sizes."""
    cache, runner, parts = model.new_cache(64), EagerRunner(model), []
    for size in chunks:
        rows = TOKENS[cache.length : cache.length + size]
        cache.reserve(size)
        parts.append(runner.step(rows, range(-1, size - 1), cache).logits)
        cache.commit(size)
    return torch.cat(parts)


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_transformers(case: str) -> None:
    with torch.no_grad():
        expected = made(case)[0](torch.tensor([TOKENS]), use_cache=False).logits[0]
    assert expected.std() > 0.3, "the comparison would not see much"
    torch.testing.assert_close(logits(decoder(case), [len(TOKENS)]), expected, rtol=1e-4, atol=3e-5)


@pytest.mark.parametrize("case", CASES)
def test_logits_do_not_depend_on_steps(case: str) -> None:
    model = decoder(case)
    whole = logits(model, [len(TOKENS)])
    assert torch.equal(logits(model, [1] * len(TOKENS)), whole)
    assert torch.equal(logits(model, [5, 1, 9, 2, 7]), whole)


@pytest.mark.parametrize("case", ["mistral", "qwen2 with window", "gemma2", "gemma3", "phi3", "mixtral"])
def test_rejected_drafts_leave_no_trace(case: str) -> None:
    """A tree of wrong and right tokens is verified at every step, across the edge of a sliding window: the logits of
    the rows that are kept are those of plain decoding, bit for bit."""
    model = decoder(case)
    whole = logits(model, [len(TOKENS)])
    cache, runner = model.new_cache(64), EagerRunner(model)
    while cache.length < len(TOKENS) - 3:
        position = cache.length
        right = TOKENS[position + 1 : position + 3]
        wrong = [(token + 1) % 97 for token in right]
        # Row 0 is pending; 1 and 2 are wrong first, the right path is 3, 4 with a wrong sibling 5.
        rows = [TOKENS[position], wrong[0], right[1], right[0], right[1], wrong[1]]
        cache.reserve(6)
        out = runner.step(rows, [-1, 0, 1, 0, 3, 3], cache)
        assert torch.equal(out.logits[[0, 3, 4]], whole[position : position + 3])
        cache.commit([0, 3])


def test_window_is_seen() -> None:
    """Mutant: without its window a model computes something else, but only past the window's edge."""
    model = decoder("mistral")
    layers = tuple(replace(layer, window=None) for layer in model.spec.layers)
    other = logits(decoder("mistral", replace(model.spec, layers=layers)), [len(TOKENS)])
    whole = logits(model, [len(TOKENS)])
    assert torch.equal(other[:WINDOW], whole[:WINDOW])
    assert not torch.allclose(other[WINDOW:], whole[WINDOW:], atol=1e-3)


@pytest.mark.parametrize(
    ("case", "change"),
    [
        ("gemma2", {"attention_softcap": None}),
        ("gemma2", {"final_softcap": None}),
        ("gemma2", {"norm_offset": 0.0}),
        ("gemma", {"embedding_scale": 1.0}),
        ("gemma", {"activation": "silu"}),
        ("granite", {"residual_scale": 1.0}),
        ("granite", {"logit_scale": 1.0}),
        ("granite", {"attention_scale": 12**-0.5}),
        ("qwen3", {"qk_norm": None}),
        ("olmo2", {"norms": NormNames(before_mlp="post_feedforward_layernorm", before_attention=POST)}),
        ("glm", {"rope_interleaved": False}),
        ("olmo2", {"norms": NormNames(None, POST, None, None)}),
    ],
)
def test_each_trait_matters(case: str, change: dict[str, Any]) -> None:
    """Mutants: leaving out what makes a family special does not pass the comparison with transformers."""
    checkpoint = made(case)[1]
    spec = replace(spec_from_config(checkpoint.config), **change)
    with torch.no_grad():
        expected = made(case)[0](torch.tensor([TOKENS]), use_cache=False).logits[0]
    got = logits(decoder(case, spec), [len(TOKENS)])
    assert not torch.allclose(got, expected, rtol=1e-4, atol=3e-5)


def test_longrope_is_fixed_by_the_longest_sequence() -> None:
    """Beyond the original context all positions, the first too, use the long factors, as transformers does when it is
    given all tokens at once."""
    config = made("phi4-mini")[1].config
    assert spec_from_config(config).context == 64
    assert spec_from_config(config, longest=65).context == 128
    tokens = torch.tensor([[(7 * index) % 97 for index in range(70)]])
    with torch.no_grad():
        expected = made("phi4-mini")[0](tokens, use_cache=False).logits[0]
    model = decoder("phi4-mini", longest=70)
    cache = model.new_cache(70)
    cache.reserve(70)
    got = EagerRunner(model).step(tokens[0].tolist(), range(-1, 69), cache).logits
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=3e-5)


# configs


def plain(**changes: Any) -> dict[str, Any]:
    return {**BASE, "model_type": "llama", **changes}


def test_three_styles_of_config_mean_the_same() -> None:
    llama3 = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    old = plain(rope_theta=5e5, rope_scaling={"type": "llama3", **llama3}, torch_dtype="bfloat16")
    newer = plain(rope_theta=5e5, rope_scaling={"rope_type": "llama3", **llama3}, dtype="bfloat16")
    newest = plain(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **llama3}, dtype="bfloat16")
    spec = spec_from_config(old)
    assert spec_from_config(newer) == spec
    assert spec_from_config(newest) == spec
    assert spec.dtype == "bfloat16"
    assert spec.layers[0].rope is not None
    assert spec.layers[0].rope.theta == 5e5
    assert spec != spec_from_config(plain(rope_theta=5e5, dtype="bfloat16"))


@pytest.mark.parametrize(
    ("rope", "longest", "context"),
    [
        ({"rope_type": "default"}, 500, 128),
        ({"rope_type": "dynamic", "factor": 2.0}, None, 128),
        ({"rope_type": "dynamic", "factor": 2.0}, 200, 200),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, None, 512),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, None, 128),
    ],
)
def test_how_far_a_model_goes(rope: dict[str, Any], longest: int | None, context: int) -> None:
    assert spec_from_config(plain(rope_scaling=rope), longest).context == context


def test_tokens_that_end_an_answer() -> None:
    assert spec_from_config(plain(eos_token_id=[2, 7])).eos == (2, 7)
    assert spec_from_config(plain(eos_token_id=None)).eos == ()
    assert spec_from_config(plain()).bos == 1


def test_a_gemma_gguf_has_its_offset_folded_in() -> None:
    config = {**made("gemma2")[1].config, "norm_offset_folded": True}
    assert spec_from_config(config).norm_offset == 0.0
    assert spec_from_config(made("gemma2")[1].config).norm_offset == 1.0


def test_the_text_part_of_a_model_that_sees() -> None:
    """Gemma 3's multimodal checkpoints leave most of text_config to defaults."""
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "intermediate_size": 10240}
    spec = spec_from_config({"model_type": "gemma3", "eos_token_id": [1, 106], "text_config": text})
    assert (spec.heads, spec.kv_heads, spec.head_dim, spec.vocab) == (8, 4, 256, 262_208)
    assert spec.eos == (1, 106)
    assert [layer.window for layer in spec.layers[:6]] == [4096] * 5 + [None]


@pytest.mark.parametrize(
    ("changes", "message", "hint"),
    [
        ({"model_type": "lama"}, "'lama'", "'llama'"),
        ({"model_type": "rwkv"}, "'rwkv'", "known are"),
        ({"model_type": None}, "model family", "known are"),
        ({"hidden_act": "silo"}, "activation 'silo'", "'silu'"),
        ({"quantization_config": {"quant_method": "gptqq"}}, "'gptqq'", "'gptq'"),
        ({"quantization_config": {"quant_method": "hqq"}}, "'hqq'", "known are"),
        ({"quantization_config": "awq"}, "quantization_config is 'awq'", None),
        ({"layer_types": ["full_attention", "linear_attention"]}, "'linear_attention'", None),
        ({"layer_types": ["full_attention"]}, "layer_types", None),
        ({"rope_scaling": {"rope_type": "yarm", "factor": 2.0}}, "'yarm'", "'yarn'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "'factor' is None", None),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}}, "'short_factor' must list 6", None),
        ({"partial_rotary_factor": 0.1}, "1 of 12 dimensions", None),
        ({"num_key_value_heads": 3}, "4 heads over 3", None),
        ({"hidden_size": None}, "hidden_size is missing", "positive integer"),
        ({"hidden_size": -5}, "hidden_size is -5", None),
        ({"hidden_size": True}, "hidden_size is True", None),
        ({"num_hidden_layers": 10**8}, "at most 1024", None),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan", None),
    ],
)
def test_what_is_not_known_is_refused_by_name(changes: dict[str, Any], message: str, hint: str | None) -> None:
    with pytest.raises(ModelError) as error:
        spec_from_config(plain(**changes))
    assert message in error.value.message
    assert hint is None or hint in str(error.value.hint)


def test_a_repository_that_wants_remote_code_is_refused_as_such() -> None:
    config = {"model_type": "newformer", "auto_map": {"AutoModelForCausalLM": "modeling_newformer.Newformer"}}
    with pytest.raises(ModelError, match="code of its own") as caught:
        spec_from_config(config)
    assert "no code" in (caught.value.hint or "")
    with pytest.raises(ModelError) as plain:
        spec_from_config({"model_type": "newformer"})
    assert "code" not in plain.value.message
