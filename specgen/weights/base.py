"""The two interfaces of this package: a checkpoint (name → tensor) and a weight format (tensors → QuantLinear).

Knows: names are Hugging Face module names (`model.layers.0.self_attn.q_proj`), whatever the file calls them.
Does not know: what a model does with a weight.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from specgen.weights.packed import QuantLinear


class Checkpoint(Protocol):
    """Tensors on disk by name, read lazily by memory map. Bounds are checked before anything is read."""

    path: Path

    @property
    def config(self) -> Mapping[str, Any]:
        """`config.json` of the model (for GGUF: its metadata translated into the same keys)."""
        ...

    def names(self) -> Collection[str]:
        """Every tensor name, e.g. `model.layers.0.self_attn.q_proj.weight`."""
        ...

    def tensor(self, name: str) -> Tensor:
        """The stored tensor as it is (a view of the map where possible). ModelError when absent or out of bounds."""
        ...

    def release(self) -> None:
        """Tell the system that the pages read so far are not needed again."""
        ...

    def digest(self) -> str:
        """A short hash that changes when the weights do (plans and caches are keyed by it)."""
        ...


class WeightFormat(Protocol):
    """One way of packing a linear layer in a file."""

    @property
    def name(self) -> str:
        """What `specgen models show` prints, e.g. "gguf Q4_1", "awq gemm"."""
        ...

    def claims(self, checkpoint: Checkpoint, key: str) -> bool:
        """Whether the tensors of module `key` are in this format: decided by content, never by a file's name."""
        ...

    def linear(self, checkpoint: Checkpoint, key: str, shape: tuple[int, int], device: torch.device) -> QuantLinear:
        """Module `key` (no `.weight`) as a packed weight. ModelError names file and tensor when they contradict."""
        ...
