"""Tables and bars fit any terminal from 40 columns on."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import pytest
from rich.cells import cell_len

from specgen.cli.charts import Column, bars, jsonable, table

COLUMNS = [
    Column("kind", ["code_editing", "故事", "all"], left=True),
    Column("speedup", ["1.57x", "–", "12.00x"]),
    Column("a very wide heading", ["1", "2", "3"]),
    Column("another very wide heading", ["1", "2", "3"]),
]


@pytest.mark.parametrize("width", range(40, 121, 5))
def test_nothing_is_wider_than_the_terminal(width: int) -> None:
    items = [
        ("a label that is much longer than there is room for it", 3.0, "3 (50%)"),
        ("b", 0.0, "0"),
        ("γ", 1e-9, "1"),
    ]
    for line in (*table("A title " * 20, COLUMNS, width), *bars("A title " * 20, items, width)):
        assert cell_len(line) <= width


def test_narrow_tables_say_what_they_leave_out() -> None:
    lines = table("t", COLUMNS, 40)
    assert "another very wide heading" not in lines[1]
    assert "wider terminal" in lines[-1]
    assert "wider terminal" not in table("t", COLUMNS, 120)[-1]


def test_cells_are_aligned_in_terminal_cells() -> None:
    lines = table("t", COLUMNS[:2], 60)
    assert [cell_len(line) for line in lines[1:]] == [cell_len(lines[1])] * 5


def test_bars_are_as_long_as_their_values() -> None:
    lines = bars("t", [("a", 4.0, "4"), ("b", 2.0, "2"), ("c", 0.0, "0")], 44)
    lengths = [line.count("█") for line in lines[1:]]
    assert lengths[0] == 2 * lengths[1] > 0
    assert lengths[2] == 0
    assert bars("t", [("a", 0.0, "0")], 40)[1].count("█") == 0
    assert bars("t", [], 40) == ["t"]


@dataclass(frozen=True)
class Inner:
    x: float
    secret: int = field(default=1, repr=False)


def test_jsonable() -> None:
    value = {"a": Inner(float("inf")), 2: (1, Inner(0.123456789)), "n": None, "t": True}
    plain = jsonable(value)
    assert plain == {"a": {"x": None}, "2": [1, {"x": 0.123457}], "n": None, "t": True}
    json.dumps(plain, allow_nan=False)
