"""Every format against its golden file, and broken readers that must fail the same check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from golden_files import CPU, NAMES, Golden, probe, sha256
from torch import Tensor

from specgen.weights import awq, bits, bnb, compressed_tensors, gguf_k, gptq
from specgen.weights.awq import AwqGemm
from specgen.weights.bits import swap_nibbles, unpack_words
from specgen.weights.dense import Dense
from specgen.weights.formats import FORMATS, find_format
from specgen.weights.packed import (
    Codebook4,
    Fp8,
    GroupedInt4,
    GroupedInt8,
    Nested,
    QuantLinear,
    to_device,
    unpack_nibbles,
)

INEXACT = {"bnb-int8": 2.0**-23, "gguf-Q3_K": 0.0, "gguf-Q4_0": 0.0}
"""Where the bytes may differ from the oracle's, and by how much relative to a weight.

bitsandbytes rounds w · SCB before it multiplies by 1 / 127, and one scale per output has 1 / 127 in it: one unit in the
last place. Q3_K and Q4_0 with a negative scale have +0 where gguf-py has -0.
"""


def check(golden: Golden, weight: QuantLinear) -> None:
    """AssertionError unless `weight` decodes to what the oracle says."""
    decoded = weight.dequantize()
    assert decoded.shape == golden.shape
    assert decoded.dtype == torch.float32
    product = (decoded.double().numpy() @ probe(decoded.shape[1])).astype(np.float32)
    first = decoded[: len(golden.rows)].numpy()
    if golden.name in INEXACT:
        np.testing.assert_allclose(first, golden.rows, rtol=INEXACT[golden.name], atol=0)
        np.testing.assert_allclose(product, golden.product, rtol=1e-6, atol=1e-6)
    else:
        np.testing.assert_array_equal(first, golden.rows)
        np.testing.assert_array_equal(product, golden.product)
        assert sha256(decoded) == golden.info["sha256"]


def passes(golden: Golden, weight: QuantLinear) -> bool:
    try:
        check(golden, weight)
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("name", NAMES)
def test_decodes_to_its_oracle(name: str, tmp_path: Path) -> None:
    golden = Golden.load(name)
    check(golden, golden.linear(tmp_path))


@pytest.mark.parametrize("name", NAMES)
def test_rows_decode_like_the_whole(name: str, tmp_path: Path) -> None:
    weight = Golden.load(name).linear(tmp_path)
    whole = weight.dequantize()
    for start, stop in ((0, 1), (7, 42), (120, 128)):
        assert torch.equal(weight.rows(start, stop).dequantize(), whole[start:stop])


@pytest.mark.parametrize("name", NAMES)
def test_exactly_one_format_claims_it(name: str, tmp_path: Path) -> None:
    golden = Golden.load(name)
    checkpoint = golden.checkpoint(tmp_path)
    assert len([each.name for each in FORMATS if each.claims(checkpoint, golden.key)]) == 1
    assert not any(each.claims(checkpoint, "model.layers.1.self_attn.k_proj") for each in FORMATS)


BYTES_PER_FILE_BYTE = {"Q2_K": 1.96, "Q3_K": 1.35, "Q5_0": 1.55, "Q5_1": 1.51, "Q5_K": 1.57, "Q6_K": 1.31}
"""These are widened to nibbles or bytes; everything else may take 13 % more than its file (act-order, BF16 scales)."""


@pytest.mark.parametrize("name", NAMES)
def test_stays_packed(name: str, tmp_path: Path) -> None:
    golden = Golden.load(name)
    stored = sum(tensor.nbytes for tensor in golden.tensors.values())
    assert golden.linear(tmp_path).nbytes <= stored * BYTES_PER_FILE_BYTE.get(golden.info.get("gguf", ""), 1.13)


def shifted(values: Tensor | Nested) -> Tensor | Nested:
    """Every group's number taken from its neighbour."""
    if isinstance(values, Nested):
        return Nested(values.inner.roll(1, 1), values.outer)
    return values.roll(1, 1) if values.shape[1] > 1 else values.roll(1, 0)


def transposed(values: Tensor) -> Tensor:
    return values.t().contiguous().reshape(values.shape)


Mutant = Callable[[Any], QuantLinear]

