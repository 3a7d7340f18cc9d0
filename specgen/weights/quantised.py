"""A dense checkpoint, quantised once and kept on disk, so that the second load is as quick as that of any other.

Knows: which modules are quantised, and the file that holds them: safetensors, written beside its final name and then
renamed, named by the checkpoint's digest, the kind and the version of the method. Does not know: arithmetic (quantise).
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from specgen.errors import ModelError
from specgen.paths import CACHE_VARIABLE, ensure_dir
from specgen.weights.base import Checkpoint
from specgen.weights.formats import find_format
from specgen.weights.module import FLOATS, Module
from specgen.weights.quantise import Quantiser, quantiser
from specgen.weights.safetensors_file import DTYPES, SafetensorsFile

METHOD_VERSION = 1
"""Raised when a kind's numbers change: files of older versions are then not used."""

EIGHT_BITS = ("embed_tokens", "lm_head")
"""Modules that are quantised to int8 whatever the kind: they are read by row or decide the logits."""

LEFT_DENSE = ("gate", "router", "shared_expert_gate")
"""Routers of experts: small, and a wrong choice of expert costs more than their bytes."""

WEIGHT = ".weight"
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
ENTRY_BYTES = 160
"""More than a header entry takes besides its name: offsets and sizes of 20 digits."""

Progress = Callable[[int, int], None]


def quantised_checkpoint(base: Checkpoint, kind: str, folder: Path, progress: Progress | None = None) -> Checkpoint:
    """`base` with its linears packed as `kind` (int4, int8, fp8, nf4) says, from `folder` or put there first.

    `progress(done, total)` is called after each module that is quantised. UsageError for an unknown kind; ModelError
    when `base` is quantised already, or holds weights that are not finite; SpecgenError when `folder` cannot be used.
    """
    method = quantiser(kind)
    path = ensure_dir(folder) / f"{base.digest()[:32]}-{kind}-{METHOD_VERSION}.safetensors"
    packed = _open(path)
    if packed is None:
        _write(base, _plan(base, method), path, progress or (lambda done, total: None))
        packed = SafetensorsFile(path)
    return QuantisedCheckpoint(base, packed, f"{kind} {METHOD_VERSION}")


class QuantisedCheckpoint:
    """The Checkpoint: packed tensors from one file, everything else from the dense one."""

    def __init__(self, base: Checkpoint, packed: SafetensorsFile, method: str) -> None:
        self.path = base.path
        self._base, self._packed, self._method = base, packed, method
        replaced = {name.rpartition(".")[0] + WEIGHT for name in packed.entries}
        self._names = frozenset(base.names()) - replaced | packed.entries.keys()

    @property
    def config(self) -> Mapping[str, Any]:
        return self._base.config

    def names(self) -> Collection[str]:
        return self._names

    def tensor(self, name: str) -> Tensor:
        if name not in self._names:
            raise ModelError(f"{self.path}: tensor {name} is missing")
        return self._packed.tensor(name) if name in self._packed.entries else self._base.tensor(name)

    def release(self) -> None:
        self._base.release()
        self._packed.file.release()

    def digest(self) -> str:
        return hashlib.sha256(f"{self._base.digest()} {self._method}".encode()).hexdigest()


def _open(path: Path) -> SafetensorsFile | None:
    """None when there is no such file, or a damaged one, which is then made again."""
    try:
        return SafetensorsFile(path) if path.exists() else None
    except ModelError:
        return None


def _plan(base: Checkpoint, method: Quantiser) -> dict[str, Quantiser]:
    """Module → how it is quantised. ModelError when a module is packed already."""
    plan: dict[str, Quantiser] = {}
    for name in sorted(base.names()):
        key, _, suffix = name.rpartition(".")
        last = key.rpartition(".")[2]
        if suffix != "weight":
            _refuse_packed(base, key, suffix)
        elif last not in LEFT_DENSE and not last.endswith(("norm", "layernorm")) and _is_matrix(base, key):
            plan[key] = quantiser("int8") if last in EIGHT_BITS else method
    if not plan:
        raise ModelError(f"{base.path} holds no matrix that could be quantised")
    return plan


def _refuse_packed(base: Checkpoint, key: str, suffix: str) -> None:
    if suffix in ("qweight", "weight_packed", "weight_scale", "weight_scale_inv", "SCB", "absmax"):
        raise _already(base, key.removesuffix(WEIGHT))


def _is_matrix(base: Checkpoint, key: str) -> bool:
    if find_format(base, key).name != "dense":
        raise _already(base, key)
    return base.tensor(key + WEIGHT).dim() == 2


def _already(base: Checkpoint, key: str) -> ModelError:
    return ModelError(
        f"{base.path}: module {key} is quantised already ({find_format(base, key).name})",
        hint="run it as it is, without quantising on load",
    )


@dataclass(slots=True)
class _Writer:
    """A safetensors file written tensor by tensor; the header's room is kept free and filled in at the end."""

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
            "dtype": DTYPE_NAMES[tensor.dtype],
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


def _write(base: Checkpoint, plan: Mapping[str, Quantiser], path: Path, progress: Progress) -> None:
    """Quantise module by module into a new file, then give it its name: a broken run leaves nothing behind."""
    room = sum(3 * (len(key) + ENTRY_BYTES) for key in plan)  # three tensors per module at most
    temporary: Path | None = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.stem, suffix=".part", delete=False) as file:
            temporary = Path(file.name)
            writer = _Writer(file.file, -(-(room + 8) // 64) * 64 - 8)  # tensors begin at a multiple of 64
            for name, tensor in _packed(base, plan, progress):
                writer.add(name, tensor)
            writer.close()
        temporary.replace(path)
    except OSError as error:
        raise ModelError(
            f"cannot write the quantised weights to {path}: {error.strerror or error}",
            hint=f"free some space, or set {CACHE_VARIABLE} to a folder with more",
        ) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def _packed(base: Checkpoint, plan: Mapping[str, Quantiser], progress: Progress) -> Iterator[tuple[str, Tensor]]:
    for done, (key, method) in enumerate(plan.items()):
        module = Module(base, key)
        weight = module.raw("weight")
        module.floats("weight", tuple(weight.shape), *FLOATS)
        for suffix, tensor in method.store(method.quantise(weight)).items():
            yield f"{key}.{suffix}", tensor
        base.release()
        progress(done + 1, len(plan))
