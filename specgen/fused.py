"""A whole cycle of a draft model and its target as one replay: the draft's steps, the target's step over them, and the
target's token behind every row, with one read-back at the end.

Knows: chains of a fixed length γ under the coupled rule, drawn on the device with the noise that the target will use.
Does not know: trees, penalties, grammars (such cycles go step by step), what is accepted (accept), when to draft.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from specgen.cache import KVCache
from specgen.draft import Draft
from specgen.graph import DrawSettings, Graph, GraphRunner, Graphs, Staging, read_back
from specgen.kernels.base import NON_FINITE, Attend, DeviceAttend, pack_attend
from specgen.kernels.card_memory import is_out_of_memory
from specgen.kernels.device_sampling import is_ranked
from specgen.model.decoder import Decoder
from specgen.model.device import DeviceDecoder
from specgen.options import RunOptions
from specgen.propose.base import Checked, DeviceDraft
from specgen.propose.model import DraftModel, ModelProposer
from specgen.sampling import Drawing, Sampler
from specgen.step import StepOut, StepRunner

GAMMAS = tuple(range(1, 9))
"""Lengths of recorded cycles."""
CATCH_ROWS = 2
"""Tokens that a draft model has not read at the start of a cycle: the corrected one, or the draft's last and the
bonus. When there are more, the draft is made step by step."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A draft model and its target, each with its cache."""

    target: DeviceDecoder
    target_cache: KVCache
    draft: DeviceDecoder
    draft_cache: KVCache
    settings: DrawSettings  # the target's

    @property
    def draft_vocab(self) -> int:
        """Tokens that the draft can propose."""
        return min(self.draft.spec.vocab, self.settings.vocab)


@dataclass(frozen=True, slots=True)
class Start:
    """Where a cycle begins."""

    unread: Sequence[int]  # 1 … CATCH_ROWS committed tokens that the draft has not read, the pending one last
    draft_start: int  # slots in the draft's cache
    target_start: int


class CycleInputs:
    """All that a cycle of γ takes from the host, in one vector: it is known before the cycle begins, but for tokens."""

    def __init__(self, gamma: int, device: torch.device) -> None:
        self.gamma = gamma
        widths = [CATCH_ROWS, *[1] * (gamma - 1), 1 + gamma]
        places = [2 + width + width * width for width in widths]
        self._staging = Staging(CATCH_ROWS + 2 + sum(places), device)
        # First the tokens and the row of the pending one, then the place of each step, one behind the other.
        self.catch_tokens, self.catch_last, self.pending, rest = torch.split(
            self._staging.device, [CATCH_ROWS, 1, 1, sum(places)]
        )
        parts = zip(torch.split(rest, places), widths, strict=True)
        self.catch, *self.steps, self.target = [DeviceAttend.over(part, width) for part, width in parts]
        self._place(widths, places)

    def _place(self, widths: Sequence[int], sizes: Sequence[int]) -> None:
        """Write what never changes, and note where the rest stands: of each place the start and the positions, of the
        first the number of rows too."""
        host = self._staging.host()
        ends = list(accumulate(sizes, initial=CATCH_ROWS + 2))
        changing = [*range(CATCH_ROWS + 2), ends[0] + 1]
        for begin, end, width in zip(ends, ends[1:], widths, strict=False):
            host[begin:end] = pack_attend(Attend.chain(0, width), width).numpy()
            changing += [begin, *range(begin + 2, begin + 2 + width)]
        self._changing = np.array(changing)

    def write(self, start: Start) -> None:
        count, begin = len(start.unread), start.draft_start
        tokens = [*start.unread, *[0] * (CATCH_ROWS - count), count - 1, start.unread[-1]]
        catch = [begin, begin, *range(begin + 1, begin + count), *[begin] * (CATCH_ROWS - count)]
        steps = [slot for level in range(self.gamma - 1) for slot in [begin + count + level] * 2]
        target = [start.target_start, *range(start.target_start, start.target_start + self.gamma + 1)]
        self._staging.host()[self._changing] = [*tokens, count, *catch, *steps, *target]
        self._staging.send()


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a cycle reads back, and the target's step."""

    draft: tuple[int, ...]  # γ; NON_FINITE and rubbish from where the draft's logits are not finite
    target: tuple[int, ...]  # 1 + γ
    confidence: float
    logits: Tensor  # (1 + γ, V)
    hidden: Tensor  # (1 + γ, H)
    draft_ms: float


