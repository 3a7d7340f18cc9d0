"""A GGUF file as a checkpoint: Hugging Face names, packed rows, configuration.

Knows: which stored tensor (or which slice of stacked experts) a name means, and that q and k rows of some families are
stored in another order. Does not know: how a packed row decodes (one file per format family does).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specgen.errors import ModelError
from specgen.weights.gguf_config import GgufSource, model_type, to_config
from specgen.weights.gguf_header import GgufHeader, GgufTensor
from specgen.weights.gguf_names import INTERLEAVED, expert_names, hf_name
from specgen.weights.mapped import MappedFile, as_dtype

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
"""Types that are no packing: what `tensor` returns."""

MAX_EXPERTS = 4096


@dataclass(frozen=True, slots=True)
class _Part:
    """A tensor as the outside sees it: a stored one, or one expert of a stack."""

    stored: GgufTensor
    shape: tuple[int, ...]
    offset: int
    heads: int = 0  # > 0: rows are interleaved for RoPE, in this many heads

    @property
    def nbytes(self) -> int:
        rows = 1
        for size in self.shape[:-1]:
            rows *= size
        return rows * self.stored.row_bytes


class GgufCheckpoint:
    """The Checkpoint of one GGUF file; `packed` gives what the formats decode, `metadata` what the tokenizer needs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = MappedFile(path)
        self._header = GgufHeader(self._file)
        self._refuse_splits()
        self._source = GgufSource(
            path, self._header, {name: entry.shape for name, entry in self._header.tensors.items()}, self._floats
        )
        self._family = model_type(self._source)
        self._parts = self._name_parts()

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The file's own keys; arrays of strings are decoded anew at each access."""
        return self._header

    @cached_property
    def config(self) -> Mapping[str, Any]:
        return to_config(self._source)

    def names(self) -> Collection[str]:
        return self._parts.keys()

    def type_name(self, name: str) -> str:
        """The ggml type of a tensor, e.g. `Q4_1`."""
        return self._part(name).stored.type.name

    def tensor(self, name: str) -> Tensor:
        """An unpacked tensor. ModelError when it is absent or packed."""
        part = self._part(name)
        dtype = PLAIN.get(part.stored.type.name)
        if dtype is None:
            raise ModelError(f"{self.path}: tensor {name} is packed as {part.stored.type.name}, a plain one is needed")
        whole = as_dtype(self._file.view(part.offset, part.nbytes, name), dtype, part.shape)
        return _undo_interleaving(whole, part.heads)

    def packed(self, name: str) -> tuple[str, tuple[int, int], Tensor]:
        """(ggml type, (N, K), rows uint8 (N, bytes of a row)) of a matrix, rows in Hugging Face's order."""
        part = self._part(name)
        if len(part.shape) != 2:
            raise ModelError(f"{self.path}: tensor {name} has the shape {part.shape}, but a matrix is needed")
        raw = self._file.view(part.offset, part.nbytes, name)
        rows = _undo_interleaving(raw.reshape(part.shape[0], part.stored.row_bytes), part.heads)
        return part.stored.type.name, (part.shape[0], part.shape[1]), rows

    def release(self) -> None:
        self._file.release()

    @cached_property
    def _digest(self) -> str:
        middles = [entry.offset + entry.nbytes // 2 for entry in self._header.tensors.values()]
        return self._file.digest(self._header.data_start, middles)

    def digest(self) -> str:
        return self._digest

    def _refuse_splits(self) -> None:
        count = self._header.get("split.count", 0)
        if isinstance(count, int) and count > 1:
            raise ModelError(
                f"{self.path} is one of {count} parts of a split model", hint="join them with: llama-gguf-split --merge"
            )

    def _floats(self, stored_name: str) -> list[float]:
        entry = self._header.tensors.get(stored_name)
        if entry is None or entry.type.name != "F32" or len(entry.shape) != 1:
            raise ModelError(f"{self.path}: tensor {stored_name} is missing or no list of float32")
        raw = self._file.view(entry.offset, entry.nbytes, stored_name)
        values: list[float] = as_dtype(raw, torch.float32, entry.shape).tolist()
        return values

    def _name_parts(self) -> dict[str, _Part]:
        parts: dict[str, _Part] = {}
        for stored in self._header.tensors.values():
            for name, part in self._parts_of(stored):
                if name in parts:
                    raise ModelError(
                        f"{self.path}: two tensors mean {name}: {stored.name} and {parts[name].stored.name}"
                    )
                parts[name] = part
        return parts

    def _parts_of(self, stored: GgufTensor) -> list[tuple[str, _Part]]:
        name, shape = hf_name(stored.name, self._family), stored.shape
        stacked = len(shape) == 3 and shape[0] <= MAX_EXPERTS
        if stacked and (experts := expert_names(stored.name, self._family, shape[0])) is not None:
            step = stored.nbytes // shape[0]
            return [(each, _Part(stored, shape[1:], stored.offset + i * step)) for i, each in enumerate(experts)]
        return [(name, _Part(stored, shape, stored.offset, self._interleaved_heads(stored)))]

    def _interleaved_heads(self, stored: GgufTensor) -> int:
        stem = stored.name.split(".")[2] if stored.name.startswith("blk.") and stored.name.count(".") == 3 else ""
        if self._family not in INTERLEAVED or stem not in ("attn_q", "attn_k"):
            return 0
        heads = self._source.integer("attention.head_count")
        if stem == "attn_k":
            heads = self._source.integer("attention.head_count_kv", heads)
        # A bias has one value per row of the weight, a weight's rows are its first dimension.
        if stored.shape[0] % (2 * heads):
            raise ModelError(f"{self.path}: tensor {stored.name} has {stored.shape[0]} rows for {heads} heads")
        return heads

    def _part(self, name: str) -> _Part:
        part = self._parts.get(name)
        if part is None:
            raise ModelError(f"{self.path}: tensor {name} is missing")
        return part


def _undo_interleaving(rows: Tensor, heads: int) -> Tensor:
    """Rows (N, …) whose heads hold pairs (x0, y0, x1, y1, …) → (x0, x1, …, y0, y1, …); 0 heads: as they are.

    The inverse of llama.cpp's LlamaModel.permute. Packed rows move whole, so nothing is decoded.
    """
    if heads == 0:
        return rows
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)
