"""What the user asked for, checked once, before any work begins.

Knows: every option of an answer and its valid range. Does not know: flags, models, tensors (no torch here).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, get_args

from specgen.errors import UsageError, nearest

ProposerName = Literal["auto", "ngram", "model", "mix", "skip", "lookahead", "none"]
NEED_DRAFT: tuple[ProposerName, ...] = ("model", "mix")
"""Proposers that need a draft model."""
AcceptName = Literal["coupled", "rejection", "typical"]
KVName = Literal["auto", "f32", "bf16", "int8"]
ConstraintKind = Literal["json-schema", "json-object", "regex", "grammar"]
ThinkName = Literal["auto", "on", "off", "show", "hide"]

QuantName = Literal["int4", "int8", "fp8", "nf4"]

MAX_GAMMA = 16
MAX_TREE = 8
SEED_LIMIT = 2**64


def check_range(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    """UsageError unless low ≤ value ≤ high (low < value with `open_low`); NaN is never in range."""
    if low <= value <= high and not (open_low and value == low):
        return
    more = "above" if open_low else "at least"
    limit = "" if math.isinf(high) else f" and at most {high:g}"
    raise UsageError(f"{name} is {value:g}", hint=f"it must be {more} {low:g}{limit}")


def check_choice(name: str, value: str, known: Iterable[str]) -> None:
    """UsageError naming the valid words (and the nearest) unless `value` is one of them."""
    words = tuple(known)
    if value not in words:
        raise UsageError(f"{name} is {value!r}", hint=nearest(value, words) or f"it must be one of {', '.join(words)}")


_DEVICE = re.compile(r"auto|cpu|cuda(?::([0-9]{1,3}))?")


def check_device(name: str) -> None:
    """UsageError unless `name` is auto, cpu, cuda or cuda:N."""
    if _DEVICE.fullmatch(name) is None:
        # No guess at the nearest: that of "gpu" is "cpu".
        raise UsageError(f"the device {name!r} is not known", hint="it must be auto, cpu, cuda or cuda:N")


def device_index(name: str) -> int | None:
    """The N of cuda:N; None: any."""
    found = _DEVICE.fullmatch(name)
    return None if found is None or found[1] is None else int(found[1])


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How the next token is chosen from the target's logits.

    Applied in this order: logit_bias, repetition, frequency and presence penalties, temperature, top-k, top-p, min-p.
    The repetition penalty looks at prompt and answer (CTRL, 1909.05858), the other two at the answer alone.
    """

    temperature: float = 0.0  # 0 = greedy
    top_k: int = 0  # 0 = off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its logit)
    seed: int = 0

    def __post_init__(self) -> None:
        check_range("temperature", self.temperature, 0, 100)
        check_range("top-k", self.top_k, 0, math.inf)
        check_range("top-p", self.top_p, 0, 1, open_low=True)
        check_range("min-p", self.min_p, 0, 1)
        check_range("repetition penalty", self.repetition_penalty, 0, 100, open_low=True)
        check_range("presence penalty", self.presence_penalty, -100, 100)
        check_range("frequency penalty", self.frequency_penalty, -100, 100)
        check_range("seed", self.seed, 0, SEED_LIMIT - 1)
        for token, bias in self.logit_bias:
            check_range("token id of a logit bias", token, 0, math.inf)
            if math.isnan(bias) or bias == math.inf:
                raise UsageError(f"logit bias of token {token} is {bias}", hint="use a number, or -inf to forbid it")
        if len({token for token, _ in self.logit_bias}) < len(self.logit_bias):
            raise UsageError("two logit biases name the same token")

    @property
    def has_penalties(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class NgramOptions:
    """Prompt lookup: suffixes of n_max … n_min tokens are looked up, the longest first."""

    n_max: int = 4
    n_min: int = 2

    def __post_init__(self) -> None:
        check_range("smallest n-gram", self.n_min, 1, 16)
        check_range("largest n-gram", self.n_max, self.n_min, 16)


@dataclass(frozen=True, slots=True)
class DraftOptions:
    """A draft made by a model."""

    stop_below: float = 0.0  # a draft ends at a token that the draft itself gives less probability than this

    def __post_init__(self) -> None:
        check_range("draft stop", self.stop_below, 0, 1)


@dataclass(frozen=True, slots=True)
class ConstraintOptions:
    """What the answer must look like (`text.grammar` reads it)."""

    kind: ConstraintKind
    source: str = ""  # the schema, expression or grammar itself; nothing for "json-object"

    def __post_init__(self) -> None:
        check_choice("constraint", self.kind, get_args(ConstraintKind))


@dataclass(frozen=True, slots=True)
class RunOptions:
    """One answer."""

    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    max_tokens: int | None = None  # None: until the model ends or the context is full
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    proposer: ProposerName = "auto"
    gamma: int | None = None  # None: chosen each cycle
    accept: AcceptName = "coupled"
    tree: int = 1  # continuations tried at each place; 1: a chain
    ngram: NgramOptions = field(default_factory=NgramOptions)
    draft: DraftOptions = field(default_factory=DraftOptions)
    constraint: ConstraintOptions | None = None
    think: ThinkName = "auto"  # on and off are told the model; with `show` the reasoning is part of the answer

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            check_range("max tokens", self.max_tokens, 1, math.inf)
        if self.gamma is not None:
            check_range("gamma", self.gamma, 0, MAX_GAMMA)
        check_range("tree", self.tree, 1, MAX_TREE)
        check_choice("proposer", self.proposer, get_args(ProposerName))
        check_choice("acceptance rule", self.accept, get_args(AcceptName))
        check_choice("think", self.think, get_args(ThinkName))
        if self.constraint is not None and self.ignore_eos:
            raise UsageError("--ignore-eos goes on after the end that a grammar sets", hint="leave one of them out")
        if any(not text for text in self.stop):
            raise UsageError("a stop string is empty", hint="give the text at which the answer should stop")


_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(?:([KMGT])(i?)B?|B)?", re.IGNORECASE)


def parse_size(name: str, text: str) -> int:
    """Bytes of `6GB`, `512 MiB`, `1.5G` or a plain number: k, M, G, T are decimal, Ki, Mi, Gi, Ti binary."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{name} is {text!r}", hint="give a size like 6GB or 512MiB")
    number, unit, binary = match.groups()
    power = " KMGT".index((unit or " ").upper())
    return int(float(number) * (1024 if binary else 1000) ** power)


WEIGHT_CACHE = "16GB"
"""Disk that weights may take which are kept as laid out for this CPU."""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How a model is put into memory."""

    device: str = "auto"
    threads: int | None = None  # None: what the affinity mask and the cgroup allow
    context_tokens: int | None = None  # None: the model's own limit
    kv: KVName = "auto"
    quant: QuantName | None = None  # packing of a dense target; None: as its files are
    draft_quant: QuantName | None = None  # the same for the draft
    max_memory_bytes: int | None = None  # None: what is free
    ngram_store: bool = False  # look in the texts of earlier runs, and keep this run's
    weight_cache_bytes: int = parse_size("weight cache", WEIGHT_CACHE)  # disk for laid-out weights; 0: keep none
    graphs: bool = True  # on a card: whether steps are captured into CUDA graphs

    def __post_init__(self) -> None:
        check_device(self.device)
        check_range("weight cache", self.weight_cache_bytes, 0, math.inf)
        for name, quant in (("quantisation", self.quant), ("draft quantisation", self.draft_quant)):
            if quant is not None:
                check_choice(name, quant, get_args(QuantName))
        if self.max_memory_bytes is not None:
            check_range("max memory", self.max_memory_bytes, 1, math.inf)
        if self.threads is not None:
            check_range("threads", self.threads, 1, 1024)
        if self.context_tokens is not None:
            check_range("context", self.context_tokens, 8, math.inf)
        check_choice("kv", self.kv, get_args(KVName))


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """Whether a loaded model outlives the command."""

    keep_alive_minutes: float | None = None  # None: use a worker that is there, start none; 0: not even that

    def __post_init__(self) -> None:
        if self.keep_alive_minutes is not None:
            check_range("keep-alive", self.keep_alive_minutes, 0, 525_600)
