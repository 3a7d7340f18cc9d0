"""Thoughts apart from the answer, however the text is cut."""

from __future__ import annotations

import itertools

import pytest

from specgen.events import Piece
from specgen.text.answer import AnswerText
from specgen.text.think import ThinkSplitter, opens_thought

CASES = {
    "<think>hm</think>\n\nyes": ("hm", "yes"),
    "\n<think>\nhm\n</think>yes": ("\nhm\n", "yes"),
    "yes <think>no</think>": ("", "yes <think>no</think>"),
    "<thin": ("", "<thin"),
    "<think>never ends </thin": ("never ends </thin", ""),
    "<think></think>\n\n  yes": ("", "yes"),
    "<think>a < b </ c</think>ok": ("a < b </ c", "ok"),
    "  plain": ("", "  plain"),
    "": ("", ""),
    "<think>x</think>\n": ("x", ""),
}


def split(pieces: list[str], *, inside: bool = False) -> tuple[str, str]:
    splitter = ThinkSplitter(inside=inside)
    parts = [part for piece in pieces for part in splitter.push(piece)] + splitter.flush()
    return "".join(p.text for p in parts if p.thinking), "".join(p.text for p in parts if not p.thinking)


@pytest.mark.parametrize("text", CASES)
def test_whole_letter_by_letter_and_cut_anywhere(text: str) -> None:
    assert split([text]) == CASES[text]
    assert split(list(text)) == CASES[text]
    for first, second in itertools.combinations(range(len(text) + 1), 2):
        assert split([text[:first], text[first:second], text[second:]]) == CASES[text]


def test_a_thought_that_the_prompt_opened() -> None:
    assert opens_thought("<|im_start|>assistant\n<think>\n")
    assert not opens_thought("<think>\n\n</think>\n\n")
    assert split(list("hm</think>yes"), inside=True) == ("hm", "yes")


def test_a_mutant_that_takes_every_tag_is_seen() -> None:
    class Greedy(ThinkSplitter):
        def _answer(self):  # type: ignore[no-untyped-def]
            return self._thought()

    splitter = Greedy()
    parts = splitter.push("yes <think>no</think>") + splitter.flush()
    assert "".join(part.text for part in parts if not part.thinking) != "yes <think>no</think>"


class Letters:
    """A tokenizer whose tokens are letters."""

    eos_ids = (0,)
    special_ids = frozenset((0,))
    prefixes_space = False

    def token_bytes(self, token: int) -> bytes:
        return bytes([token])


def test_pieces_say_what_is_thought_and_the_answer_has_none_of_it() -> None:
    answer = AnswerText(Letters(), ("STOP",), thoughts=ThinkSplitter())  # type: ignore[arg-type]
    pieces: list[Piece] = []
    for letter in b"<think>hm STOP? no</think>yes":
        kept, reason = answer.cut([letter])
        pieces += answer.pieces([letter][:kept], 1)
        if reason is not None:
            break
    pieces += answer.flush()
    assert answer.thinking == "hm "
    assert answer.text == ""
    assert all(piece.thinking for piece in pieces)
