"""Small integers in and out of machine words: what the packed formats share.

Knows: little-endian words whose lowest bits come first, nibbles, zero points, input permutations. Does not know: names,
files, formats.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specgen.weights.packed import GroupedInt4, GroupedInt8, Nested, unpack_nibbles


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """int32 (…, W) → uint8 fields (…, W · 32 / bits), the lowest bits first. bits is 4 or 8."""
    assert bits in (4, 8)
    as_bytes = words.contiguous().view(torch.uint8)
    return as_bytes if bits == 8 else unpack_nibbles(as_bytes)


def pack_nibbles(values: Tensor) -> Tensor:
    """uint8 0…15 (…, K) → bytes (…, K / 2), the low nibble first."""
    return values[..., 0::2] | (values[..., 1::2] << 4)


def swap_nibbles(packed: Tensor) -> Tensor:
    """Bytes whose high nibble comes first → bytes whose low nibble does."""
    return (packed >> 4) | (packed << 4)


def zero_min(zero: Tensor, scale: Tensor) -> Nested:
    """The min of (q - zero) · scale: zero (N, G) integers within ±255, scale (N, G).

    In float32 q · scale, zero · scale and their difference are all exact when scale has 11 significant bits or fewer,
    so W comes out as the tools compute it, (q - zero) · scale, to the last bit.
    """
    inner = -zero.to(torch.int16)
    narrow = inner.to(torch.int8)
    return Nested(narrow if torch.equal(narrow.to(torch.int16), inner) else inner, scale)


def input_order(groups: Tensor, group: int) -> Tensor | None:
    """`g_idx` (K,), the group of each input → perm (K,) int32 that makes groups contiguous; None when they are.

    ValueError when an index is out of range or a group has not exactly `group` inputs.
    """
    inputs = groups.numel()
    groups = groups.long()
    if bool(((groups < 0) | (groups >= inputs // group)).any()):
        raise ValueError(f"holds a group outside 0…{inputs // group - 1}")
    if torch.equal(groups, torch.arange(inputs) // group):
        return None
    if not bool((groups.bincount(minlength=inputs // group) == group).all()):
        raise ValueError(f"does not give {group} inputs to each group")
    return groups.argsort(stable=True).int()


def int4(nibbles: Tensor, scale: Tensor, zero: Tensor, bias: Tensor | None, perm: Tensor | None = None) -> GroupedInt4:
    """(q - zero) · scale. nibbles (N, K / 2) in the order of the inputs, scale and zero (N, G)."""
    if perm is not None:
        nibbles = pack_nibbles(unpack_nibbles(nibbles)[:, perm.long()])
    group = nibbles.shape[1] * 2 // scale.shape[1]
    return GroupedInt4(nibbles, scale, zero_min(zero, scale), group, bias, perm)


def int8(q: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, perm: Tensor | None = None) -> GroupedInt8:
    """(q - zero) · scale. q (N, K) int8 in the order of the inputs, scale and zero (N, G)."""
    if perm is not None:
        q = q[:, perm.long()]
    low = None if zero is None or not bool(zero.any()) else zero_min(zero, scale)
    return GroupedInt8(q, scale, q.shape[1] // scale.shape[1], low, bias, perm)


def signed(fields: Tensor) -> Tensor:
    """uint8 stored + 128 → int8."""
    return (fields ^ 0x80).view(torch.int8)
