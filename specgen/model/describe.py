"""What a checkpoint is, in a few numbers: `specgen models show`.

Knows: every weight's packed size, found by reading the layers one at a time and letting go of them, so that what is
shown is what a run would load (and what cannot be loaded is told). Does not know: how fast any of it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from specgen.model.families import spec_from_config
from specgen.model.spec import ModelSpec
from specgen.model.weights import LayerWeights, MoeWeights, load_weights
from specgen.weights.base import Checkpoint
from specgen.weights.checkpoint import open_checkpoint
from specgen.weights.formats import find_format
from specgen.weights.packed import QuantLinear

_KV_BYTES = 2  # of one number of the KV cache, 16-bit
_EMBEDDING = "embed_tokens"
_NOT_LINEAR = ("norm", "rotary_emb")


@dataclass(frozen=True, slots=True)
class Description:
    """One checkpoint. "Per token" is what one plain decoding step reads."""

    spec: ModelSpec
    formats: Mapping[str, int]  # format → modules packed that way
    parameters: int  # weights of linears and embedding, a tied head counted once
    weight_bytes: int  # packed, in memory
    read_bytes_per_token: int  # of an untied embedding one row, of experts the active ones
    kv_bytes_per_token: int  # 16-bit

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.weight_bytes / self.parameters


@dataclass(slots=True)
class _Sum:
    """Adds up weights; `share` is the part that one step reads."""

    parameters: int = 0
    weight_bytes: int = 0
    read_bytes: float = 0.0

    def add(self, linear: QuantLinear, share: float = 1.0) -> None:
        outputs, inputs = linear.shape
        self.parameters += outputs * inputs
        self.weight_bytes += linear.nbytes
        self.read_bytes += linear.nbytes * share


def describe(path: Path) -> Description:
    """Look at a GGUF file or a folder. ModelError for whatever could not be loaded either."""
    checkpoint = open_checkpoint(path)
    spec = spec_from_config(checkpoint.config)
    weights = load_weights(checkpoint, spec, torch.device("cpu"))
    total = _Sum()
    total.add(weights.embedding, 1.0 if spec.tied_head else 1 / spec.vocab)
    if weights.head is not weights.embedding:
        total.add(weights.head)
    for layer, layer_spec in zip(weights.layers, spec.layers, strict=True):
        moe = layer_spec.moe
        _add_layer(total, layer, 1.0 if moe is None else moe.active / moe.experts)
    kv_bytes = 2 * _KV_BYTES * len(spec.layers) * spec.kv_heads * spec.head_dim
    return Description(
        spec, _formats(checkpoint), total.parameters, total.weight_bytes, round(total.read_bytes), kv_bytes
    )


def _add_layer(total: _Sum, layer: LayerWeights, expert_share: float) -> None:
    for linear in (layer.q, layer.k, layer.v, layer.o):
        total.add(linear)
    mlp = layer.mlp
    if isinstance(mlp, MoeWeights):
        total.add(mlp.router)
    for part in mlp.experts if isinstance(mlp, MoeWeights) else (mlp,):
        for linear in (part.gate, part.up, part.down):
            total.add(linear, expert_share)


def _formats(checkpoint: Checkpoint) -> dict[str, int]:
    """The format of every module of the language model but the norms, the most common first."""
    modules = sorted({name.rpartition(".")[0] for name in checkpoint.names()})
    root = next(module for module in modules if module.endswith(_EMBEDDING)).removesuffix(_EMBEDDING)
    linears = (
        module
        for module in modules
        if module.startswith((f"{root}layers.", root + _EMBEDDING)) or module.endswith("lm_head")
    )
    counts = Counter(find_format(checkpoint, m).name for m in linears if not m.endswith(_NOT_LINEAR))
    return dict(counts.most_common())
