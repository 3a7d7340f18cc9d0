"""Whether two tokenizers are one: the same ids must mean the same tokens, or a draft is noise.

Knows: token spellings, special ids, padding. Does not know: models. Nothing but tokenizers is loaded for this.
"""

from __future__ import annotations

import re
from itertools import zip_longest

from specgen.errors import ModelError
from specgen.text.tokenizer import Tokenizer

SHOWN = 3
"""Differences that a message names."""

_PADDING = re.compile(r"|\[PAD\d*\]|<\|?(?:reserved|unused|pad|dummy|extra)\w*\|?>", re.IGNORECASE)
"""How vocabularies are filled up to a round number: such entries behind the other's end mean nothing."""

HINT = "leave the draft out (--draft none: n-gram lookup drafts without a model), or name one of the same family"


def check_same_tokens(target: Tokenizer, draft: Tokenizer, draft_name: str) -> None:
    """ModelError naming the first ids that differ, unless every token of the one is the other's, padding aside."""
    pairs = enumerate(zip_longest(target.token_strings(), draft.token_strings()))
    wrong = [(index, ours, theirs) for index, (ours, theirs) in pairs if not _same(ours, theirs)]
    if wrong:
        shown = ", ".join(f"{index} is {_shown(ours)} / {_shown(theirs)}" for index, ours, theirs in wrong[:SHOWN])
        raise ModelError(
            f"the draft {draft_name} has another tokenizer: {len(wrong)} ids differ (target / draft: {shown})", HINT
        )
    shared = min(target.vocab_size, draft.vocab_size)
    special = sorted(index for index in target.special_ids ^ draft.special_ids if index < shared)
    if special:
        words = ", ".join(f"{index} {_shown(target.token_strings()[index])}" for index in special[:SHOWN])
        raise ModelError(f"the draft {draft_name} disagrees on which tokens are special: {words}", HINT)


def _same(ours: str | None, theirs: str | None) -> bool:
    if ours is None or theirs is None:
        return _PADDING.fullmatch(ours or theirs or "") is not None
    return ours == theirs


def _shown(token: str | None) -> str:
    return "nothing" if token is None else ascii(token)
