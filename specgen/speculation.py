"""How one loaded model is speculated, answer by answer: the options become a proposer and a γ policy.

Knows: which parts a proposer needs, and what outlives an answer (the draft model's cache, estimates, earlier texts, the
skip set). Does not know: strings, files of models, events.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from specgen.cancel import Cancel
from specgen.engine import Engine, GammaPolicy
from specgen.errors import SpecgenError, UsageError
from specgen.fused import DeviceProposer, FusedCycles, can_fuse
from specgen.model.decoder import Decoder
from specgen.model.spec import Skipped
from specgen.options import NEED_DRAFT, RunOptions
from specgen.propose.base import AnyProposer
from specgen.propose.draw import CHOOSERS
from specgen.propose.lookahead import LookaheadProposer
from specgen.propose.mix import MixProposer
from specgen.propose.model import DraftModel, ModelProposer, Reader
from specgen.propose.ngram import NgramIndex, NgramProposer
from specgen.propose.none import NoProposer
from specgen.propose.skip import Agreement, SharedPrefix, draft_share, sublayers_of, without
from specgen.propose.store import NgramStore
from specgen.sampling import Sampler
from specgen.step import EagerRunner
from specgen.tune.controller import AutoGamma, DraftCost, FixedGamma
from specgen.tune.cost import CostTable
from specgen.tune.cost_store import CostStore, Learned
from specgen.tune.skip_search import SkipChoice, SkipSearch
from specgen.tune.skip_store import SkipStore

SKIP_SEARCH_S = 5.0
"""What the search for a skip set may take, once per model."""
LEAST_EVALUATIONS = 8
ALONE_SHARE = 0.7
"""Of them, for sublayers that are left out alone."""
READ_SHARE = 0.25
"""What reading a token takes a model beside drafting one: many are read in one step."""


class SearchStoppedError(Exception):
    """The user did not want to wait any longer."""


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A draft model in memory."""

    name: str
    reader: DraftModel
    share: float  # what one of its steps costs as a share of the target's: bytes of weights, until it is measured
    digest: str  # of its files, and how they were quantised
    cycles: FusedCycles | None = None  # recorded with the target, where both run by graphs


@dataclass(slots=True)
class Start:
    """What an answer is decoded with."""

    proposer: AnyProposer
    policy: GammaPolicy
    notices: tuple[str, ...] = ()


