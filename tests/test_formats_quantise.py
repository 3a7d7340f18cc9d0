"""Quantising on load: errors within each kind's own step, the cache on disk, what is left alone and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from golden_files import CPU, Golden
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from specgen.errors import ModelError, UsageError
from specgen.weights import quantise as methods
from specgen.weights import quantised, safetensors_write
from specgen.weights.bnb import codebook
from specgen.weights.checkpoint import open_checkpoint
from specgen.weights.formats import find_format
from specgen.weights.packed import Codebook4, Fp8, GroupedInt4, GroupedInt8, QuantLinear
from specgen.weights.quantise import QUANTISERS, quantise
from specgen.weights.quantised import quantised_checkpoint

LAYER = "model.layers.0."
KINDS = list(QUANTISERS)


def matrix(outputs: int, inputs: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(outputs + inputs)
    weight = torch.randn(outputs, inputs, generator=generator) * 0.05
    weight[1, : inputs // 2] = 0.25  # a constant group
    weight[2] = 0.0
    weight[3, 5] = 1.5  # an outlier
    return weight.to(dtype)


def relative_error(weight: Tensor, packed: QuantLinear) -> float:
    return float((packed.dequantize() - weight.float()).norm() / weight.float().norm())


BOUNDS = {"int4": (0.07, 0.082), "int8": (0.004, 0.009), "fp8": (0.015, 0.03), "nf4": (0.07, 0.1)}
"""Relative error of normally distributed weights: below the upper bound, and not better than the kind can be."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_error_is_what_the_kind_allows(kind: str, dtype: torch.dtype) -> None:
    weight = matrix(200, 192, dtype)
    low, high = BOUNDS[kind]
    assert low < relative_error(weight[4:], quantise(weight[4:], kind)) < high


@pytest.mark.parametrize("kind", KINDS)
def test_rows_do_not_depend_on_their_neighbours(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = matrix(200, 192)
    whole = quantise(weight, kind).dequantize()
    monkeypatch.setattr(methods, "ELEMENTS_AT_ONCE", 1)
    assert torch.equal(quantise(weight, kind).dequantize(), whole)


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_and_constants_survive(kind: str) -> None:
    packed = quantise(matrix(200, 192), kind)
    decoded = packed.dequantize()
    assert bool(decoded.isfinite().all())
    assert torch.equal(decoded[2], torch.zeros(192))
    assert torch.allclose(decoded[1, :64], torch.full((64,), 0.25), rtol=2.0**-8 if kind != "fp8" else 0.07)


@pytest.mark.parametrize(
    ("kind", "packed", "bits"), [("int4", GroupedInt4, 5.0), ("int8", GroupedInt8, 8.5), ("nf4", Codebook4, 5.0)]
)
def test_bytes(kind: str, packed: type, bits: float) -> None:
    weight = quantise(matrix(256, 256)[4:], kind)
    assert isinstance(weight, packed)
    assert weight.nbytes * 8 / weight.dequantize().numel() <= bits + 0.02


def test_a_search_over_clips_beats_plain_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = matrix(256, 256)
    searched = relative_error(weight, quantise(weight, "int4"))
    monkeypatch.setattr(methods, "INT4_CLIPS", (1.0,))
    assert searched < 0.97 * relative_error(weight, quantise(weight, "int4"))


def test_each_group_keeps_its_best_clip(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = matrix(64, 256)

    def errors() -> Tensor:
        return (quantise(weight, "int4").dequantize() - weight).square().reshape(64, 8, 32).sum(-1)

    best = errors()
    for clip in methods.INT4_CLIPS:
        monkeypatch.setattr(methods, "INT4_CLIPS", (clip,))
        assert bool((best <= errors() * (1 + 1e-5)).all())


def test_nf4_is_what_bitsandbytes_decodes() -> None:
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    weight = matrix(96, 192)
    theirs = dequantize_4bit(*quantize_4bit(weight, blocksize=64, quant_type="nf4"))
    packed = quantise(weight, "nf4")
    assert torch.equal(packed.dequantize(), theirs)
    assert isinstance(packed, Codebook4)
    high_first, _ = quantize_4bit(weight, blocksize=64, quant_type="nf4")
    wrong = codebook(high_first.reshape(96, 96) >> 4, packed.code, packed.scale.float().flatten(), 64)
    assert not torch.equal(wrong.dequantize(), theirs)


def test_fp8_has_one_scale_per_output() -> None:
    packed = quantise(matrix(64, 96), "fp8")
    assert isinstance(packed, Fp8)
    assert packed.block == (1, 96)
    assert float(packed.q.float().abs().amax()) == 448.0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1e-6, 1e6])
def test_weights_beyond_float16(kind: str, size: float) -> None:
    weight = matrix(64, 96)[4:] * size
    assert relative_error(weight, quantise(weight, kind)) < 0.12


def test_inputs_that_a_group_does_not_divide() -> None:
    weight = matrix(64, 80)
    packed = quantise(weight, "int4")
    assert isinstance(packed, GroupedInt4)
    assert packed.group == 16
    with pytest.raises(ModelError, match="81 inputs"):
        quantise(matrix(64, 81), "int4")
    assert relative_error(matrix(64, 81), quantise(matrix(64, 81), "int8")) < 0.01


def test_an_unknown_kind_is_named() -> None:
    with pytest.raises(UsageError, match="'int3'") as raised:
        quantise(matrix(64, 64), "int3")
    assert raised.value.hint is not None
    assert "int4" in raised.value.hint


