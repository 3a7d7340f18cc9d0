"""Frequencies against transformers' own, and tables that do not depend on what was asked for first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specgen.errors import ModelError
from specgen.model.rope import TABLE_BLOCK, RopeSettings, RopeTable, rope_spec, rope_type

HEAD_DIM = 32
POSITIONS, ORIGINAL = 256, 64
FACTORS = {"short_factor": [1.0 + 0.1 * i for i in range(16)], "long_factor": [2.0 + 0.5 * i for i in range(16)]}

SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"factor": 4.0},
    "yarn with betas": {"factor": 4.0, "beta_fast": 20, "beta_slow": 2, "truncate": False},
    "yarn with mscale": {"factor": 40.0, "mscale": 0.7, "mscale_all_dim": 0.5},
    "yarn with its own attention factor": {"factor": 4.0, "attention_factor": 1.3},
    "longrope": FACTORS,
    "longrope with factor": {"factor": 8.0, **FACTORS},
    "longrope with its own attention factor": {"attention_factor": 1.2, **FACTORS},
}


def settings(name: str, longest: int = POSITIONS, dims: int = HEAD_DIM) -> RopeSettings:
    values = {"rope_type": name.split()[0], **SCALINGS.get(name, {})}
    return RopeSettings(10_000.0, dims, POSITIONS, ORIGINAL, longest, values)


def published(name: str, longest: int) -> tuple[torch.Tensor, float]:
    """transformers' frequencies for a sequence of `longest` tokens."""
    functions = pytest.importorskip("transformers.modeling_rope_utils").ROPE_INIT_FUNCTIONS
    values = {
        "rope_type": name.split()[0],
        "rope_theta": 10_000.0,
        "original_max_position_embeddings": ORIGINAL,
        **SCALINGS[name],
    }
    values.setdefault("factor", None)
    config = SimpleNamespace(
        rope_parameters=values,
        head_dim=HEAD_DIM,
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        max_position_embeddings=POSITIONS,
        standardize_rope_params=lambda: None,
    )
    inverse, attention = functions[name.split()[0]](config, torch.device("cpu"), seq_len=longest)
    return inverse, attention


@pytest.mark.parametrize("longest", [32, 200, 1024])
@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_equal_the_published_ones(name: str, longest: int) -> None:
    got = rope_spec(settings(name, longest))
    inverse, attention = published(name, longest)
    torch.testing.assert_close(torch.tensor(got.inv_freq), inverse, rtol=1e-6, atol=0.0)
    assert got.attention_factor == pytest.approx(attention, rel=1e-9)


def test_only_dynamic_and_longrope_depend_on_the_longest_sequence() -> None:
    changing = {name for name in SCALINGS if rope_spec(settings(name, 32)) != rope_spec(settings(name, 1024))}
    assert {name.split()[0] for name in changing} == {"dynamic", "longrope"}


def test_default_and_partial_frequencies() -> None:
    got = rope_spec(settings("default", dims=8))
    assert got.inv_freq == pytest.approx([10_000 ** (-i / 4) for i in range(4)], rel=1e-6)
    assert got.dims == 8


def test_names_of_scalings() -> None:
    assert rope_type({}) == "default"
    assert rope_type({"type": "linear"}) == "linear"
    assert rope_type({"rope_type": "yarn", "type": "linear"}) == "yarn"
    assert rope_type({"type": "su"}) == "longrope"
    with pytest.raises(ModelError, match="'mrope'"):
        rope_type({"rope_type": "mrope"})


@pytest.mark.parametrize("value", ["4", True, float("inf"), None])
def test_a_factor_that_is_no_number_is_refused(value: Any) -> None:
    with pytest.raises(ModelError, match="'factor'"):
        rope_spec(RopeSettings(1e4, 8, 64, 64, 64, {"rope_type": "linear", "factor": value}))


def test_cos_and_sin_of_a_position() -> None:
    rope = rope_spec(settings("yarn"))
    positions = [3, 0, 700, 255, 256, 3]
    cos, sin = RopeTable(rope).rows(positions)
    angle = torch.tensor(positions).double()[:, None] * torch.tensor(rope.inv_freq).double()
    torch.testing.assert_close(cos, (angle.cos() * rope.attention_factor).float(), rtol=0, atol=1e-4)
    torch.testing.assert_close(sin, (angle.sin() * rope.attention_factor).float(), rtol=0, atol=1e-4)


def test_a_table_does_not_depend_on_how_it_grew() -> None:
    rope = rope_spec(settings("llama3"))
    positions = list(range(3 * TABLE_BLOCK))
    whole = RopeTable(rope).rows(positions)
    slow = RopeTable(rope)
    for position in (0, TABLE_BLOCK - 1, TABLE_BLOCK, 2 * TABLE_BLOCK + 5):
        cos, sin = slow.rows([position])
        assert torch.equal(cos[0], whole[0][position])
        assert torch.equal(sin[0], whole[1][position])