@dataclass(slots=True)
class Speculation:
    """One per session."""

    engine: Engine
    model: Decoder
    digest: str
    draft: LoadedDraft | None = None
    missing_draft: str | None = None  # why there is none although one was named
    store: NgramStore | None = None
    costs: CostTable = field(default_factory=CostTable)
    drafting: Mapping[str, DraftCost] = field(default_factory=dict)  # as measured, by proposer
    learned: Learned = field(default_factory=Learned)  # by the last answers
    _cost_store: CostStore | None = None
    _policies: dict[int, AutoGamma] = field(default_factory=dict)  # by width
    _earlier: dict[tuple[int, int], NgramIndex] = field(default_factory=dict)  # by (n_max, n_min)
    _skip: SkipChoice | None = None

    def begin(
        self, options: RunOptions, sampler: Sampler, prompt: Sequence[int], cancel: Cancel | None = None
    ) -> Start:
        """UsageError when a proposer was asked for that this session cannot run. A search that comes before the first
        answer with `skip` ends when `cancel` is set."""
        name = self._resolved(options)
        notices: tuple[str, ...] = ()
        if name == "skip" and self._skip is None:
            notices = self._find_skips(prompt, cancel or Cancel())
            name = "none" if self._skip is None else name
        policy = self._policy(options, prompt)
        return Start(self._proposer(name, options, sampler, policy), policy, (*notices, *self._store_notice()))

    def finish(self, committed: Sequence[int]) -> None:
        """An answer is complete: what it taught of t(R) is kept, and where that was asked for its text."""
        agreement = dict(self.learned.agreement)
        for policy in self._policies.values():
            agreement |= {self._drafter(name): share for name, share in policy.agreement().items()}
        self._keep(Learned(self.costs.latest, agreement))
        if self.store is not None:
            self.store.add(committed)
            self._earlier.clear()

    def use_costs(self, costs: CostTable, drafting: Mapping[str, DraftCost] | None = None) -> None:
        """A calibrated t(R), and what the models that draft were measured to cost."""
        self.costs = costs
        self.drafting = drafting or {}
        self._policies.clear()

    def recall_costs(self, store: CostStore, measure: Callable[[], Mapping[int, Sequence[float]]]) -> None:
        """Go on with what earlier answers found; where there were none, `measure` it, which takes a moment."""
        self._cost_store = store
        self._keep(store.load() or Learned(measure()))
        self.use_costs(CostTable(known_ms=self.learned.step_ms))

    def _keep(self, learned: Learned) -> None:
        changed, self.learned = learned != self.learned, learned
        if self._cost_store is None or not learned.step_ms or not changed:
            return
        try:
            self._cost_store.save(learned)
        except SpecgenError:
            self._cost_store = None  # a full disk or a read-only folder: the next start measures again

    def _resolved(self, options: RunOptions) -> str:
        """The proposer by its own name."""
        name = options.proposer
        if name == "auto":
            return "ngram" if self.draft is None else "mix"
        if name in NEED_DRAFT and self.draft is None:
            if self.missing_draft is None:
                raise UsageError(f"--proposer {name} needs a draft model", hint="name one with --draft NAME|PATH")
            return "ngram"  # the reason was told when the model was loaded
        return name

    def _policy(self, options: RunOptions, prompt: Sequence[int]) -> GammaPolicy:
        if options.gamma is not None:
            return FixedGamma(options.gamma, options.tree)
        policy = self._policies.get(options.tree)
        if policy is None:
            drafting = self._draft_costs()
            policy = self._policies[options.tree] = AutoGamma(self.costs, width=options.tree, drafting=drafting)
        policy.new_text(0 if self.draft is None else self.draft.reader.unread(prompt))
        return policy

    def _draft_costs(self) -> dict[str, DraftCost]:
        """Of the proposers that pay for every token: by their share of the weights where nothing was measured."""
        found: dict[str, DraftCost] = {}
        if self.draft is not None:
            found["model"] = DraftCost(self.draft.share, READ_SHARE * self.draft.share)
        if self._skip is not None:
            found["skip"] = DraftCost(draft_share(self.model, self._skip.skipped), agreement=self._skip.agreement)
        agreement = self.learned.agreement
        return {
            name: replace(self.drafting.get(name, guess), agreement=agreement.get(self._drafter(name), guess.agreement))
            for name, guess in found.items()
        }

    def _drafter(self, name: str) -> str:
        """Which model drafts for that proposer: what one taught does not hold for another."""
        if name == "model":
            assert self.draft is not None
            return f"{name} {self.draft.digest}"
        assert self._skip is not None
        return f"{name} {sorted(self._skip.skipped)}"

    def _proposer(self, name: str, options: RunOptions, sampler: Sampler, policy: GammaPolicy) -> AnyProposer:
        if name == "none":
            return NoProposer()
        if name == "skip":
            return self._with_reader("skip", self.skip_reader(), options, sampler)
        if name == "lookahead":
            return LookaheadProposer()
        lookup = NgramProposer(options.ngram, options.tree, self._earlier_texts(options))
        if name == "ngram":
            return lookup
        model = self._drafting(options, sampler)
        return model if name == "model" else MixProposer(lookup, model, policy)

    def _drafting(self, options: RunOptions, sampler: Sampler) -> AnyProposer:
        """The draft model as a proposer, left to the device where it can make whole cycles."""
        assert self.draft is not None
        stepwise = self._with_reader("model", self.draft.reader, options, sampler)
        cycles = self.draft.cycles
        if cycles is None or not can_fuse(cycles, sampler, options):
            return stepwise
        return DeviceProposer(stepwise, self.draft.reader, cycles)

    @staticmethod
    def _with_reader(name: str, reader: Reader, options: RunOptions, sampler: Sampler) -> ModelProposer:
        chooser = CHOOSERS[options.accept](sampler)
        return ModelProposer(name, reader, sampler, chooser, options.draft, options.tree)

    def skip_reader(self) -> SharedPrefix:
        """The target without the sublayers that were found last (`use_skips`, or `begin` with `skip`)."""
        assert self._skip is not None
        runner = EagerRunner(without(self.model, self._skip.skipped))
        return SharedPrefix(runner, self.engine.cache, self.model.spec.vocab)

    def _earlier_texts(self, options: RunOptions) -> NgramIndex | None:
        if self.store is None:
            return None
        key = (options.ngram.n_max, options.ngram.n_min)
        if key not in self._earlier:
            self._earlier[key] = NgramIndex(options.ngram, self.store.read())
        return self._earlier[key]

    def _store_notice(self) -> tuple[str, ...]:
        if self.store is None or self.store.notice is None:
            return ()
        notice, self.store.notice = self.store.notice, None
        return (notice,)

    def use_skips(self, found: SkipChoice) -> None:
        """Leave these sublayers out from now on, in later sessions too. SpecgenError when they cannot be stored."""
        self._skip = found
        self._policies.clear()  # they do not know what a draft step costs
        SkipStore(self.digest, len(self.model.spec.layers)).save(found)

    def search_skips(self, texts: Sequence[Sequence[int]], seconds: float, cancel: Cancel | None = None) -> SkipChoice:
        """The sublayers whose absence changes least along the ends of `texts`, searched for about so long.
        SearchStoppedError once `cancel` is set."""
        agreements = [Agreement(self.model, text) for text in texts]

        def agreement(skipped: Skipped) -> float:
            if cancel is not None and cancel.is_set():
                raise SearchStoppedError
            return fmean(one(skipped) for one in agreements)

        sublayers = sublayers_of(self.model)
        began = time.perf_counter()
        agreement(frozenset(sublayers[:1]))
        each_s = time.perf_counter() - began
        budget = max(LEAST_EVALUATIONS, int(seconds / max(each_s, 1e-6)))
        # Some are left for sets of more than one.
        alone = sublayers[: max(1, int(ALONE_SHARE * budget))]
        return SkipSearch(
            alone, agreement, lambda skipped: draft_share(self.model, skipped), self.costs.ratio, budget
        ).run()

    def _find_skips(self, prompt: Sequence[int], cancel: Cancel) -> tuple[str, ...]:
        """The stored skip set, or one that is searched on the prompt; what to say about it."""
        self._skip = SkipStore(self.digest, len(self.model.spec.layers)).load()
        self._policies.clear()
        if self._skip is not None:
            return ()
        began = time.perf_counter()
        try:
            found = self.search_skips([prompt], SKIP_SEARCH_S, cancel)
        except SearchStoppedError:
            return ("skip: the search for sublayers to leave out was stopped",)
        took_s = time.perf_counter() - began
        where = "kept for the next time"
        try:
            self.use_skips(found)
        except SpecgenError as error:
            where = error.message
        count = f"{len(found.skipped)} of {2 * len(self.model.spec.layers)} sublayers"
        expected = f"{found.speedup:.2f}x expected" if found.gamma else "not expected to pay"
        right = f"right for {found.agreement:.0%} of the prompt"
        return (f"drafting without {count}: {right}, {expected} (searched for {took_s:.1f} s, {where})",)
