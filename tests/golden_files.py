"""The golden files of tests/golden as checkpoints: one linear as a real tool packed it, and what it decodes to."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from specgen.weights.base import Checkpoint
from specgen.weights.checkpoint import open_checkpoint
from specgen.weights.formats import find_format
from specgen.weights.packed import QuantLinear

GOLDEN = Path(__file__).parent / "golden"
NAMES = sorted(path.stem for path in GOLDEN.glob("*.npz"))
CPU = torch.device("cpu")


def probe(inputs: int) -> np.ndarray:
    """(K,) the vector that the oracles multiply every matrix with: no two of its values are equal."""
    return np.cos(0.37 * np.arange(inputs)) + 0.5


@dataclass(frozen=True)
class Golden:
    """The packed tensors of one linear and its oracle."""

    name: str
    info: dict[str, Any]
    tensors: dict[str, Tensor]
    rows: np.ndarray  # (first rows, K) float32
    product: np.ndarray  # (N,) float32: W @ probe

    @classmethod
    def load(cls, name: str) -> Golden:
        with np.load(GOLDEN / f"{name}.npz") as file:
            info = json.loads(file["info"].tobytes())
            tensors = {
                key: torch.from_numpy(file[key].copy()).view(getattr(torch, dtype)).reshape(shape)
                for key, (dtype, shape) in info["tensors"].items()
            }
            return cls(name, info, tensors, file["rows"], file["product"])

    @property
    def key(self) -> str:
        return self.info["key"]

    @property
    def shape(self) -> tuple[int, int]:
        return (self.info["shape"][0], self.info["shape"][1])

    @property
    def config(self) -> dict[str, Any]:
        """`quantization_config`, to be changed before `checkpoint`."""
        return self.info["quantization_config"]

    def tensor(self, suffix: str) -> Tensor:
        return self.tensors[f"{self.key}.{suffix}"]

    def replace(self, suffix: str, tensor: Tensor) -> None:
        self.tensors[f"{self.key}.{suffix}"] = tensor

    def checkpoint(self, folder: Path) -> Checkpoint:
        """Written to `folder` and opened as a user's file would be."""
        return open_checkpoint(self._gguf(folder) if "gguf" in self.info else self._safetensors(folder))

    def linear(self, folder: Path) -> QuantLinear:
        checkpoint = self.checkpoint(folder)
        return find_format(checkpoint, self.key).linear(checkpoint, self.key, self.shape, CPU)

    def _safetensors(self, folder: Path) -> Path:
        config = {"model_type": "llama"}
        if "quantization_config" in self.info:
            config["quantization_config"] = self.config
        (folder / "config.json").write_text(json.dumps(config))
        save_file({key: tensor.contiguous() for key, tensor in self.tensors.items()}, folder / "model.safetensors")
        return folder

    def _gguf(self, folder: Path) -> Path:
        path = folder / "model.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_head_count(self.info["heads"])
        writer.add_head_count_kv(self.info["kv_heads"])
        for name, tensor in self.tensors.items():
            kind = gguf.GGMLQuantizationType[self.info["gguf"]]
            writer.add_tensor(name, tensor.numpy(), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def sha256(weight: Tensor) -> str:
    """Of the little-endian row-major float32 bytes."""
    return hashlib.sha256(weight.contiguous().numpy().astype("<f4").tobytes()).hexdigest()
