"""A model of random weights at real shapes, measured from its kernels up to whole cycles.

Knows: how it is put together (as a session does it, without files and text) and what is measured, in which order. Does
not know: tables, flags, what the weights look like (random_weights).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import cast

import torch
from torch import Tensor

from specgen.accept import Coupled
from specgen.cache import KV_DTYPES, KVCache
from specgen.cancel import Cancel
from specgen.draft import Draft
from specgen.engine import Answer, Cycle, Engine
from specgen.events import FinishReason
from specgen.fused import build_cycles
from specgen.graph import Graphs, build_runner, device_graphs
from specgen.kernels.device import DeviceKernels
from specgen.measure.random_weights import Packing, random_weights
from specgen.measure.roofline import bandwidth_of, weight_bytes
from specgen.measure.runs import Report, silent
from specgen.measure.shapes import Shape
from specgen.measure.synthetic import CycleCost, SyntheticRow, synthetic_table
from specgen.measure.timer import Spread, Timer, in_turns, timer_for
from specgen.model.build import make_decoder
from specgen.model.decoder import Decoder
from specgen.options import MAX_GAMMA, RunOptions, SamplingOptions
from specgen.placement import Placement
from specgen.propose.model import DraftModel
from specgen.propose.none import NoProposer
from specgen.records import CycleRecord, RunRecord
from specgen.sampling import Sampler
from specgen.speculation import LoadedDraft, Speculation, Start
from specgen.step import DrawsRows
from specgen.steptime import fill_cache, step_task
from specgen.tune.controller import FixedGamma
from specgen.tune.cost import CostTable

ROWS = tuple(range(1, MAX_GAMMA + 2))
LINEAR_ROWS = (1, 5, 17)
SPAN = 8
"""Steps one behind the other, for the device's own time."""
WITH_DRAFT = "draft model"
CYCLES = 24
WARM_CYCLES = 4


@dataclass(frozen=True, slots=True)
class ShapeRequest:
    shape: Shape
    packing: Packing
    draft: Shape | None
    context_tokens: int  # cached before what is measured
    gamma: int  # of the measured cycles
    repeats: int
    kv: str = "bf16"
    graphs: bool = True

    @property
    def capacity(self) -> int:
        return self.context_tokens + (CYCLES + 2) * (1 + self.gamma) + len(ROWS)


@dataclass(frozen=True, slots=True)
class LinearSpeed:
    """All weights of one role and shape, one after the other: none of them is still in a cache from the last time,
    unless all of them together fit into it."""

    role: str
    outputs: int
    inputs: int
    count: int
    nbytes: int  # of all
    gbps: dict[int, float]  # rows → GB/s


@dataclass(frozen=True, slots=True)
class StepSpeed:
    """t(R), by the clock of the host that waits for it."""

    rows: int
    ms: Spread
    device_ms: float | None  # a card's own time, of a step among others without waiting


@dataclass(frozen=True, slots=True)
class CycleSpeed:
    """Whole cycles of the engine; medians."""

    label: str
    gamma: int
    ms: float
    propose_ms: float
    verify_ms: float
    reconcile_ms: float
    parts_ms: float  # the draft's steps and the target's, measured by themselves
    device_ms: float  # of which the device computes

    @property
    def host_ms(self) -> float:
        """What is not the device's: launch gaps, choosing, bookkeeping."""
        return max(0.0, self.ms - self.device_ms)


@dataclass(slots=True)
class ShapeResult:
    shape: str
    packing: str
    draft: str | None
    device: str
    place: str
    kernels: str
    context_tokens: int
    weights_bytes: int | None  # read by a step
    slot_bytes: int
    bandwidth: str  # "read" or "copy"
    bandwidth_gbps: float
    linears: list[LinearSpeed]
    steps: list[StepSpeed]
    draft_step: StepSpeed | None
    cycles: list[CycleSpeed]  # plain first
    with_draft: list[SyntheticRow]  # empty without a draft
    free_drafts: list[SyntheticRow]  # as n-gram drafts are
    notices: list[str]  # where steps were not taken as they were meant to be

    @property
    def reading_ms(self) -> float | None:
        """What t(1) would be if memory were all that counted."""
        if self.weights_bytes is None:
            return None
        return (self.weights_bytes + self.context_tokens * self.slot_bytes) / (self.bandwidth_gbps * 1e6)


class FixedProposer:
    """Always the same γ tokens, for the time of a cycle alone."""

    name = "fixed"
    reason: str | None = None

    def __init__(self, gamma: int, vocab: int) -> None:
        self._tokens = tuple((13 * i + 7) % vocab for i in range(gamma))

    def propose(self, committed: Sequence[int], limit: int) -> Draft | None:
        tokens = self._tokens[:limit]
        return Draft.chain(tokens, source=self.name) if tokens else None

    def observe(self, tokens: Sequence[int], hidden: Tensor | None, start: int) -> None:
        """Nothing to learn."""

    def rollback(self, length: int) -> None:
        """Nothing to forget."""


