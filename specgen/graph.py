"""Steps that are recorded once and replayed: the launches of a whole step as one.

Knows: a fixed small set of widths, the memory that a recorded step reads its place from, and what is read back. Does
not know: drafts, acceptance; how a model computes (model.device).

A step of R rows runs at the next width ≥ R; the rows behind R write nothing and nobody reads them. Nothing is allocated
after the recording, and results stay where they are until the next replay, of whichever recording of the same pool.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from specgen.cache import KVCache
from specgen.kernels.base import Attend, DeviceAttend, Truncation, pack_attend
from specgen.kernels.card_memory import is_out_of_memory
from specgen.kernels.device import use_device
from specgen.kernels.device_sampling import DeviceCut, DeviceNoise, device_cut, device_noise, is_ranked
from specgen.model.decoder import Decoder
from specgen.model.device import DeviceDecoder
from specgen.model.planned import PlannedDecoder, PlannedRunner
from specgen.sampling import Drawing
from specgen.step import EagerRunner, StepOut, StepRunner

if TYPE_CHECKING:
    from numpy.typing import NDArray

WIDTHS = (1, 2, 3, 5, 9, 17, 33)
"""Rows of recorded steps: 1 + γ for powers of two. Each keeps its logits, so wider ones are launched op by op."""
DRAFT_WIDTHS = (1, 2, 5, 17)
"""Of a model that drafts: it reads what was accepted, then one token after another."""
MAX_ROWS = 64
WARM_UPS = 2
"""Launches before a recording: kernels are compiled in the first, and libraries set themselves up."""

Out = TypeVar("Out", bound=tuple[Tensor, ...])


OutCo = TypeVar("OutCo", bound=tuple[Tensor, ...], covariant=True)


class Graph(Protocol[OutCo]):
    """A recorded launch."""

    @property
    def out(self) -> OutCo:
        """What the launch returned: always the same tensors, which another graph's replay may overwrite."""
        ...

    def replay(self) -> None: ...


class Mark(Protocol):
    """A place in a launch whose time is known once the launch is over."""

    def record(self) -> None: ...

    def ms_until(self, later: Mark) -> float:
        """Milliseconds from this mark to a later one, in the last replay."""
        ...


class Graphs(Protocol):
    """What records launches."""

    def capture(self, launch: Callable[[], Out]) -> Graph[Out]:
        """Record `launch`, which may be run a few times before. RuntimeError when it cannot be recorded."""
        ...

    def mark(self) -> Mark: ...


@dataclass(frozen=True, slots=True)
class _CudaGraph(Generic[Out]):
    graph: torch.cuda.CUDAGraph
    out: Out

    def replay(self) -> None:
        self.graph.replay()


_new_event: Callable[..., torch.cuda.Event] = torch.cuda.Event
_new_stream: Callable[..., torch.cuda.Stream] = torch.cuda.Stream


class _CudaMark:
    """An event that is recorded by the graph itself."""

    def __init__(self) -> None:
        self.event = _new_event(enable_timing=True, external=True)

    def record(self) -> None:
        self.event.record()

    def ms_until(self, later: Mark) -> float:
        assert isinstance(later, _CudaMark)
        return float(self.event.elapsed_time(later.event))


class CudaGraphs:
    """CUDA graphs of one device, with one pool of memory: they are replayed one after another, so what one needs for
    itself another may use too."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _new_stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, launch: Callable[[], Out]) -> Graph[Out]:
        with torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                for _ in range(WARM_UPS):
                    launch()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                out = launch()
        return _CudaGraph(graph, out)

    def mark(self) -> Mark:
        return _CudaMark()


def device_graphs(device: torch.device, wanted: bool = True) -> Graphs | None:
    """What records launches on `device`, where anything does and it is wanted."""
    return CudaGraphs(device) if wanted and device.type == "cuda" else None


class Staging:
    """An int32 vector on the device that one copy from the host fills."""

    def __init__(self, size: int, device: torch.device) -> None:
        on_card = device.type == "cuda"
        self.device = torch.zeros(size, dtype=torch.int32, device=device)
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=on_card)
        self._numbers = self._host.numpy()  # assigning to it takes a fraction of what a tensor takes
        self._copied = _new_event() if on_card else None

    def host(self) -> NDArray[np.int32]:
        """(size,) what is sent next."""
        if self._copied is not None:
            self._copied.synchronize()  # the last copy may still read it; after a read-back it never does
        return self._numbers

    def send(self) -> None:
        self.device.copy_(self._host, non_blocking=True)
        if self._copied is not None:
            self._copied.record()


class StepInputs:
    """Tokens and place of a step of W rows, where a recorded step reads them. At first no row is real."""

    def __init__(self, width: int, device: torch.device) -> None:
        self.width = width
        self._staging = Staging(width + 2 + width + width * width, device)
        self.tokens = self._staging.device[:width]
        self.attend = DeviceAttend.over(self._staging.device[width:], width)
        self._path_of: tuple[int, ...] | None = None  # parents of the tree whose paths are there; () a chain

    def write(self, tokens: Sequence[int], attend: Attend) -> None:
        host, width, rows = self._staging.host(), self.width, len(tokens)
        place = host[width:]
        host[:rows] = tokens
        place[:2] = attend.start, rows
        place[2 : 2 + rows] = attend.positions
        place[2 + rows : 2 + width] = attend.start
        shape = () if attend.is_chain else attend.parents
        if shape != self._path_of:
            self._path_of = None  # whatever ends this in between leaves nothing to trust
            place[2 + width :] = pack_attend(attend, width)[2 + width :].numpy()
            self._path_of = shape
        self._staging.send()


class DrawSettings:
    """How the target's tokens are drawn, where recorded steps read it."""

    def __init__(self, vocab: int, device: torch.device) -> None:
        self.vocab = vocab
        self._cut = device_cut(Truncation(), device, ranked=True)
        self._noise = device_noise(0, torch.zeros(1, dtype=torch.int32, device=device))

    def cut(self, ranked: bool) -> DeviceCut:
        """ranked: whether top-k and top-p are heard: a recording is for one or the other."""
        return replace(self._cut, ranked=ranked)

    def noise(self, positions: Tensor) -> DeviceNoise:
        """Of rows at `positions` (W,)."""
        return DeviceNoise(self._noise.key, positions)

    def write(self, drawing: Drawing) -> None:
        self._cut.write(drawing.cut)
        self._noise.write(drawing.seed)