def dense_model(folder: Path, damage: Callable[[dict[str, Tensor]], None] = lambda tensors: None) -> Path:
    tensors = {
        "model.embed_tokens.weight": matrix(96, 64, torch.bfloat16),
        "lm_head.weight": matrix(96, 64, torch.bfloat16) * 2,
        "model.norm.weight": torch.ones(64),
        LAYER + "self_attn.q_proj.weight": matrix(64, 64, torch.bfloat16),
        LAYER + "self_attn.q_proj.bias": torch.arange(64.0),
        LAYER + "self_attn.q_norm.weight": torch.ones(64),
        LAYER + "mlp.gate.weight": matrix(8, 64),
        LAYER + "mlp.down_proj.weight": matrix(64, 128),
    }
    damage(tensors)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_quantised_once(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = open_checkpoint(dense_model(tmp_path / "model"))
    steps: list[tuple[int, int]] = []
    first = quantised_checkpoint(base, kind, tmp_path / "cache", lambda done, total: steps.append((done, total)))
    assert steps == [(1, 4), (2, 4), (3, 4), (4, 4)]
    monkeypatch.setattr(quantised, "_write", None)  # a second call must not need it
    second = quantised_checkpoint(base, kind, tmp_path / "cache")
    for checkpoint in (first, second):
        for key, shape in {LAYER + "self_attn.q_proj": (64, 64), LAYER + "mlp.down_proj": (64, 128)}.items():
            linear = find_format(checkpoint, key).linear(checkpoint, key, shape, CPU)
            assert torch.equal(linear.dequantize(), quantise(base.tensor(key + ".weight"), kind).dequantize())
            assert (linear.bias is None) == key.endswith("down_proj")
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".safetensors"]


def test_what_stays_as_it_is(tmp_path: Path) -> None:
    base = open_checkpoint(dense_model(tmp_path / "model"))
    checkpoint = quantised_checkpoint(base, "nf4", tmp_path / "cache")
    for key in ("model.embed_tokens", "lm_head"):
        assert find_format(checkpoint, key).name == "int8 (on load)"
    assert find_format(checkpoint, LAYER + "mlp.gate").name == "dense"
    assert torch.equal(checkpoint.tensor("model.norm.weight"), torch.ones(64))
    assert checkpoint.config == base.config
    with pytest.raises(ModelError, match=r"down_proj\.weight is missing"):
        checkpoint.tensor(LAYER + "mlp.down_proj.weight")
    checkpoint.release()


def test_the_cache_knows_model_kind_and_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = open_checkpoint(dense_model(tmp_path / "model"))
    digests = {quantised_checkpoint(base, kind, tmp_path / "cache").digest() for kind in KINDS}
    monkeypatch.setattr(quantised, "METHOD_VERSION", 2)
    digests.add(quantised_checkpoint(base, "int4", tmp_path / "cache").digest())
    other = open_checkpoint(dense_model(tmp_path / "other", lambda t: t["lm_head.weight"].add_(1)))
    digests.add(quantised_checkpoint(other, "int4", tmp_path / "cache").digest())
    assert len(digests - {base.digest()}) == len(list((tmp_path / "cache").iterdir())) == len(KINDS) + 2


def test_the_cached_file_is_a_safetensors_file(tmp_path: Path) -> None:
    quantised_checkpoint(open_checkpoint(dense_model(tmp_path / "model")), "int4", tmp_path / "cache")
    (path,) = (tmp_path / "cache").iterdir()
    with safe_open(path, "pt") as file:
        assert tuple(file.get_tensor(LAYER + "mlp.down_proj.int4_q").shape) == (64, 64)


def test_a_damaged_cache_is_made_again(tmp_path: Path) -> None:
    base = open_checkpoint(dense_model(tmp_path / "model"))
    quantised_checkpoint(base, "int8", tmp_path / "cache")
    (path,) = (tmp_path / "cache").iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[:-1000])
    quantised_checkpoint(base, "int8", tmp_path / "cache")
    assert path.read_bytes() == whole


def test_a_broken_run_leaves_nothing_behind(tmp_path: Path) -> None:
    base = open_checkpoint(dense_model(tmp_path / "model"))

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantised_checkpoint(base, "int4", tmp_path / "cache", interrupt)
    assert list((tmp_path / "cache").iterdir()) == []


def test_weights_that_are_not_finite_are_named(tmp_path: Path) -> None:
    def damage(tensors: dict[str, Tensor]) -> None:
        tensors[LAYER + "mlp.down_proj.weight"][0, 0] = float("nan")

    base = open_checkpoint(dense_model(tmp_path / "model", damage))
    with pytest.raises(ModelError, match=r"down_proj\.weight holds values that are not finite"):
        quantised_checkpoint(base, "int4", tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize(("name", "said"), [("awq-gemm", "awq gemm"), ("bnb-nf4", "nf4"), ("gguf-Q4_K", "gguf Q4_K")])
def test_a_packed_model_is_refused(name: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    base = Golden.load(name).checkpoint(tmp_path / "model")
    with pytest.raises(ModelError, match="is quantised already") as raised:
        quantised_checkpoint(base, "int4", tmp_path / "cache")
    assert said in raised.value.message


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = open_checkpoint(dense_model(tmp_path / "model"))

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors_write.os, "fsync", full)
    with pytest.raises(ModelError, match="No space left on device") as raised:
        quantised_checkpoint(base, "int4", tmp_path / "cache")
    assert raised.value.hint is not None
    assert "SPECGEN_CACHE" in raised.value.hint
    assert list((tmp_path / "cache").iterdir()) == []
