"""CUDA graphs without a card: what was launched is recorded, with the very tensors, and launched again.

As on a card, a number that the host put into a launch stays what it was, results land in the tensors of the recording,
and whoever asks for a value while it is recorded is refused. Ops of torch are recorded one by one; a kernel (of
Triton's interpreter, or a method of `Opaque`) as a whole: it reads its arguments when it runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

REFUSED = ("_local_scalar_dense", "nonzero", "masked_select", "lift_fresh", "lift_fresh_copy", "_unique2", "equal")
"""Ops of torch that wait for a value, or take one from the host's memory."""


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


@dataclass
class Entry:
    func: Callable[..., Any]
    args: Any
    kwargs: Any
    out: Any

    def again(self) -> None:
        fresh = self.func(*self.args, **self.kwargs)
        owned = {tensor.untyped_storage().data_ptr() for tensor in _tensors((self.args, self.kwargs))}
        for kept, new in zip(_tensors(self.out), _tensors(fresh), strict=True):
            if kept.untyped_storage().data_ptr() not in owned:
                kept.copy_(new)


class Tape(TorchDispatchMode):
    """Launches: neither views nor allocations are any."""

    current: Tape | None = None

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[Entry] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        if name in REFUSED:
            raise RuntimeError(f"operation not permitted when a stream is capturing: {name}")
        return self.run(func, args, kwargs or {}, again=not func.is_view and not name.startswith("empty"))

    def run(self, func: Callable[..., Any], args: Any, kwargs: Any, again: bool = True) -> Any:
        with _disable_current_modes():
            out = func(*args, **kwargs)
        if again:
            self.entries.append(Entry(func, args, kwargs, out))
        return out

    def record(self, launch: Callable[[], Any]) -> Any:
        def refuse(*_: Any) -> None:
            raise RuntimeError("operation not permitted when a stream is capturing: reading a tensor")

        Tape.current = self
        try:
            with patch.object(Tensor, "tolist", refuse), patch.object(Tensor, "numpy", refuse), self:
                return launch()
        finally:
            Tape.current = None


class Opaque:
    """Ops of which every call is one launch."""

    def __init__(self, ops: Any) -> None:
        self._ops = ops

    def __getattr__(self, name: str) -> Any:
        op = getattr(self._ops, name)
        if not callable(op) or name == "prepare":
            return op

        return _launched(op)


_TOLIST, _NUMPY = Tensor.tolist, Tensor.numpy


def _launched(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """`kernel`, recorded while something is: it may look at its arguments where others may not."""

    def looking(*args: Any, **kwargs: Any) -> Any:
        with patch.object(Tensor, "tolist", _TOLIST), patch.object(Tensor, "numpy", _NUMPY):
            return kernel(*args, **kwargs)

    def call(*args: Any, **kwargs: Any) -> Any:
        return kernel(*args, **kwargs) if Tape.current is None else Tape.current.run(looking, args, kwargs)

    return call


def record_triton() -> Any:
    """A patch under which launches of Triton's interpreter are recorded as a whole."""
    from triton.runtime.interpreter import GridExecutor

    return patch.object(GridExecutor, "__call__", _launched(GridExecutor.__call__))


@dataclass
class TapeMark:
    at: float = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()
        if Tape.current is not None:
            Tape.current.entries.append(Entry(self._now, (), {}, None))

    def _now(self) -> None:
        self.at = time.perf_counter()

    def ms_until(self, later: TapeMark) -> float:
        return 1e3 * (later.at - self.at)


@dataclass
class TapeGraph:
    """On a card all graphs share a pool: what one needs for itself may stand where another has left its results."""

    tape: Tape
    out: Any
    pool: TapeGraphs

    def replay(self) -> None:
        self.pool.replays.append(len(self.tape.entries))
        for entry in self.tape.entries:
            entry.again()
        for other in self.pool.graphs:
            if other is not self:
                spoil(other.out)


def spoil(out: Any) -> None:
    for tensor in _tensors(out):
        tensor.fill_(float("nan") if tensor.is_floating_point() else -(2**31))


@dataclass
class TapeGraphs:
    """`graph.Graphs`."""

    replays: list[int] = field(default_factory=list)  # launches of each
    graphs: list[TapeGraph] = field(default_factory=list)

    @property
    def captured(self) -> int:
        return len(self.graphs)

    def capture(self, launch: Callable[[], Any]) -> TapeGraph:
        launch()
        tape = Tape()
        out = tape.record(launch)
        self.graphs.append(TapeGraph(tape, out, self))
        return self.graphs[-1]

    def mark(self) -> TapeMark:
        return TapeMark()
