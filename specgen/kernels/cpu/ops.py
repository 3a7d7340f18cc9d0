"""The CPU backend: every op of `kernels.Kernels` over the compiled library.

Knows: how a packed weight is laid out for the library, and how tensors become its arguments. Does not know: models, or
how the library came to be. Arithmetic: int4 and int8 weights meet activations quantised to int8 per row and 32 inputs
(scale amax / 127, half to even); everything else is float32. Rows do not depend on each other, bit for bit.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Mapping, Sequence
from ctypes import byref, c_int32
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from specgen.errors import SpecgenError
from specgen.kernels.base import Attend, KVLayer, Noise, Truncation
from specgen.kernels.cpu import library as lib
from specgen.weights.packed import Codebook4, Dense, Fp8, GroupedInt4, GroupedInt8, GroupValues, Nested, QuantLinear

BLOCK = 32
"""Inputs that share one activation scale."""

HEAD_DIM_MAX = 512

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}

_NUMBERS = ("kind", "n", "k", "k_pad", "group", "scale_f32", "has_min", "tile_bytes")
"""The fields of a prepared weight's struct that are no pointers."""

_DENSE = {torch.float32: lib.DENSE_F32, torch.float16: lib.DENSE_F16, torch.bfloat16: lib.DENSE_BF16}
_KV = {torch.float32: lib.KV_F32, torch.bfloat16: lib.KV_BF16, torch.int8: lib.KV_INT8}


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A weight in the library's layout; `struct` points into the tensors beside it."""

    struct: lib.Linear
    shape: tuple[int, int]  # (N, K)
    data: Tensor  # tiles, uint8
    bias: Tensor | None  # (N,) float32
    code: Tensor | None  # (16,) float32
    perm: Tensor | None  # (K,) int64: stored column j multiplies input perm[j]

    @property
    def nbytes(self) -> int:
        """Bytes that one decoding step reads."""
        return self.data.numel() + (0 if self.bias is None else self.bias.numel() * 4)

    def tensors(self) -> dict[str, Tensor]:
        """Everything there is to keep of it, for `CpuKernels.restore`."""
        numbers = torch.tensor([getattr(self.struct, name) for name in _NUMBERS])
        given = {"data": self.data, "struct": numbers, "bias": self.bias, "code": self.code, "perm": self.perm}
        return {name: tensor for name, tensor in given.items() if tensor is not None}


@dataclass(frozen=True, slots=True)
class _Arrays:
    """What `prepare` reads of a packed weight: contiguous, rows first."""

    kind: int
    values: Tensor
    scale: Tensor | None = None  # (N, G)
    low: Tensor | None = None  # (N, G)
    group: int = 1
    code: Tensor | None = None


