"""A file as a private memory map, and the bounds check that every container shares.

Knows: bytes, offsets, torch dtypes. Does not know: what any container's header means.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from specgen.errors import ModelError

SAMPLE_BYTES = 256
"""Bytes that a digest takes from each sampled place."""


class MappedFile:
    """A whole file, mapped copy-on-write: tensors are views of it, and nothing written to them reaches the disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.size = os.fstat(file.fileno()).st_size
                if self.size == 0:
                    raise ModelError(f"{path} is empty", hint="the file was cut off while copying; fetch it again")
                self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
        self._bytes = torch.frombuffer(self.map, dtype=torch.uint8)

    def view(self, offset: int, nbytes: int, name: str) -> Tensor:
        """Bytes offset…offset + nbytes - 1 as uint8 (nbytes,). ModelError naming tensor `name` when out of bounds."""
        self.check(offset, nbytes, name)
        return self._bytes[offset : offset + nbytes]

    def check(self, offset: int, nbytes: int, name: str) -> None:
        """ModelError when tensor `name` does not lie inside the file."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.size:
            raise ModelError(
                f"{self.path}: tensor {name} takes bytes {offset} to {offset + nbytes}, but the file has {self.size}",
                hint="the file is truncated or corrupted; fetch it again",
            )

    def will_need(self) -> None:
        """Have the system read the file ahead of its use."""
        if hasattr(mmap, "MADV_WILLNEED"):
            self.map.madvise(mmap.MADV_WILLNEED)

    def release(self) -> None:
        """Drop the pages read so far from this process; a later read maps them again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self.map.madvise(mmap.MADV_DONTNEED)

    def digest(self, header_bytes: int, places: Iterable[int]) -> str:
        """sha256 over the size, the header and `SAMPLE_BYTES` at each of `places`, in hexadecimal.

        Reading a whole checkpoint would take seconds. With a sample inside every tensor, another training run, another
        quantisation or an edited header all change the digest; a single flipped bit may not.
        """
        state = hashlib.sha256(str(self.size).encode())
        state.update(memoryview(self.map)[:header_bytes])
        for place in places:
            state.update(self.map[place : place + SAMPLE_BYTES])
        return state.hexdigest()


def as_dtype(raw: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """uint8 bytes as a tensor of `dtype` and `shape`: a view where the alignment allows it, else a copy."""
    if raw.storage_offset() % dtype.itemsize:
        raw = raw.clone()
    return raw.view(dtype).reshape(shape)
