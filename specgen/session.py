"""A loaded model and its conversation with one user: prompts in, events out.

Knows: how the parts are put together (checkpoint, tokenizer, decoder, cache, engine) and where text meets tokens.
Does not know: terminals, flags. Nothing below this module knows strings.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import specgen
from specgen.accept import RULES
from specgen.cache import KV_DTYPES, KVCache
from specgen.cancel import Cancel
from specgen.engine import Answer, Cut, Cycle, Engine
from specgen.errors import ContextFullError, UsageError
from specgen.events import CycleDone, Event, Finished, FinishReason, Prefilled, Started
from specgen.fused import build_cycles
from specgen.graph import Graphs, build_runner, device_graphs
from specgen.kernels.base import Kernels
from specgen.kernels.card_memory import shortage_told
from specgen.machine import processor_name
from specgen.memory import MemoryPlan, Need, Request, peak_rss_bytes
from specgen.model.build import build_model
from specgen.model.decoder import Decoder
from specgen.model.families import spec_from_config
from specgen.model.laidout import LaidOutStore
from specgen.model.spec import ModelSpec, workspace_bytes
from specgen.options import ConstraintOptions, LoadOptions, RunOptions, ThinkName
from specgen.paths import cache_dir, data_dir
from specgen.placement import Placement, first_that_holds
from specgen.prompt import Prompt
from specgen.propose.forced import ForcedProposer
from specgen.propose.model import DraftModel
from specgen.propose.store import NgramStore
from specgen.records import RunRecord
from specgen.registry import ModelRef, Progress, pull
from specgen.sampling import Sampler
from specgen.speculation import LoadedDraft, Speculation
from specgen.steptime import fill_cache, quick_costs
from specgen.text.answer import AnswerText
from specgen.text.compatible import check_same_tokens
from specgen.text.constrained import GrammarConstraint, GrammarCut, GrammarVocabulary
from specgen.text.grammar import compile_grammar
from specgen.text.template import render_chat, starts_with_bos
from specgen.text.think import THINK_VARIABLES, ThinkSplitter, opens_thought
from specgen.text.tokenizer import Tokenizer, load_tokenizer
from specgen.tune.cost_store import CostStore
from specgen.tune.plan import PlanBook, PlanStore, Scope
from specgen.weights.base import Checkpoint
from specgen.weights.checkpoint import open_checkpoint
from specgen.weights.quantised import quantised_checkpoint

__all__ = ["Cancel", "Prompt", "Session", "load"]


ANSWERING = "answering"  # what was being done when memory ran out
TRIED_TOKENS = 80
"""More than a draft ever has, so that long steps are tried too."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What is known of a model once it is in memory."""

    name: str
    digest: str
    spec: ModelSpec
    kernels: str
    load_s: float
    notices: tuple[str, ...]
    planned_bytes: int = 0  # weights, KV of the whole context and workspace, of target and draft
    device: str = "cpu"
    place: str = ""  # the card's name or the processor's


def load(
    ref: ModelRef,
    options: LoadOptions | None = None,
    progress: Progress | None = None,
    draft: ModelRef | None = None,
) -> Session:
    """Fetch the model (and the one that drafts for it) when it is not on this disk yet, and put it into memory.

    ModelError for files that cannot be used and for a draft with another tokenizer, OutOfMemoryError when the target
    does not fit; a draft that does not fit is left out with a notice.
    """
    options = options or LoadOptions()
    target_path = pull(ref.entry, progress=progress).target
    draft_path = None if draft is None else pull(draft.entry, progress=progress).target
    began = time.perf_counter()
    target = _open(ref.name, target_path, options.quant, options.context_tokens)
    small = None
    if draft is not None and draft_path is not None:
        small = _open(draft.name, draft_path, options.draft_quant, None)
        check_same_tokens(target.tokenizer, small.tokenizer, small.name)
    loading = _Loading(ref.name, target, small, options, began)
    session = first_that_holds(options, loading.request(), loading.session)
    session.refresh_plans()
    session.recall_costs()
    return session


@dataclass(frozen=True, slots=True)
class _Opened:
    """A model of which only the headers and the tokenizer have been read."""

    name: str
    checkpoint: Checkpoint
    spec: ModelSpec
    tokenizer: Tokenizer
    weights_bytes: int

    def need(self, kv: torch.dtype) -> Need:
        spec = self.spec
        slot_bytes = KVCache(len(spec.layers), spec.kv_heads, spec.head_dim, 1, kv).slot_bytes
        return Need(self.weights_bytes, slot_bytes, workspace_bytes(spec), spec.context)