def read_back(tokens: Tensor) -> list[int]:
    """The one place where a cycle waits for the device: tokens (n,) int32."""
    return [int(token) for token in tokens.tolist()]


@dataclass(frozen=True, slots=True)
class _Recorded:
    inputs: StepInputs
    graph: Graph[tuple[Tensor, ...]]


class GraphRunner:
    """`step.StepRunner` by replaying. `EagerRunner` over the same model gives the same bits.

    It belongs to one cache (and its shadows); a step over another one runs eagerly, as prefill does and what is wider
    than all recordings. With a `vocab` each step also draws the target's token behind every row (`step.DrawsRows`).
    """

    def __init__(
        self,
        model: DeviceDecoder,
        cache: KVCache,
        graphs: Graphs,
        vocab: int | None = None,  # logits behind it are padding
        widths: Sequence[int] = WIDTHS,
    ) -> None:
        self.model = model
        self.layers = cache.layers
        self.settings = None if vocab is None else DrawSettings(vocab, model.device)
        self.widths = (*sorted(widths), MAX_ROWS)
        self._graphs = graphs
        self._eager = EagerRunner(model, MAX_ROWS)
        self._draws = False
        self._steps = {False: self._record_all(ranked=False)}
        self._ranked = False  # which of the recordings is used

    def _record_all(self, ranked: bool) -> dict[int, _Recorded]:
        # The widest first: the others find room in the memory that it needed.
        return {width: self._record(width, ranked) for width in reversed(self.widths[:-1])}

    def _record(self, width: int, ranked: bool) -> _Recorded:
        inputs = StepInputs(width, self.model.device)

        def launch() -> tuple[Tensor, ...]:
            out = self.model.run(inputs.tokens, inputs.attend, self.layers)
            return out.logits, out.hidden, *self._drawn(out.logits, inputs.attend, ranked)

        return _Recorded(inputs, self._graphs.capture(launch))

    def _drawn(self, logits: Tensor, attend: DeviceAttend, ranked: bool) -> list[Tensor]:
        settings = self.settings
        if settings is None:
            return []
        noise = settings.noise(attend.positions)
        return [self.model.ops.gumbel_argmax(logits, settings.cut(ranked), noise, settings.vocab)]

    def draw_with(self, drawing: Drawing | None) -> None:
        use_device(self.model.device)  # an answer may be decoded in a thread of its own
        self._draws = False
        if drawing is None or self.settings is None or drawing.vocab != self.settings.vocab:
            return
        self.settings.write(drawing)  # recorded cycles read it too
        ranked = is_ranked(drawing.cut)
        if self._has_recorded(ranked):
            self._draws, self._ranked = True, ranked

    def _has_recorded(self, ranked: bool) -> bool:
        """The first answer with top-k or top-p has its steps recorded; where that fails, the sampler draws."""
        if ranked not in self._steps:
            try:
                self._steps[ranked] = self._record_all(ranked)
            except RuntimeError:
                return False
        return True

    def step(self, tokens: Sequence[int], parents: Sequence[int], cache: KVCache) -> StepOut:
        rows = len(tokens)
        width = next(width for width in self.widths if width >= rows)
        recorded = self._steps[self._ranked].get(width)
        if recorded is None or cache.layers is not self.layers:
            return self._eager.step(tokens, parents, cache)
        recorded.inputs.write(tokens, Attend.tree(cache.length, tuple(parents)))
        recorded.graph.replay()
        logits, hidden, *drawn = recorded.graph.out
        read = read_back(drawn[0][:rows]) if self._draws else None
        return StepOut(logits[:rows], hidden[:rows], read)

    def prefill(self, tokens: Sequence[int], cache: KVCache) -> StepOut:
        return self._eager.prefill(tokens, cache)

    def diagnose(self, tokens: Sequence[int], attend: Attend, cache: KVCache) -> str | None:
        return self._eager.diagnose(tokens, attend, cache)


def build_runner(
    model: Decoder,
    cache: KVCache,
    graphs: Graphs | None,  # None: every step is launched op by op
    vocab: int | None = None,  # see GraphRunner; None for a model that drafts
) -> tuple[StepRunner, str | None]:
    """How `model` takes its steps over `cache`, and one line for the user when that is not the intended way."""
    if isinstance(model, PlannedDecoder) and model.draws:
        return PlannedRunner(model), None
    if graphs is None or not isinstance(model, DeviceDecoder):
        return EagerRunner(model), None
    if model.refusal is not None:
        return EagerRunner(model), f"running without CUDA graphs: {model.refusal}"
    try:
        return GraphRunner(model, cache, graphs, vocab, DRAFT_WIDTHS if vocab is None else WIDTHS), None
    except RuntimeError as error:  # what torch raises for a capture that failed
        if is_out_of_memory(error):
            raise  # a shorter context, or no draft, leaves room for the recordings
        reason = str(error).splitlines()[0]
        return EagerRunner(model), f"running without CUDA graphs: recording a step failed ({reason})"
