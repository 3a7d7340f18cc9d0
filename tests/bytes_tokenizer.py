"""A tokenizer of given words, for tests that need a vocabulary they can enumerate."""

from __future__ import annotations

import json
from collections.abc import Sequence

import tokenizers

from specgen.text.tokenizer import BYTE_ALPHABET, Tokenizer

END = "<|end|>"


def words_tokenizer(words: Sequence[str], *, end: bool = True) -> Tokenizer:
    """One token per word of ASCII letters, in order; the last one is the end token, unless there is to be none."""
    spelled = {byte: letter for letter, byte in BYTE_ALPHABET.items()}
    vocab = {"".join(spelled[byte] for byte in word.encode()): index for index, word in enumerate(words)}
    state = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": {"type": "BPE", "vocab": vocab, "merges": [], "fuse_unk": False, "byte_fallback": False},
    }
    core = tokenizers.Tokenizer.from_str(json.dumps(state))
    if end:
        core.add_special_tokens([END])
    return Tokenizer(core, bos=None, end_ids=(), chat_template=None, named={})
