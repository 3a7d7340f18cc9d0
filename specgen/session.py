"""A loaded model and its conversation with one user: prompts in, events out.

Knows: how the parts are put together (checkpoint, tokenizer, decoder, cache, engine) and where text meets tokens.
Does not know: terminals, flags. Nothing below this module knows strings.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import specgen
from specgen.accept import RULES
from specgen.cache import KV_DTYPES, KVCache
from specgen.engine import Answer, Cancel, Cycle, Engine
from specgen.errors import ContextFullError, OutOfMemoryError, UsageError
from specgen.events import CycleDone, Event, Finished, FinishReason, Prefilled, Started
from specgen.kernels import select_kernels
from specgen.machine import processor_name
from specgen.memory import available_bytes, megabytes, peak_rss_bytes
from specgen.model.build import build_model
from specgen.model.families import spec_from_config
from specgen.model.spec import ModelSpec
from specgen.options import LoadOptions, RunOptions
from specgen.paths import cache_dir
from specgen.propose.base import Proposer
from specgen.propose.ngram import NgramProposer
from specgen.propose.none import NoProposer
from specgen.records import RunRecord
from specgen.registry import ModelRef, Progress, pull
from specgen.sampling import Sampler
from specgen.step import EagerRunner
from specgen.text.answer import AnswerText
from specgen.text.template import render_chat, starts_with_bos
from specgen.text.tokenizer import Tokenizer, load_tokenizer
from specgen.tune.controller import AutoGamma, FixedGamma
from specgen.tune.cost import CostTable
from specgen.tune.plan import PlanBook, PlanStore, Scope
from specgen.weights.checkpoint import open_checkpoint

__all__ = ["Cancel", "Prompt", "Session", "load"]

KV_SHARE = 0.5
"""Without --ctx, the KV cache may take this share of the memory that is free after the weights."""


@dataclass(frozen=True, slots=True)
class Prompt:
    ids: tuple[int, ...]
    notices: tuple[str, ...] = ()
    turn: bool = True  # the answer is a chat turn of its own, not the continuation of a text


@dataclass(frozen=True, slots=True)
class Loaded:
    """What is known of a model once it is in memory."""

    name: str
    digest: str
    spec: ModelSpec
    kernels: str
    load_s: float
    notices: tuple[str, ...]


def load(ref: ModelRef, options: LoadOptions | None = None, progress: Progress | None = None) -> Session:
    """Fetch the model when it is not on this disk yet, and put it into memory.

    ModelError for files that cannot be used, OutOfMemoryError when they do not fit.
    """
    options = options or LoadOptions()
    files = pull(ref.entry, progress=progress)
    began = time.perf_counter()
    checkpoint = open_checkpoint(files.target)
    spec = spec_from_config(checkpoint.config, options.context_tokens)
    _check_fits(files.target)
    kernels, notice = select_kernels(options.device, options.threads)
    tokenizer = load_tokenizer(checkpoint, cache_dir() / "tokenizers")
    model = build_model(checkpoint, spec, kernels)
    capacity, cut = _capacity(spec, options)
    cache = KVCache(len(spec.layers), spec.kv_heads, spec.head_dim, capacity, _kv_dtype(options))
    loaded = Loaded(
        name=ref.name,
        digest=checkpoint.digest(),
        spec=spec,
        kernels=kernels.name,
        load_s=time.perf_counter() - began,
        notices=tuple(line for line in (notice, cut) if line),
    )
    session = Session(Engine(EagerRunner(model), cache), kernels, tokenizer, loaded)
    session.use_plans(PlanStore().book(session.scope))
    return session


def _kv_dtype(options: LoadOptions) -> torch.dtype:
    return KV_DTYPES["bf16" if options.kv == "auto" else options.kv]


def _check_fits(path: Path) -> None:
    files = [path] if path.is_file() else [*path.glob("*.safetensors"), *path.glob("*.gguf")]
    needed, free = sum(file.stat().st_size for file in files), available_bytes()
    if free is not None and needed > free:
        raise OutOfMemoryError(
            f"the weights take {megabytes(needed)} and {megabytes(free)} are free",
            hint="close other programs, or choose a smaller model (`specgen models list`)",
        )


def _capacity(spec: ModelSpec, options: LoadOptions) -> tuple[int, str | None]:
    """(slots of the cache, a notice when that is less than the model's own context)."""
    if options.context_tokens is not None:
        if options.context_tokens > spec.context:
            raise UsageError(
                f"--ctx is {options.context_tokens}", hint=f"the model was made for at most {spec.context} tokens"
            )
        return options.context_tokens, None
    slot_bytes = KVCache(len(spec.layers), spec.kv_heads, spec.head_dim, 1, _kv_dtype(options)).slot_bytes
    free = available_bytes()
    fitting = spec.context if free is None else int(free * KV_SHARE) // slot_bytes
    if fitting >= spec.context:
        return spec.context, None
    capacity = max(512, fitting // 256 * 256)
    return capacity, f"context cut to {capacity} of {spec.context} tokens: that is what the free memory holds"


class Session:
    """One model, one cache, one answer at a time. The cache is kept between answers: a prompt that begins like the
    last one is prefilled from where it differs."""

    def __init__(self, engine: Engine, kernels: Any, tokenizer: Tokenizer, loaded: Loaded) -> None:
        self.tokenizer = tokenizer
        self.loaded = loaded
        self.engine = engine
        self.kernels = kernels
        self._vocab = min(tokenizer.vocab_size, loaded.spec.vocab)
        self.plans = PlanBook()
        self._costs = CostTable()

    @property
    def scope(self) -> Scope:
        """What a measurement of this session holds for."""
        threads = getattr(self.kernels, "threads", None) or torch.get_num_threads()
        kv = next(name for name, dtype in KV_DTYPES.items() if dtype == self.engine.cache.layers[0].k.dtype)
        device = f"{processor_name()}, {self.kernels.name}, {threads} threads, kv {kv}"
        return Scope(self.loaded.digest, device, f"specgen {specgen.__version__}, torch {torch.__version__}")

    def use_plans(self, plans: PlanBook) -> None:
        """What `specgen tune` found, for answers whose speculation is left to us; its costs are where `--gamma auto`
        begins."""
        self.plans = plans
        if plans.costs is not None:
            self._costs = plans.costs.at(0)

    def prompt_ids(self, text: str, *, system: str | None = None, raw: bool = False) -> Prompt:
        """`text` as the user's turn of a chat, or as it is with `raw`. UsageError for options that exclude others."""
        if not raw:
            turns = [{"role": "system", "content": system}] if system is not None else []
            return self.chat_ids([*turns, {"role": "user", "content": text}])
        if system is not None:
            raise UsageError("--system needs a chat template, and --raw goes without", hint="leave one of them out")
        return self._checked(self.tokenizer.encode(text, add_special=True), turn=False)

    def chat_ids(self, messages: Sequence[Mapping[str, str]]) -> Prompt:
        """Messages (`role`, `content`) through the model's chat template, up to where the model's turn begins."""
        tokenizer = self.tokenizer
        rendered = render_chat(
            tokenizer.chat_template,
            messages,
            special=tokenizer.named,
            shielded=tokenizer.special_strings,
        )
        return self._checked(tokenizer.encode_chat(rendered), turn=True)

    def _checked(self, ids: Sequence[int], *, turn: bool) -> Prompt:
        if not ids:
            raise UsageError("the prompt is empty", hint="give some text, or a model whose tokenizer adds a BOS token")
        bos = self.tokenizer.bos
        doubled = starts_with_bos(ids, bos) and starts_with_bos(ids[1:], bos)
        notice = "the prompt begins with two BOS tokens, which most models were not trained on"
        return Prompt(tuple(ids), (notice,) if doubled else (), turn)

    def generate(self, prompt: Prompt, options: RunOptions, cancel: Cancel | None = None) -> Iterator[Event]:
        """The events of one answer, see `specgen.events`. Closing the iterator cancels; the session stays usable.

        UsageError and ContextFullError come before any work.
        """
        cancel = cancel or Cancel()
        limit = self.engine.cache.capacity
        if len(prompt.ids) >= limit:
            raise ContextFullError(
                f"the prompt has {len(prompt.ids)} tokens and the context holds {limit}",
                hint="shorten the prompt" + ("" if limit >= self.loaded.spec.context else ", or raise --ctx"),
            )
        text = AnswerText(self.tokenizer, options.stop, ignore_eos=options.ignore_eos, turn=prompt.turn)
        options, notices = self._planned(prompt, options)
        answer = self._answer(prompt, options, text, cancel)
        return self._events(replace(prompt, notices=(*prompt.notices, *notices)), options, answer, text)

    def _planned(self, prompt: Prompt, options: RunOptions) -> tuple[RunOptions, tuple[str, ...]]:
        """The tuned setting where the user leaves the choice to us, and what to say about it."""
        if options.proposer != "auto" or options.gamma is not None or options.tree != 1 or options.accept != "coupled":
            return options, ()
        plan = self.plans.choice(options.sampling.temperature, len(prompt.ids))
        return (options, self.plans.notes) if plan is None else (plan.setting.options(options), (plan.notice,))

    def _answer(self, prompt: Prompt, options: RunOptions, text: AnswerText, cancel: Cancel) -> Answer:
        gamma = options.gamma
        return Answer(
            prompt=prompt.ids,
            proposer=self._proposer(options),
            policy=AutoGamma(self._costs) if gamma is None else FixedGamma(gamma),
            rule=RULES[options.accept](),
            sampler=Sampler(options.sampling, self.kernels, prompt.ids, self._vocab),
            cut=text.cut,
            max_tokens=options.max_tokens,
            cancel=cancel,
        )

    def _proposer(self, options: RunOptions) -> Proposer:
        return NoProposer() if options.proposer == "none" else NgramProposer(options.ngram)

    def _events(self, prompt: Prompt, options: RunOptions, answer: Answer, text: AnswerText) -> Iterator[Event]:
        began = time.perf_counter()
        record = RunRecord()
        yield Started(
            model=self.loaded.name,
            proposer=answer.proposer.name,
            accept=answer.rule.name,
            lossless=answer.rule.lossless,
            gamma="auto" if options.gamma is None else str(options.gamma),
            prompt_tokens=len(prompt.ids),
            context_tokens=self.engine.cache.capacity,
            notices=(*self.loaded.notices, *prompt.notices),
        )
        reason = FinishReason.CANCELLED
        if self.engine.prefill(answer, record):
            yield Prefilled(record.prefilled_tokens, record.reused_tokens, record.prefill_ms)
            last = began
            for cycle in self.engine.decode(answer, record):
                last = _time(record, cycle, began, last)
                if cycle.tokens:
                    yield CycleDone(cycle.record, len(self.engine.committed))
                    yield from text.pieces(cycle.tokens, cycle.accepted)
                reason = cycle.reason or reason
        yield from text.flush()
        record.kv_bytes = record.kv_tokens * self.engine.cache.slot_bytes
        yield Finished(reason, text.text, tuple(text.token_ids), record)

    def report(self) -> dict[str, Any]:
        """What `--json` says of the session: model, load time, memory in bytes, versions."""
        cache, loaded = self.engine.cache, self.loaded
        return {
            "model": loaded.name,
            "digest": loaded.digest,
            "load_s": loaded.load_s,
            "memory": {
                "kv_capacity_tokens": cache.capacity,
                "kv_token_bytes": cache.slot_bytes,
                "peak_rss_bytes": peak_rss_bytes(),
            },
            "versions": {
                "specgen": specgen.__version__,
                "python": platform.python_version(),
                "torch": torch.__version__,
                "kernels": loaded.kernels,
            },
        }


def _time(record: RunRecord, cycle: Cycle, began: float, last: float) -> float:
    """Book the time since the last commit; tokens committed together arrive together. Returns now."""
    if not cycle.tokens:
        return last
    now = time.perf_counter()
    if len(record.cycles) == 1:
        record.ttft_ms = 1e3 * (now - began)
        record.gaps_ms += [0.0] * (len(cycle.tokens) - 1)
    else:
        record.gaps_ms += [1e3 * (now - last), *[0.0] * (len(cycle.tokens) - 1)]
        record.decode_ms = 1e3 * (now - began) - record.ttft_ms
    return now
