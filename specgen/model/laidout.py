"""A model's weights as the CPU kernels laid them out, kept on disk and mapped at the next start.

Laying out takes most of a start, and its result depends on nothing but the checkpoint, the code and the CPU: a file in
the cache is named by all three. Mapped pages are shared with every other process, and the system can drop them.

Knows: `ModelWeights` ↔ named tensors of one file, how large all such files may get, and which go first. Does not know:
layouts (kernels.cpu). A file appears whole or not at all; one that cannot be written or is damaged costs time only.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from specgen.errors import SpecgenError
from specgen.kernels.cpu.ops import CpuKernels, Prepared
from specgen.model.weights import LayerWeights, MlpWeights, ModelWeights, MoeWeights
from specgen.paths import ensure_dir
from specgen.weights.base import Checkpoint
from specgen.weights.safetensors_file import SafetensorsFile
from specgen.weights.safetensors_write import PART, room_for, write_safetensors

SUFFIX = ".weights"
SUM = "sum"
"""The tensor that holds a digest of the others' samples and of their names, shapes and places."""

SUM_BYTES = 64
STALE_S = 86_400
"""An unfinished file of this age belongs to a process that was killed."""


class LaidOutStore:
    """A folder of at most `limit_bytes`. A limit of 0 turns it off."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self.folder = folder
        self.limit_bytes = limit_bytes

    def path(self, checkpoint: Checkpoint, kernels: CpuKernels) -> Path:
        """Where the weights of this model for these kernels belong."""
        parts = (checkpoint.digest(), kernels.layout, _code())
        return self.folder / f"{hashlib.sha256(' '.join(parts).encode()).hexdigest()[:32]}{SUFFIX}"

    def read(self, path: Path, kernels: CpuKernels) -> ModelWeights | None:
        """The mapped weights; None when there are none, or damaged ones."""
        if self.limit_bytes <= 0 or not path.exists():
            return None
        try:
            file = SafetensorsFile(path)
            if SUM not in file.entries or bytes(file.tensor(SUM).numpy()) != _sum(file):
                return None
            weights = _tree({name: file.tensor(name) for name in file.entries if name != SUM}, kernels)
            os.utime(path)  # used now: the last to be evicted
        except (SpecgenError, OSError):
            return None
        file.file.will_need()
        return weights

    def write(self, path: Path, weights: ModelWeights) -> None:
        """Keep `weights`, all of them prepared, unless there is no room or another process is at it."""
        tensors = dict(_flat(weights))
        needed = sum(tensor.nbytes for tensor in tensors.values())
        if needed > self.limit_bytes:
            return
        try:
            ensure_dir(self.folder)
            with FileLock(path.with_suffix(".lock"), timeout=0):
                self._evict(self.limit_bytes - needed, keep=path)
                if shutil.disk_usage(self.folder).free < 2 * needed:
                    return
                _write(path, tensors)
        except (Timeout, OSError, SpecgenError):
            return  # a full disk or a read-only folder: the next start lays them out again

    def _evict(self, limit_bytes: int, keep: Path) -> None:
        """Remove the files unused for longest until the rest fits; processes that have mapped one keep it."""
        found = []
        for path in self.folder.iterdir():
            state = path.stat()
            if path.suffix == SUFFIX and path != keep:
                found.append((state.st_mtime, state.st_size, path))
            elif path.suffix == PART and state.st_mtime < time.time() - STALE_S:
                path.unlink(missing_ok=True)
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= limit_bytes:
                return
            path.unlink(missing_ok=True)
            path.with_suffix(".lock").unlink(missing_ok=True)
            total -= size


@cache
def _code() -> str:
    """A digest of the Python that turns a checkpoint into laid-out weights; the kernels' own is in their name."""
    package = Path(__file__).parents[1]
    sources = [*(package / "weights").glob("*.py"), *(package / "model").glob("*.py")]
    sources += [package / "kernels" / "cpu" / "ops.py", package / "kernels" / "cpu" / "library.py"]
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in sorted(sources))).hexdigest()


def _write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    partial = path.with_suffix(f".{os.getpid()}{PART}")
    try:
        # First, so that no sample of another tensor reaches into it; 64 bytes keep the others aligned.
        whole = [(SUM, torch.zeros(SUM_BYTES, dtype=torch.uint8)), *tensors.items()]
        write_safetensors(partial, room_for(name for name, _ in whole), whole)
        file = SafetensorsFile(partial)
        with partial.open("r+b") as out:
            out.seek(file.entries[SUM].offset)
            out.write(_sum(file))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _sum(file: SafetensorsFile) -> bytes:
    middles = [entry.offset + entry.nbytes // 2 for name, entry in file.entries.items() if name != SUM]
    return file.file.digest(file.data_start, middles).encode()


def _flat(weights: ModelWeights) -> Iterator[tuple[str, Tensor]]:
    """Every tensor with its name: `layers.0.q:data`, `layers.0.before_attention`, …; a tied head has none."""
    leaves = [leaf for leaf in _leaves("", weights) if not (weights.head is weights.embedding and leaf[0] == "head")]
    for name, leaf in leaves:
        if isinstance(leaf, Prepared):
            yield from ((f"{name}:{part}", tensor) for part, tensor in leaf.tensors().items())
        else:
            yield name, leaf


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Prepared | Tensor]]:
    if isinstance(value, Prepared | Tensor):
        yield name, value
        return
    if value is None:
        return
    parts = enumerate(value) if isinstance(value, tuple) else ((f.name, getattr(value, f.name)) for f in fields(value))
    for part, inner in parts:
        yield from _leaves(f"{name}.{part}" if name else str(part), inner)


def _tree(tensors: Mapping[str, Tensor], kernels: CpuKernels) -> ModelWeights:
    """What `_flat` took apart. SpecgenError when parts do not fit together."""
    leaves: dict[str, Any] = {}
    for full_name, tensor in tensors.items():
        name, _, part = full_name.partition(":")
        if part:
            leaves.setdefault(name, {})[part] = tensor
        else:
            leaves[name] = tensor
    leaves = {name: kernels.restore(leaf) if isinstance(leaf, dict) else leaf for name, leaf in leaves.items()}
    layers = tuple(_layer(leaves, f"layers.{index}.") for index in range(_count(leaves, "layers.{}.q")))
    embedding = leaves["embedding"]
    return ModelWeights(embedding, layers, leaves["norm"], leaves.get("head", embedding))


def _layer(leaves: Mapping[str, Any], prefix: str) -> LayerWeights:
    given: dict[str, Any] = {field.name: leaves.get(prefix + field.name) for field in fields(LayerWeights)}
    given["mlp"] = _mlp(leaves, f"{prefix}mlp.")
    return LayerWeights(**given)


def _mlp(leaves: Mapping[str, Any], prefix: str) -> MlpWeights | MoeWeights:
    if f"{prefix}router" not in leaves:
        return MlpWeights(leaves[f"{prefix}gate"], leaves[f"{prefix}up"], leaves[f"{prefix}down"])
    experts = range(_count(leaves, prefix + "experts.{}.gate"))
    made = [_mlp(leaves, f"{prefix}experts.{index}.") for index in experts]
    return MoeWeights(leaves[f"{prefix}router"], tuple(expert for expert in made if isinstance(expert, MlpWeights)))


def _count(leaves: Mapping[str, Any], name: str) -> int:
    """How many of `name` there are, numbered from 0."""
    count = 0
    while name.format(count) in leaves:
        count += 1
    return count
