"""Which tokenizers may draft for each other."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import tokenizers

from specgen.errors import ModelError
from specgen.text.compatible import check_same_tokens
from specgen.text.tokenizer import Tokenizer

WORDS = ["<s>", "</s>", "a", "b", "c", "ab"]


def tokenizer(words: Sequence[str], special: Sequence[str] = ("<s>", "</s>")) -> Tokenizer:
    core = tokenizers.Tokenizer(tokenizers.models.BPE({word: index for index, word in enumerate(words)}, []))
    core.decoder = tokenizers.decoders.ByteLevel()
    core.add_special_tokens(list(special))
    return Tokenizer(core, bos=0, end_ids=[1], chat_template=None, named={})


def test_the_same_tokens_are_fine() -> None:
    check_same_tokens(tokenizer(WORDS), tokenizer(WORDS), "small")


@pytest.mark.parametrize(
    "padding", [["[PAD6]", "[PAD7]"], ["<unused0>", "<unused1>"], ["<|reserved_special_token_0|>"]]
)
def test_padding_of_either_is_fine(padding: list[str]) -> None:
    check_same_tokens(tokenizer([*WORDS, *padding]), tokenizer(WORDS), "small")
    check_same_tokens(tokenizer(WORDS), tokenizer([*WORDS, *padding]), "small")


def test_a_mismatch_names_the_first_ids_and_what_to_do() -> None:
    swapped = ["<s>", "</s>", "b", "a", "c", "ba"]
    with pytest.raises(ModelError) as caught:
        check_same_tokens(tokenizer(WORDS), tokenizer(swapped), "small")
    assert caught.value.message == (
        "the draft small has another tokenizer: 3 ids differ "
        "(target / draft: 2 is 'a' / 'b', 3 is 'b' / 'a', 5 is 'ab' / 'ba')"
    )
    assert caught.value.hint is not None
    assert "--draft none" in caught.value.hint


def test_a_real_token_that_only_one_has_is_a_mismatch() -> None:
    for target, draft in ((WORDS, WORDS[:5]), (WORDS[:5], WORDS)):
        with pytest.raises(ModelError, match=r"1 ids differ.*5 is"):
            check_same_tokens(tokenizer(target), tokenizer(draft), "small")


def test_special_ids_must_agree() -> None:
    with pytest.raises(ModelError, match="disagrees on which tokens are special: 5 'ab'"):
        check_same_tokens(tokenizer(WORDS), tokenizer(WORDS, ("<s>", "</s>", "ab")), "small")


def test_a_token_cannot_steer_the_terminal() -> None:
    with pytest.raises(ModelError) as caught:
        check_same_tokens(tokenizer(WORDS), tokenizer([*WORDS[:5], "\x1b[2J"]), "small")
    assert "\x1b" not in caught.value.message
