"""The int8 arithmetic of the CPU linears in numpy, one number at a time: slow and obvious."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from specgen.weights.packed import GroupedInt4, GroupedInt8

BLOCK = 32


def quantise_block(x: np.ndarray) -> tuple[np.ndarray, np.float32]:
    """32 activations → int8 numbers and their scale, amax / 127; nothing below 1e-30 counts."""
    amax = np.float32(np.abs(x).max())
    if amax < np.float32(1e-30):
        return np.zeros(len(x), np.int64), np.float32(0)
    inverse = np.float32(127) / amax
    return np.rint(x * inverse).astype(np.int64), amax * np.float32(1 / np.float32(127))


def int_linear(x: Tensor, weight: GroupedInt4 | GroupedInt8) -> Tensor:
    """x (R, K) → (R, N) in float64: exact sums of the integers that the kernels multiply."""
    n, k = weight.shape
    if isinstance(weight, GroupedInt4):
        q = torch.stack((weight.nibbles & 15, weight.nibbles >> 4), -1).reshape(n, k).numpy().astype(np.int64)
    else:
        q = weight.q.numpy().astype(np.int64)
    low = None if weight.min is None else weight.min.double().numpy()
    scale, rows = weight.scale.double().numpy(), (x if weight.perm is None else x[:, weight.perm.long()]).numpy()
    step = min(BLOCK, weight.group) if weight.group != k else BLOCK
    result = np.zeros((len(rows), n))
    for r, row in enumerate(rows):
        for begin in range(0, k, BLOCK):
            numbers, x_scale = quantise_block(row[begin : begin + BLOCK])
            for at in range(begin, min(begin + BLOCK, k), step):
                part = slice(at, min(at + step, k))
                own = numbers[at - begin : at - begin + (part.stop - part.start)]
                group = at // weight.group
                result[r] += scale[:, group] * float(x_scale) * (q[:, part] @ own)
                if low is not None:
                    result[r] += low[:, group] * float(x_scale) * own.sum()
    return torch.from_numpy(result if weight.bias is None else result + weight.bias.double().numpy())
