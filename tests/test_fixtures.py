"""Whole checkpoints that the real tools wrote: every linear against its oracle, then the model's logits and tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from golden_files import CPU, probe, sha256

from specgen.errors import SpecgenError
from specgen.kernels.base import Attend, Kernels
from specgen.kernels.reference import ReferenceKernels
from specgen.model.build import build_model
from specgen.model.decoder import Decoder
from specgen.model.families import spec_from_config
from specgen.model.weights import load_weights
from specgen.weights.base import Checkpoint
from specgen.weights.checkpoint import open_checkpoint
from specgen.weights.formats import find_format
from specgen.weights.gguf_file import GgufCheckpoint
from specgen.weights.gguf_names import hf_name
from specgen.weights.packed import QuantLinear

FOLDERS = {
    "llama-awq-gemm-g128": "awq gemm",
    "llama-awq-gemm-g64-skip-sharded": "awq gemm",
    "llama-awq-gemv-g64": "awq gemv",
    "llama-awq-gemvfast-g64": "awq gemv_fast",
    "llama-awq-gptqmodel-g64": "awq gemm",
    "llama-base": "dense",
    "llama-bnb-fp4": "bitsandbytes fp4",
    "llama-bnb-int8": "bitsandbytes int8",
    "llama-bnb-nf4": "bitsandbytes nf4",
    "llama-ct-fp8-block": "compressed-tensors 8-bit",
    "llama-ct-fp8-dynamic": "compressed-tensors 8-bit",
    "llama-ct-fp8-static": "compressed-tensors 8-bit",
    "llama-ct-w4a16-g64-actorder": "compressed-tensors pack-quantized",
    "llama-ct-w4a16-g64-asym": "compressed-tensors pack-quantized",
    "llama-ct-w4a16-g64-sym": "compressed-tensors pack-quantized",
    "llama-ct-w8a16-channel": "compressed-tensors pack-quantized",
    "llama-fp8-block128": "fp8 blocks",
    "llama-fp8-block128-ue8m0": "fp8 blocks",
    "llama-gptq-8bit-g64-sym": "gptq",
    "llama-gptq-g128-desc_act": "gptq",
    "llama-gptq-g64-sym": "gptq",
    "llama-gptq_v2-g64-asym": "gptq v2",
    "llama_z-gptq-g64-asym-zerozp": "gptq",
    "qwen2-awq-gemm-g64": "awq gemm",
    "qwen2-awq-gptqmodel-g32-asym": "awq gemm",
    "qwen2-base": "dense",
    "qwen2-bnb-nf4-dq": "bitsandbytes nf4",
    "qwen2-ct-mixed-fp8-w4": "compressed-tensors pack-quantized",
    "qwen2-ct-w8a8-int8": "compressed-tensors 8-bit",
    "qwen2-fp8-block128-skip": "fp8 blocks",
}
"""Folder → the format of the up projections of its first layer."""

KINDS = ("F16", "IQ4_NL", "IQ4_XS", "Q2_K", "Q3_K_S", "Q4_0", "Q4_1", "Q4_K_M", "Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0")
GGUFS = [
    *(f"llama-gguf/llama-{kind}" for kind in KINDS),
    *(f"qwen2-gguf/qwen2-{kind}" for kind in ("Q4_K_M", "Q5_0", "Q8_0")),
]

ROUNDED_OTHERWISE = {"llama-bnb-int8"}
"""w · SCB · (1 / 127) rounds twice; one scale per output rounds once: a unit in the last place."""

RELATIVE = 2.0**-23
PRODUCT_TOLERANCE = 1e-6  # of a product of at most 512 weights below 0.3, summed in float64


def test_every_checkpoint_is_listed(checkpoints_dir: Path) -> None:
    folders = {path.name for path in checkpoints_dir.iterdir() if (path / "config.json").exists()}
    assert folders == set(FOLDERS)
    assert {str(path.relative_to(checkpoints_dir))[:-5] for path in checkpoints_dir.glob("*/*.gguf")} == set(GGUFS)


def oracle(stem: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """expected.json and expected.npz of a folder, or of a GGUF file without its ending."""
    prefix = f"{stem}/" if stem.is_dir() else f"{stem}."
    with np.load(f"{prefix}expected.npz") as file:
        return json.loads(Path(f"{prefix}expected.json").read_text()), dict(file)


def linears(checkpoint: Checkpoint, weights: dict[str, Any]) -> Iterator[tuple[str, QuantLinear]]:
    for key, entry in weights.items():
        yield key, find_format(checkpoint, key).linear(checkpoint, key, tuple(entry["shape"]), CPU)


@pytest.mark.parametrize("name", [name for name in FOLDERS if not name.endswith("-base")])
def test_every_linear_decodes_to_its_oracle(name: str, checkpoints_dir: Path) -> None:
    checkpoint = open_checkpoint(checkpoints_dir / name)
    info, arrays = oracle(checkpoints_dir / name)
    assert find_format(checkpoint, "model.layers.0.mlp.up_proj").name == FOLDERS[name]
    for key, linear in linears(checkpoint, info["weights"]):
        decoded = linear.dequantize()
        product = (decoded.double().numpy() @ probe(decoded.shape[1])).astype(np.float32)
        np.testing.assert_allclose(product, arrays[f"proj/{key}"], rtol=0, atol=PRODUCT_TOLERANCE)
        exact = name not in ROUNDED_OTHERWISE
        assert (sha256(decoded) == info["weights"][key]["sha256_f32"]) is exact, key
        if f"w/{key}" in arrays:
            tolerance = 0.0 if exact else RELATIVE
            np.testing.assert_allclose(decoded.numpy(), arrays[f"w/{key}"], rtol=tolerance, atol=0)


def in_file_order(weight: np.ndarray, stored_name: str, checkpoint: GgufCheckpoint) -> np.ndarray:
    """Rows as llama.cpp's converter stores them: those of q and k in llama models interleaved for its RoPE."""
    stem = stored_name.split(".")[-2]
    if checkpoint.config["model_type"] != "llama" or stem not in ("attn_q", "attn_k"):
        return weight
    heads = checkpoint.config["num_attention_heads" if stem == "attn_q" else "num_key_value_heads"]
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


