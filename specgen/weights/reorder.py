"""The outputs of a packed weight in another order.

Knows: which parts of each kind have a line per output. Does not know: why anyone would want another order.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from torch import Tensor

from specgen.weights.packed import Fp8, Nested, QuantLinear

_PER_OUTPUT = ("weight", "nibbles", "q", "scale", "min", "bias")


def reorder_outputs(weight: QuantLinear, order: Tensor) -> QuantLinear:
    """Output i of the result is output order[i] (N,) of `weight`: lines move whole, so nothing is decoded."""
    if isinstance(weight, Fp8):
        weight = weight.rows(0, weight.shape[0])  # which gives it a scale per output
    changes: dict[str, Any] = {}
    packed: Any = weight
    for field in fields(packed):
        value = getattr(packed, field.name)
        if field.name not in _PER_OUTPUT or value is None:
            continue
        changes[field.name] = (
            Nested(value.inner[order], value.outer[order]) if isinstance(value, Nested) else value[order]
        )
    reordered: QuantLinear = replace(packed, **changes)
    return reordered
