"""Checkpoints that contradict themselves or are packed in a way that is not read: a ModelError that says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from golden_files import Golden

from specgen.errors import ModelError

Damage = Callable[[Golden], None]


def setting(name: str, value: object) -> Damage:
    return lambda golden: golden.config.__setitem__(name, value)


def group_setting(name: str, value: object) -> Damage:
    return lambda golden: golden.config["config_groups"]["group_0"]["weights"].__setitem__(name, value)


def cut(suffix: str, rows: int) -> Damage:
    return lambda golden: golden.replace(suffix, golden.tensor(suffix)[:rows])


def fill(suffix: str, value: float) -> Damage:
    """One element of `suffix` is `value`."""

    def damage(golden: Golden) -> None:
        tensor = golden.tensor(suffix).clone()
        tensor.view(-1)[-1] = value
        golden.replace(suffix, tensor)

    return damage


def retype(suffix: str, dtype: torch.dtype) -> Damage:
    return lambda golden: golden.replace(suffix, golden.tensor(suffix).to(dtype))


def drop(suffix: str) -> Damage:
    return lambda golden: golden.tensors.__delitem__(f"{golden.key}.{suffix}")


def only(suffix: str) -> Damage:
    """The module has nothing but a tensor of this name."""

    def damage(golden: Golden) -> None:
        golden.tensors.clear()
        golden.replace(suffix, torch.zeros(8, dtype=torch.int32))

    return damage


def nameless(golden: Golden) -> None:
    """An unknown tensor, and a config that does not say what it is."""
    only("whatever")(golden)
    del golden.config["quant_method"]


def state(text: bytes) -> Damage:
    suffix = "weight.quant_state.bitsandbytes__nf4"
    return lambda golden: golden.replace(suffix, torch.tensor(list(text), dtype=torch.uint8))


def nan_fp8(golden: Golden) -> None:
    weight = golden.tensor("weight").view(torch.uint8).clone()
    weight[3, 5] = 0xFF
    golden.replace("weight", weight.view(torch.float8_e4m3fn))


NAN, INF = float("nan"), float("inf")

CASES: list[tuple[str, str, Damage, str]] = [
    ("awq version", "awq-gemm", setting("version", "marlin"), "AWQ of version 'marlin'"),
    ("awq bits", "awq-gemm", setting("bits", 3), "qweight is AWQ of 3 bits"),
    ("awq group does not divide", "awq-gemm", setting("group_size", 96), "groups of 96 do not divide"),
    ("awq group is no number", "awq-gemm", setting("group_size", "many"), "groups of 'many'"),
    (
        "awq group of another model",
        "awq-gemm",
        setting("group_size", 64),
        "scales has the shape (2, 128), not (4, 128)",
    ),
    ("awq layout of another model", "awq-gemm", setting("version", "gemv"), "qweight has the shape"),
    ("awq nan", "awq-gemm", fill("scales", NAN), "scales holds values that are not finite"),
    ("awq inf", "awq-gemv", fill("scales", INF), "scales holds values that are not finite"),
    ("awq fast inf", "awq-gemv_fast", fill("qzeros", INF), "qzeros holds values that are not finite"),
    ("awq short", "awq-gemm", cut("qweight", 128), "qweight has the shape (128, 16), not (256, 16)"),
    ("awq dtype", "awq-gemm", retype("qzeros", torch.int16), "qzeros is torch.int16, not torch.int32"),
    ("awq scales missing", "awq-gemm", drop("scales"), "scales is missing"),
    ("awq bias", "awq-gemm-bf16-bias", fill("bias", NAN), "bias holds values that are not finite"),
    ("gptq 3 bits", "gptq", lambda g: g.replace("qweight", torch.zeros(24, 128).int()), "qweight is GPTQ of 3 bits"),
    ("gptq 2 bits", "gptq", cut("qweight", 16), "qweight is GPTQ of 2 bits"),
    ("gptq no width", "gptq", cut("qweight", 31), "has 31 rows of words"),
    ("gptq format", "gptq", setting("checkpoint_format", "marlin"), "GPTQ in the format 'marlin'"),
    ("gptq group does not divide", "gptq", setting("group_size", 100), "groups of 100 do not divide"),
    ("gptq group of another model", "gptq", setting("group_size", 128), "scales has the shape (4, 128), not (2, 128)"),
    ("gptq g_idx too large", "gptq-act-order", fill("g_idx", 2), "g_idx holds a group outside 0…1"),
    ("gptq g_idx negative", "gptq-act-order", fill("g_idx", -1), "g_idx holds a group outside 0…1"),
    ("gptq g_idx uneven", "gptq", fill("g_idx", 0), "g_idx does not give 64 inputs to each group"),
    ("gptq g_idx short", "gptq", cut("g_idx", 255), "g_idx has the shape (255,), not (256,)"),
    ("gptq inf", "gptq-8-bit", fill("scales", -INF), "scales holds values that are not finite"),
    ("gptq zero points missing", "gptq", drop("qzeros"), "qzeros is missing"),
    ("ct format", "ct-w4a16", setting("format", "marlin-24"), "format 'marlin-24'"),
    ("ct sparse", "ct-w4a16", setting("sparsity_config", {"format": "sparse-24-bitmask"}), "'sparse-24-bitmask'"),
    ("ct transform", "ct-w4a16", setting("transform_config", {"config_groups": {"a": {}}}), "transform"),
    ("ct shape", "ct-w4a16", fill("weight_shape", 512), "weight_shape says (128, 512), but (128, 256) is needed"),
    ("ct bits", "ct-w4a16", lambda g: g.replace("weight_packed", torch.zeros(128, 16).int()), "has 16 words"),
    ("ct group size", "ct-w4a16", group_setting("group_size", 32), "groups of 64, but the config says [32]"),
    ("ct groups", "ct-w4a16", lambda g: g.replace("weight_scale", torch.ones(128, 7).half()), "no number of groups"),
    ("ct rows", "ct-w4a16", cut("weight_scale", 64), "weight_scale has 64 rows for 128 outputs"),
    ("ct nan", "ct-w4a16", fill("weight_scale", NAN), "weight_scale holds values that are not finite"),
    ("ct zero points", "ct-w4a16-asym", cut("weight_zero_point", 8), "weight_zero_point has the shape (8, 4)"),
    ("ct g_idx", "ct-w4a16-act-order", fill("weight_g_idx", 4), "weight_g_idx holds a group outside 0…3"),
    ("ct block", "ct-fp8-block", group_setting("block_structure", [64, 64]), "fits no block of the config"),
    ("ct block is no pair", "ct-fp8-block", group_setting("block_structure", "128x128"), "two positive numbers"),
    ("ct int8 scale", "ct-int8", fill("weight_scale", INF), "weight_scale holds values that are not finite"),
    ("ct int8 short", "ct-int8", cut("weight", 64), "weight has the shape (64, 256), not (128, 256)"),
    ("fp8 nan scale", "fp8-block", fill("weight_scale_inv", NAN), "weight_scale_inv holds values that are not finite"),
    ("fp8 nan weight", "fp8-block", nan_fp8, "weight holds values that are not numbers"),
    ("fp8 nan weight, ct", "ct-fp8-channel", nan_fp8, "weight holds values that are not numbers"),
    ("fp8 block", "fp8-block", setting("weight_block_size", [64, 64]), "has the shape (1, 2), not (2, 4)"),
    ("fp8 block is no pair", "fp8-block", setting("weight_block_size", [128]), "two positive numbers"),
    ("fp8 block of zero", "fp8-block", setting("weight_block_size", [0, 128]), "two positive numbers"),
    ("fp8 e5m2", "fp8-block", retype("weight", torch.float8_e5m2), "weight is float8 e5m2"),
    ("fp8 ue8m0 nan", "fp8-block-ue8m0", retype("weight_scale_inv", torch.int8), "weight_scale_inv is torch.int8"),
    ("bnb no json", "bnb-nf4", state(b"{"), "holds no valid JSON"),
    ("bnb no object", "bnb-nf4", state(b"[]"), "holds no JSON object"),
    ("bnb deep json", "bnb-nf4", state(b"[" * 60000), "holds no valid JSON"),
    ("bnb long json", "bnb-nf4", state(b" " * 70000), "not a short JSON text"),
    ("bnb no shape", "bnb-nf4", state(b'{"blocksize": 64}'), "is of the shape None"),
    ("bnb block of zero", "bnb-nf4", state(b'{"blocksize": 0, "shape": [128, 256]}'), "has the blocksize 0"),
    ("bnb huge block", "bnb-nf4", state(b'{"blocksize": 1e99, "shape": [128, 256]}'), "has the blocksize 1e+99"),
    ("bnb absmax", "bnb-nf4", cut("weight.absmax", 511), "weight.absmax has the shape (511,), not (512,)"),
    ("bnb nan", "bnb-nf4", fill("weight.absmax", NAN), "weight.absmax holds values that are not finite"),
    ("bnb code", "bnb-fp4", fill("weight.quant_map", NAN), "weight.quant_map holds values that are not finite"),
    ("bnb nested", "bnb-nf4-double", fill("weight.nested_absmax", NAN), "weight.nested_absmax holds values"),
    ("bnb nested code", "bnb-nf4-double", cut("weight.nested_quant_map", 255), "weight.nested_quant_map has the shape"),
    ("bnb short", "bnb-nf4", cut("weight", 99), "weight has 99 bytes, not 16384"),
    ("bnb int8 order", "bnb-int8", fill("weight_format", 2), "weight_format is 2"),
    ("bnb int8 nan", "bnb-int8", fill("SCB", NAN), "SCB holds values that are not finite"),
    ("method", "awq-gemm", setting("quant_method", "hqq"), "quant_method 'hqq'"),
    ("method missing", "ct-int8", nameless, "without quant_method"),
    ("exl2", "gptq", only("q_weight"), "packed as EXL2, not read"),
    ("hqq", "gptq", only("W_q"), "packed as HQQ, not read"),
    ("aqlm", "gptq", only("codebooks"), "packed as AQLM, not read"),
    ("quip", "gptq", only("Qidxs"), "packed as QuIP#, not read"),
    ("unknown", "gptq", only("whatever"), "packed in an unknown way"),
]


@pytest.mark.parametrize(("golden", "damage", "message"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_damage_is_named(golden: str, damage: Damage, message: str, tmp_path: Path) -> None:
    broken = Golden.load(golden)
    damage(broken)
    with pytest.raises(ModelError) as raised:
        broken.linear(tmp_path)
    assert message in raised.value.message
    assert str(tmp_path) in raised.value.message
    assert broken.key in raised.value.message


BLOCK_BYTES = {"Q2_K": 84, "Q3_K": 110, "Q4_K": 144, "Q5_K": 176, "Q6_K": 210, "Q5_0": 22, "Q5_1": 24, "IQ4_XS": 136}
SCALE_AT = {"Q2_K": 80, "Q3_K": 108, "Q4_K": 2, "Q5_K": 0, "Q6_K": 208, "Q5_0": 0, "Q5_1": 2, "IQ4_XS": 0}


@pytest.mark.parametrize("kind", BLOCK_BYTES)
def test_a_gguf_scale_that_is_no_number_is_named(kind: str, tmp_path: Path) -> None:
    golden = Golden.load(f"gguf-{kind}")
    blocks = golden.tensors["blk.0.attn_k.weight"].view(-1, BLOCK_BYTES[kind])
    blocks[-1, SCALE_AT[kind] : SCALE_AT[kind] + 2] = torch.tensor([0xFF, 0x7F], dtype=torch.uint8)
    with pytest.raises(ModelError, match=r"k_proj\.weight holds values that are not finite"):
        golden.linear(tmp_path)


def test_a_gguf_matrix_of_another_shape_is_named(tmp_path: Path) -> None:
    golden = Golden.load("gguf-Q6_K")
    golden.info["shape"] = [128, 512]
    with pytest.raises(ModelError, match=r"k_proj\.weight has the shape \(128, 256\), not \(128, 512\)"):
        golden.linear(tmp_path)
