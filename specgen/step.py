"""One forward step of a model over a few rows.

Knows: rows in, logits out, through any model that has `forward`. Does not know: drafts, acceptance, sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from specgen.kernels.base import Attend

if TYPE_CHECKING:
    from torch import Tensor

    from specgen.cache import KVCache
    from specgen.sampling import Drawing


@dataclass(frozen=True, slots=True)
class StepOut:
    """Tensors may be the runner's own: they hold until its next step, or that of a runner recorded in the same pool."""

    logits: Tensor  # (R, V) float32, or (1, V) when only the last row's were asked for
    hidden: Tensor  # (R, H) float32, before the final norm (likewise)
    drawn: Sequence[int] | None = None  # (R,) the target's token behind each row, from a runner that draws (DrawsRows)


class Model(Protocol):
    """A decoder: reads and writes one cache, knows no lengths of its own."""

    def forward(self, tokens: Sequence[int], attend: Attend, cache: KVCache, last_only: bool) -> StepOut:
        """Rows `tokens` (R,) at `attend`; their K and V go into slots attend.start … + R - 1 of `cache`."""
        ...

    def find_non_finite(self, tokens: Sequence[int], attend: Attend, cache: KVCache) -> str | None:
        """Run the rows again, layer by layer, and name the first place where a value is not finite, or None."""
        ...


class StepRunner(Protocol):
    widths: tuple[int, ...]  # row counts a step may have, ascending; a step of R rows runs at the next width ≥ R

    def step(self, tokens: Sequence[int], parents: Sequence[int], cache: KVCache) -> StepOut:
        """Rows after `cache.length` (already reserved). parents[r] is row r's parent row, -1 for row 0."""
        ...

    def prefill(self, tokens: Sequence[int], cache: KVCache) -> StepOut:
        """A chain of any length after `cache.length` (reserved); logits and hidden of the last row only."""
        ...

    def diagnose(self, tokens: Sequence[int], attend: Attend, cache: KVCache) -> str | None:
        """Name the first place where these rows become non-finite."""
        ...


@runtime_checkable
class DrawsRows(Protocol):
    """A runner that can draw the target's token of every row within the step, so that a cycle reads back once."""

    def draw_with(self, drawing: Drawing | None) -> None:
        """From now on; None: only logits are wanted."""
        ...


class EagerRunner:
    """Runs the model directly: the definition of a step."""

    def __init__(self, model: Model, max_rows: int = 64, prefill_rows: int = 512) -> None:
        self.model = model
        self.widths = tuple(range(1, max_rows + 1))
        self.prefill_rows = prefill_rows

    def step(self, tokens: Sequence[int], parents: Sequence[int], cache: KVCache) -> StepOut:
        attend = Attend.tree(cache.length, tuple(parents))
        return self.model.forward(tokens, attend, cache, last_only=False)

    def prefill(self, tokens: Sequence[int], cache: KVCache) -> StepOut:
        assert tokens
        out: StepOut | None = None
        for begin in range(0, len(tokens), self.prefill_rows):
            chunk = tokens[begin : begin + self.prefill_rows]
            attend = Attend.chain(cache.length + begin, len(chunk))
            out = self.model.forward(chunk, attend, cache, last_only=True)
        assert out is not None
        return out

    def diagnose(self, tokens: Sequence[int], attend: Attend, cache: KVCache) -> str | None:
        return self.model.find_non_finite(tokens, attend, cache)
