"""GGUF types decode bit for bit as gguf-py decodes them."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf_files import KV_HEADS, add_key, llama_file, model_keys, tokenizer_keys, weights, write_gguf
from torch import Tensor

from specgen.errors import ModelError
from specgen.weights import gguf_file, gguf_q4
from specgen.weights.dense import Dense
from specgen.weights.formats import FORMATS, find_format
from specgen.weights.gguf_file import GgufCheckpoint
from specgen.weights.gguf_q4 import GgufQ4_0, GgufQ4_1
from specgen.weights.gguf_q8 import GgufQ8_0
from specgen.weights.packed import GroupedInt4, QuantLinear

CPU = torch.device("cpu")
FORMAT_OF = {"Q4_0": GgufQ4_0, "Q4_1": GgufQ4_1, "Q8_0": GgufQ8_0, "F16": Dense, "BF16": Dense, "F32": Dense}
MODULES = {
    "model.layers.0.self_attn.q_proj": "blk.0.attn_q.weight",
    "model.layers.0.self_attn.k_proj": "blk.0.attn_k.weight",
    "model.layers.0.mlp.down_proj": "blk.0.ffn_down.weight",
    "model.embed_tokens": "token_embd.weight",
}


def oracle(stored_name: str, quant: str) -> Tensor:
    """gguf-py packs and unpacks the rows in Hugging Face's order (rows are packed one by one)."""
    kind = gguf.GGMLQuantizationType[quant]
    weight = weights()[stored_name]
    packed = weight if quant == "F32" else gguf.quants.quantize(weight, kind)
    return torch.from_numpy(gguf.quants.dequantize(packed, kind).astype(np.float32))


def load(checkpoint: GgufCheckpoint, key: str) -> QuantLinear:
    shape = weights()[MODULES[key]].shape
    return find_format(checkpoint, key).linear(checkpoint, key, (shape[0], shape[1]), CPU)


@pytest.mark.parametrize("quant", FORMAT_OF)
def test_bit_for_bit(quant: str, tmp_path: Path) -> None:
    checkpoint = GgufCheckpoint(llama_file(tmp_path / "model.gguf", quant))
    for key, stored_name in MODULES.items():
        assert type(find_format(checkpoint, key)) is FORMAT_OF[quant]
        assert torch.equal(load(checkpoint, key).dequantize(), oracle(stored_name, quant)), key


@pytest.mark.parametrize("quant", ["Q4_0", "Q4_1"])
def test_scales_stay_as_stored(quant: str, tmp_path: Path) -> None:
    weight = load(GgufCheckpoint(llama_file(tmp_path / "model.gguf", quant)), "model.embed_tokens")
    assert isinstance(weight, GroupedInt4)
    assert weight.scale.dtype == weight.min.dtype == torch.float16
    assert weight.nbytes == weight.shape[0] * weight.shape[1] // 32 * 20


RIGHT_ORDER = gguf_q4.neighbours


def swapped(nibbles: Tensor) -> Tensor:
    right = RIGHT_ORDER(nibbles)
    return (right >> 4) | (right << 4)


def stored_order(nibbles: Tensor) -> Tensor:
    return nibbles.reshape(nibbles.shape[0], -1)


@pytest.mark.parametrize("mutant", [swapped, stored_order])
@pytest.mark.parametrize("quant", ["Q4_0", "Q4_1"])
def test_mutants_of_the_nibble_order_fail(
    quant: str, mutant: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_q4, "neighbours", mutant)
    weight = load(GgufCheckpoint(llama_file(tmp_path / "model.gguf", quant)), "model.embed_tokens")
    assert not torch.equal(weight.dequantize(), oracle("token_embd.weight", quant))


def test_mutant_without_the_permutation_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_file, "_undo_interleaving", lambda rows, heads: rows)
    checkpoint = GgufCheckpoint(llama_file(tmp_path / "model.gguf", "Q4_1"))
    for key in ("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"):
        assert not torch.equal(load(checkpoint, key).dequantize(), oracle(MODULES[key], "Q4_1"))


