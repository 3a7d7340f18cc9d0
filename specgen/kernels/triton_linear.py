"""Products with packed weights on a graphics card, for a few rows of activations or many.

Knows: how each kind of `TritonWeight` decodes in registers, and the order in which a product is summed. Does not know:
models, formats. The reference is `reference.linear` and `reference.embedding`.

A program takes 64 outputs and a part of K. Per iteration it reads one contiguous tile of packed weights (asynchronous
copies of 16 bytes, several tiles ahead), decodes it once into the left operand of the matrix instructions (m16n8k16;
see `Program` for Turing), and multiplies it with up to 32 rows, which stand in columns: a column of such an
instruction's result depends on its own column alone, and one row costs 8 columns, not 16. The programs of the same
outputs leave their sums in a workspace; the last one to finish adds them up, in the order of K.

So a row's bits do not depend on the step that it is in: the cut of K is the weight's (`Tiles`), every sum over K runs
in ascending order whatever the number of rows, no product is fused with a sum unless `tl.fma` says so, and for more
than 64 rows one program walks through all the parts of K and adds them up as the last one would have. Sums of
activations are products with ones, because a reduction's order is the compiler's choice and a matrix instruction's is
not.

Exactness. Decoded integers (16 + q for int4, q for int8) and e4m3 numbers are exact in the compute type; a group's
scale and min multiply float32 sums: y = Σ_g scale · (x · q) + min · Σ x. Against the reference on activations already
in the compute type, only the order of float32 sums differs: under the interpreter by at most 8e-7 of a row's largest
result. Dequantising to bfloat16 before the product, as is usual, errs by 2e-3 to 5e-3 on the same weights (float16:
2e-4 to 6e-4) and takes another instruction per weight. Rounded to the compute type are only codes that it does not hold
(NF4 and FP4, not IQ4_NL: 1e-3), and dense weights that are stored in another type (2e-3).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgen.kernels.aot import BF16_CAPABILITIES, AotCase
from specgen.kernels.launch import Launch
from specgen.kernels.triton_layout import BLOCK_N, PARTED_ROWS, Kind, TritonWeight, prepare
from specgen.kernels.triton_math import numbers
from specgen.weights.packed import Codebook4, Dense, Fp8, GroupedInt4, GroupedInt8, Nested, QuantLinear

ROW_TILES = (8, 16, 32)
"""Rows that a program is compiled for: columns of 1, 2 or 4 matrix instructions. More rows are several programs,
neighbours in time, of which the first brings the weights into the second cache for the others."""

NUM_STAGES = {Kind.DENSE: 4, Kind.INT4: 4, Kind.INT8: 3, Kind.FP8: 3, Kind.CODE4: 3}
"""Tiles in flight: 4 KiB for four bits, 8 KiB for the others."""


@dataclass(frozen=True, slots=True)
class Program:
    """How a weight's programs are compiled for a card: never a function of the rows of a step."""

    num_warps: int
    num_stages: int
    most_rows: int

    @classmethod
    def of(cls, weight: TritonWeight, capability: int) -> Program:
        """Two warps of 32 outputs each reuse every activation that they read for two instructions; a block this small
        leaves room for five to ten on a processor, which hide one another's waits. Four would take a quarter to a half
        more instructions in all, for fewer barriers, and on Hopper select warp-group instructions, whose shape follows
        the rows. With 64 rows, or 32 and mins, sums do not fit into registers.

        On Turing, Triton makes no matrix instructions and no asynchronous copies: sums on 32-bit floats in ascending
        order, four warps and 8 rows, or registers spill by the kilobyte. It works there; it is not fast.
        """
        if capability < 80:
            return cls(4, 1, 8)
        return cls(2, NUM_STAGES[weight.kind], 32 if weight.min is None else 16)


@lru_cache
def _capability(device: torch.device) -> int:
    """86 for compute capability 8.6; the interpreter takes the shapes of such a card."""
    if device.type != "cuda":
        return 80
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


_DENSE, _INT4, _INT8, _FP8, _CODE4 = (tl.constexpr(int(kind)) for kind in Kind)


