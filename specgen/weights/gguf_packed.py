"""What the GGUF formats share: finding a module's packed rows and taking fields out of the blocks.

Knows: a row is a run of equal blocks, a block is a few fields one after the other. Does not know: any type's fields.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specgen.weights.base import Checkpoint
from specgen.weights.gguf_file import GgufCheckpoint
from specgen.weights.module import CONTRADICTION, Module


def has_type(checkpoint: Checkpoint, key: str, types: tuple[str, ...]) -> bool:
    """Whether module `key` is one GGUF tensor of one of the ggml `types`."""
    name = f"{key}.weight"
    return isinstance(checkpoint, GgufCheckpoint) and name in checkpoint.names() and checkpoint.type_name(name) in types


@dataclass(frozen=True, slots=True)
class Blocks:
    """A matrix's packed blocks, (N, G, bytes of a block) uint8, G blocks per row."""

    raw: Tensor

    @classmethod
    def of(cls, module: Module, shape: tuple[int, int], block: int) -> Blocks:
        """Blocks of `block` values. ModelError when the tensor has another shape."""
        assert isinstance(module.checkpoint, GgufCheckpoint)
        _, found, rows = module.checkpoint.packed(f"{module.key}.weight")
        if found != shape:
            raise module.error("weight", f"has the shape {found}, not {shape}", CONTRADICTION)
        return cls(rows.reshape(found[0], found[1] // block, -1))

    def field(self, start: int, nbytes: int, dtype: torch.dtype) -> Tensor:
        """Bytes start…start + nbytes - 1 of every block as `dtype`: (N, G, nbytes / size of dtype), a copy."""
        return self.raw[..., start : start + nbytes].contiguous().view(dtype)
