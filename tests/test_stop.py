"""Stop strings end a text at the same place however it arrives, and nothing of one is ever shown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specgen.text.stop import StopScanner

letters = st.text("ab\n", max_size=14)
stop_lists = st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=4)


def oracle(text: str, stops: list[str]) -> tuple[str, bool]:
    """Slow and obvious: the stop string that ends first; of those that end together, the longest."""
    found = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    if not found:
        return text, False
    end, negative = min(found)
    return text[: end + negative], True


def scanned(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    scanner, shown, stopped = StopScanner(stops), "", False
    for piece in pieces:
        hit = scanner.push(piece)
        shown, stopped = shown + hit.text, hit.stopped
    return shown + ("" if stopped else scanner.flush()), stopped


def per_piece(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    """The mutant: looks for stop strings within each piece only."""
    shown = ""
    for piece in pieces:
        text, stopped = oracle(piece, stops)
        shown += text
        if stopped:
            return shown, True
    return shown, False


@given(st.lists(letters, max_size=6), stop_lists)
def test_any_pieces_agree_with_the_oracle_on_the_whole(pieces: list[str], stops: list[str]) -> None:
    assert scanned(pieces, stops) == oracle("".join(pieces), stops)


@given(st.lists(letters, max_size=6), stop_lists)
def test_what_was_shown_is_never_taken_back(pieces: list[str], stops: list[str]) -> None:
    final, _ = oracle("".join(pieces), stops)
    scanner, shown = StopScanner(stops), ""
    for piece in pieces:
        shown += scanner.push(piece).text
        assert final.startswith(shown)


@given(letters, st.lists(letters, max_size=6), stop_lists)
def test_first_stop_is_the_piece_that_push_stops_at(before: str, pieces: list[str], stops: list[str]) -> None:
    scanner, other = StopScanner(stops), StopScanner(stops)
    if scanner.push(before).stopped:
        return
    other.push(before)
    expected = next((index for index, piece in enumerate(pieces) if other.push(piece).stopped), None)
    assert scanner.first_stop(pieces) == scanner.first_stop(pieces) == expected


def test_mutant_that_looks_at_single_pieces_fails() -> None:
    pieces, stops = ["one EN", "D two"], ["END"]
    assert scanned(pieces, stops) == ("one ", True) == oracle("".join(pieces), stops)
    assert per_piece(pieces, stops) != oracle("".join(pieces), stops)


@pytest.mark.parametrize(
    ("stops", "pieces", "shown"),
    [
        (["\n\n"], ["a\n", "b\n", "\nc"], "a\nb"),
        (["abcd", "bc"], ["xabc", "d"], "xa"),
        (["bc", "abc"], ["xab", "c"], "x"),
        (["aab"], ["aaa", "ab"], "aa"),
        (["é", "🙂"], ["caf", "é"], "caf"),
    ],
)
def test_cases(stops: list[str], pieces: list[str], shown: str) -> None:
    assert scanned(pieces, stops) == (shown, True)


def test_held_back_text_comes_with_the_flush() -> None:
    scanner = StopScanner(["###"])
    assert scanner.push("a##").text == "a"
    assert scanner.flush() == "##"


def test_after_a_stop_nothing_comes() -> None:
    scanner = StopScanner(["x"])
    assert scanner.push("ax").stopped
    assert (scanner.push("more").text, scanner.flush()) == ("", "")


def test_without_stop_strings_everything_passes_at_once() -> None:
    scanner = StopScanner([])
    assert not scanner.active
    assert (scanner.push("text").text, scanner.flush(), scanner.first_stop(["a"])) == ("text", "", None)
