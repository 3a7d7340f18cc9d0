"""Memory that ran out: how such an error looks, and what is done about it.

Knows: torch's ways of saying it, and its caches. Does not know: plans, models.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from specgen.errors import OutOfMemoryError

_SAID = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "can't allocate memory")
"""Errors that have no class of their own."""

ANSWER_HINT = "give a shorter --ctx, --kv int8 or --draft none, or close what else uses the card"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a smaller model, context or draft would have gone well."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _SAID)


def release() -> None:
    """Give back what is held for nothing. Call it when the error is forgotten: its frames hold tensors."""
    gc.collect()
    with suppress(RuntimeError):  # a card that is lost answers everything with the error that it was lost by
        torch.cuda.empty_cache()  # nothing, where CUDA was not started


@contextmanager
def shortage_told(what: str) -> Iterator[None]:
    """Memory that runs out in the block becomes an OutOfMemoryError with what torch says of it; `what` was being
    done."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise shortage(what, error) from None


def shortage(what: str | None, error: BaseException) -> OutOfMemoryError:
    """`error` as the user is told, with the numbers that torch gives; `what` was being done, if that is known."""
    first = str(error).strip().splitlines()
    said = _numbers(first[0]) if first else "nothing is left"
    return OutOfMemoryError(f"memory ran out{f' while {what}' if what else ''}: {said}", ANSWER_HINT)


def _numbers(text: str) -> str:
    """The sentences with numbers of torch's paragraph: what was asked for, what the card has, what is free."""
    sentences = [part.strip().rstrip(".") for part in text.split(". ")]
    wanted = [part for part in sentences if any(char.isdigit() for char in part) and "http" not in part]
    return "; ".join(wanted[:3]) or text
