"""Text comes out whole, however its bytes were split over tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specgen.text.stream import TextStream

SAMPLES = ["naïve café", "日本語のテキスト", "👩‍🚀🏳️‍🌈👍🏽", "e\u0301a\u0308", "tab\tand\r\nline", "ascii"]


def cuts(data: bytes, sizes: Sequence[int]) -> list[bytes]:
    """`data` in pieces of the given sizes, the rest in the last one."""
    pieces, position = [], 0
    for size in sizes:
        pieces.append(data[position : position + size])
        position += size
    return [*pieces, data[position:]]


def streamed(pieces: Sequence[bytes]) -> str:
    stream = TextStream(pieces.__getitem__)
    return "".join(stream.push([index]) for index in range(len(pieces))) + stream.flush()


def per_token(pieces: Sequence[bytes]) -> str:
    """The mutant: each token decoded by itself."""
    return "".join(piece.decode(errors="replace") for piece in pieces)


@pytest.mark.parametrize("text", SAMPLES)
def test_bytes_one_by_one_give_the_text(text: str) -> None:
    assert streamed(cuts(text.encode(), [1] * len(text.encode()))) == text


@pytest.mark.parametrize("text", [text for text in SAMPLES if not text.isascii()])
def test_mutant_decoding_per_token_fails(text: str) -> None:
    assert per_token(cuts(text.encode(), [1] * len(text.encode()))) != text


@given(st.text(), st.lists(st.integers(0, 5), max_size=40))
def test_any_split_of_any_text_round_trips(text: str, sizes: list[int]) -> None:
    assert streamed(cuts(text.encode(), sizes)) == text


@given(st.binary(), st.lists(st.integers(0, 5), max_size=40))
def test_invalid_bytes_become_what_a_whole_decode_gives(data: bytes, sizes: list[int]) -> None:
    assert streamed(cuts(data, sizes)) == data.decode(errors="replace")


def test_nothing_is_shown_before_a_character_is_whole() -> None:
    pieces = cuts("🙂".encode(), [1, 1, 1])
    stream = TextStream(pieces.__getitem__)
    assert [stream.push([index]) for index in range(4)] == ["", "", "", "🙂"]


def test_several_tokens_at_once_equal_one_by_one() -> None:
    pieces = cuts("añ日🙂".encode(), [1, 2, 2, 3])
    whole = TextStream(pieces.__getitem__)
    assert whole.push(range(len(pieces))) + whole.flush() == "añ日🙂"


@given(st.binary(max_size=12), st.binary(max_size=12))
def test_preview_says_what_push_will_and_changes_nothing(before: bytes, after: bytes) -> None:
    pieces = [before, *cuts(after, [1] * len(after))]
    stream, other = TextStream(pieces.__getitem__), TextStream(pieces.__getitem__)
    assert stream.push([0]) == other.push([0])
    tokens = range(1, len(pieces))
    assert stream.preview(tokens) == stream.preview(tokens) == [other.push([token]) for token in tokens]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda get: TextStream(get, at_start=True), "Hello world"),
        (TextStream, " Hello world"),
    ],
)
def test_the_first_space_is_dropped_only_where_a_text_begins(
    make: Callable[[Callable[[int], bytes]], TextStream], expected: str
) -> None:
    pieces = [b"", b" Hello", b" world"]
    stream = make(pieces.__getitem__)
    assert stream.preview([1, 2]) == [expected.removesuffix(" world"), " world"]
    assert "".join(stream.push([index]) for index in range(3)) + stream.flush() == expected
