"""Whatever the user points at is recognised by its first bytes, or refused with a reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from gguf_files import llama_file
from safetensors.torch import save_file

from specgen.errors import ModelError
from specgen.weights.checkpoint import open_checkpoint
from specgen.weights.gguf_file import GgufCheckpoint
from specgen.weights.safetensors_file import SafetensorsCheckpoint


def safetensors_folder(path: Path) -> Path:
    path.mkdir(exist_ok=True)
    save_file({"w": torch.ones(2)}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return path


def test_a_gguf_file_by_any_name(tmp_path: Path) -> None:
    path = llama_file(tmp_path / "model.gguf").rename(tmp_path / "weights.dat")
    assert isinstance(open_checkpoint(path), GgufCheckpoint)


def test_a_folder_with_one_gguf_file(tmp_path: Path) -> None:
    llama_file(tmp_path / "model.gguf")
    (tmp_path / "README.md").write_text("GG")
    assert open_checkpoint(tmp_path).path == tmp_path / "model.gguf"


def test_a_safetensors_folder_and_a_file_in_it(tmp_path: Path) -> None:
    folder = safetensors_folder(tmp_path)
    assert isinstance(open_checkpoint(folder), SafetensorsCheckpoint)
    assert open_checkpoint(folder / "model.safetensors").path == folder


def test_several_gguf_files_are_not_guessed_between(tmp_path: Path) -> None:
    llama_file(tmp_path / "a.gguf")
    llama_file(tmp_path / "b.gguf")
    with pytest.raises(ModelError, match=r"several GGUF files: a\.gguf, b\.gguf"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.gguf", "model.safetensors"])
def test_pickles_are_refused_whatever_their_name(name: str, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / name)
    with pytest.raises(ModelError, match="pickle") as caught:
        open_checkpoint(tmp_path / name)
    assert "run code" in (caught.value.hint or "")


def test_a_folder_of_pickles(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="pickles only"):
        open_checkpoint(tmp_path)


def test_what_is_not_there_or_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        open_checkpoint(tmp_path / "nothing")
    with pytest.raises(ModelError, match="holds no model"):
        open_checkpoint(tmp_path)
    (tmp_path / "page.gguf").write_text("<html>not found</html>")
    with pytest.raises(ModelError, match="neither a GGUF nor a safetensors file"):
        open_checkpoint(tmp_path / "page.gguf")


def test_weights_without_a_configuration(tmp_path: Path) -> None:
    (safetensors_folder(tmp_path) / "config.json").unlink()
    with pytest.raises(ModelError, match=r"no config\.json"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("text", ["[1]", "{", "[" * 100_000, '"model"'])
def test_a_broken_configuration_is_named(text: str, tmp_path: Path) -> None:
    (safetensors_folder(tmp_path) / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json"):
        open_checkpoint(tmp_path)


def test_gguf_and_safetensors_of_one_model_agree(checkpoints_dir: Path) -> None:
    """llama.cpp's own conversion of a Hugging Face checkpoint gives back every name, value and setting."""
    base = open_checkpoint(checkpoints_dir / "llama-base")
    converted = open_checkpoint(checkpoints_dir / "llama-gguf" / "llama-F16.gguf")
    assert set(base.names()) == set(converted.names())
    for name in base.names():
        assert torch.equal(base.tensor(name).float(), converted.tensor(name).float()), name
    same = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")
    same += ("num_key_value_heads", "vocab_size", "max_position_embeddings", "tie_word_embeddings", "attention_bias")
    assert {key: base.config[key] for key in same} == {key: converted.config[key] for key in same}
