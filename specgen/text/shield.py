"""Marks around text that must not be read as special tokens.

Knows: how a template's caller marks a stretch of text, and how the tokenizer finds the marks again. Does not know:
templates, tokens.

A chat template's output holds special tokens that end and begin turns, so it is tokenised with them recognised. A
message may hold the same letters (`<|im_end|>`), by accident or to forge a turn. Such stretches are put between two
Unicode noncharacters (U+FDD0, U+FDD1), which no interchanged text may contain, before the template sees them; the
tokenizer takes the marks out and encodes what stands between them as ordinary letters. Nothing is lost: the model reads
the letters that the user wrote.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

OPEN, CLOSE = "\ufdd0", "\ufdd1"
_MARKED = re.compile(f"{OPEN}([^{OPEN}{CLOSE}]*){CLOSE}")
_MARKS = str.maketrans(dict.fromkeys((OPEN, CLOSE), "\ufffd"))
_DROP = str.maketrans(dict.fromkeys((OPEN, CLOSE)))


def shield(text: str, specials: Collection[str]) -> str:
    """`text` with every special token's string in it marked. Marks that were there already become U+FFFD."""
    text = text.translate(_MARKS)
    present = [special for special in specials if special and special in text]
    if not present:
        return text
    longest_first = sorted(present, key=len, reverse=True)
    pattern = re.compile("|".join(re.escape(special) for special in longest_first))
    return pattern.sub(lambda match: f"{OPEN}{match.group()}{CLOSE}", text)


def segments(rendered: str) -> Iterator[tuple[str, bool]]:
    """(text, shielded) pieces of a rendered template, in order, without marks. A template may have cut a pair apart; a
    mark without its partner is dropped."""
    position = 0
    for match in _MARKED.finditer(rendered):
        yield rendered[position : match.start()].translate(_DROP), False
        yield match.group(1), True
        position = match.end()
    yield rendered[position:].translate(_DROP), False


def unshield(rendered: str) -> str:
    """`rendered` without marks."""
    return rendered.translate(_DROP)
