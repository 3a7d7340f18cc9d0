"""Random numbers without a state: Philox4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as
1, 2, 3", SC'11; constants and test vectors from Random123).

Knows: the word for (seed, position, token id, purpose) and what follows from it. Does not know: logits.
The counter is (token id, position, purpose, 0), the key is the seed's low and high half; word 0 of the block is used.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from specgen.kernels.base import Noise

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_MASK = 0xFFFFFFFF


Word = TypeVar("Word", Tensor, int)
"""A word, or an int64 tensor of words: the same arithmetic serves both."""


def _multiply(constant: int, word: Word) -> tuple[Word, Word]:
    """High and low 32 bits of constant · word. The int64 product wraps, its bits are those of the uint64 product."""
    product = word * constant
    return (product >> 32) & _MASK, product & _MASK


def philox4x32(counter: tuple[Word, Word, Word, Word], key: tuple[int, int]) -> tuple[Word, Word, Word, Word]:
    """Four words for each counter. Words are ints, or int64 tensors of one shape, with values 0 … 2**32 - 1."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(_MULTIPLIERS[0], c0)
        high1, low1 = _multiply(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def uniforms(noise: Noise, ids: Tensor) -> Tensor:
    """ids (n,) int64 → (n,) float64 in (0, 1): (word + 0.5) · 2⁻³², exact in float64, never 0 or 1."""
    words = (ids, torch.full_like(ids, noise.position), torch.full_like(ids, noise.purpose), torch.zeros_like(ids))
    word = philox4x32(words, (noise.seed & _MASK, noise.seed >> 32))[0]
    return (word.double() + 0.5) * 2.0**-32


def uniform(noise: Noise, token: int) -> float:
    """The same for one token id."""
    word = philox4x32((token, noise.position, int(noise.purpose), 0), (noise.seed & _MASK, noise.seed >> 32))[0]
    return (word + 0.5) * 2.0**-32


def exponentials(noise: Noise, ids: Tensor) -> Tensor:
    """ids (n,) → (n,) float64 standard exponential draws, -log(u)."""
    return -torch.log(uniforms(noise, ids))


def gumbel(noise: Noise, ids: Tensor) -> Tensor:
    """ids (n,) → (n,) float64 standard Gumbel draws G = -log(-log(u)), the noise that `gumbel_argmax` adds to log p."""
    return -torch.log(exponentials(noise, ids))
