"""The header of a GGUF file, read with suspicion: every count, length and offset is checked before it is used.

Knows: the container (github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian). Does not
know: what a key or a tensor means. gguf-py's own reader takes 3 s for a vocabulary of 49k tokens and trusts the file's
counts; this one skips over arrays and decodes them when they are asked for.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specgen.errors import ModelError
from specgen.weights.ggml_types import GGML_TYPES, GgmlType
from specgen.weights.mapped import MappedFile

MAGIC = b"GGUF"
MAX_DIMS = 4
STRING, ARRAY = 8, 9
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
CORRUPTED = "the file is truncated or corrupted; fetch it again"


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One entry of the tensor table. `shape` is in torch's order: the contiguous dimension comes last."""

    name: str
    shape: tuple[int, ...]
    type: GgmlType
    offset: int  # from the start of the file
    nbytes: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row along the last dimension (rows are packed independently)."""
        return self.nbytes // math.prod(self.shape[:-1])


@dataclass(frozen=True, slots=True)
class _Value:
    """Where a metadata value lies: `position` is that of its first byte (of the first element for an array)."""

    kind: int
    position: int
    count: int = -1  # elements of an array, -1 for a single value


class _Cursor:
    """A read position in the file's bytes that cannot leave them."""

    def __init__(self, data: memoryview, path: Path) -> None:
        self.data = data
        self.path = path
        self.position = 0

    def fail(self, what: str, hint: str = CORRUPTED) -> ModelError:
        return ModelError(f"{self.path}: {what}", hint=hint)

    def scalar(self, layout: str) -> Any:
        try:
            (value,) = struct.unpack_from(layout, self.data, self.position)
        except struct.error:
            raise self.fail(f"the header ends at byte {len(self.data)}, in the middle of a value") from None
        self.position += struct.calcsize(layout)
        return value

    def need(self, nbytes: int, what: str) -> None:
        left = len(self.data) - self.position
        if nbytes > left:
            raise self.fail(f"{what} needs {nbytes} bytes at byte {self.position}, but the file has {left} more")

    def string(self, what: str) -> str:
        length = self.scalar("<Q")
        self.need(length, what)
        raw = bytes(self.data[self.position : self.position + length])
        self.position += length
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self.fail(f"{what} is not valid UTF-8") from None

    def skip_strings(self, count: int, key: str) -> None:
        self.need(8 * count, f"{key} (an array of {count} strings)")
        unpack, data, position = struct.Struct("<Q").unpack_from, self.data, self.position
        last = len(data) - 8
        for _ in range(count):
            if position > last:
                break
            position += 8 + unpack(data, position)[0]
        if position > len(data):
            raise self.fail(f"{key} (an array of {count} strings) runs past the end of the file")
        self.position = position


class GgufHeader(Mapping[str, Any]):
    """Metadata by key (decoded on access) and the tensor table. ModelError for whatever is wrong with the header."""

    def __init__(self, file: MappedFile) -> None:
        self._file = file
        self._cursor = _Cursor(memoryview(file.map), file.path)
        self._values: dict[str, _Value] = {}
        tensors, keys = self._read_counts()
        for _ in range(keys):
            self._read_key()
        self.tensors = self._read_table(tensors)

    def _read_counts(self) -> tuple[int, int]:
        cursor = self._cursor
        if bytes(cursor.data[:4]) != MAGIC:
            raise cursor.fail("is no GGUF file (it does not begin with the letters GGUF)")
        cursor.position = 4
        version = cursor.scalar("<I")
        if version & 0xFFFF == 0 and version:
            raise cursor.fail("is a big-endian GGUF file", hint="convert it with gguf-py's gguf_convert_endian.py")
        if version not in (2, 3):
            raise cursor.fail(
                f"has GGUF version {version}", hint="versions 2 and 3 can be read; convert the model anew"
            )
        tensors, keys = cursor.scalar("<Q"), cursor.scalar("<Q")
        # The smallest entries there can be: an empty name, one byte of value; an empty name, no dimensions.
        cursor.need(13 * keys + 24 * tensors, f"a header of {keys} keys and {tensors} tensors")
        return tensors, keys

    def _read_key(self) -> None:
        cursor = self._cursor
        key = cursor.string("a metadata key")
        if key in self._values:
            raise cursor.fail(f"metadata key {key} occurs twice")
        kind = cursor.scalar("<I")
        if kind != ARRAY:
            self._values[key] = _Value(kind, cursor.position)
            self._skip(key, kind, 1)
            return
        kind, count = cursor.scalar("<I"), cursor.scalar("<Q")
        self._values[key] = _Value(kind, cursor.position, count)
        self._skip(key, kind, count)

    def _skip(self, key: str, kind: int, count: int) -> None:
        cursor = self._cursor
        if kind == STRING:
            cursor.skip_strings(count, key)
        elif kind in SCALARS:
            nbytes = struct.calcsize(SCALARS[kind]) * count
            cursor.need(nbytes, key)
            cursor.position += nbytes
        else:
            raise cursor.fail(f"metadata key {key} has the unknown value type {kind}")

    def _read_table(self, count: int) -> dict[str, GgufTensor]:
        entries = [self._read_entry() for _ in range(count)]
        alignment = self.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise self._cursor.fail(f"general.alignment is {alignment!r}, which is no power of two")
        self.data_start = -(-self._cursor.position // alignment) * alignment
        table: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in entries:
            if name in table:
                raise self._cursor.fail(f"tensor {name} occurs twice")
            if offset % alignment:
                raise self._cursor.fail(f"tensor {name} begins at {offset}, which is no multiple of {alignment}")
            table[name] = self._place(name, shape, kind, offset)
        return table

    def _read_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        cursor = self._cursor
        name = cursor.string("a tensor's name")
        dims = cursor.scalar("<I")
        if not 1 <= dims <= MAX_DIMS:
            raise cursor.fail(f"tensor {name} has {dims} dimensions (1 to {MAX_DIMS} are possible)")
        shape = tuple(cursor.scalar("<Q") for _ in range(dims))[::-1]
        if 0 in shape:
            raise cursor.fail(f"tensor {name} has the shape {shape}, which is empty")
        return name, shape, cursor.scalar("<I"), cursor.scalar("<Q")

    def _place(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GgufTensor:
        found = GGML_TYPES.get(kind)
        if found is None:
            raise self._cursor.fail(f"tensor {name} has the unknown type {kind}")
        if shape[-1] % found.block:
            raise self._cursor.fail(
                f"tensor {name} has rows of {shape[-1]}, not a multiple of {found.name}'s {found.block}"
            )
        nbytes = math.prod(shape) // found.block * found.block_bytes
        self._file.check(self.data_start + offset, nbytes, name)
        return GgufTensor(name, shape, found, self.data_start + offset, nbytes)

    def __getitem__(self, key: str) -> Any:
        """A Python number, bool or string; for an array a list of strings or a numpy array."""
        value = self._values[key]
        cursor = _Cursor(self._cursor.data, self._cursor.path)
        cursor.position = value.position
        if value.kind == STRING:
            strings = [cursor.string(key) for _ in range(abs(value.count))]
            return strings[0] if value.count < 0 else strings
        if value.count < 0:
            return cursor.scalar(SCALARS[value.kind])
        layout = np.dtype(SCALARS[value.kind])
        return np.frombuffer(cursor.data, layout, value.count, value.position)

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)
