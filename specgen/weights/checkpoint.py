"""Opening whatever the user points at.

Knows: which kinds of checkpoint there are and how their first bytes look. Does not know: what is inside. Pickles are
never opened: reading one runs the code in it.
"""

from __future__ import annotations

from pathlib import Path

from specgen.errors import ModelError
from specgen.weights.base import Checkpoint
from specgen.weights.gguf_file import GgufCheckpoint
from specgen.weights.gguf_header import MAGIC
from specgen.weights.safetensors_file import SafetensorsCheckpoint

PICKLE_STARTS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
NO_PICKLES = "pickles can run code and are not opened; get the safetensors or GGUF version of the model"


def open_checkpoint(path: Path) -> Checkpoint:
    """A GGUF file, a folder with one, or a folder with `config.json` and safetensors files.

    ModelError when there is nothing that can be read: it names the file and, where that is known, the tensor.
    """
    if not path.exists():
        raise ModelError(f"{path} does not exist", hint="check the path; `specgen models list` shows the known models")
    return _open_folder(path) if path.is_dir() else _open_file(path)


def _first_bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(16)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error


def _open_file(path: Path) -> Checkpoint:
    start = _first_bytes(path)
    if start.startswith(MAGIC):
        return GgufCheckpoint(path)
    if start.startswith(PICKLE_STARTS):
        raise ModelError(f"{path} is a pickle", hint=NO_PICKLES)
    if start[8:9] == b"{":
        return SafetensorsCheckpoint(path.parent)
    raise ModelError(
        f"{path} is neither a GGUF nor a safetensors file",
        hint="give a .gguf file, or a folder with config.json and *.safetensors; a broken download must be repeated",
    )


def _open_folder(path: Path) -> Checkpoint:
    try:
        files = sorted(file for file in path.iterdir() if file.is_file())
    except OSError as error:
        raise ModelError(f"cannot list {path}: {error.strerror or error}") from error
    if any(file.suffix == ".safetensors" for file in files):
        return _open_safetensors(path)
    models = [file for file in files if _first_bytes(file).startswith(MAGIC)]
    if len(models) == 1:
        return GgufCheckpoint(models[0])
    if models:
        names = ", ".join(file.name for file in models)
        raise ModelError(f"{path} holds several GGUF files: {names}", hint="give the path of one of them")
    if any(file.suffix in PICKLE_SUFFIXES for file in files):
        raise ModelError(f"{path} holds the model as pickles only", hint=NO_PICKLES)
    raise ModelError(f"{path} holds no model", hint="a .gguf file, or config.json and *.safetensors, are needed")


def _open_safetensors(path: Path) -> Checkpoint:
    if not (path / "config.json").is_file():
        raise ModelError(
            f"{path} has safetensors files but no config.json", hint="fetch config.json from the same place"
        )
    return SafetensorsCheckpoint(path)
