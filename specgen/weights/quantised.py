"""A dense checkpoint, quantised once and kept on disk, so that the second load is as quick as that of any other.

Knows: which modules are quantised, and the file that holds them: safetensors, written beside its final name and then
renamed, named by the checkpoint's digest, the kind and the version of the method. Does not know: arithmetic (quantise).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from specgen.errors import ModelError
from specgen.paths import CACHE_VARIABLE, ensure_dir
from specgen.weights.base import Checkpoint
from specgen.weights.formats import find_format
from specgen.weights.module import FLOATS, Module
from specgen.weights.quantise import Quantiser, quantiser
from specgen.weights.safetensors_file import SafetensorsFile
from specgen.weights.safetensors_write import room_for, write_safetensors

METHOD_VERSION = 1
"""Raised when a kind's numbers change: files of older versions are then not used."""

EIGHT_BITS = ("embed_tokens", "lm_head")
"""Modules that are quantised to int8 whatever the kind: they are read by row or decide the logits."""

LEFT_DENSE = ("gate", "router", "shared_expert_gate")
"""Routers of experts: small, and a wrong choice of expert costs more than their bytes."""

WEIGHT = ".weight"
MAX_SUFFIX = 16
"""Letters in the longest name that a kind gives a tensor of a module."""

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


def _write(base: Checkpoint, plan: Mapping[str, Quantiser], path: Path, progress: Progress) -> None:
    """Quantise module by module into a new file: a broken run leaves nothing behind."""
    room = 3 * room_for(f"{key}.{'x' * MAX_SUFFIX}" for key in plan)  # three tensors per module at most
    try:
        write_safetensors(path, room, _packed(base, plan, progress))
    except OSError as error:
        raise ModelError(
            f"cannot write the quantised weights to {path}: {error.strerror or error}",
            hint=f"free some space, or set {CACHE_VARIABLE} to a folder with more",
        ) from error


def _packed(base: Checkpoint, plan: Mapping[str, Quantiser], progress: Progress) -> Iterator[tuple[str, Tensor]]:
    for done, (key, method) in enumerate(plan.items()):
        module = Module(base, key)
        weight = module.raw("weight")
        module.floats("weight", tuple(weight.shape), *FLOATS)
        for suffix, tensor in method.store(method.quantise(weight)).items():
            yield f"{key}.{suffix}", tensor
        base.release()
        progress(done + 1, len(plan))