class RecordedCycle:
    """One γ."""

    def __init__(self, pair: Pair, gamma: int, ranked: bool, graphs: Graphs) -> None:
        self._pair = pair
        self._cut = pair.settings.cut(ranked)
        self._inputs = CycleInputs(gamma, pair.target.device)
        self._began, self._drafted = graphs.mark(), graphs.mark()
        self._graph: Graph[tuple[Tensor, ...]] = graphs.capture(self._launch)

    def run(self, start: Start) -> Drawn:
        self._inputs.write(start)
        self._graph.replay()
        read, logits, hidden = self._graph.out
        numbers = read_back(read)
        gamma = self._inputs.gamma
        (confidence,) = struct.unpack("f", struct.pack("i", numbers[-1]))
        draft_ms = self._began.ms_until(self._drafted)
        return Drawn(tuple(numbers[:gamma]), tuple(numbers[gamma:-1]), confidence, logits, hidden, draft_ms)

    def _launch(self) -> tuple[Tensor, ...]:
        pair, inputs = self._pair, self._inputs
        self._began.record()
        drafted, confidence = self._draft()
        self._drafted.record()
        # A token that could not be drawn still has to be one that can be looked up.
        tokens = torch.cat((inputs.pending, *drafted)).clamp(min=0)
        out = pair.target.run(tokens, inputs.target, pair.target_cache.layers)
        noise = pair.settings.noise(inputs.target.positions)
        own = pair.target.ops.gumbel_argmax(out.logits, self._cut, noise, pair.settings.vocab)
        return torch.cat((*drafted, own, confidence.view(torch.int32))), out.logits, out.hidden

    def _draft(self) -> tuple[list[Tensor], Tensor]:
        """γ tokens, (1,) int32 each, and how sure the draft was of the first, (1,) float32."""
        pair, inputs = self._pair, self._inputs
        layers = pair.draft_cache.layers
        out = pair.draft.run(inputs.catch_tokens, inputs.catch, layers, inputs.catch_last)
        positions = inputs.target.positions  # each level stands where a row of the target does
        tokens = [self._token(out, positions[:1])]
        confidence = self._confidence(out)
        for level, step in enumerate(inputs.steps, start=1):
            out = pair.draft.run(tokens[-1].clamp(min=0), step, layers)
            tokens.append(self._token(out, positions[level : level + 1]))
        return tokens, confidence

    def _token(self, out: StepOut, position: Tensor) -> Tensor:
        pair = self._pair
        noise = pair.settings.noise(position)
        return pair.draft.ops.gumbel_argmax(out.logits, self._cut, noise, pair.draft_vocab)

    def _confidence(self, out: StepOut) -> Tensor:
        """`Sampler.likelihood` of the likeliest token."""
        temperature = self._cut.values[0].float()
        # 0 counts as 1, by arithmetic: a constant would have to come from the host.
        scaled = out.logits[:, : self._pair.draft_vocab] / (temperature + (temperature == 0))
        return (scaled.amax(-1) - scaled.logsumexp(-1)).exp()


class FusedCycles:
    """The recorded cycles of one draft model and its target. Which of them serve an answer is said with `use`."""

    def __init__(self, pair: Pair, graphs: Graphs, gammas: Sequence[int] = GAMMAS) -> None:
        self.pair = pair
        self._gammas = sorted(gammas, reverse=True)
        self._graphs = graphs
        self._cycles = {False: self._record_all(ranked=False)}
        self._ranked = False

    def _record_all(self, ranked: bool) -> dict[int, RecordedCycle]:
        return {gamma: RecordedCycle(self.pair, gamma, ranked, self._graphs) for gamma in self._gammas}

    def use(self, drawing: Drawing) -> bool:
        """Whether cycles can be drawn so; the first answer with top-k or top-p has its own recorded."""
        if drawing.vocab != self.pair.settings.vocab:
            return False
        ranked = is_ranked(drawing.cut)
        if ranked not in self._cycles:
            try:
                self._cycles[ranked] = self._record_all(ranked)
            except RuntimeError:
                return False
        self._ranked = ranked
        return True

    def __contains__(self, gamma: int) -> bool:
        return gamma in self._cycles[self._ranked]

    def run(self, gamma: int, start: Start) -> Drawn:
        return self._cycles[self._ranked][gamma].run(start)


