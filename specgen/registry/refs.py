"""What `--model` may say: a name of the registry, a path, or `hf:OWNER/REPO[@REVISION][#file.gguf]`.

Knows: how to tell them apart (a registry name wins; write ./name for a folder of the same name). Does not know: files
beyond their names; what is inside is the business of `specgen.weights`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from specgen.errors import ModelError, UsageError
from specgen.paths import user_path
from specgen.registry.entries import Artefact, Entry, Registry
from specgen.registry.sources import LocalSource, SourceSyntaxError, parse_source

_MODEL_SUFFIXES = {".gguf", ".safetensors", ".bin", ".pt", ".pth"}  # a file by its looks, even when it is missing
_BY_PATH = "give a folder with config.json and *.safetensors, or a .gguf file"


@dataclass(frozen=True, slots=True)
class ModelRef:
    """A model that exists or can be fetched. `entry` of an unregistered model has only a target."""

    name: str
    entry: Entry
    registered: bool


def resolve_model(ref: str, registry: Registry) -> ModelRef:
    """The model that `ref` means. ModelError for an unknown name (with the nearest) or a path that is no model."""
    if ref and ref not in registry.entries:
        if ref.startswith(("hf:", "pypi:")):
            return _from_source(ref)
        path = user_path(ref)
        if path.exists() or _looks_like_path(ref):
            return _from_path(ref, path)
    return ModelRef(ref, registry.get(ref), registered=True)  # raises, with the nearest names


def draft_of(target: ModelRef) -> ModelRef | None:
    """The draft model that the target's entry has, as a model of its own."""
    artefact = target.entry.draft
    if artefact is None:
        return None
    name = f"{target.name} (draft)"
    return ModelRef(name, Entry(name, artefact), target.registered)


def _looks_like_path(ref: str) -> bool:
    return ref.startswith((".", "~")) or "/" in ref or os.sep in ref or Path(ref).suffix in _MODEL_SUFFIXES


def _from_source(ref: str) -> ModelRef:
    try:
        source = parse_source(ref, Path.cwd())
    except SourceSyntaxError as error:
        raise UsageError(str(error), error.hint) from error
    name = Path(source.filename).stem if source.filename.endswith(".gguf") else source.filename
    return ModelRef(name, Entry(ref, Artefact(((source,),))), registered=False)


def _from_path(ref: str, path: Path) -> ModelRef:
    _check_path(ref, path)
    source = LocalSource(path.absolute())
    name = path.stem if path.suffix == ".gguf" else path.absolute().name
    return ModelRef(name, Entry(ref, Artefact(((source,),))), registered=False)


def _check_path(ref: str, path: Path) -> None:
    if not path.exists():
        could_be_repo = ref.count("/") == 1 and ref[0].isalnum()
        hint = f"for a model of the Hugging Face hub write hf:{ref}" if could_be_repo else _BY_PATH
        raise ModelError(f"no such file or folder: {ref}", hint)
