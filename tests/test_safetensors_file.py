"""Safetensors folders are read as the reference library reads them; broken ones name file and tensor."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from specgen.errors import ModelError
from specgen.weights.dense import Dense
from specgen.weights.formats import find_format
from specgen.weights.safetensors_file import INDEX, SafetensorsCheckpoint

TENSORS = {
    "model.norm.weight": torch.arange(5, dtype=torch.float32),
    "a.weight": torch.arange(12, dtype=torch.float16).reshape(3, 4),
    "a.bias": torch.tensor([1.5, 2.5, 3.5], dtype=torch.bfloat16),
    "packed": torch.arange(7, dtype=torch.int32),
    "bytes": torch.arange(3, dtype=torch.uint8),
    "fp8": torch.tensor([[1.0, -2.0]]).to(torch.float8_e4m3fn),
    "scalar": torch.tensor(4, dtype=torch.int64),
    "empty": torch.empty(0, 4),
    "flag": torch.tensor([True, False]),
}


def folder(path: Path, tensors: dict[str, torch.Tensor] = TENSORS) -> Path:
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return path


def write_raw(path: Path, header: object, data: bytes = b"") -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    (path / "config.json").write_text("{}")
    return path


def sharded(path: Path) -> Path:
    first = {name: tensor for name, tensor in TENSORS.items() if name < "d"}
    rest = {name: tensor for name, tensor in TENSORS.items() if name >= "d"}
    shards = {"model-00001-of-00002.safetensors": first, "model-00002-of-00002.safetensors": rest}
    for file, tensors in shards.items():
        save_file(tensors, path / file)
    index = {name: file for file, tensors in shards.items() for name in tensors}
    (path / INDEX).write_text(json.dumps({"weight_map": index}))
    (path / "config.json").write_text("{}")
    return path


@pytest.mark.parametrize("build", [folder, sharded])
def test_the_same_as_the_reference_library(build: Callable[[Path], Path], tmp_path: Path) -> None:
    checkpoint = SafetensorsCheckpoint(build(tmp_path))
    expected = {name: tensor for file in tmp_path.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert set(checkpoint.names()) == set(expected) == set(TENSORS)
    for name, tensor in expected.items():
        ours = checkpoint.tensor(name)
        assert (ours.dtype, ours.shape) == (tensor.dtype, tensor.shape)
        assert ours.reshape(-1).view(torch.uint8).tolist() == tensor.reshape(-1).view(torch.uint8).tolist()


def test_tensors_are_views_of_the_file(tmp_path: Path) -> None:
    checkpoint = SafetensorsCheckpoint(folder(tmp_path))
    first, again = checkpoint.tensor("a.weight"), checkpoint.tensor("a.weight")
    assert first.data_ptr() == again.data_ptr()
    checkpoint.release()
    assert torch.equal(first, TENSORS["a.weight"])


def test_writing_to_a_view_does_not_reach_the_disk(tmp_path: Path) -> None:
    SafetensorsCheckpoint(folder(tmp_path)).tensor("a.weight").zero_()
    assert torch.equal(SafetensorsCheckpoint(tmp_path).tensor("a.weight"), TENSORS["a.weight"])


def test_an_unaligned_tensor_is_copied(tmp_path: Path) -> None:
    header = {"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}
    header["b"] = {"dtype": "F32", "shape": [1], "data_offsets": [1, 5]}
    for padding in range(4):
        write_raw(tmp_path, json.dumps(header).encode() + b" " * padding, b"\x00" + struct.pack("<f", 2.5))
        assert SafetensorsCheckpoint(tmp_path).tensor("b").tolist() == [2.5]


def test_dense_linear(tmp_path: Path) -> None:
    checkpoint = SafetensorsCheckpoint(folder(tmp_path))
    weight_format = find_format(checkpoint, "a")
    assert isinstance(weight_format, Dense)
    weight = weight_format.linear(checkpoint, "a", (3, 4), torch.device("cpu"))
    assert torch.equal(weight.dequantize(), TENSORS["a.weight"].float())
    assert weight.bias is not None
    assert weight.bias.tolist() == [1.5, 2.5, 3.5]
    with pytest.raises(ModelError, match=r"a\.weight"):
        weight_format.linear(checkpoint, "a", (4, 3), torch.device("cpu"))


def entry(**changes: Any) -> dict[str, Any]:
    return {"model.w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (entry(data_offsets=[0, 7]), "not the size of F32"),
        (entry(shape=[3], data_offsets=[0, 12]), "takes bytes"),
        (entry(data_offsets=[8, 0]), "takes bytes"),
        (entry(data_offsets=[-8, 0]), "malformed"),
        (entry(data_offsets=[0]), "malformed"),
        (entry(shape=[1 << 61, 1 << 61]), "not the size"),
        (entry(shape=[1 << 80]), "malformed"),
        (entry(shape=[True, 2]), "malformed"),
        (entry(shape="2"), "malformed"),
        (entry(shape=[1] * 99), "malformed"),
        (entry(dtype=7), "malformed"),
        ({"model.w": {}}, "malformed"),
        ({"model.w": None}, "malformed"),
        ([1, 2], "no JSON object"),
        (b"{]", "no valid JSON"),
        (b"[" * 100_000, "no valid JSON"),
        (b'{"model.w": 1, "model.w": 2}', "'model.w' occurs twice"),
        (b"\xff\xfe", "no valid JSON"),
    ],
)
def test_a_broken_header_is_told(header: object, message: str, tmp_path: Path) -> None:
    write_raw(tmp_path, header, bytes(8))
    with pytest.raises(ModelError) as caught:
        SafetensorsCheckpoint(tmp_path)
    assert str(tmp_path / "model.safetensors") in caught.value.message
    assert message in caught.value.message


def test_an_unknown_dtype_is_told_when_it_is_needed(tmp_path: Path) -> None:
    write_raw(tmp_path, entry(dtype="F4"), bytes(8))
    checkpoint = SafetensorsCheckpoint(tmp_path)
    with pytest.raises(ModelError, match=r"model\.w has the unknown dtype 'F4'"):
        checkpoint.tensor("model.w")


@pytest.mark.parametrize("size", [0, 5, 8, 40, -1])
def test_a_truncated_file_is_told(size: int, tmp_path: Path) -> None:
    file = folder(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        SafetensorsCheckpoint(tmp_path)


def test_an_index_that_names_a_missing_file(tmp_path: Path) -> None:
    (sharded(tmp_path) / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"index\.json says that tensor .* is in model-00002.*missing"):
        SafetensorsCheckpoint(tmp_path)


def test_an_index_that_lists_a_tensor_in_the_wrong_file(tmp_path: Path) -> None:
    path = sharded(tmp_path) / INDEX
    index = json.loads(path.read_text())
    index["weight_map"]["lm_head.weight"] = "model-00001-of-00002.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"00001-of-00002\.safetensors: tensor lm_head\.weight is missing"):
        SafetensorsCheckpoint(tmp_path)


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", "..", ""])
def test_an_index_cannot_leave_its_folder(file: str, tmp_path: Path) -> None:
    (sharded(tmp_path) / INDEX).write_text(json.dumps({"weight_map": {"x": file}}))
    with pytest.raises(ModelError, match=r"no file of this folder|missing"):
        SafetensorsCheckpoint(tmp_path)


def test_several_files_without_an_index(tmp_path: Path) -> None:
    (sharded(tmp_path) / INDEX).unlink()
    with pytest.raises(ModelError, match="2 safetensors files and no model"):
        SafetensorsCheckpoint(tmp_path)


def test_the_digest_follows_weights_and_config(tmp_path: Path) -> None:
    seen = set()
    for config, scale in (("{}", 1), ('{"a": 1}', 1), ("{}", 2)):
        folder(tmp_path, {"w": torch.ones(1000) * scale})
        (tmp_path / "config.json").write_text(config)
        seen.add(SafetensorsCheckpoint(tmp_path).digest())
    assert len(seen) == 3


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_fuzz(tmp_path: Path, data: st.DataObject) -> None:
    """Random damage: the file opens, or it is refused with its name."""
    file = folder(tmp_path) / "model.safetensors"
    damaged = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        offset = data.draw(st.integers(0, len(damaged) - 1))
        damaged[offset : offset + 4] = data.draw(st.binary(min_size=1, max_size=4))
    file.write_bytes(damaged[: data.draw(st.integers(1, len(damaged)))])
    with suppress(ModelError):
        checkpoint = SafetensorsCheckpoint(tmp_path)
        for name in checkpoint.names():
            checkpoint.tensor(name)
        checkpoint.digest()