MUTANTS: dict[type, dict[str, Mutant]] = {
    GroupedInt4: {
        "nibbles swapped": lambda w: replace(w, nibbles=swap_nibbles(w.nibbles)),
        "bytes transposed": lambda w: replace(w, nibbles=transposed(w.nibbles)),
        "zero point one off": lambda w: replace(w, min=w.min.float() - w.scale.float()),
        "no zero point": lambda w: replace(w, min=torch.zeros_like(w.min.float())),
        "scale of another group": lambda w: replace(w, scale=shifted(w.scale)),
        "min of another group": lambda w: replace(w, min=w.min.float().roll(1, 0)),
    },
    GroupedInt8: {
        "bytes transposed": lambda w: replace(w, q=transposed(w.q)),
        "one off": lambda w: replace(w, q=w.q + 1),
        "sign bit flipped": lambda w: replace(w, q=w.q ^ -128),
        "scale of another group": lambda w: replace(w, scale=shifted(w.scale)),
    },
    Fp8: {
        "bytes transposed": lambda w: replace(w, q=transposed(w.q.view(torch.uint8)).view(w.q.dtype)),
        "divided by the scale": lambda w: replace(w, scale=1 / w.scale),
    },
    Codebook4: {
        "nibbles swapped": lambda w: replace(w, nibbles=swap_nibbles(w.nibbles)),
        "bytes transposed": lambda w: replace(w, nibbles=transposed(w.nibbles)),
        "code one off": lambda w: replace(w, code=w.code.roll(1)),
        "scale of another group": lambda w: replace(w, scale=shifted(w.scale)),
    },
}


@pytest.mark.parametrize("name", NAMES)
def test_a_broken_packed_weight_fails(name: str, tmp_path: Path) -> None:
    golden = Golden.load(name)
    weight = golden.linear(tmp_path)
    assert [what for what, mutant in MUTANTS[type(weight)].items() if passes(golden, mutant(weight))] == []


def per_field_add(words: Tensor, bits: int) -> Tensor:
    """What a reader does that has not heard of the borrow."""
    return (unpack_words(words, bits) + 1) & ((1 << bits) - 1)


def test_v1_zero_points_are_added_to_whole_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gptq.Gptq, "zeros", lambda self, words, bits: per_field_add(words, bits))
    golden = Golden.load("gptq-zero-points-of-0")
    with pytest.raises(AssertionError):
        check(golden, golden.linear(tmp_path))


READER_MUTANTS = [
    ("gptq", gptq, "BORROWED", {4: 0, 8: 0}),
    ("gptq-8-bit", gptq, "BORROWED", {4: 0x11111111, 8: 0x11111111}),
    ("gptq-act-order", gptq, "_order", lambda module, inputs, group: None),
    ("ct-w4a16-act-order", compressed_tensors, "_order", lambda module, inputs, group: None),
    ("awq-gemm", awq, "WORD_ORDER", tuple(range(8))),
    ("awq-gemm-bf16-bias", awq, "WORD_ORDER", (0, 2, 4, 6, 1, 3, 5, 7)),
    ("awq-gemv_fast", awq, "deinterleaved", lambda words: unpack_nibbles(words.view(torch.uint8)).reshape(128, 256)),
    ("ct-w8a16-channel", compressed_tensors, "signed", lambda stored: stored.view(torch.int8)),
    ("bnb-nf4", bnb, "swap_nibbles", lambda packed: packed),
    ("bnb-fp4", bnb, "swap_nibbles", lambda packed: packed),
    ("gguf-Q4_K", gguf_k, "neighbours", lambda nibbles: nibbles.flatten(1)),
    ("gguf-IQ4_XS", gguf_k, "IQ4_CODE", tuple(range(16))),
]


