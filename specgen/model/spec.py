"""What a model is, in numbers: everything the decoder needs to know beside the weights.

Knows: `config.json` (or GGUF metadata translated to the same keys) → `ModelSpec`. Does not know: tensors.
A model family that is not known is refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding (RoFormer, 2104.09864), half-split layout as in Hugging Face."""

    theta: float
    dims: int  # rotated dimensions of a head, ≤ head_dim (partial rotary)
    inv_freq: tuple[float, ...]  # (dims / 2,) after the published scaling (linear, llama3, yarn, longrope)
    attention_factor: float = 1.0  # multiplies cos and sin (yarn, longrope)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What may differ from layer to layer."""

    window: int | None = None  # sliding window in tokens: a query sees keys with q_pos - k_pos < window
    rope: RopeSpec | None = None  # None: no positional encoding (NoPE)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only transformer. Sizes in elements, lengths in tokens."""

    family: str  # "llama", "qwen2", …
    vocab: int  # V, rows of the embedding
    hidden: int  # H
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int  # D
    context: int  # longest sequence the model was made for
    norm_eps: float
    layers: tuple[LayerSpec, ...]
    tied_head: bool
    activation: Activation = "silu"
    attention_scale: float = 0.0  # set by the builder; head_dim ** -0.5 unless the family says otherwise
    attention_softcap: float | None = None
    final_softcap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # Granite
    logit_scale: float = 1.0
    qk_norm: bool = False  # per-head RMSNorm on q and k (Qwen3, Gemma 3)
    sandwich_norm: bool = False  # RMSNorm after attention and after the MLP, before the residual add (Gemma 2, 3)
    bos: int | None = None
    eos: tuple[int, ...] = ()
    dtype: str = "float32"  # of the checkpoint, for display
