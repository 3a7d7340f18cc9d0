"""Safetensors files as a checkpoint: one file or shards, with `config.json` beside them.

Knows: the container (github.com/huggingface/safetensors, README "Format"). Does not know: what a tensor is for. The
header is parsed here and not by the `safetensors` package so that every error names the file and the tensor, and so
that tensors are views of one map whose pages can be given back.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specgen.errors import ModelError
from specgen.weights.mapped import MappedFile, as_dtype

MAX_HEADER_BYTES = 100_000_000  # the reference implementation's limit
MAX_JSON_BYTES = 100_000_000
MAX_DIMS = 16
INDEX = "model.safetensors.index.json"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def load_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of bounded size. ModelError names the file and, where there is one, the line."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ModelError(f"{path} is larger than {MAX_JSON_BYTES // 1_000_000} MB, too large for what it should be")
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is no valid JSON: {error}", hint="fetch the file again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds no JSON object")
    return value


@dataclass(frozen=True, slots=True)
class _Entry:
    dtype: str
    shape: tuple[int, ...]
    offset: int  # from the start of the file
    nbytes: int


class SafetensorsFile:
    """One file: names, bounds, views."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = MappedFile(path)
        self.data_start = 8 + self._header_bytes()
        self.entries = {
            name: self._entry(name, entry) for name, entry in self._header().items() if name != "__metadata__"
        }

    def tensor(self, name: str) -> Tensor:
        entry = self.entries[name]
        dtype = DTYPES.get(entry.dtype)
        if dtype is None:
            raise ModelError(f"{self.path}: tensor {name} has the unknown dtype {entry.dtype!r}")
        return as_dtype(self.file.view(entry.offset, entry.nbytes, name), dtype, entry.shape)

    def digest(self) -> str:
        return self.file.digest(self.data_start, [entry.offset + entry.nbytes // 2 for entry in self.entries.values()])

    def _header_bytes(self) -> int:
        length = int.from_bytes(bytes(self.file.map[:8]), "little")
        if self.file.size < 8 or length > min(self.file.size - 8, MAX_HEADER_BYTES):
            raise ModelError(
                f"{self.path}: the header should take {length} bytes, but the file has {self.file.size}",
                hint="the file is truncated, or it is no safetensors file",
            )
        return length

    def _header(self) -> dict[str, Any]:
        raw = bytes(self.file.map[8 : self.data_start])
        try:
            header = json.loads(raw, object_pairs_hook=_no_duplicates)
        except (ValueError, RecursionError) as error:
            raise ModelError(
                f"{self.path}: the header is no valid JSON: {error}", hint="fetch the file again"
            ) from error
        if not isinstance(header, dict):
            raise ModelError(f"{self.path}: the header is no JSON object")
        return header

    def _entry(self, name: str, value: object) -> _Entry:
        fields = value if isinstance(value, dict) else {}
        dtype, shape, ends = fields.get("dtype"), _sizes(fields.get("shape")), _sizes(fields.get("data_offsets"))
        if not isinstance(dtype, str) or shape is None or ends is None or len(ends) != 2:
            raise ModelError(f"{self.path}: the header's entry of tensor {name} is malformed")
        begin, end = ends
        self.file.check(self.data_start + begin, end - begin, name)
        known = DTYPES.get(dtype)
        if known is not None and math.prod(shape) * known.itemsize != end - begin:
            raise ModelError(
                f"{self.path}: tensor {name} has {end - begin} bytes, which is not the size of {dtype} {list(shape)}",
                hint="the file is corrupted; fetch it again",
            )
        return _Entry(dtype, shape, self.data_start + begin, end - begin)


def _sizes(value: object) -> tuple[int, ...] | None:
    """A short list of sizes that fit into 62 bits, or None for anything else."""
    if not isinstance(value, list) or len(value) > MAX_DIMS:
        return None
    if not all(isinstance(size, int) and not isinstance(size, bool) and 0 <= size < 1 << 62 for size in value):
        return None
    return tuple(value)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} occurs twice")
    return found


class SafetensorsCheckpoint:
    """The Checkpoint of a folder with `config.json` and *.safetensors files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config: Mapping[str, Any] = load_json(path / "config.json")
        self._files = self._open_files()
        self._where = self._locate()

    def names(self) -> Collection[str]:
        return self._where.keys()

    def tensor(self, name: str) -> Tensor:
        file = self._where.get(name)
        if file is None:
            raise ModelError(f"{self.path}: tensor {name} is missing")
        return file.tensor(name)

    def release(self) -> None:
        for file in self._files.values():
            file.file.release()

    @cached_property
    def _digest(self) -> str:
        config = json.dumps(self.config, sort_keys=True)
        parts = [f"{name} {file.digest()}" for name, file in sorted(self._files.items())]
        return hashlib.sha256("\n".join([config, *parts]).encode()).hexdigest()

    def digest(self) -> str:
        return self._digest

    @cached_property
    def _index(self) -> dict[str, str] | None:
        """Tensor name → file name, when the folder has an index."""
        path = self.path / INDEX
        if not path.exists():
            return None
        shards = load_json(path).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(file, str) for file in shards.values()):
            raise ModelError(f"{path} has no weight_map of names")
        for name, file in shards.items():
            if Path(file).name != file:
                raise ModelError(f"{path}: tensor {name} is said to be in {file!r}, which is no file of this folder")
        return shards

    def _open_files(self) -> dict[str, SafetensorsFile]:
        if self._index is None:
            return {name: SafetensorsFile(self.path / name) for name in self._only_file()}
        for name, file in self._index.items():
            if not (self.path / file).is_file():
                raise ModelError(
                    f"{self.path / INDEX} says that tensor {name} is in {file}, but that file is missing",
                    hint="the download is incomplete; fetch the missing shard",
                )
        return {name: SafetensorsFile(self.path / name) for name in sorted(set(self._index.values()))}

    def _only_file(self) -> list[str]:
        names = sorted(file.name for file in self.path.glob("*.safetensors"))
        if "model.safetensors" in names:
            return ["model.safetensors"]
        if len(names) != 1:
            raise ModelError(
                f"{self.path} holds {len(names)} safetensors files and no {INDEX}",
                hint="give a folder with model.safetensors, or with shards and their index",
            )
        return names

    def _locate(self) -> dict[str, SafetensorsFile]:
        if self._index is None:
            return {name: file for file in self._files.values() for name in file.entries}
        for name, file in self._index.items():
            if name not in self._files[file].entries:
                raise ModelError(f"{self.path / file}: tensor {name} is missing, though {INDEX} lists it there")
        return {name: self._files[file] for name, file in self._index.items()}