@pytest.mark.parametrize("name", GGUFS)
def test_every_gguf_matrix_decodes_to_its_oracle(name: str, checkpoints_dir: Path) -> None:
    checkpoint = open_checkpoint(checkpoints_dir / f"{name}.gguf")
    assert isinstance(checkpoint, GgufCheckpoint)
    info, arrays = oracle(checkpoints_dir / name)
    assert len(info["weights"]) >= 15
    for stored_name, entry in info["weights"].items():
        key = hf_name(stored_name, checkpoint.config["model_type"]).removesuffix(".weight")
        kind, shape, rows = checkpoint.packed(f"{key}.weight")
        decoded = find_format(checkpoint, key).linear(checkpoint, key, shape, CPU).dequantize().numpy()
        expected = gguf.quants.dequantize(rows.contiguous().numpy(), gguf.GGMLQuantizationType[kind])
        np.testing.assert_array_equal(decoded, expected.reshape(shape), err_msg=stored_name)
        stored = in_file_order(decoded, stored_name, checkpoint)
        assert list(stored.shape) == entry["shape"]
        product = (stored.astype(np.float64) @ probe(shape[1])).astype(np.float32)
        np.testing.assert_allclose(product, arrays[f"proj/{stored_name}"], rtol=0, atol=PRODUCT_TOLERANCE)


LOGIT_TOLERANCE = 2e-5
"""Against transformers in float32: the same weights, another order of summation (measured: 5.2e-6). Logits reach 11."""


def model_of(checkpoint: Checkpoint) -> Decoder:
    spec = spec_from_config(checkpoint.config)
    return Decoder(spec, load_weights(checkpoint, spec, CPU), ReferenceKernels())


def logits_of(model: Decoder, ids: list[int]) -> np.ndarray:
    """(R, V) of a prompt."""
    cache = model.new_cache(len(ids))
    start = cache.reserve(len(ids))
    return model.forward(ids, Attend.chain(start, len(ids)), cache, last_only=False).logits.numpy()