@triton.jit
def _pairs(low, high):
    """Values at even and odd inputs (n, s) → (n, 2 s)."""
    return tl.join(low, high).reshape(low.shape[0], 2 * low.shape[1])


@triton.jit
def _halves(word, dtype: tl.constexpr):
    """(n, s) int32, each two numbers of 16 bits → (n, 2 s) of `dtype`."""
    low = word.to(tl.int16).to(dtype, bitcast=True)
    return _pairs(low, (word >> 16).to(tl.int16).to(dtype, bitcast=True))


@triton.jit
def _nibbles(word, PART: tl.constexpr, dtype: tl.constexpr):
    """16 + q for nibble PART of each half: q goes to the top of the mantissa of the number 16."""
    UP: tl.constexpr = 3 if dtype == tl.bfloat16 else 6
    moved = word << (UP - 4 * PART) if UP > 4 * PART else word >> (4 * PART - UP)
    if dtype == tl.bfloat16:
        return _halves((moved & 0x00780078) | 0x41804180, dtype)
    else:
        return _halves((moved & 0x03C003C0) | 0x4C004C00, dtype)


@triton.jit
def _bytes(word, PART: tl.constexpr, dtype: tl.constexpr):
    """Byte PART of each half, less 128."""
    unsigned = (word >> (8 * PART)) & 0x00FF00FF
    if dtype == tl.float16:
        return _halves(unsigned | 0x64006400, dtype) - 1152.0  # 1024 + u
    else:
        low = ((unsigned & 0xFF) | 0x4B000000).to(tl.float32, bitcast=True)  # 2**23 + u
        high = ((unsigned >> 16) | 0x4B000000).to(tl.float32, bitcast=True)
        return _pairs((low - 8388736.0).to(dtype), (high - 8388736.0).to(dtype))


@triton.jit
def _e4m3(word, PART: tl.constexpr, dtype: tl.constexpr):
    """Byte PART of each half as e4m3: in a float16 its bits, moved below the sign, mean 2**-8 of the number, be it
    subnormal or not; the scale makes up for that, see `triton_layout.E4M3_SCALE`."""
    moved = word << 8 if PART == 0 else word
    sign = moved & -2147450880  # 0x80008000
    return _halves(sign | ((moved & 0x7F007F00) >> 1), tl.float16).to(dtype)


@triton.jit
def _codes(word, PART: tl.constexpr, code_ptr, dtype: tl.constexpr):
    """The code of nibble PART of each half, from a table (16,) that stays in the first cache."""
    index = (word >> (4 * PART)) & 0x000F000F
    return _pairs(tl.load(code_ptr + (index & 0xF)).to(dtype), tl.load(code_ptr + (index >> 16)).to(dtype))


@triton.jit
def _centred(value):
    return value - tl.full((1, 1), 24.0, value.dtype)


@triton.jit
def _decode(word, PART: tl.constexpr, KIND: tl.constexpr, CENTRED: tl.constexpr, code_ptr, dtype: tl.constexpr):
    """word (n, sub / 2) int32 → values (n, sub) at inputs PART · sub… of its block; int4 is 16 + q, centred q - 8."""
    if KIND == _DENSE:
        return word
    elif KIND == _INT4:
        if CENTRED:
            return _centred(numbers(_nibbles(word, PART, dtype)))
        else:
            return _nibbles(word, PART, dtype)
    elif KIND == _INT8:
        return _bytes(word, PART, dtype)
    elif KIND == _FP8:
        return _e4m3(word, PART, dtype)
    else:
        return _codes(word, PART, code_ptr, dtype)