@pytest.mark.parametrize("quant", ["Q4_0", "Q4_1"])
def test_mutant_without_the_minimum_fails(quant: str, tmp_path: Path) -> None:
    weight = load(GgufCheckpoint(llama_file(tmp_path / "model.gguf", quant)), "model.embed_tokens")
    assert isinstance(weight, GroupedInt4)
    dropped = GroupedInt4(weight.nibbles, weight.scale, torch.zeros_like(weight.min), weight.group)
    assert not torch.equal(dropped.dequantize(), oracle("token_embd.weight", quant))


def test_every_nibble_lands_in_its_place() -> None:
    values = torch.arange(32, dtype=torch.int64) % 16
    block = (values[:16] | (values[16:] << 4)).to(torch.uint8).reshape(1, 1, 16)
    out = gguf_q4.neighbours(block.repeat(2, 3, 1))
    assert torch.stack((out & 15, out >> 4), dim=-1).reshape(2, 3, 32).tolist() == [[values.tolist()] * 3] * 2


def packed_file(tmp_path: Path, rows: np.ndarray, quant: str) -> GgufCheckpoint:
    """One ready-packed matrix as the embedding."""
    kind = gguf.GGMLQuantizationType[quant]
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    for key, value in {**model_keys(), **tokenizer_keys()}.items():
        add_key(writer, key, value)
    writer.add_tensor("token_embd.weight", rows, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufCheckpoint(tmp_path / "model.gguf")


def q4_0_rows(scale: float) -> np.ndarray:
    rows = np.arange(2 * 18, dtype=np.uint8).reshape(2, 18)
    rows[:, :2] = np.array([scale], dtype=np.float16).view(np.uint8)
    return rows


def test_a_scale_too_large_for_half_the_minimum_stays_exact(tmp_path: Path) -> None:
    rows = q4_0_rows(60000.0)
    checkpoint = packed_file(tmp_path, rows, "Q4_0")
    weight = find_format(checkpoint, "model.embed_tokens").linear(checkpoint, "model.embed_tokens", (2, 32), CPU)
    expected = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType.Q4_0)
    assert torch.equal(weight.dequantize(), torch.from_numpy(expected))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_scale_that_is_not_finite_names_the_tensor(bad: float, tmp_path: Path) -> None:
    checkpoint = packed_file(tmp_path, q4_0_rows(bad), "Q4_0")
    with pytest.raises(ModelError, match=r"model\.embed_tokens\.weight .*not finite"):
        find_format(checkpoint, "model.embed_tokens").linear(checkpoint, "model.embed_tokens", (2, 32), CPU)


@pytest.mark.parametrize("quant", FORMAT_OF)
def test_a_wrong_shape_names_the_tensor(quant: str, tmp_path: Path) -> None:
    checkpoint = GgufCheckpoint(llama_file(tmp_path / "model.gguf", quant))
    with pytest.raises(ModelError, match=r"model\.embed_tokens\.weight"):
        find_format(checkpoint, "model.embed_tokens").linear(checkpoint, "model.embed_tokens", (64, 288), CPU)


def test_biases_come_along(tmp_path: Path) -> None:
    bias = np.arange(KV_HEADS * 16, dtype=np.float32)
    keys = {**model_keys("qwen2"), **tokenizer_keys()}
    tensors = {**weights(), "blk.0.attn_k.bias": bias}
    checkpoint = GgufCheckpoint(write_gguf(tmp_path / "m.gguf", tensors, quant="Q8_0", arch="qwen2", keys=keys))
    weight = load(checkpoint, "model.layers.0.self_attn.k_proj")
    assert weight.bias is not None
    assert weight.bias.tolist() == bias.tolist()
    assert load(checkpoint, "model.layers.0.self_attn.q_proj").bias is None


def test_a_missing_module_is_named(tmp_path: Path) -> None:
    checkpoint = GgufCheckpoint(llama_file(tmp_path / "model.gguf"))
    with pytest.raises(ModelError, match="module lm_head has no tensors"):
        find_format(checkpoint, "lm_head")


def test_an_unread_type_is_refused_by_name(tmp_path: Path) -> None:
    rows = np.zeros((2, 66), dtype=np.uint8)
    checkpoint = packed_file(tmp_path, rows, "TQ2_0")
    with pytest.raises(ModelError, match="packed as TQ2_0") as caught:
        find_format(checkpoint, "model.embed_tokens")
    assert all(weight_format.name in (caught.value.hint or "") for weight_format in FORMATS)