def _open(name: str, path: Path, quant: str | None, context_tokens: int | None) -> _Opened:
    checkpoint, weights_bytes = open_checkpoint(path), _file_bytes(path)
    tokenizer = load_tokenizer(checkpoint, cache_dir() / "tokenizers")
    if quant is not None:
        checkpoint = quantised_checkpoint(checkpoint, quant, cache_dir() / "quantised")
        weights_bytes = sum(checkpoint.tensor(tensor).nbytes for tensor in checkpoint.names())
    spec = spec_from_config(checkpoint.config, context_tokens)
    return _Opened(name, checkpoint, spec, tokenizer, weights_bytes)


def _file_bytes(path: Path) -> int:
    """About what the weights take in memory: they stay packed as in the files."""
    files = [path] if path.is_file() else [*path.glob("*.safetensors"), *path.glob("*.gguf")]
    return sum(file.stat().st_size for file in files)


@dataclass(frozen=True, slots=True)
class _Loading:
    """What is to be put into memory, wherever there is room."""

    name: str
    target: _Opened
    draft: _Opened | None
    options: LoadOptions
    began: float

    def request(self) -> Request:
        asked, kv = self.options.context_tokens, _kv_dtype(self.options)
        longest = self.target.spec.context
        if asked is not None and asked > longest:
            raise UsageError(f"--ctx is {asked}", hint=f"the model was made for at most {longest} tokens")
        return Request(self.target.need(kv), None if self.draft is None else self.draft.need(kv), asked)

    def session(self, placement: Placement, plan: MemoryPlan) -> Session:
        target, kernels = self.target, placement.kernels
        vocab = min(target.tokenizer.vocab_size, target.spec.vocab)
        graphs = device_graphs(kernels.device, self.options.graphs)
        engine, model, notice = self._engine(target, plan.context_tokens, kernels, graphs, vocab)
        notices = [*placement.notices, *plan.notices, notice]
        speculation = Speculation(engine, model, target.checkpoint.digest())
        if self.draft is not None and plan.with_draft:
            speculation.draft, notice = self._draft(self.draft, plan, engine, kernels, graphs)
            notices.append(notice)
        elif self.draft is not None:
            speculation.missing_draft = plan.notices[0]
        if self.options.ngram_store:
            speculation.store = NgramStore(data_dir() / "ngrams", speculation.digest, vocab)
        if placement.card is not None:
            _try_out(engine, target.spec.vocab)
        loaded = Loaded(
            name=self.name,
            digest=speculation.digest,
            spec=target.spec,
            kernels=kernels.name,
            load_s=time.perf_counter() - self.began,
            notices=tuple(notice for notice in notices if notice is not None),
            planned_bytes=plan.needed_bytes,
            device=placement.device,
            place=placement.name,
        )
        return Session(speculation, kernels, target.tokenizer, loaded)

    def _engine(
        self, opened: _Opened, context_tokens: int, kernels: Kernels, graphs: Graphs | None, vocab: int | None = None
    ) -> tuple[Engine, Decoder, str | None]:
        """With the reason, where steps are not taken as they were meant to be. `vocab`: see `graph.GraphRunner`."""
        store = LaidOutStore(cache_dir() / "weights", self.options.weight_cache_bytes)
        model = build_model(opened.checkpoint, opened.spec, kernels, store)
        cache = model.new_cache(context_tokens, _kv_dtype(self.options))
        runner, notice = build_runner(model, cache, graphs, vocab)
        return Engine(runner, cache), model, notice

    def _draft(
        self, draft: _Opened, plan: MemoryPlan, target: Engine, kernels: Kernels, graphs: Graphs | None
    ) -> tuple[LoadedDraft, str | None]:
        engine, model, notice = self._engine(draft, min(plan.context_tokens, draft.spec.context), kernels, graphs)
        reader = DraftModel(engine.runner, engine.cache, draft.spec.vocab)
        share = draft.weights_bytes / self.target.weights_bytes
        cycles, fusing = build_cycles(target.runner, target.cache, model, engine.cache, graphs)
        return LoadedDraft(draft.name, reader, share, draft.checkpoint.digest(), cycles), notice or fusing