@triton.jit
def _value(
    inner_ptr, outer_ptr, block, PART: tl.constexpr, n, stride,
    SUB: tl.constexpr, PER: tl.constexpr, GROUP: tl.constexpr, RATIO: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """The scale or min (float32) of outputs n at inputs PART · SUB… of a block: see `triton_layout.Values`."""
    column = n // SPAN
    group = 0 if GROUP == 0 else (block * PER + PART) * SUB // GROUP
    value = tl.load(inner_ptr + group * stride + column).to(tl.float32)
    if RATIO > 0:
        if GROUP * RATIO % (SUB * PER) == 0 and GROUP > 0:
            coarse = block // (GROUP * RATIO // (SUB * PER))  # the same for the whole block, so that it is read once
        else:
            coarse = group // RATIO
        value *= tl.load(outer_ptr + coarse * stride + column).to(tl.float32)
    return value


@triton.jit
def _part(
    x_ptr, words_ptr, scale_ptr, scale_outer_ptr, min_ptr, min_outer_ptr, code_ptr, perm_ptr,
    rows, inputs, padded, scale_stride, first_row, first_n, first_step, last_step,
    KIND: tl.constexpr, SUB: tl.constexpr, PER: tl.constexpr, CHUNKS: tl.constexpr, GROUP: tl.constexpr,
    SCALE_RATIO: tl.constexpr, MIN_RATIO: tl.constexpr, SPAN: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """(BLOCK_N, ROWS) float32: the product of outputs first_n… with rows first_row… over some steps of K."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    BLOCK: tl.constexpr = SUB * PER
    WIDTH: tl.constexpr = SUB if KIND == _DENSE else SUB // 2
    HAS_MIN: tl.constexpr = min_ptr is not None
    n = first_n + tl.arange(0, BLOCK_N)
    column = tl.arange(0, WIDTH)
    r = tl.arange(0, ROWS)
    x_ptr += first_row.to(tl.int64) * inputs
    ones = tl.full((16, SUB), 1.0, tl.float32).to(dtype)
    acc = tl.zeros((BLOCK_N, ROWS), tl.float32)
    for step in range(first_step, last_step):
        for chunk in tl.static_range(CHUNKS):
            block = step * CHUNKS + chunk
            word = tl.load(words_ptr + (block.to(tl.int64) * padded + n[:, None]) * WIDTH + column[None, :])
            part = tl.zeros((BLOCK_N, ROWS), tl.float32)
            sums = tl.zeros((16, ROWS), tl.float32)
            for i in tl.static_range(PER):
                k = block * BLOCK + i * SUB + tl.arange(0, SUB)
                source = k
                if perm_ptr is not None:
                    source = tl.load(perm_ptr + k, mask=k < inputs, other=0)
                seen = (r[None, :] < rows - first_row) & (k[:, None] < inputs)
                x = tl.load(x_ptr + (r[None, :] * inputs + source[:, None]), mask=seen, other=0.0)
                x = numbers(x)
                part = tl.dot(numbers(_decode(word, i, KIND, not HAS_MIN, code_ptr, dtype)), x, part)
                if HAS_MIN:
                    sums = tl.dot(numbers(ones), x, sums)
                if KIND == _DENSE:
                    acc += part
                elif (i == PER - 1) or (GROUP > 0 and (i + 1) * SUB % GROUP == 0):
                    scale = _value(
                        scale_ptr, scale_outer_ptr, block, i, n, scale_stride, SUB, PER, GROUP, SCALE_RATIO, SPAN
                    )
                    acc = tl.fma(part, tl.broadcast_to(scale[:, None], (BLOCK_N, ROWS)), acc)
                    part = tl.zeros((BLOCK_N, ROWS), tl.float32)
                    if HAS_MIN:
                        low = _value(
                            min_ptr, min_outer_ptr, block, i, n, scale_stride, SUB, PER, GROUP, MIN_RATIO, SPAN
                        )
                        if KIND == _INT4:
                            low = tl.fma(scale, tl.full((BLOCK_N,), -16.0, tl.float32), low)
                        total = tl.max(sums, axis=0)  # of 16 equal rows
                        acc = tl.fma(
                            tl.broadcast_to(low[:, None], (BLOCK_N, ROWS)),
                            tl.broadcast_to(total[None, :], (BLOCK_N, ROWS)),
                            acc,
                        )
                        sums = tl.zeros((16, ROWS), tl.float32)
    return acc


@triton.jit(do_not_specialize=["rows"])
def _linear_kernel(
    x_ptr, words_ptr, scale_ptr, scale_outer_ptr, min_ptr, min_outer_ptr, code_ptr, perm_ptr, bias_ptr,
    out_ptr, parts_ptr, counters_ptr,
    rows, outputs, inputs, padded, scale_stride, steps, split_steps,
    KIND: tl.constexpr, SUB: tl.constexpr, PER: tl.constexpr, CHUNKS: tl.constexpr, GROUP: tl.constexpr,
    SCALE_RATIO: tl.constexpr, MIN_RATIO: tl.constexpr, SPAN: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
    SPLITS: tl.constexpr, WALK: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of rows, tiles of outputs, splits); with WALK one program does all the splits, in order."""
    tile = tl.program_id(1)
    split = tl.program_id(2)
    first_n = tile * BLOCK_N
    first_row = tl.program_id(0) * ROWS
    counter_ptr = counters_ptr if WALK or SPLITS == 1 else counters_ptr + tile * tl.num_programs(0) + tl.program_id(0)
    n = first_n + tl.arange(0, BLOCK_N)
    r = first_row + tl.arange(0, ROWS)
    kept = (n[:, None] < outputs) & (r[None, :] < rows)
    place = r[None, :].to(tl.int64) * outputs + n[:, None]
    total = tl.zeros((BLOCK_N, ROWS), tl.float32)
    for walked in range(SPLITS if WALK else 1):
        first_step = (split + walked) * split_steps
        total += _part(
            x_ptr, words_ptr, scale_ptr, scale_outer_ptr, min_ptr, min_outer_ptr, code_ptr, perm_ptr,
            rows, inputs, padded, scale_stride, first_row, first_n,
            first_step, tl.minimum(first_step + split_steps, steps),
            KIND, SUB, PER, CHUNKS, GROUP, SCALE_RATIO, MIN_RATIO, SPAN, BLOCK_N, ROWS,
        )  # fmt: skip
    if SPLITS == 1 or WALK:
        tl.store(out_ptr + place, _biased(total, bias_ptr, n, outputs), mask=kept)
    else:
        part_size = rows.to(tl.int64) * outputs
        tl.store(parts_ptr + split * part_size + place, total, mask=kept)
        tl.debug_barrier()  # all threads have stored before one tells the others
        done = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")
        if done == SPLITS - 1:
            summed = tl.zeros((BLOCK_N, ROWS), tl.float32)
            for index in range(SPLITS):
                # Past the first cache, which the other programs' stores do not reach.
                summed += tl.load(parts_ptr + index * part_size + place, mask=kept, other=0.0, cache_modifier=".cg")
            tl.store(out_ptr + place, _biased(summed, bias_ptr, n, outputs), mask=kept)
            tl.store(counter_ptr, 0)  # as the next call wants it


@triton.jit
def _biased(total, bias_ptr, n, outputs):
    if bias_ptr is not None:
        return total + tl.load(bias_ptr + n, mask=n < outputs, other=0.0)[:, None]
    else:
        return total


@triton.jit
def _embedding_kernel(
    ids_ptr, words_ptr, scale_ptr, scale_outer_ptr, min_ptr, min_outer_ptr, code_ptr, out_ptr,
    outputs, inputs, padded, scale_stride,
    KIND: tl.constexpr, SUB: tl.constexpr, PER: tl.constexpr, GROUP: tl.constexpr,
    SCALE_RATIO: tl.constexpr, MIN_RATIO: tl.constexpr, SPAN: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Grid: (rows, blocks of K). An id outside the table, as padding rows have, reads its first or last row."""
    row = tl.program_id(0)
    block = tl.program_id(1)
    WIDTH: tl.constexpr = SUB if KIND == _DENSE else SUB // 2
    CENTRED: tl.constexpr = min_ptr is None
    token = tl.load(ids_ptr + row).to(tl.int64)
    token = tl.minimum(tl.maximum(token, 0), outputs - 1)
    token = token + tl.zeros((1,), tl.int64)
    column = tl.arange(0, WIDTH)
    word = tl.load(words_ptr + (block * padded + token[:, None]) * WIDTH + column[None, :])
    for i in tl.static_range(PER):
        k = (block * PER + i) * SUB + tl.arange(0, SUB)[None, :]
        value = _decode(word, i, KIND, CENTRED, code_ptr, DTYPE).to(tl.float32)
        if KIND == _INT4 and not CENTRED:
            value = value - 16.0
        if KIND != _DENSE:
            value *= _value(
                scale_ptr, scale_outer_ptr, block, i, token, scale_stride, SUB, PER, GROUP, SCALE_RATIO, SPAN
            )[:, None]
            if min_ptr is not None:
                value += _value(
                    min_ptr, min_outer_ptr, block, i, token, scale_stride, SUB, PER, GROUP, MIN_RATIO, SPAN
                )[:, None]
        tl.store(out_ptr + row.to(tl.int64) * inputs + k, value, mask=k < inputs)


def linear(x: Tensor, weight: TritonWeight) -> Tensor:
    """x (R, K) → (R, N) float32, bias included; x is rounded to the weight's compute dtype if it is not in it."""
    assert x.shape[1] == weight.shape[1]
    out = torch.empty((len(x), weight.shape[0]), dtype=torch.float32, device=x.device)
    if len(x):
        program = Program.of(weight, _capability(x.device))
        _linear_launch(x.to(weight.compute).contiguous(), weight, out, program).run()
    return out


def embedding(ids: Tensor, weight: TritonWeight) -> Tensor:
    """Rows `ids` (R,) int32 or int64 of a (V, H) weight → (R, H) float32; ids outside 0…V-1 are clamped."""
    out = torch.empty((len(ids), weight.shape[1]), dtype=torch.float32, device=ids.device)
    if len(ids):
        _embedding_launch(ids.contiguous(), weight, out).run()
    return out


def _linear_launch(x: Tensor, weight: TritonWeight, out: Tensor, program: Program) -> Launch:
    rows, tiles = len(x), weight.tiles
    tile_rows = min(program.most_rows, next((tile for tile in ROW_TILES if rows <= tile), ROW_TILES[-1]))
    walk = rows > PARTED_ROWS
    parted = tiles.splits > 1 and not walk
    arguments = _weight_arguments(weight, exact=False) | {
        "x_ptr": x,
        "perm_ptr": weight.perm,
        "bias_ptr": weight.bias,
        "out_ptr": out,
        "parts_ptr": torch.empty((tiles.splits, *out.shape), device=x.device) if parted else None,
        "counters_ptr": weight.counters if parted else None,
        "rows": rows,
        "steps": tiles.steps,
        "split_steps": tiles.split_steps,
    }
    constants = _weight_constants(weight) | {
        "CHUNKS": tiles.chunks,
        "BLOCK_N": BLOCK_N,
        "ROWS": tile_rows,
        "SPLITS": tiles.splits,
        "WALK": walk,
    }
    grid = (-(-rows // tile_rows), tiles.tiles, tiles.splits if parted else 1)
    return Launch(_linear_kernel, grid, arguments, constants, program.num_warps, program.num_stages)


def _embedding_launch(ids: Tensor, weight: TritonWeight, out: Tensor) -> Launch:
    # The codes of a codebook are read as they are, all other values are exact in the compute type.
    dtype = tl.bfloat16 if weight.compute == torch.bfloat16 else tl.float16
    return Launch(
        _embedding_kernel,
        (len(ids), -(-weight.shape[1] // weight.tiles.block)),
        _weight_arguments(weight, exact=True) | {"ids_ptr": ids, "out_ptr": out},
        _weight_constants(weight) | {"DTYPE": tl.float32 if weight.kind == Kind.CODE4 else dtype},
        num_warps=1,
    )


def _weight_arguments(weight: TritonWeight, exact: bool) -> dict[str, Tensor | int | None]:
    """`exact`: codes as they are, not rounded to the compute dtype."""
    columns = weight.tiles.padded[0] if weight.scale is None else weight.scale.inner.shape[1]
    return {
        "words_ptr": weight.words if weight.kind == Kind.DENSE else weight.words.view(torch.int32),
        "scale_ptr": None if weight.scale is None else weight.scale.inner,
        "scale_outer_ptr": None if weight.scale is None else weight.scale.outer,
        "min_ptr": None if weight.min is None else weight.min.inner,
        "min_outer_ptr": None if weight.min is None else weight.min.outer,
        "code_ptr": None if weight.code is None else weight.code[0 if exact else 1],
        "outputs": weight.shape[0],
        "inputs": weight.shape[1],
        "padded": weight.tiles.padded[0],
        "scale_stride": columns,
    }


def _weight_constants(weight: TritonWeight) -> dict[str, Any]:
    return {
        "KIND": int(weight.kind),
        "SUB": weight.tiles.sub,
        "PER": weight.tiles.per,
        "GROUP": weight.tiles.group,
        "SCALE_RATIO": 0 if weight.scale is None else weight.scale.ratio,
        "MIN_RATIO": 0 if weight.min is None else weight.min.ratio,
        "SPAN": 1 if weight.scale is None else weight.scale.span,
    }


def aot_cases() -> list[AotCase]:
    """Every kind with the groups and scales that the formats have: for the fewest and the most rows of a program, and
    walking through all of K. Turing, which has no bfloat16, compiles one example of each kind."""
    cases = []
    for name, packed in _examples().items():
        for compute, capabilities in ((torch.bfloat16, BF16_CAPABILITIES), (torch.float16, (75,))):
            if compute == torch.bfloat16 or name in TURING_EXAMPLES:
                weight = prepare(packed, compute, torch.device("cpu"))
                program = Program.of(weight, capabilities[0])
                cases += [launch.case(f"{op} {name}", capabilities) for op, launch in _launches(weight, program)]
    return [replace(case, name=case.name + _suffix(case)) for case in cases]


def _launches(weight: TritonWeight, program: Program) -> Iterator[tuple[str, Launch]]:
    outputs, inputs = weight.shape
    for rows in sorted({1 if program.most_rows > ROW_TILES[0] else ROW_TILES[0], program.most_rows, PARTED_ROWS + 1}):
        x = torch.empty(rows, inputs, dtype=weight.compute)
        yield f"linear R={rows}", _linear_launch(x, weight, torch.empty(rows, outputs), program)
    yield "embedding", _embedding_launch(torch.empty(1, dtype=torch.int32), weight, torch.empty(1, inputs))


def _suffix(case: AotCase) -> str:
    return " fp16" if case.capabilities == (75,) else " bf16"


TURING_EXAMPLES = ("int4 g128 symmetric", "int4 g32 nested", "int8 g32", "fp8 blocks", "codebook4 g64", "dense")


def _examples() -> dict[str, QuantLinear]:
    """Weights of all kinds, for the compiler: AWQ and GPTQ (act-order), K-quants, Q4_1, Q8_0, NF4, fp8 …"""
    n, k = 64, 1024

    def half(group: int) -> Tensor:
        return torch.ones(n, k // group, dtype=torch.float16)

    def nested(group: int, outer: int) -> Nested:
        return Nested(torch.ones(n, k // group, dtype=torch.uint8), half(outer))

    nibbles, q = torch.zeros(n, k // 2, dtype=torch.uint8), torch.zeros(n, k, dtype=torch.int8)
    e4m3, order = q.view(torch.float8_e4m3fn), torch.arange(k, dtype=torch.int32)
    return {
        "int4 g128 symmetric": GroupedInt4(nibbles, half(128), -8 * half(128), 128),
        "int4 g128 zeros": GroupedInt4(nibbles, half(128), Nested(nested(128, 128).inner, half(128)), 128),
        "int4 g128 act-order": GroupedInt4(nibbles, half(128), half(128), 128, perm=order),
        "int4 g32 min": GroupedInt4(nibbles, half(32), half(32), 32),
        "int4 g32 nested": GroupedInt4(nibbles, nested(32, 256), nested(32, 256), 32),
        "int8 g16 nested": GroupedInt8(q, nested(16, 256), 16),
        "int8 g32": GroupedInt8(q, half(32), 32, bias=torch.zeros(n)),
        "int8 g32 nested min": GroupedInt8(q, nested(32, 256), 32, min=nested(32, 256)),
        "int8 channel": GroupedInt8(q, half(k), k),
        "fp8 channel": Fp8(e4m3, torch.ones(n, 1), (1, k)),
        "fp8 blocks": Fp8(e4m3, torch.ones(1, k // 128), (128, 128)),
        "codebook4 g64": Codebook4(nibbles, torch.zeros(16), half(64), 64),
        "dense": Dense(torch.zeros(n, k, dtype=torch.bfloat16)),
    }
