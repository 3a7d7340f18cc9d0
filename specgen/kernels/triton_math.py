"""Arithmetic that several Triton kernels share.

Knows: functions of numbers. Does not know: shapes, memory. Everything is written with ops that Triton's interpreter has
too, so no libdevice, and that give the same bits whatever stands in the neighbouring lanes.
"""

from __future__ import annotations

import triton
import triton.language as tl

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_ROUND_MAGIC = tl.constexpr(12582912.0)  # 1.5 · 2**23: adding it leaves no bits behind the point
_SQRT_2_OVER_PI = tl.constexpr(0.7978845608028654)


@triton.jit
def numbers(value):
    """`value`; in float32, as exact, where Triton's interpreter would compute with the bits of a bfloat16."""
    return value.to(tl.float32) if _INTERPRETED and value.dtype == tl.bfloat16 else value


@triton.jit
def tanh(x):
    """float32 tanh, absolute error below 1e-6; ±1 far out."""
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def gelu_tanh(x):
    """0.5 · x · (1 + tanh(u)) as x · sigmoid(2u), which cancels nothing for negative x."""
    u = _SQRT_2_OVER_PI * (x + 0.044715 * x * x * x)
    return x / (1.0 + tl.exp(-2.0 * u))


@triton.jit
def round_half_even(x):
    """float32 of |x| < 2**22 to a whole number."""
    return (x + _ROUND_MAGIC) - _ROUND_MAGIC


@triton.jit
def philox_word(token, position, purpose, key_low, key_high):
    """Word 0 of the Philox4x32-10 block with counter (token, position, purpose, 0), all uint32: see `philox`."""
    c0, c1, c2 = token, position, purpose
    c3 = token * 0
    k0, k1 = key_low, key_high
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(c0, 0xD2511F53), c0 * 0xD2511F53
        high1, low1 = tl.umulhi(c2, 0xCD9E8D57), c2 * 0xCD9E8D57
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    return c0
