"""The compiled library as Python sees it: its structs and the signatures of its functions.

Knows: the C interface of kernels.cpp, word for word. Does not know: tensors, or how the library was built.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_char_p, c_double, c_float, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

from specgen.errors import SpecgenError

INT4, INT8, DENSE_F32, DENSE_F16, DENSE_BF16, FP8, CODE4, INT4_ANY, INT8_ANY = range(9)
"""Kinds of prepared weight (linear.h)."""

KV_F32, KV_BF16, KV_INT8 = range(3)
"""Number formats of the cache (attention.h)."""

NEEDS = {
    "avx512 vnni": {"avx512f", "avx512bw", "avx512vl", "avx512_vnni", "f16c", "fma"},
    "avx2 vnni": {"avx2", "avx_vnni", "f16c", "fma"},
    "avx2": {"avx2", "f16c", "fma"},
    "neon dot": {"asimddp"},
    "portable": set(),
}
"""CPU flags (as Linux names them) that each path cannot do without."""

EMULATED = " emulated"
"""How the name of a path ends that was built for tests over emulated instructions."""


class Linear(Structure):
    """linear.h: Linear. The memory belongs to Python."""

    _fields_ = [
        ("kind", c_int32),
        ("n", c_int32),
        ("k", c_int32),
        ("k_pad", c_int32),
        ("group", c_int32),
        ("scale_f32", c_int32),
        ("has_min", c_int32),
        ("spare", c_int32),
        ("tile_bytes", c_int64),
        ("data", c_void_p),
        ("bias", c_void_p),
        ("code", c_void_p),
    ]


class KvView(Structure):
    """attention.h: KvView."""

    _fields_ = [
        ("k", c_void_p),
        ("v", c_void_p),
        ("k_scale", c_void_p),
        ("v_scale", c_void_p),
        ("capacity", c_int64),
        ("kv_heads", c_int32),
        ("dim", c_int32),
        ("type", c_int32),
        ("spare", c_int32),
    ]


class Draw(Structure):
    """sample.h: Draw."""

    _fields_ = [
        ("temperature", c_double),
        ("top_p", c_double),
        ("min_p", c_double),
        ("seed", c_uint64),
        ("position", c_uint32),
        ("purpose", c_uint32),
        ("top_k", c_int64),
    ]


class PlanLayer(Structure):
    """plan.h: PlanLayer."""

    _fields_ = [
        *((name, POINTER(Linear)) for name in ("q", "k", "v", "o", "gate", "up", "down")),
        *(
            (name, c_void_p)
            for name in ("before_attention", "after_attention", "before_mlp", "after_mlp", "q_norm", "k_norm")
        ),
        ("window", c_int32),
        ("rope", c_int32),
    ]


class Plan(Structure):
    """plan.h: Plan."""

    _fields_ = [
        *(
            (name, c_int32)
            for name in (
                "hidden",
                "intermediate",
                "heads",
                "kv_heads",
                "dim",
                "layer_count",
                "activation",
                "qk_norm",
            )
        ),
        *(
            (name, c_float)
            for name in ("eps", "attention_scale", "softcap", "embedding_scale", "residual_scale", "spare")
        ),
        ("layers", POINTER(PlanLayer)),
        ("embedding", POINTER(Linear)),
        ("head", POINTER(Linear)),
        ("norm", c_void_p),
    ]


class Angles(Structure):
    """plan.h: Angles."""

    _fields_ = [("cos", c_void_p), ("sin", c_void_p), ("half", c_int64)]


class Step(Structure):
    """plan.h: Step."""

    _fields_ = [
        ("tokens", c_void_p),
        ("parents", c_void_p),
        ("positions", c_void_p),
        ("kv", POINTER(KvView)),
        ("angles", POINTER(Angles)),
        ("skip", c_void_p),
        ("logits", c_void_p),
        ("hidden", c_void_p),
        ("drawn", c_void_p),
        ("vocab", c_int64),
        ("rows", c_int32),
        ("start", c_int32),
        ("last_only", c_int32),
        ("spare", c_int32),
    ]


_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "sg_path": (c_char_p, []),
    "sg_lanes": (c_int32, []),
    "sg_context_new": (c_void_p, [c_int32]),
    "sg_context_free": (None, [c_void_p]),
    "sg_tile_bytes": (c_int64, [POINTER(Linear)]),
    "sg_tiles": (c_int64, [POINTER(Linear)]),
    "sg_pack": (None, [c_void_p, POINTER(Linear), c_void_p, c_void_p, c_void_p, c_int64, c_void_p]),
    "sg_embedding": (None, [c_void_p, POINTER(Linear), c_void_p, c_int64, c_void_p]),
    "sg_rms_norm": (None, [c_void_p, c_void_p, c_void_p, c_float, c_int64, c_int64, c_void_p]),
    "sg_linear": (None, [c_void_p, POINTER(Linear), c_void_p, c_int64, c_void_p]),
    "sg_rope_write": (
        None,
        [c_void_p, *[c_void_p] * 5, c_int64, c_int32, c_int32, POINTER(KvView), c_int32],
    ),
    "sg_attention": (
        None,
        [
            c_void_p,
            c_void_p,
            POINTER(KvView),
            c_void_p,
            c_void_p,
            c_int32,
            c_int32,
            c_int32,
            c_float,
            c_float,
            c_int32,
            c_void_p,
        ],
    ),
    "sg_gated": (None, [c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int32, c_void_p]),
    "sg_argmax": (None, [c_void_p, c_void_p, c_int64, c_int64, c_void_p]),
    "sg_gumbel_argmax": (c_int64, [c_void_p, c_void_p, c_int64, POINTER(Draw)]),
    "sg_step": (None, [c_void_p, POINTER(Plan), POINTER(Step)]),
    "sg_read": (c_uint32, [c_void_p, c_void_p, c_int64]),
    "sg_barriers": (None, [c_void_p, c_int64]),
}


def open_library(path: Path, cpu_flags: frozenset[str]) -> ctypes.CDLL:
    """The library with its signatures set. SpecgenError when it does not load or wants what the CPU lacks."""
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise SpecgenError(f"the CPU kernels do not load: {error}", hint=f"delete {path} and try again") from error
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    taken: str = library.sg_path().decode()
    missing = set() if taken.endswith(EMULATED) else NEEDS[taken] - cpu_flags
    if cpu_flags and missing:
        raise SpecgenError(f"the CPU kernels at {path} need {', '.join(sorted(missing))}, which this CPU lacks")
    return library
