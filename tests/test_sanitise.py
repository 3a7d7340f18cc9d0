"""No character that commands a terminal gets through, and ordinary text is not touched."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specgen.text.sanitise import sanitise

hostile = st.text(
    st.one_of(st.characters(max_codepoint=0xA0), st.sampled_from("\u202e\u2066\ufeff\u2028\x1b]0;"), st.characters())
)


def controls(text: str) -> list[str]:
    return [letter for letter in text if unicodedata.category(letter) == "Cc" and letter not in "\n\t"]


@given(hostile)
def test_no_control_character_is_left_but_newline_and_tab(text: str) -> None:
    assert controls(sanitise(text)) == []


@given(hostile)
def test_twice_is_once(text: str) -> None:
    assert sanitise(sanitise(text)) == sanitise(text)


@given(hostile, hostile)
def test_cutting_a_text_changes_nothing(left: str, right: str) -> None:
    assert sanitise(left) + sanitise(right) == sanitise(left + right)


@pytest.mark.parametrize(
    "text",
    [
        "plain text\n\twith tabs",
        "日本語",
        "👩‍🚀🏳️‍🌈👍🏽",
        "e\u0301",
        "שלום\u200f!",
        "नमस्ते\u200d",
        "می\u200cخواهم",
        "a\u00a0b",
    ],
)
def test_ordinary_text_is_not_touched(text: str) -> None:
    assert sanitise(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J\x1b[H", "[2J[H"),
        ("\x1b]0;title\x07", "]0;title"),
        ("\x9b31mred", "31mred"),
        ("line\r\nline", "line\nline"),
        ("over\rwrite", "overwrite"),
        ("back\x08space", "backspace"),
        ("user\u202etxt.exe", "usertxt.exe"),
        ("a\u2066b\u2069c", "abc"),
        ("one\u2028two", "one\ntwo"),
        ("\ufeffstart", "start"),
        ("hidden\U000e0041", "hidden"),
    ],
)
def test_commands_become_harmless(text: str, shown: str) -> None:
    assert sanitise(text) == shown


def test_mutant_that_strips_colour_sequences_only_fails() -> None:
    import re

    def colours_only(text: str) -> str:
        return re.sub(r"\x1b\[[0-9;]*m", "", text)

    attack = "\x1b[31mred\x1b[0m \x1b]52;c;aGk=\x07 \x9b2J"
    assert controls(sanitise(attack)) == []
    assert controls(colours_only(attack)) != []
