"""GGUF metadata → the keys of a Hugging Face `config.json`.

Knows: llama.cpp's `{arch}.*` keys (gguf-py's constants.py) and the defaults that llama.cpp has in code where a file
does not say. Does not know: how the container is read, what a decoder does with a key. An architecture that is not
known is refused by name.

Two keys beside Hugging Face's own: `norm_offset_folded` (true: the stored norm weights already contain Gemma's + 1)
and `rope_interleaved` (true: RoPE turns neighbouring pairs, as GLM-4 does in both kinds of file).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specgen.errors import ModelError, nearest

FAMILIES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "phi3": "phi3",
    "granite": "granite",
    "olmo2": "olmo2",
    "smollm3": "smollm3",
    "stablelm": "stablelm",
    "glm4": "glm4",
}
"""general.architecture → model_type."""

GEMMA = ("gemma", "gemma2", "gemma3_text")
FOLDED_QUERY_SCALE_LAYERS = {"gemma2": 46, "gemma3_text": 62}
"""The 27B models scale queries by (hidden / heads) ** -0.5; llama.cpp knows them by their number of layers too."""

MAX_LAYERS = 4096

_FLOATS = {
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_eps",
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


@dataclass(frozen=True, slots=True)
class GgufSource:
    """What the translation reads: metadata, tensor shapes, and float tensors (RoPE factors are stored as tensors)."""

    path: Path
    metadata: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    floats: Callable[[str], list[float]]

    @property
    def arch(self) -> str:
        arch = self.metadata.get("general.architecture")
        if not isinstance(arch, str):
            raise ModelError(f"{self.path}: general.architecture is missing, so the model's kind is unknown")
        return arch

    def get(self, key: str, default: Any = None) -> Any:
        """`{arch}.{key}`; an array whose elements are all equal counts as that element."""
        value = self.metadata.get(f"{self.arch}.{key}", default)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            return value[0].item()
        return value

    def integer(self, key: str, default: int | None = None, most: int = (1 << 31) - 1) -> int:
        """An integer from 1 to `most`. ModelError naming the key otherwise."""
        value = self.get(key, default)
        if value is None:
            raise ModelError(f"{self.path}: metadata key {self.arch}.{key} is missing")
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
            raise ModelError(
                f"{self.path}: metadata key {self.arch}.{key} is {value!r}, not one integer from 1 to {most}"
            )
        return value

    def number(self, key: str) -> float | None:
        """A finite number, or None when the key is absent."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, int | float) or not np.isfinite(value):
            raise ModelError(f"{self.path}: metadata key {self.arch}.{key} is {value!r}, not a finite number")
        return float(value)


def model_type(source: GgufSource) -> str:
    """Hugging Face's name of the architecture. ModelError naming one that is not known."""
    family = FAMILIES.get(source.arch)
    if family is None:
        known = nearest(source.arch, FAMILIES) or "known are " + ", ".join(FAMILIES)
        raise ModelError(f"{source.path}: the architecture {source.arch!r} is not known", hint=known)
    return "mixtral" if family == "llama" and source.get("expert_count", 0) else family


def to_config(source: GgufSource) -> dict[str, Any]:
    """The translated configuration. ModelError names a key that is missing or makes no sense."""
    family = model_type(source)
    config = {"model_type": family, **_sizes(source), **_rope(source), **_tokens(source)}
    for key, name in _FLOATS.items():
        if (value := source.number(key)) is not None:
            config[name] = value
    config["hidden_act"] = "gelu_pytorch_tanh" if family in GEMMA else "silu"
    config.update(_experts(source, family))
    config.update(_family_keys(source, family, config))
    return config


def _sizes(source: GgufSource) -> dict[str, Any]:
    heads = source.integer("attention.head_count")
    embedding = source.shapes.get("token_embd.weight", ())
    if len(embedding) != 2:
        raise ModelError(f"{source.path}: tensor token_embd.weight is missing or has no two dimensions")
    return {
        "vocab_size": embedding[0],
        "hidden_size": source.integer("embedding_length"),
        "intermediate_size": source.integer("feed_forward_length", 1 if source.get("expert_count") else None),
        "num_hidden_layers": source.integer("block_count", most=MAX_LAYERS),
        "num_attention_heads": heads,
        "num_key_value_heads": source.integer("attention.head_count_kv", heads),
        "head_dim": _head_dim(source),
        "max_position_embeddings": source.integer("context_length"),
        "tie_word_embeddings": "output.weight" not in source.shapes,
        "attention_bias": "blk.0.attn_q.bias" in source.shapes,
    }