def check_logits(model: Decoder, arrays: dict[str, np.ndarray], tolerance: float = LOGIT_TOLERANCE) -> None:
    logits = logits_of(model, arrays["ids"].tolist())
    np.testing.assert_allclose(logits, arrays["logits"], rtol=0, atol=tolerance)


def greedy(model: Decoder, ids: list[int], steps: int) -> list[int]:
    cache = model.new_cache(len(ids) + steps)
    tokens, pending = list(ids), list(ids)
    for _ in range(steps):
        start = cache.reserve(len(pending))
        out = model.forward(pending, Attend.chain(start, len(pending)), cache, last_only=True)
        cache.commit(len(pending))
        pending = [int(out.logits[-1].argmax())]
        tokens += pending
    return tokens[len(ids) :]


def clear_steps(margins: np.ndarray, too_close: float = 2 * LOGIT_TOLERANCE) -> int:
    """Steps before the first whose two best logits are too close to compare."""
    close = np.flatnonzero(margins <= too_close)
    return int(close[0]) if len(close) else len(margins)


@pytest.mark.parametrize("name", [*FOLDERS, *GGUFS])
def test_the_model_says_what_transformers_says(name: str, checkpoints_dir: Path) -> None:
    file = checkpoints_dir / f"{name}.gguf"
    model = model_of(open_checkpoint(file if file.exists() else checkpoints_dir / name))
    _, arrays = oracle(checkpoints_dir / name)
    check_logits(model, arrays)
    for ids, text, margins in (("ids", "greedy", "greedy_margin"), ("text_ids", "text_greedy", "text_greedy_margin")):
        steps = clear_steps(arrays[margins])
        assert steps >= 4
        assert greedy(model, arrays[ids].tolist(), steps) == arrays[text][:steps].tolist()


CPU_TOLERANCE = 0.2
"""Of the CPU kernels, whose activations are int8 per 32 inputs for integer weights (measured: 0.112)."""
CPU_TOO_CLOSE = 0.05
"""Two best logits nearer than this may change places (seen: at most 0.04)."""


@pytest.fixture(scope="module")
def cpu_kernels() -> Kernels:
    from specgen.kernels.cpu import load_cpu_kernels

    try:
        return load_cpu_kernels(1)
    except SpecgenError as error:
        pytest.skip(f"the CPU kernels cannot be built here: {error.message}")


@pytest.mark.parametrize("name", [*FOLDERS, *GGUFS])
def test_the_model_runs_packed_on_the_cpu_kernels(name: str, checkpoints_dir: Path, cpu_kernels: Kernels) -> None:
    file = checkpoints_dir / f"{name}.gguf"
    checkpoint = open_checkpoint(file if file.exists() else checkpoints_dir / name)
    model = build_model(checkpoint, spec_from_config(checkpoint.config), cpu_kernels)
    _, arrays = oracle(checkpoints_dir / name)
    check_logits(model, arrays, CPU_TOLERANCE)
    compared = 0
    for ids, text, margins in (("ids", "greedy", "greedy_margin"), ("text_ids", "text_greedy", "text_greedy_margin")):
        steps = clear_steps(arrays[margins], CPU_TOO_CLOSE)
        assert greedy(model, arrays[ids].tolist(), steps) == arrays[text][:steps].tolist()
        compared += steps
    assert compared >= 8


def test_another_rounding_of_the_same_model_is_noticed(checkpoints_dir: Path) -> None:
    _, arrays = oracle(checkpoints_dir / "llama-ct-fp8-dynamic")
    with pytest.raises(AssertionError):
        check_logits(model_of(open_checkpoint(checkpoints_dir / "llama-ct-fp8-static")), arrays)


def test_a_missing_bias_is_noticed(checkpoints_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "qwen2-awq-gptqmodel-g32-asym"
    monkeypatch.setattr("specgen.weights.module.Module.bias", lambda self, outputs: None)
    with pytest.raises(AssertionError):
        check_logits(model_of(open_checkpoint(checkpoints_dir / name)), oracle(checkpoints_dir / name)[1])