@dataclass(frozen=True, slots=True)
class FusedDraft:
    """`DeviceDraft` of a draft model."""

    gamma: int
    start: Start
    inner: ModelProposer
    reader: DraftModel
    cycles: FusedCycles

    def __len__(self) -> int:
        return self.gamma

    def check(self, cache: KVCache) -> Checked:
        assert cache.layers is self.cycles.pair.target_cache.layers
        assert cache.length == self.start.target_start
        unread = self.start.unread
        with self.reader.cache.transaction(len(unread) + self.gamma - 1):
            drawn = self.cycles.run(self.gamma, self.start)
            good = drawn.draft.index(NON_FINITE) if NON_FINITE in drawn.draft else self.gamma
            # The last token of a draft is drawn, never read.
            self.reader.keep([*unread, *drawn.draft[: min(good, self.gamma - 1)]])
        out = StepOut(drawn.logits, drawn.hidden, drawn.target)
        if good < self.gamma:
            self.inner.give_up()
            return Checked(None, out, drawn.draft_ms, self.inner.reason)
        chain = Draft.chain(drawn.draft, source=self.inner.name)
        return Checked(replace(chain, confidence=drawn.confidence), out, drawn.draft_ms)


class DeviceProposer:
    """A `ModelProposer` of chains under the coupled rule whose usual cycles are left to the device."""

    def __init__(self, inner: ModelProposer, reader: DraftModel, cycles: FusedCycles) -> None:
        self.name = inner.name
        self._inner = inner
        self._reader = reader
        self._cycles = cycles

    @property
    def reason(self) -> str | None:
        return self._inner.reason

    def propose(self, committed: Sequence[int], limit: int) -> Draft | DeviceDraft | None:
        gamma = self._inner.levels(committed, limit)
        if gamma in self._cycles:
            unread = self._inner.unread(committed)
            if unread <= CATCH_ROWS:
                start = Start(committed[-unread:], self._reader.cache.length, len(committed) - 1)
                return FusedDraft(gamma, start, self._inner, self._reader, self._cycles)
        return self._inner.propose(committed, limit)

    def observe(self, tokens: Sequence[int], hidden: Tensor | None, start: int) -> None:
        self._inner.observe(tokens, hidden, start)

    def rollback(self, length: int) -> None:
        self._inner.rollback(length)


def build_cycles(
    runner: StepRunner,  # the target's
    target_cache: KVCache,
    draft: Decoder,
    draft_cache: KVCache,
    graphs: Graphs | None,
) -> tuple[FusedCycles | None, str | None]:
    """Recorded cycles where both models run on one device by graphs, and one line for the user when that failed."""
    if graphs is None or not isinstance(runner, GraphRunner) or runner.settings is None:
        return None, None
    if not isinstance(draft, DeviceDecoder) or draft.refusal is not None:
        return None, None
    pair = Pair(runner.model, target_cache, draft, draft_cache, runner.settings)
    try:
        return FusedCycles(pair, graphs), None
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        reason = str(error).splitlines()[0]
        return None, f"drafting step by step: recording a whole cycle failed ({reason})"


def can_fuse(cycles: FusedCycles, sampler: Sampler, options: RunOptions) -> bool:
    """Whether the cycles of an answer may be left to the device: its tokens are drawn by rows alone, and neither trees
    nor a doubtful draft ask the host."""
    drawing = sampler.drawing
    plain = options.accept == "coupled" and options.tree == 1 and options.draft.stop_below == 0.0
    return plain and drawing is not None and cycles.use(drawing)
