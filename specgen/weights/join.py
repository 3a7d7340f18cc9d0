"""Several linears over the same inputs as one: one product in place of three.

Knows: which packed weights can stand in one tensor; no number changes. Does not know: what the linears are for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specgen.weights.packed import Codebook4, Dense, Fp8, GroupedInt4, GroupedInt8, GroupValues, Nested, QuantLinear


def joined(weights: Sequence[QuantLinear]) -> QuantLinear | None:
    """The outputs of all `weights` (N_i, K) one behind the other, (ΣN_i, K), or None where they are packed too
    differently."""
    first = weights[0]
    if any(type(weight) is not type(first) or weight.shape[1] != first.shape[1] for weight in weights):
        return None
    if isinstance(first, Dense):
        return _dense([weight for weight in weights if isinstance(weight, Dense)])
    if isinstance(first, GroupedInt4):
        return _int4([weight for weight in weights if isinstance(weight, GroupedInt4)])
    if isinstance(first, GroupedInt8):
        return _int8([weight for weight in weights if isinstance(weight, GroupedInt8)])
    if isinstance(first, Fp8):
        return _fp8([weight for weight in weights if isinstance(weight, Fp8)])
    if isinstance(first, Codebook4):
        return _codebook([weight for weight in weights if isinstance(weight, Codebook4)])
    return None


def _dense(weights: Sequence[Dense]) -> Dense | None:
    if len({weight.weight.dtype for weight in weights}) > 1:
        return None
    return Dense(torch.cat([weight.weight for weight in weights]), _bias(weights))


def _int4(weights: Sequence[GroupedInt4]) -> GroupedInt4 | None:
    scale, low = _values([weight.scale for weight in weights]), _values([weight.min for weight in weights])
    if scale is None or low is None or not _same_order(weights) or len({weight.group for weight in weights}) > 1:
        return None
    nibbles = torch.cat([weight.nibbles for weight in weights])
    return replace(weights[0], nibbles=nibbles, scale=scale, min=low, bias=_bias(weights))


def _int8(weights: Sequence[GroupedInt8]) -> GroupedInt8 | None:
    scale = _values([weight.scale for weight in weights])
    lows = [weight.min for weight in weights if weight.min is not None]
    low = _values(lows) if lows else None
    unlike = len(lows) not in (0, len(weights)) or (lows and low is None)
    if scale is None or unlike or not _same_order(weights) or len({weight.group for weight in weights}) > 1:
        return None
    q = torch.cat([weight.q for weight in weights])
    return replace(weights[0], q=q, scale=scale, min=low, bias=_bias(weights))


def _fp8(weights: Sequence[Fp8]) -> Fp8 | None:
    blocks = {weight.block for weight in weights}
    if len(blocks) > 1 or any(weight.shape[0] % weight.block[0] for weight in weights[:-1]):
        if len({weight.block[1] for weight in weights}) > 1:
            return None
        weights = [weight.rows(0, weight.shape[0]) for weight in weights]  # a scale for each output
    scale = torch.cat([weight.scale for weight in weights])
    # e4m3 is moved as bytes: torch.cat does not take it everywhere.
    q = torch.cat([weight.q.view(torch.uint8) for weight in weights]).view(torch.float8_e4m3fn)
    return Fp8(q, scale, weights[0].block, _bias(weights))


def _codebook(weights: Sequence[Codebook4]) -> Codebook4 | None:
    scale = _values([weight.scale for weight in weights])
    same = all(torch.equal(weight.code, weights[0].code) and weight.group == weights[0].group for weight in weights)
    if scale is None or not same:
        return None
    return replace(
        weights[0], nibbles=torch.cat([weight.nibbles for weight in weights]), scale=scale, bias=_bias(weights)
    )


def _bias(weights: Sequence[QuantLinear]) -> Tensor | None:
    """(ΣN_i,), zeros where a weight has none."""
    biases = [weight.bias for weight in weights]
    like = next((bias for bias in biases if bias is not None), None)
    if like is None:
        return None
    parts = zip(biases, weights, strict=True)
    return torch.cat([like.new_zeros(weight.shape[0]) if bias is None else bias for bias, weight in parts])


def _values(parts: Sequence[GroupValues]) -> GroupValues | None:
    nested = [part for part in parts if isinstance(part, Nested)]
    plain = [part for part in parts if isinstance(part, Tensor)]
    if len(nested) == len(parts):
        inner, outer = _stacked([part.inner for part in nested]), _stacked([part.outer for part in nested])
        return None if inner is None or outer is None else Nested(inner, outer)
    return _stacked(plain) if len(plain) == len(parts) else None


def _stacked(tensors: Sequence[Tensor]) -> Tensor | None:
    if len({(tensor.dtype, tensor.shape[1:]) for tensor in tensors}) > 1:
        return None
    return torch.cat(list(tensors))


def _same_order(weights: Sequence[GroupedInt4] | Sequence[GroupedInt8]) -> bool:
    """Whether all columns stand in the same order of inputs."""
    first = weights[0].perm
    if first is None:
        return all(weight.perm is None for weight in weights)
    return all(weight.perm is not None and torch.equal(weight.perm, first) for weight in weights)