def _never(tokens: Sequence[int]) -> tuple[int, FinishReason | None]:
    """A cut that lets everything pass."""
    return len(tokens), None


class Rig:
    """A model in memory, with its own engine."""

    def __init__(
        self, shape: Shape, request: ShapeRequest, placement: Placement, graphs: Graphs | None, *, drafts: bool = False
    ) -> None:
        spec = shape.spec(request.capacity)
        device = placement.kernels.device
        weights = random_weights(spec, request.packing, device, biased=shape.biased, seed=int(drafts))
        self.model: Decoder = make_decoder(spec, weights, placement.kernels)
        self.cache: KVCache = self.model.new_cache(request.capacity, KV_DTYPES[request.kv])
        runner, self.notice = build_runner(self.model, self.cache, graphs, None if drafts else spec.vocab)
        self.engine = Engine(runner, self.cache)
        self.vocab = spec.vocab
        self._timer: Timer = timer_for(device)

    def steps(self, rows: Sequence[int], context_tokens: int, repeats: int) -> list[StepSpeed]:
        """t(R) after `context_tokens` cached tokens, all row counts in turns."""
        self._draw_nothing()
        fill_cache(self.engine, context_tokens, self.vocab)
        tasks = {str(count): step_task(self.engine, count, self.vocab) for count in rows}
        in_turns(tasks, 1)  # warm-up
        found = {int(name): Spread.of(times) for name, times in in_turns(tasks, repeats).items()}
        return [StepSpeed(count, spread, self._device_ms(count)) for count, spread in found.items() if spread]

    def _draw_nothing(self) -> None:
        if isinstance(self.engine.runner, DrawsRows):
            self.engine.runner.draw_with(None)

    def _device_ms(self, rows: int) -> float | None:
        if self.model.kernels.device.type == "cpu":
            return None
        tokens = [(11 * row + 5) % self.vocab for row in range(rows)]
        parents = range(-1, rows - 1)
        with self.cache.transaction(rows):
            return self._timer.span(lambda: self.engine.runner.step(tokens, parents, self.cache), SPAN)

    def linears(self, repeats: int) -> list[LinearSpeed]:
        kernels = self.model.kernels
        dtype = kernels.ops.compute if isinstance(kernels, DeviceKernels) else torch.float32  # as they come in a step
        groups: dict[tuple[str, int, int], list[object]] = {}
        for role, linear in self.model.linears():
            groups.setdefault((role, *linear.shape), []).append(linear)
        found = []
        for (role, outputs, inputs), linears in groups.items():
            nbytes = sum(int(getattr(linear, "nbytes", 0)) for linear in linears)
            tasks = {}
            for rows in LINEAR_ROWS:
                x = torch.randn(rows, inputs, device=kernels.device).to(dtype)
                tasks[str(rows)] = self._timer.task(
                    lambda x=x, linears=linears: [kernels.linear(x, linear) for linear in linears]  # type: ignore[misc]
                )
            in_turns(tasks, 1)  # warm-up
            times = in_turns(tasks, repeats)
            gbps = {int(name): nbytes / (median(ms) * 1e6) for name, ms in times.items()}
            found.append(LinearSpeed(role, outputs, inputs, len(linears), nbytes, gbps))
        return found


@dataclass(frozen=True, slots=True)
class _Timed:
    """Cycles as they came."""

    label: str
    gamma: int
    ms: Sequence[float]
    records: Sequence[CycleRecord]

    def speed(self, parts_ms: float, device_ms: float | None) -> CycleSpeed:
        """device_ms None: the host computes, so its steps are what is not bookkeeping."""
        # A draft model first reads the text: until it has, cycles are plain.
        kept = [n for n, record in enumerate(self.records) if n >= WARM_CYCLES and record.proposed == self.gamma]
        records = [self.records[n] for n in kept]
        propose_ms = median(record.propose_ms for record in records)
        verify_ms = median(record.verify_ms for record in records)
        if device_ms is None:
            device_ms = verify_ms + (propose_ms if self.label == WITH_DRAFT else 0.0)
        return CycleSpeed(
            self.label,
            self.gamma,
            median(self.ms[n] for n in kept),
            propose_ms,
            verify_ms,
            median(record.reconcile_ms for record in records),
            parts_ms,
            device_ms,
        )