@pytest.mark.parametrize(
    ("name", "where", "attribute", "value"), READER_MUTANTS, ids=[f"{case[0]}-{case[2]}" for case in READER_MUTANTS]
)
def test_a_broken_reader_fails(
    name: str, where: object, attribute: str, value: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    golden = Golden.load(name)
    check(golden, golden.linear(tmp_path))
    monkeypatch.setattr(where, attribute, value)
    with pytest.raises(AssertionError):
        check(golden, golden.linear(tmp_path))


def test_v2_zero_points_are_what_they_are(tmp_path: Path) -> None:
    golden = Golden.load("gptq_v2")
    golden.config["checkpoint_format"] = "gptq"
    with pytest.raises(AssertionError):
        check(golden, golden.linear(tmp_path))


def test_bias_is_read(tmp_path: Path) -> None:
    golden = Golden.load("awq-gemm-bf16-bias")
    bias = golden.linear(tmp_path).bias
    assert bias is not None
    assert torch.equal(bias, golden.tensor("bias").float())
    assert float(bias.abs().max()) > 0


def test_awq_without_zero_points_counts_from_eight(tmp_path: Path) -> None:
    golden = Golden.load("awq-gemm")
    golden.replace("qzeros", torch.full_like(golden.tensor("qzeros"), -0x77777778))
    (tmp_path / "with").mkdir()
    (tmp_path / "without").mkdir()
    expected = golden.linear(tmp_path / "with").dequantize()
    del golden.tensors[f"{golden.key}.qzeros"]
    assert torch.equal(golden.linear(tmp_path / "without").dequantize(), expected)


@pytest.mark.parametrize("name", ["awq-gemm", "gptq", "gptq-act-order"])
def test_without_a_quantisation_config_the_tensors_tell(name: str, tmp_path: Path) -> None:
    golden = Golden.load(name)
    del golden.info["quantization_config"]
    check(golden, golden.linear(tmp_path))


@pytest.mark.parametrize("name", ["awq-gemm", "gptq", "ct-w4a16"])
def test_a_plain_weight_beside_the_packed_one_wins(name: str, tmp_path: Path) -> None:
    golden = Golden.load(name)
    golden.replace("weight", torch.ones(golden.shape, dtype=torch.float16))
    checkpoint = golden.checkpoint(tmp_path)
    assert isinstance(find_format(checkpoint, golden.key), Dense)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_nf4_stored_as_another_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    golden = Golden.load("bnb-nf4")
    golden.replace("weight", golden.tensor("weight").reshape(-1).view(dtype).reshape(-1, 1))
    check(golden, golden.linear(tmp_path))


def test_nf4_blocks_that_run_over_the_end_of_a_row() -> None:
    packed = torch.randint(0, 256, (6, 20), dtype=torch.uint8)  # rows of 40 values, blocks of 64
    code, absmax = torch.linspace(-1, 1, 16), torch.rand(4)
    flat = torch.stack((packed >> 4, packed & 15), -1).reshape(-1).long()
    expected = code[flat] * absmax.repeat_interleave(64)[:240]
    assert torch.equal(bnb.codebook(packed, code, absmax, 64).dequantize(), expected.reshape(6, 40))


def test_scales_beyond_float16_stay_exact(tmp_path: Path) -> None:
    golden = Golden.load("awq-gemm-bf16-bias")
    scales = golden.tensor("scales").clone()
    scales[0, 0] = 2.0**-30
    golden.replace("scales", scales)
    weight = golden.linear(tmp_path)
    assert isinstance(weight, GroupedInt4)
    assert float(weight.scale.float()[0, 0]) == 2.0**-30


def test_one_zero_point_of_0_is_enough_to_tell() -> None:
    golden = Golden.load("gptq-zero-points-of-0")
    words = golden.tensor("qzeros")
    assert not torch.equal(per_field_add(words, 4), gptq.Gptq().zeros(words, 4))


def test_fp8_blocks_at_a_ragged_edge_follow_the_config(tmp_path: Path) -> None:
    golden = Golden.load("fp8-block")
    weight = golden.tensor("weight").repeat(2, 1)[:192].contiguous()
    golden.replace("weight", weight)
    golden.replace("weight_scale_inv", torch.tensor([[1.0, 2.0], [4.0, 8.0]]))
    golden.info["shape"] = [192, 256]
    decoded = golden.linear(tmp_path).dequantize()
    assert torch.equal(decoded[127, :128], weight[127, :128].float())
    assert torch.equal(decoded[128, :128], 4.0 * weight[128, :128].float())
    assert torch.equal(decoded[191, 128:], 8.0 * weight[191, 128:].float())


def test_ct_zero_points_stored_as_int8(tmp_path: Path) -> None:
    golden = Golden.load("ct-w4a16-asym")
    fields = unpack_words(golden.tensor("weight_zero_point").t(), 4).t()
    golden.replace("weight_zero_point", (fields.to(torch.int8) - 8).contiguous())
    check(golden, golden.linear(tmp_path))


def test_asymmetric_8_bit_is_exact(tmp_path: Path) -> None:
    golden = Golden.load("gptq-8-bit")
    zeros = torch.randint(-(2**31), 2**31 - 1, golden.tensor("qzeros").shape, dtype=torch.int32)
    golden.replace("qzeros", zeros)
    q = unpack_words(golden.tensor("qweight").t(), 8).int()
    zero = unpack_words(zeros + 0x01010101, 8).int().t().repeat_interleave(64, 1)
    scale = golden.tensor("scales").t().float().repeat_interleave(64, 1)
    assert torch.equal(golden.linear(tmp_path).dequantize(), (q - zero) * scale)


def test_a_permuted_weight_survives_a_move_between_devices(tmp_path: Path) -> None:
    weight = Golden.load("gptq-act-order").linear(tmp_path)
    assert isinstance(weight, GroupedInt4)
    assert weight.perm is not None
    moved = to_device(weight, torch.device("meta"))
    assert {moved.nibbles.device.type, moved.perm.device.type, moved.min.inner.device.type} == {"meta"}
    assert moved.min.outer is moved.scale
    assert to_device(weight, CPU).nibbles is weight.nibbles


def test_input_order_is_found_only_where_it_is_needed() -> None:
    assert bits.input_order(torch.tensor([0, 0, 1, 1]), 2) is None
    order = bits.input_order(torch.tensor([1, 0, 1, 0]), 2)
    assert order is not None
    assert order.tolist() == [1, 3, 0, 2]


def test_the_name_says_the_layout() -> None:
    names = [each.name for each in FORMATS]
    assert len(set(names)) == len(names)
    assert AwqGemm().name == "awq gemm"
