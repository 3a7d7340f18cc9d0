"""What a model is, in numbers: everything the decoder needs to know beside the weights.

Knows: sizes, scales, and where the norms of a layer stand. Does not know: tensors, or how `config.json` spells these
things (families).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu_tanh"]

Sublayer = tuple[Literal["attention", "mlp"], int]
"""One half of a layer, by the layer's index."""
Skipped = frozenset[Sublayer]
"""What a draft of the model itself leaves out."""

QkNorm = Literal["head", "projection"]
"""RMSNorm on q and k before RoPE: over each head (Qwen3, Gemma 3), or over all heads together (OLMo 2)."""


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding (RoFormer, 2104.09864), half-split layout as in Hugging Face."""

    theta: float
    dims: int  # rotated dimensions of a head, ≤ head_dim (partial rotary)
    inv_freq: tuple[float, ...]  # (dims / 2,) after the published scaling (linear, llama3, yarn, longrope)
    attention_factor: float = 1.0  # multiplies cos and sin (yarn, longrope)


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """A mixture of experts in place of the MLP: softmax over all, the best few run."""

    experts: int
    active: int  # experts per token
    intermediate: int
    renormalise: bool  # whether the weights of the active experts are made to sum to 1
    module: str = "mlp"  # `{module}.gate` is the router, `{module}.experts.{e}.{name}` the experts
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What may differ from layer to layer."""

    window: int | None = None  # sliding window in tokens: a query sees keys with q_pos - k_pos < window
    rope: RopeSpec | None = None  # None: no positional encoding (NoPE)
    moe: MoeSpec | None = None


@dataclass(frozen=True, slots=True)
class NormNames:
    """Which RMSNorms a layer has, and what they are called."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None  # on the attention's output, before the residual add
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


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
    attention_scale: float  # head_dim ** -0.5 unless the family says otherwise
    activation: Activation = "silu"
    attention_softcap: float | None = None
    final_softcap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what a sublayer adds (Granite)
    logit_scale: float = 1.0
    qk_norm: QkNorm | None = None
    norms: NormNames = NormNames()
    rope_interleaved: bool = False  # stored q and k turn neighbouring pairs (GLM); loading puts them in halves
    norm_offset: float = 0.0  # stored norm weights are w - offset (Gemma: 1)
    bos: int | None = None
    eos: tuple[int, ...] = ()
    dtype: str = "float32"  # of the checkpoint, for display


def workspace_bytes(spec: ModelSpec, prefill_rows: int = 512, step_rows: int = 64) -> int:
    """About what the activations of the widest prefill and the logits of the widest step take, in float32."""
    heads = spec.head_dim * 2 * (spec.heads + spec.kv_heads)
    row = 4 * spec.hidden + 3 * spec.intermediate + heads
    return 4 * (prefill_rows * row + step_rows * (spec.vocab + spec.hidden))
