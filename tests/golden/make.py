"""Cuts the golden files of this folder out of checkpoints that the real tools wrote, each with its oracle.

    python tests/golden/make.py FOLDER_OF_CHECKPOINTS

One file per way of packing: the packed tensors of one linear, the settings of its config, and what they decode to
according to the oracle (`expected.npz` of the checkpoint; for GGUF `gguf.quants.dequantize`): the sha256 of the whole
float32 matrix, its first rows, and its product with a fixed vector. `tests/golden_files.py` reads them.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from specgen.weights.formats import find_format
from specgen.weights.gguf_file import GgufCheckpoint
from specgen.weights.safetensors_file import SafetensorsCheckpoint

HERE = Path(__file__).parent
ROWS = 16
LAYER = "model.layers.0.self_attn."
KEY = LAYER + "k_proj"

CHECKPOINTS = {
    "awq-gemm": "llama-awq-gemm-g128",
    "awq-gemm-bf16-bias": "qwen2-awq-gptqmodel-g32-asym",
    "awq-gemv": "llama-awq-gemv-g64",
    "awq-gemv_fast": "llama-awq-gemvfast-g64",
    "gptq": "llama-gptq-g64-sym",
    "gptq-asym": "llama_z-gptq-g64-asym-zerozp",
    "gptq-act-order": "llama-gptq-g128-desc_act",
    "gptq-8-bit": "llama-gptq-8bit-g64-sym",
    "gptq_v2": "llama-gptq_v2-g64-asym",
    "ct-w4a16": "llama-ct-w4a16-g64-sym",
    "ct-w4a16-asym": "llama-ct-w4a16-g64-asym",
    "ct-w4a16-act-order": "llama-ct-w4a16-g64-actorder",
    "ct-w8a16-channel": "llama-ct-w8a16-channel",
    "ct-fp8-tensor": "llama-ct-fp8-static",
    "ct-fp8-channel": "llama-ct-fp8-dynamic",
    "ct-fp8-block": "llama-ct-fp8-block",
    "ct-int8": "qwen2-ct-w8a8-int8",
    "fp8-block": "llama-fp8-block128",
    "fp8-block-ue8m0": "llama-fp8-block128-ue8m0",
    "bnb-nf4": "llama-bnb-nf4",
    "bnb-nf4-double": "qwen2-bnb-nf4-dq",
    "bnb-fp4": "llama-bnb-fp4",
    "bnb-int8": "llama-bnb-int8",
}
GGUFS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K_S", "Q4_K_M", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")


def save(name: str, info: dict[str, Any], tensors: dict[str, torch.Tensor], weight: np.ndarray) -> None:
    """`info` has the linear's `key`, and what a config must say."""
    probe = np.cos(0.37 * np.arange(weight.shape[1])) + 0.5
    info |= {
        "shape": list(weight.shape),
        "sha256": hashlib.sha256(weight.astype("<f4").tobytes()).hexdigest(),
        "tensors": {key: [str(tensor.dtype)[6:], list(tensor.shape)] for key, tensor in tensors.items()},
    }
    raw = {key: tensor.contiguous().reshape(-1).view(torch.uint8).numpy() for key, tensor in tensors.items()}
    product = (weight.astype(np.float64) @ probe).astype(np.float32)
    text = np.frombuffer(json.dumps(info).encode(), np.uint8)
    np.savez_compressed(HERE / f"{name}.npz", info=text, rows=weight[:ROWS], product=product, **raw)


def cut_safetensors(name: str, folder: Path) -> None:
    checkpoint = SafetensorsCheckpoint(folder)
    info = {"key": KEY, "quantization_config": checkpoint.config["quantization_config"]}
    tensors = {key: checkpoint.tensor(key) for key in checkpoint.names() if key.startswith(f"{KEY}.")}
    save(name, info, tensors, np.load(folder / "expected.npz")[f"w/{KEY}"])


def cut_zero_points_of_0(folder: Path) -> None:
    """Only q_proj has them; of it the oracle gives a sha256 and a product, which the decoded rows are held against."""
    key, checkpoint = LAYER + "q_proj", SafetensorsCheckpoint(folder)
    expected = json.loads((folder / "expected.json").read_text())["weights"][key]
    linear = find_format(checkpoint, key).linear(checkpoint, key, tuple(expected["shape"]), torch.device("cpu"))
    weight = linear.dequantize().numpy()
    assert hashlib.sha256(weight.astype("<f4").tobytes()).hexdigest() == expected["sha256_f32"]
    tensors = {name: checkpoint.tensor(name) for name in checkpoint.names() if name.startswith(f"{key}.")}
    info = {"key": key, "quantization_config": checkpoint.config["quantization_config"]}
    save("gptq-zero-points-of-0", info, tensors, weight)


def cut_gguf(folder: Path, file: str) -> None:
    checkpoint = GgufCheckpoint(folder / f"llama-{file}.gguf")
    stored = gguf.GGUFReader(folder / f"llama-{file}.gguf")
    tensor = next(tensor for tensor in stored.tensors if tensor.name == "blk.0.attn_k.weight")
    heads = checkpoint.config["num_key_value_heads"]
    decoded = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    weight = decoded.reshape(heads, -1, 2, decoded.shape[1]).swapaxes(1, 2).reshape(decoded.shape)
    kind = tensor.tensor_type.name
    info = {"key": KEY, "gguf": kind, "heads": checkpoint.config["num_attention_heads"], "kv_heads": heads}
    save(f"gguf-{kind}", info, {tensor.name: torch.from_numpy(tensor.data.copy())}, weight)


def main(folder: Path) -> None:
    for name, checkpoint in CHECKPOINTS.items():
        cut_safetensors(name, folder / checkpoint)
    cut_zero_points_of_0(folder / CHECKPOINTS["gptq-asym"])
    for file in GGUFS:
        cut_gguf(folder / "llama-gguf", file)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