def _try_out(engine: Engine, vocab: int) -> None:
    """Read a few tokens and forget them: what does not run on a card, or finds no memory, shows while it is loaded."""
    try:
        fill_cache(engine, min(TRIED_TOKENS, engine.cache.capacity - 1), vocab)
    finally:
        engine.rewind(0)


def _kv_dtype(options: LoadOptions) -> torch.dtype:
    return KV_DTYPES["bf16" if options.kv == "auto" else options.kv]


@dataclass(frozen=True, slots=True)
class _Ending:
    """What can end an answer."""

    text: AnswerText
    constraint: GrammarConstraint | None
    cancel: Cancel

    @property
    def cut(self) -> Cut:
        return self.text.cut if self.constraint is None else GrammarCut(self.text.cut, self.constraint)

    def complete(self, reason: FinishReason) -> bool:
        """Whether the answer is a whole sentence of its grammar."""
        if self.constraint is None or reason in (FinishReason.EOS, FinishReason.GRAMMAR):
            return True
        return self.constraint.accepts(self.text.text)


class Session:
    """One model, one cache, one answer at a time. The cache is kept between answers: a prompt that begins like the
    last one is prefilled from where it differs."""

    def __init__(self, speculation: Speculation, kernels: Kernels, tokenizer: Tokenizer, loaded: Loaded) -> None:
        self.tokenizer = tokenizer
        self.loaded = loaded
        self.speculation = speculation
        self.engine = speculation.engine
        self.kernels = kernels
        self._grammars: GrammarVocabulary | None = None  # made for the first constrained answer
        self.vocab = min(tokenizer.vocab_size, loaded.spec.vocab)
        self.plans = PlanBook()

    @property
    def scope(self) -> Scope:
        """What a measurement of this session holds for."""
        threads = getattr(self.kernels, "threads", None) or torch.get_num_threads()
        kv = next(name for name, dtype in KV_DTYPES.items() if dtype == self.engine.cache.layers[0].k.dtype)
        where = self.loaded.place or processor_name()
        device = f"{where}, {self.kernels.name}, {threads} threads, kv {kv}"
        versions = f"specgen {specgen.__version__}, torch {torch.__version__}"
        draft = self.speculation.draft
        return Scope(self.loaded.digest, device, versions, None if draft is None else draft.digest)

    def refresh_plans(self) -> None:
        """Use what `specgen tune` has found for this model and machine by now."""
        self.use_plans(PlanStore().book(self.scope))

    def recall_costs(self) -> None:
        """Where nothing was tuned, begin with what earlier answers found out about t(R)."""
        tuned = self.plans.costs is not None  # then nothing has to be measured: that is where an answer begins
        measure = dict if tuned else partial(quick_costs, self.engine, self.loaded.spec.vocab)
        alone = replace(self.scope, draft=None)  # the target's steps take as long with a draft as without
        self.speculation.recall_costs(CostStore(alone), measure)
        self.use_plans(self.plans)

    def use_plans(self, plans: PlanBook) -> None:
        """What `specgen tune` found, for answers whose speculation is left to us; its costs are where `--gamma auto`
        begins."""
        self.plans = plans
        if plans.costs is not None:
            self.speculation.use_costs(plans.costs.at(0), plans.costs.drafting())

    def prompt_ids(
        self, text: str, *, system: str | None = None, raw: bool = False, think: ThinkName = "auto"
    ) -> Prompt:
        """`text` as the user's turn of a chat, or as it is with `raw`. UsageError for options that exclude others."""
        if not raw:
            turns = [{"role": "system", "content": system}] if system is not None else []
            return self.chat_ids([*turns, {"role": "user", "content": text}], think)
        if system is not None:
            raise UsageError("--system needs a chat template, and --raw goes without", hint="leave one of them out")
        return self._checked(self.tokenizer.encode(text, add_special=True), turn=False)

    def chat_ids(self, messages: Sequence[Mapping[str, str]], think: ThinkName = "auto") -> Prompt:
        """Messages (`role`, `content`) through the model's chat template, up to where the model's turn begins."""
        rendered = self.render(messages, think)
        prompt = self._checked(self.tokenizer.encode_chat(rendered), turn=True)
        return replace(prompt, thinking=opens_thought(rendered))

    def render(self, messages: Sequence[Mapping[str, str]], think: ThinkName = "auto") -> str:
        """The text of the chat template for `messages`, as `Tokenizer.encode_chat` reads it."""
        tokenizer = self.tokenizer
        return render_chat(
            tokenizer.chat_template,
            messages,
            special=tokenizer.named,
            shielded=tokenizer.special_strings,
            extra=THINK_VARIABLES.get(think),
        )

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
        constraint = None if options.constraint is None else self._constraint(options.constraint)
        split = prompt.turn and constraint is None and options.think != "show"
        text = AnswerText(
            self.tokenizer,
            options.stop,
            ignore_eos=options.ignore_eos,
            turn=prompt.turn and constraint is None,  # a grammar says whether there is a space
            thoughts=ThinkSplitter(inside=prompt.thinking) if split else None,
        )
        ending = _Ending(text, constraint, cancel)
        options, notices = self._planned(prompt, options)
        with shortage_told(ANSWERING):
            answer, more = self._answer(prompt, options, ending)
        return self._told(replace(prompt, notices=(*prompt.notices, *notices, *more)), options, answer, ending)

    def _planned(self, prompt: Prompt, options: RunOptions) -> tuple[RunOptions, tuple[str, ...]]:
        """The tuned setting where the user leaves the choice to us, and what to say about it."""
        if options.proposer != "auto" or options.gamma is not None or options.tree != 1 or options.accept != "coupled":
            return options, ()
        plan = self.plans.choice(options.sampling.temperature, len(prompt.ids))
        return (options, self.plans.notes) if plan is None else (plan.setting.options(options), (plan.notice,))

    def _answer(self, prompt: Prompt, options: RunOptions, ending: _Ending) -> tuple[Answer, tuple[str, ...]]:
        """What the engine needs for one answer, and what to say about it."""
        sampler = Sampler(options.sampling, self.kernels, prompt.ids, self.vocab, ending.constraint)
        start = self.speculation.begin(options, sampler, prompt.ids, ending.cancel)
        if ending.constraint is not None and options.proposer != "none":
            start.proposer = ForcedProposer(ending.constraint, start.proposer, start.policy)
        answer = Answer(
            prompt=prompt.ids,
            proposer=start.proposer,
            policy=start.policy,
            rule=RULES[options.accept](),
            sampler=sampler,
            cut=ending.cut,
            max_tokens=options.max_tokens,
            cancel=ending.cancel,
        )
        return answer, start.notices

    def _told(self, prompt: Prompt, options: RunOptions, answer: Answer, ending: _Ending) -> Iterator[Event]:
        with shortage_told(ANSWERING):
            yield from self._events(prompt, options, answer, ending)

    def _events(self, prompt: Prompt, options: RunOptions, answer: Answer, ending: _Ending) -> Iterator[Event]:
        began = time.perf_counter()
        record, text = RunRecord(), ending.text
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
                    yield CycleDone(cycle.record, len(self.engine.committed), cycle.tokens)
                    yield from text.pieces(cycle.tokens, cycle.accepted)
                reason = cycle.reason or reason
        yield from text.flush()
        self.speculation.finish(self.engine.committed)
        record.kv_bytes = record.kv_tokens * self.engine.cache.slot_bytes
        yield Finished(reason, text.text, tuple(text.token_ids), record, ending.complete(reason), text.thinking)

    def _constraint(self, options: ConstraintOptions) -> GrammarConstraint:
        """GrammarError where the grammar cannot be used (a command checks it before it loads a model)."""
        if self._grammars is None:
            self._grammars = GrammarVocabulary(self.tokenizer)
        return GrammarConstraint(self._grammars, compile_grammar(options))

    def _card_memory(self) -> dict[str, int]:
        device = self.kernels.device
        return {} if device.type == "cpu" else {"peak_card_bytes": torch.cuda.max_memory_allocated(device)}

    def report(self) -> dict[str, Any]:
        """What `--json` says of the session: model, load time, memory in bytes, versions."""
        cache, loaded = self.engine.cache, self.loaded
        return {
            "model": loaded.name,
            "digest": loaded.digest,
            "device": loaded.device,
            "draft": None if self.speculation.draft is None else self.speculation.draft.name,
            "load_s": loaded.load_s,
            "memory": {
                "kv_capacity_tokens": cache.capacity,
                "kv_token_bytes": cache.slot_bytes,
                "planned_bytes": loaded.planned_bytes,
                "peak_rss_bytes": peak_rss_bytes(),
                **self._card_memory(),
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
