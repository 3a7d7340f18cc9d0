"""Real models as sizes alone, for measurements that need no files.

Knows: the numbers of their `config.json`. Does not know: weights (random_weights).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from specgen.errors import UsageError, nearest
from specgen.model.families import spec_from_config
from specgen.model.spec import ModelSpec

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@dataclass(frozen=True, slots=True)
class Shape:
    """One model. `draft` is a shape that would draft for it."""

    name: str
    config: Mapping[str, Any]
    draft: str | None = None
    biased: bool = False  # q, k and v have biases

    def spec(self, context_tokens: int) -> ModelSpec:
        """As if the model had been made for `context_tokens`: what is kept for each position stays small."""
        return replace(spec_from_config(self.config), context=context_tokens)


@dataclass(frozen=True, slots=True)
class _Size:
    """(hidden, intermediate, layers, heads, KV heads, head dim)"""

    values: tuple[int, int, int, int, int, int]
    vocab: int
    tied: bool = False
    more: Mapping[str, Any] = field(default_factory=dict)

    def config(self, family: str) -> dict[str, Any]:
        hidden, intermediate, layers, heads, kv_heads, head_dim = self.values
        return {
            "model_type": family,
            "hidden_size": hidden,
            "intermediate_size": intermediate,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "vocab_size": self.vocab,
            "tie_word_embeddings": self.tied,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10_000.0,
            "max_position_embeddings": 32768,
            "hidden_act": "silu",
            **self.more,
        }


def _llama3(factor: float) -> dict[str, Any]:
    return {
        "rope_theta": 500_000.0,
        "rope_scaling": {**_LLAMA3_ROPE, "factor": factor},
        "max_position_embeddings": 131072,
    }


_QWEN: dict[str, Any] = {"rope_theta": 1e6, "rms_norm_eps": 1e-6}
_SMOL: dict[str, Any] = {"rope_theta": 100_000.0}

_SIZES: dict[str, tuple[str, _Size, str | None]] = {
    "llama-3.1-8b": ("llama", _Size((4096, 14336, 32, 32, 8, 128), 128256, more=_llama3(8.0)), "llama-3.2-1b"),
    "llama-3.2-3b": ("llama", _Size((3072, 8192, 28, 24, 8, 128), 128256, True, _llama3(32.0)), "llama-3.2-1b"),
    "llama-3.2-1b": ("llama", _Size((2048, 8192, 16, 32, 8, 64), 128256, True, _llama3(32.0)), None),
    "mistral-7b": ("mistral", _Size((4096, 14336, 32, 32, 8, 128), 32768, more={"sliding_window": None}), None),
    "qwen2.5-7b": ("qwen2", _Size((3584, 18944, 28, 28, 4, 128), 152064, more=_QWEN), "qwen2.5-0.5b"),
    "qwen2.5-0.5b": ("qwen2", _Size((896, 4864, 24, 14, 2, 64), 151936, True, _QWEN), None),
    "qwen3-4b": ("qwen3", _Size((2560, 9728, 36, 32, 8, 128), 151936, True, _QWEN), "qwen3-0.6b"),
    "qwen3-0.6b": ("qwen3", _Size((1024, 3072, 28, 16, 8, 128), 151936, True, _QWEN), None),
    "smollm2-1.7b": ("llama", _Size((2048, 8192, 24, 32, 32, 64), 49152, True, _SMOL), "smollm2-135m"),
    "smollm2-135m": ("llama", _Size((576, 1536, 30, 9, 3, 64), 49152, True, _SMOL), None),
}

SHAPES: dict[str, Shape] = {
    name: Shape(name, size.config(family), draft, biased=family == "qwen2")
    for name, (family, size, draft) in _SIZES.items()
}


def find_shape(name: str) -> Shape:
    """UsageError for a name that is not in SHAPES."""
    found = SHAPES.get(name)
    if found is None:
        raise UsageError(f"--shape {name!r} is not known", nearest(name, SHAPES) or f"known: {', '.join(SHAPES)}")
    return found
