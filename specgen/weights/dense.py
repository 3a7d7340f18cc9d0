"""Weights that are not packed: float32, float16 and bfloat16, in GGUF and in safetensors files → Dense.

Knows: the three dtypes. Does not know: containers. The result is a view of the file's map on the CPU.
"""

from __future__ import annotations

import torch

from specgen.weights.base import Checkpoint
from specgen.weights.gguf_file import GgufCheckpoint
from specgen.weights.gguf_packed import has_type
from specgen.weights.module import FLOATS, Module
from specgen.weights.packed import Dense as DenseWeight
from specgen.weights.packed import to_device


class Dense:
    """One matrix of floating-point numbers named `key.weight`."""

    name = "dense"

    def claims(self, checkpoint: Checkpoint, key: str) -> bool:
        if isinstance(checkpoint, GgufCheckpoint):
            return has_type(checkpoint, key, ("F32", "F16", "BF16"))
        name = f"{key}.weight"
        return name in checkpoint.names() and checkpoint.tensor(name).dtype in FLOATS

    def linear(self, checkpoint: Checkpoint, key: str, shape: tuple[int, int], device: torch.device) -> DenseWeight:
        module = Module(checkpoint, key)
        weight = module.tensor("weight", shape, *FLOATS)
        return to_device(DenseWeight(weight, module.bias(shape[0])), device)