def _head_dim(source: GgufSource) -> int:
    hidden, heads = source.integer("embedding_length"), source.integer("attention.head_count")
    return source.integer("attention.key_length", hidden // heads)


def _rope(source: GgufSource) -> dict[str, Any]:
    head_dim = _head_dim(source)
    config: dict[str, Any] = {"rope_theta": source.number("rope.freq_base") or 10000.0}
    if (dims := source.integer("rope.dimension_count", head_dim)) != head_dim:
        config["partial_rotary_factor"] = dims / head_dim
    if scaling := _rope_scaling(source):
        config["rope_scaling"] = scaling
        if "original_max_position_embeddings" in scaling:
            config["original_max_position_embeddings"] = scaling["original_max_position_embeddings"]
    return config


def _rope_scaling(source: GgufSource) -> dict[str, Any] | None:
    context = source.integer("context_length")
    original = source.integer("rope.scaling.original_context_length", context)
    if "rope_factors_long.weight" in source.shapes:
        scaling = {
            "rope_type": "longrope",
            "short_factor": source.floats("rope_factors_short.weight"),
            "long_factor": source.floats("rope_factors_long.weight"),
            "original_max_position_embeddings": original,
            "factor": context / original,
        }
        if (attention := source.number("rope.scaling.attn_factor")) is not None:
            scaling["attention_factor"] = attention
        return scaling
    if "rope_freqs.weight" in source.shapes:
        # Llama 3's scaling is stored as its result, a divisor per frequency: longrope with one list says exactly that.
        factors = source.floats("rope_freqs.weight")
        return {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "attention_factor": 1.0,
            "original_max_position_embeddings": context,
            "factor": 1.0,
        }
    return _named_scaling(source, original)


def _named_scaling(source: GgufSource, original: int) -> dict[str, Any] | None:
    kind, factor = source.get("rope.scaling.type", "none"), source.number("rope.scaling.factor")
    if kind == "none" or factor is None:
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise ModelError(
            f"{source.path}: the RoPE scaling {kind!r} is not known", hint="known are linear, yarn, longrope"
        )
    scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    for key, name in (
        ("yarn_beta_fast", "beta_fast"),
        ("yarn_beta_slow", "beta_slow"),
        ("yarn_attn_factor", "attention_factor"),
    ):
        if (value := source.number(f"rope.scaling.{key}")) is not None:
            scaling[name] = value
    return scaling


def _tokens(source: GgufSource) -> dict[str, Any]:
    ids = {key: source.metadata.get(f"tokenizer.ggml.{key}") for key in ("bos_token_id", *_END_KEYS)}
    ends = [ids[key] for key in _END_KEYS if isinstance(ids[key], int)]
    return {"bos_token_id": ids["bos_token_id"], "eos_token_id": list(dict.fromkeys(ends))}


def _experts(source: GgufSource, family: str) -> dict[str, Any]:
    if family not in ("qwen3_moe", "mixtral"):
        return {}
    count, used = source.integer("expert_count"), source.integer("expert_used_count")
    if family == "mixtral":
        return {"num_local_experts": count, "num_experts_per_tok": used}
    return {
        "num_experts": count,
        "num_experts_per_tok": used,
        "moe_intermediate_size": source.integer("expert_feed_forward_length"),
        "norm_topk_prob": True,  # llama.cpp always normalises Qwen3-MoE's weights
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _family_keys(source: GgufSource, family: str, config: Mapping[str, Any]) -> dict[str, Any]:
    keys = _windows(source, family, config["num_hidden_layers"])
    if family in GEMMA:
        keys["norm_offset_folded"] = True
        keys["hidden_activation"] = config["hidden_act"]
    if family in FOLDED_QUERY_SCALE_LAYERS:
        big = config["num_hidden_layers"] == FOLDED_QUERY_SCALE_LAYERS[family]
        keys["query_pre_attn_scalar"] = (
            config["hidden_size"] // config["num_attention_heads"] if big else config["head_dim"]
        )
    if family == "gemma2":
        keys["attn_logit_softcapping"] = config.get("attn_logit_softcapping", 50.0)
        keys["final_logit_softcapping"] = config.get("final_logit_softcapping", 30.0)
    if family == "gemma3_text":
        keys["rope_local_base_freq"] = source.number("rope.freq_base_swa") or 10000.0
    if family == "smollm3":
        keys["no_rope_layers"] = [int((layer + 1) % 4 != 0) for layer in range(config["num_hidden_layers"])]
    if family == "glm4":
        keys["rope_interleaved"] = True
    if family == "stablelm":
        keys["use_parallel_residual"] = bool(source.get("use_parallel_residual", True))
        keys["use_qkv_bias"] = config["attention_bias"]
        keys["qk_layernorm"] = "blk.0.attn_q_norm.weight" in source.shapes
    return keys


def _windows(source: GgufSource, family: str, layers: int) -> dict[str, Any]:
    """Sliding windows: their size and which layers have one."""
    window = source.get("attention.sliding_window", 4096 if family == "gemma2" else 0)
    if not window:
        return {}
    window = source.integer("attention.sliding_window", window)
    pattern = source.metadata.get(f"{source.arch}.attention.sliding_window_pattern")
    if isinstance(pattern, np.ndarray) and len(pattern) == layers:
        sliding = [bool(flag) for flag in pattern]
    elif family in ("gemma2", "gemma3_text"):
        period = source.integer("attention.sliding_window_pattern", 2 if family == "gemma2" else 6)
        sliding = [(layer + 1) % period != 0 for layer in range(layers)]
    else:
        return {"sliding_window": window}
    kinds = ["sliding_attention" if flag else "full_attention" for flag in sliding]
    return {"sliding_window": window, "layer_types": kinds}