class CpuKernels:
    """Implements `kernels.Kernels`. One call runs at a time; each call uses all `threads`."""

    device = torch.device("cpu")

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        self.library = library
        self.threads = threads
        self.name = f"cpu {library.sg_path().decode()}"
        self.context = library.sg_context_new(threads)
        if not self.context:
            raise SpecgenError(f"the {threads} threads of the CPU kernels could not be started")
        self._close = weakref.finalize(self, library.sg_context_free, self.context)

    @property
    def layout(self) -> str:
        """A name for how weights are laid out: the library's, which stands for its source, its compiler and the CPU."""
        return Path(self.library._name).stem

    def prepare(self, weight: QuantLinear | Prepared) -> Prepared:
        if isinstance(weight, Prepared):
            return weight  # kept from an earlier start
        arrays = _arrays(weight)
        n, k = weight.shape
        padded = -(-k // arrays.group) * arrays.group
        struct = lib.Linear(arrays.kind, n, k, padded, arrays.group)
        struct.scale_f32 = int(arrays.scale is not None and arrays.scale.dtype == torch.float32)
        struct.has_min = int(arrays.low is not None)
        struct.tile_bytes = self.library.sg_tile_bytes(byref(struct))
        data = torch.empty(self.library.sg_tiles(byref(struct)) * struct.tile_bytes, dtype=torch.uint8)
        bias = None if weight.bias is None else weight.bias.float().contiguous()
        code = None if arrays.code is None else arrays.code.float().contiguous()
        struct.data, struct.bias, struct.code = data.data_ptr(), _pointer(bias), _pointer(code)
        groups = 0 if arrays.scale is None else arrays.scale.shape[1]
        values, scale, low = arrays.values, arrays.scale, arrays.low
        self.library.sg_pack(
            self.context, byref(struct), values.data_ptr(), _pointer(scale), _pointer(low), groups, data.data_ptr()
        )
        perm = weight.perm if isinstance(weight, GroupedInt4 | GroupedInt8) else None
        return Prepared(struct, (n, k), data, bias, code, None if perm is None else perm.long())

    def restore(self, tensors: Mapping[str, Tensor]) -> Prepared:
        """What `Prepared.tensors` gave, over these very tensors. SpecgenError when they contradict each other."""
        data, bias, code, perm = (tensors.get(name) for name in ("data", "bias", "code", "perm"))
        numbers = dict(zip(_NUMBERS, tensors["struct"].tolist(), strict=True)) if "struct" in tensors else {}
        struct = lib.Linear(**numbers)
        sane = data is not None and struct.group > 0 and 0 < struct.k <= struct.k_pad and struct.n > 0
        if not sane or self.library.sg_tile_bytes(byref(struct)) != struct.tile_bytes:
            raise SpecgenError("a laid-out weight is damaged")
        assert data is not None
        sizes = (data, self.library.sg_tiles(byref(struct)) * struct.tile_bytes), (bias, struct.n), (perm, struct.k)
        if any(tensor is not None and tensor.numel() != size for tensor, size in sizes):
            raise SpecgenError("a laid-out weight has parts of the wrong size")
        struct.data, struct.bias, struct.code = data.data_ptr(), _pointer(bias), _pointer(code)
        return Prepared(struct, (struct.n, struct.k), data, bias, code, perm)

    def embedding(self, ids: Tensor, weight: Prepared) -> Tensor:
        ids = ids.to(torch.int64).contiguous()
        assert bool(((ids >= 0) & (ids < weight.shape[0])).all())
        out = torch.empty(len(ids), weight.shape[1])
        self.library.sg_embedding(self.context, byref(weight.struct), ids.data_ptr(), len(ids), out.data_ptr())
        if weight.perm is None:
            return out
        result = torch.empty_like(out)
        result[:, weight.perm] = out
        return result

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x, weight = _floats(x), _floats(weight)
        out = torch.empty_like(x)
        size = x.shape[-1]
        self.library.sg_rms_norm(
            self.context, x.data_ptr(), weight.data_ptr(), eps, x.numel() // size, size, out.data_ptr()
        )
        return out

    def linear(self, x: Tensor, weight: Prepared) -> Tensor:
        x = _floats(x if weight.perm is None else x[:, weight.perm])
        assert x.shape[1] == weight.shape[1]
        out = torch.empty(len(x), weight.shape[0])
        self.library.sg_linear(self.context, byref(weight.struct), x.data_ptr(), len(x), out.data_ptr())
        return out

    def rope_write(
        self, q: Tensor, k: Tensor, v: Tensor, cos_sin: tuple[Tensor, Tensor] | None, layer: KVLayer, start: int
    ) -> Tensor:
        rows, heads, _ = q.shape
        assert start + rows <= layer.k.shape[1]
        q, k, v = q.float().clone(memory_format=torch.contiguous_format), _floats(k).clone(), _floats(v)
        cos, sin = (None, None) if cos_sin is None else (_floats(cos_sin[0]), _floats(cos_sin[1]))
        half = 0 if cos is None else cos.shape[1]
        view = kv_view(layer)
        self.library.sg_rope_write(
            self.context,
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            _pointer(cos),
            _pointer(sin),
            half,
            rows,
            heads,
            byref(view),
            start,
        )
        return q

    def attention(
        self, q: Tensor, layer: KVLayer, attend: Attend, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        q = _floats(q)
        rows, heads, _ = q.shape
        assert rows == len(attend.parents) == len(attend.positions)
        out = torch.empty_like(q)
        view = kv_view(layer)
        self.library.sg_attention(
            self.context,
            q.data_ptr(),
            byref(view),
            int32s(attend.parents),
            int32s(attend.positions),
            rows,
            heads,
            attend.start,
            scale,
            softcap or 0.0,
            window or 0,
            out.data_ptr(),
        )
        return out

    def gated(self, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        gate, up = _floats(gate), _floats(up)
        out = torch.empty_like(gate)
        rows, size = gate.shape
        self.library.sg_gated(
            self.context, gate.data_ptr(), up.data_ptr(), rows, size, ACTIVATIONS[activation], out.data_ptr()
        )
        return out

    def gumbel_argmax(self, logits: Tensor, cut: Truncation, noise: Noise) -> int:
        logits = _floats(logits)
        draw = lib.Draw(
            cut.temperature, cut.top_p, cut.min_p, noise.seed, noise.position, noise.purpose, max(0, cut.top_k)
        )
        return int(self.library.sg_gumbel_argmax(self.context, logits.data_ptr(), len(logits), byref(draw)))

    def argmax(self, logits: Tensor) -> list[int]:
        logits = _floats(logits)
        rows, count = logits.shape
        out = (ctypes.c_int64 * rows)()
        self.library.sg_argmax(self.context, logits.data_ptr(), rows, count, out)
        return list(out)

    def read(self, data: Tensor) -> None:
        """Reads all of `data` on all threads, as fast as loads go: the bandwidth that ops are measured against."""
        self.library.sg_read(self.context, data.data_ptr(), data.numel() * data.element_size())


def kv_view(layer: KVLayer) -> lib.KvView:
    """One layer's cache as the library sees it; it points into the layer's tensors."""
    heads, capacity, dim = layer.k.shape
    assert layer.k.is_contiguous()
    assert layer.v.is_contiguous()
    assert dim <= HEAD_DIM_MAX
    return lib.KvView(
        layer.k.data_ptr(),
        layer.v.data_ptr(),
        _pointer(layer.k_scale),
        _pointer(layer.v_scale),
        capacity,
        heads,
        dim,
        _KV[layer.k.dtype],
    )


def int32s(numbers: Sequence[int]) -> ctypes.Array[c_int32]:
    return (c_int32 * len(numbers))(*numbers)


def _floats(x: Tensor) -> Tensor:
    return x.to(torch.float32).contiguous()


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _arrays(weight: QuantLinear) -> _Arrays:
    match weight:
        case GroupedInt4():
            return _int4(weight)
        case GroupedInt8():
            return _int8(weight)
        case Fp8():
            return _fp8(weight)
        case Codebook4():
            scale = weight.scale.float().contiguous()
            return _Arrays(lib.CODE4, weight.nibbles.contiguous(), scale, None, weight.group, weight.code)
        case Dense():
            return _Arrays(_DENSE[weight.weight.dtype], weight.weight.contiguous())
    raise TypeError(f"{type(weight).__name__} is no packed weight")


def _int4(weight: GroupedInt4) -> _Arrays:
    values, scale, low = (
        weight.nibbles.contiguous(),
        _plain(weight.scale, weight.group),
        _plain(weight.min, weight.group),
    )
    if scale.dtype != low.dtype:
        scale, low = scale.float(), low.float()
    group = _block_group(weight.group, weight.shape[1], (BLOCK,))
    if group is None:
        return _Arrays(lib.INT4_ANY, values, scale.float(), low.float(), weight.group)
    return _Arrays(lib.INT4, values, scale, low, group)


def _int8(weight: GroupedInt8) -> _Arrays:
    values, scale = weight.q.contiguous(), _plain(weight.scale, weight.group)
    low = None if weight.min is None else _plain(weight.min, weight.group)
    if low is not None and scale.dtype != low.dtype:
        scale, low = scale.float(), low.float()
    group = _block_group(weight.group, weight.shape[1], (16, BLOCK))
    if group is None:
        return _Arrays(lib.INT8_ANY, values, scale.float(), None if low is None else low.float(), weight.group)
    return _Arrays(lib.INT8, values, scale, low, group)


def _plain(values: GroupValues, group: int) -> Tensor:
    """Scales or mins (N, G) as the library reads them. Products of nested scales are rounded to float16 where groups
    are small: float32 would make a third of what a step reads out of scales, and the rounding (2⁻¹¹) is far below a
    quantisation step."""
    if isinstance(values, Nested):
        return (values.float().half() if group <= BLOCK else values.float()).contiguous()
    return values.contiguous()


def _block_group(group: int, k: int, fits: tuple[int, ...]) -> int | None:
    """The group that the integer kernels use, or None when they have none of this shape: they take 16 or multiples
    of 32 inputs, and one group over a whole row of any length, which is padded with zeros."""
    if group == k:
        return -(-k // BLOCK) * BLOCK
    return group if group in fits or group % BLOCK == 0 else None


def _fp8(weight: Fp8) -> _Arrays:
    n, k = weight.shape
    rows, group = weight.block
    scale = weight.scale.repeat_interleave(rows, dim=0)[:n]
    # A block that does not divide K is cut so that it does: a ragged edge then ends on a group's boundary.
    even = math.gcd(group, k) if group < k else k
    return _Arrays(
        lib.FP8,
        weight.q.contiguous(),
        scale.repeat_interleave(min(group, k) // even, dim=1)[:, : k // even].float().contiguous(),
        None,
        even,
    )
