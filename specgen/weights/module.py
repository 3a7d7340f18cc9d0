"""The tensors of one linear module, read with suspicion: what every format shares.

Knows: which checks a stored tensor must pass before its numbers are used, and how a failure is told. Does not know: any
format.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specgen.errors import ModelError
from specgen.weights.base import Checkpoint

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
CONTRADICTION = "the configuration and the weights belong to different models"


def quant_config(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """`quantization_config` of config.json (older files: `compression_config`); empty when there is none."""
    for key in ("quantization_config", "compression_config"):
        value = checkpoint.config.get(key)
        if isinstance(value, Mapping):
            return value
        if value is not None:
            raise ModelError(f"{checkpoint.path}: {key} in config.json is no object")
    return {}


def quant_method(checkpoint: Checkpoint) -> str | None:
    """`quant_method` in lower case, or None where config.json does not say."""
    method = quant_config(checkpoint).get("quant_method")
    return method.lower() if isinstance(method, str) else None


def compact(values: Tensor) -> Tensor:
    """The same numbers as float16 where that is exact, else as float32."""
    half = values.to(torch.float16)
    return half if torch.equal(half.float(), values.float()) else values.float()


@dataclass(frozen=True, slots=True)
class Module:
    """Tensors named `{key}.{suffix}` of a checkpoint."""

    checkpoint: Checkpoint
    key: str

    def has(self, suffix: str) -> bool:
        return f"{self.key}.{suffix}" in self.checkpoint.names()

    def packed_as(self, suffix: str) -> bool:
        """Whether `suffix` is the module's weight: with a plain `weight` beside it, the module was left as it was."""
        return self.has(suffix) and not self.has("weight")

    def error(self, suffix: str, what: str, hint: str | None = None) -> ModelError:
        return ModelError(f"{self.checkpoint.path}: tensor {self.key}.{suffix} {what}", hint)

    def raw(self, suffix: str) -> Tensor:
        """A tensor as it is stored, of any shape and dtype."""
        return self.checkpoint.tensor(f"{self.key}.{suffix}")

    def tensor(self, suffix: str, shape: tuple[int, ...], *dtypes: torch.dtype) -> Tensor:
        """A tensor that must have this shape and one of `dtypes`."""
        tensor = self.raw(suffix)
        if tensor.dtype not in dtypes:
            expected = " or ".join(str(dtype) for dtype in dtypes)
            raise self.error(suffix, f"is {tensor.dtype}, not {expected}", CONTRADICTION)
        if tuple(tensor.shape) != shape:
            raise self.error(suffix, f"has the shape {tuple(tensor.shape)}, not {shape}", CONTRADICTION)
        return tensor

    def floats(self, suffix: str, shape: tuple[int, ...], *dtypes: torch.dtype) -> Tensor:
        """A tensor of finite float16, bfloat16 or float32 numbers (or only `dtypes`)."""
        return self.finite(suffix, self.tensor(suffix, shape, *(dtypes or FLOATS)))

    def finite(self, suffix: str, values: Tensor) -> Tensor:
        """`values` as they are. ModelError when one is infinite or no number."""
        if not bool(values.isfinite().all()):
            raise self.error(suffix, "holds values that are not finite", "the file is corrupted; fetch it again")
        return values

    def bias(self, outputs: int) -> Tensor | None:
        """(N,) float32, or None for a module without one."""
        return self.floats("bias", (outputs,)).float() if self.has("bias") else None

    def group(self, inputs: int, size: object, suffix: str) -> int:
        """The inputs that share a scale; -1 or None: all of them. ModelError when `size` does not divide `inputs`."""
        if size is None or size == -1:
            return inputs
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise self.error(suffix, f"cannot be in groups of {size!r}", CONTRADICTION)
        if inputs % size:
            raise self.error(suffix, f"has {inputs} inputs, which groups of {size} do not divide", CONTRADICTION)
        return size
