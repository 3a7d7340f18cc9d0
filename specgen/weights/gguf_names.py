"""GGUF tensor names → Hugging Face names.

Knows: what llama.cpp's converters rename (gguf-py's tensor_mapping.py, read the other way round) and which
architectures have their query and key rows interleaved. Does not know: shapes, bytes.
"""

from __future__ import annotations

import re

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

_SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

_BLOCK_BY_FAMILY = {
    "gemma2": _SANDWICH,
    "gemma3_text": _SANDWICH,
    "olmo2": {
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    "glm4": {
        "post_attention_norm": "post_self_attn_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
        "ffn_up": "mlp.gate_up_proj",
    },
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
    "stablelm": {"attn_q_norm": "self_attn.q_layernorm", "attn_k_norm": "self_attn.k_layernorm"},
    "qwen3_moe": {"ffn_gate_inp": "mlp.gate"},
    "mixtral": {"ffn_gate_inp": "block_sparse_moe.gate"},
}

_EXPERTS = {
    "qwen3_moe": (
        "mlp.experts",
        {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"},
    ),
    "mixtral": ("block_sparse_moe.experts", {"ffn_gate_exps": "w1", "ffn_up_exps": "w3", "ffn_down_exps": "w2"}),
}

INTERLEAVED = frozenset({"llama", "mixtral", "granite", "smollm3"})
"""Families whose converter reorders q and k rows for RoPE over neighbouring pairs (LlamaModel.permute in llama.cpp)."""

_PATTERN = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")


def hf_name(name: str, family: str) -> str:
    """`blk.0.attn_q.weight` → `model.layers.0.self_attn.q_proj.weight`; a name without a counterpart stays as it is."""
    match = _PATTERN.fullmatch(name)
    if match is None:
        return name
    layer, stem, suffix = match.groups()
    if layer is None:
        return f"{_TOP[stem]}.{suffix}" if stem in _TOP else name
    module = _BLOCK_BY_FAMILY.get(family, {}).get(stem) or _BLOCK.get(stem)
    return name if module is None else f"model.layers.{layer}.{module}.{suffix}"


def expert_names(name: str, family: str, experts: int) -> list[str] | None:
    """The Hugging Face names of the experts stacked in tensor `name`, or None when it holds none."""
    match = _PATTERN.fullmatch(name)
    if match is None or family not in _EXPERTS:
        return None
    layer, stem, suffix = match.groups()
    parent, projections = _EXPERTS[family]
    if stem not in projections:
        return None
    return [f"model.layers.{layer}.{parent}.{expert}.{projections[stem]}.{suffix}" for expert in range(experts)]