class ShapeBench:
    """Puts the models together, and measures. OutOfMemoryError as torch says it, for the caller to tell."""

    def __init__(self, request: ShapeRequest, placement: Placement) -> None:
        self._request = request
        self._placement = placement
        self._graphs = graphs = device_graphs(placement.kernels.device, request.graphs)
        self.target = Rig(request.shape, request, placement, graphs)
        self.draft = None if request.draft is None else Rig(request.draft, request, placement, graphs, drafts=True)

    def run(self, report: Report = silent) -> ShapeResult:
        request, target = self._request, self.target
        report(0, 5, "memory")
        bandwidth = bandwidth_of(target.model.kernels)
        readings = [bandwidth.gbps() for _ in range(request.repeats)]
        report(1, 5, "linears")
        linears = target.linears(request.repeats)
        report(2, 5, "steps")
        readings += [bandwidth.gbps() for _ in range(request.repeats)]  # the machine drifts
        steps = target.steps(self._rows(), request.context_tokens, request.repeats)
        report(3, 5, "draft")
        draft_step = self._draft_step()
        report(4, 5, "cycles")
        cycles = self._cycles(steps, draft_step)
        report(5, 5, "done")
        table = CostTable(known_ms={step.rows: step.ms.middle for step in steps})
        return ShapeResult(
            shape=request.shape.name,
            packing=request.packing.name,
            draft=None if request.draft is None else request.draft.name,
            device=self._placement.device,
            place=self._placement.name,
            kernels=target.model.kernels.name,
            context_tokens=request.context_tokens,
            weights_bytes=weight_bytes(target.model),
            slot_bytes=target.cache.slot_bytes,
            bandwidth=bandwidth.what,
            bandwidth_gbps=median(readings),
            linears=linears,
            steps=steps,
            draft_step=draft_step,
            cycles=cycles,
            with_draft=_table(table, cycles, draft_step) if draft_step is not None else [],
            free_drafts=_table(table, cycles, None),
            notices=[rig.notice for rig in (target, self.draft) if rig is not None and rig.notice is not None],
        )

    def _rows(self) -> list[int]:
        return [rows for rows in ROWS if rows <= self.target.engine.runner.widths[-1]]

    def _draft_step(self) -> StepSpeed | None:
        if self.draft is None:
            return None
        return self.draft.steps((1,), self._request.context_tokens, self._request.repeats)[0]

    def _cycles(self, steps: Sequence[StepSpeed], draft: StepSpeed | None) -> list[CycleSpeed]:
        gamma, vocab = self._request.gamma, self.target.vocab
        known = {step.rows: step for step in steps}
        one, wide = known[1], known[1 + gamma]
        plain, fixed = Start(NoProposer(), FixedGamma(0)), Start(FixedProposer(gamma, vocab), FixedGamma(gamma))
        found = [
            self._measured("plain", 0, lambda sampler, prompt: plain).speed(one.ms.middle, one.device_ms),
            self._measured("fixed draft", gamma, lambda sampler, prompt: fixed).speed(wide.ms.middle, wide.device_ms),
        ]
        if draft is not None:
            options = RunOptions(proposer="model", gamma=gamma)
            timed = self._measured(WITH_DRAFT, gamma, partial(self._speculation().begin, options))
            parts_ms = gamma * draft.ms.middle + wide.ms.middle
            own = None
            if draft.device_ms is not None and wide.device_ms is not None:
                own = gamma * draft.device_ms + wide.device_ms
            found.append(timed.speed(parts_ms, own))
        return found

    def _speculation(self) -> Speculation:
        """As a session would put the two together."""
        assert self.draft is not None
        assert self._request.draft is not None
        engine, name = self.draft.engine, self._request.draft.name
        reader = DraftModel(engine.runner, engine.cache, self.draft.vocab)
        target = self.target.engine
        cycles, self.draft.notice = build_cycles(
            target.runner, target.cache, self.draft.model, engine.cache, self._graphs
        )
        draft = LoadedDraft(name, reader, 0.1, name, cycles)
        return Speculation(target, self.target.model, self._request.shape.name, draft)

    def _measured(self, label: str, gamma: int, begin: Callable[[Sampler, Sequence[int]], Start]) -> _Timed:
        engine = self.target.engine
        engine.rewind(0)
        prompt = [(7 * i + 3) % self.target.vocab for i in range(self._request.context_tokens)]
        sampler = Sampler(SamplingOptions(), self.target.model.kernels, prompt, self.target.vocab)
        start = begin(sampler, prompt)
        answer = Answer(prompt, start.proposer, start.policy, Coupled(), sampler, _never, None, Cancel())
        record = RunRecord()
        times: list[float] = []
        engine.prefill(answer, record)
        with closing(cast("Generator[Cycle]", engine.decode(answer, record))) as cycles:
            last = time.perf_counter()
            for _ in range(CYCLES):
                next(cycles)
                now = time.perf_counter()
                times.append(1e3 * (now - last))
                last = now
        return _Timed(label, gamma, times, record.cycles)


def _table(steps: CostTable, cycles: Sequence[CycleSpeed], draft: StepSpeed | None) -> list[SyntheticRow]:
    measured = cycles[-1] if draft is not None else cycles[1]
    rest_ms = max(0.0, measured.ms - measured.parts_ms)
    cost = CycleCost(steps.step_ms, 0.0 if draft is None else draft.ms.middle, rest_ms)
    return synthetic_table(cost, cycles[0].ms)
