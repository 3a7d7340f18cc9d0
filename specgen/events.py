"""What happens during one answer, as plain values: the session yields them, a view or a pipe consumes them.

Order: Started, Prefilled, then for each cycle a CycleDone followed by zero or more Piece, last Finished (always, also
after a cancel). Knows: nothing of terminals.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from specgen.records import CycleRecord, RunRecord


class FinishReason(StrEnum):
    EOS = "eos"  # the model ended its answer
    STOP = "stop"  # a stop string
    GRAMMAR = "grammar"  # the grammar of a constrained answer allows nothing more
    LENGTH = "length"  # --max-tokens
    CONTEXT = "context"  # the context limit
    CANCELLED = "cancelled"  # Ctrl-C or a consumer that went away


@dataclass(frozen=True, slots=True)
class Started:
    """Before prefill: what will run, and what the user should know about it."""

    model: str
    proposer: str
    accept: str  # acceptance rule; `lossless` says whether the target's distribution is kept
    lossless: bool
    gamma: str  # "auto" or a number
    prompt_tokens: int
    context_tokens: int  # limit
    notices: tuple[str, ...] = ()  # one line each: fallbacks, a double BOS, a cut context …


@dataclass(frozen=True, slots=True)
class Prefilled:
    tokens: int  # prompt tokens computed now
    reused_tokens: int  # prompt tokens whose KV was there already
    ms: float


@dataclass(frozen=True, slots=True)
class CycleDone:
    """One cycle was committed. `length` is the number of tokens in the context now."""

    record: CycleRecord
    length: int
    tokens: tuple[int, ...] = ()  # the committed ones


@dataclass(frozen=True, slots=True)
class Piece:
    """Text of committed tokens, whole characters only. Untrusted: a view must pass it through `text.sanitise`."""

    text: str
    drafted: bool  # True: an accepted draft token; False: the target's own (corrected, bonus or plain)
    thinking: bool = False  # reasoning before the answer, which is no part of it


@dataclass(frozen=True, slots=True)
class Finished:
    reason: FinishReason
    text: str  # all pieces joined; a stop string and what follows it are not in it
    token_ids: tuple[int, ...]  # committed completion tokens, up to the one that ended the answer (included)
    record: RunRecord
    complete: bool = True  # False: a constrained answer was cut where its grammar may not end
    thinking: str = ""  # what a reasoning model wrote before its answer, where that is kept apart


Event = Started | Prefilled | CycleDone | Piece | Finished
