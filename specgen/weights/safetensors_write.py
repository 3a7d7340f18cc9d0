"""Writing a safetensors file tensor by tensor, whole or not at all.

Knows: the container, a temporary file beside the final one, and a rename. Does not know: what a tensor is for.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from specgen.weights.safetensors_file import DTYPES

PART = ".part"
"""How the names of unfinished files end."""

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ENTRY_BYTES = 160
"""More than a header entry takes besides its name: offsets and sizes of 20 digits."""


def room_for(names: Iterable[str]) -> int:
    """Bytes to keep free for a header that lists tensors of these names."""
    return sum(len(name.encode()) + _ENTRY_BYTES for name in names)


def write_safetensors(path: Path, header_room: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write `tensors` as they come into a new file, then give it its name. OSError when that fails; nothing is left.

    header_room: see `room_for`; the tensors need not be known beforehand.
    """
    temporary: Path | None = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.stem, suffix=PART, delete=False) as file:
            temporary = Path(file.name)
            writer = _Writer(file.file, -(-(header_room + 8) // 64) * 64 - 8)  # tensors begin at a multiple of 64
            for name, tensor in tensors:
                writer.add(name, tensor)
            writer.close()
        temporary.replace(path)
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


@dataclass(slots=True)
class _Writer:
    """The header's room is kept free and filled in at the end."""

    file: IO[bytes]
    header_bytes: int
    entries: dict[str, Any] = field(default_factory=dict)
    end: int = 0

    def __post_init__(self) -> None:
        self.file.seek(8 + self.header_bytes)

    def add(self, name: str, tensor: Tensor) -> None:
        data = tensor.contiguous().flatten().view(torch.uint8).numpy()
        self.file.write(data.data)
        self.entries[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [self.end, self.end + data.nbytes],
        }
        self.end += data.nbytes

    def close(self) -> None:
        header = json.dumps(self.entries).encode().ljust(self.header_bytes)
        assert len(header) == self.header_bytes
        self.file.seek(0)
        self.file.write(self.header_bytes.to_bytes(8, "little") + header)
        self.file.flush()
        os.fsync(self.file.fileno())
