"""How much memory there is, how much is used, and what of a run fits into it.

Knows: the limits of this machine and process, and the sizes that a plan is given. Does not know: models.
"""

from __future__ import annotations

import os
import resource
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from specgen.errors import OutOfMemoryError

KV_SHARE = 0.5
"""Where the context was not asked for, KV caches may take this share of what is free behind the weights."""
LEAST_CONTEXT_TOKENS = 512
"""A context that nobody asked for is not cut below this."""
CONTEXT_STEP_TOKENS = 256
"""A cut context is a multiple of this."""
FIT_HINT = "close other programs, ask for less with --ctx or --kv int8, or choose a smaller model"


def available_bytes() -> int | None:
    """What could still be allocated without swapping: the system's own estimate, or the cgroup's limit where that is
    lower. None when the system does not say."""
    found = [size for size in (_meminfo_available(), _cgroup_left()) if size is not None]
    return min(found) if found else None


def _meminfo_available() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        return None


def _cgroup_left() -> int | None:
    folder = Path("/sys/fs/cgroup")
    try:
        limit = (folder / "memory.max").read_text().strip()
        return None if limit == "max" else max(0, int(limit) - int((folder / "memory.current").read_text()))
    except (OSError, ValueError):
        return None


def peak_rss_bytes() -> int:
    """The largest resident size of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def rss_bytes() -> int:
    """The resident size of this process now; its peak where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return peak_rss_bytes()
    return pages * os.sysconf("SC_PAGE_SIZE")


def megabytes(size: float) -> str:
    """For messages: decimal megabytes."""
    return f"{size / 1e6:,.0f} MB"


def budget_bytes(max_memory_bytes: int | None) -> int | None:
    """What a plan may use: what is free, and with a limit no more than it leaves beside what is used already."""
    free = available_bytes()
    if max_memory_bytes is None:
        return free
    left = max(0, max_memory_bytes - rss_bytes())
    return left if free is None else min(free, left)


@dataclass(frozen=True, slots=True)
class Need:
    """What one model takes."""

    weights_bytes: int
    slot_bytes: int  # KV of one token
    workspace_bytes: int  # activations and logits of its widest step
    context_tokens: int  # longest sequence that it was made for

    def kv_bytes(self, context_tokens: int) -> int:
        return self.slot_bytes * min(context_tokens, self.context_tokens)

    @property
    def fixed_bytes(self) -> int:
        return self.weights_bytes + self.workspace_bytes


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What is loaded, and how long the context is."""

    context_tokens: int
    with_draft: bool
    needed_bytes: int
    budget_bytes: int | None
    notices: tuple[str, ...] = ()


def plan_memory(target: Need, draft: Need | None, budget: int | None, asked_tokens: int | None = None) -> MemoryPlan:
    """The longest context with the draft, else the longest without it; a context that was asked for is never cut.

    OutOfMemoryError with the numbers when not even the target alone fits. `budget` None: nobody knows, all is tried.
    """
    wanted = target.context_tokens if asked_tokens is None else asked_tokens
    notices: list[str] = []
    for models in ([target, draft], [target]) if draft is not None else ([target],):
        known = [model for model in models if model is not None]
        context = _context(known, budget, wanted, asked_tokens is not None)
        if context is None:
            notices.append(f"running without the draft model: {_shortage(known, budget, _least(wanted, asked_tokens))}")
            continue
        if context < wanted:
            notices.append(_cut_notice(context, wanted))
        return MemoryPlan(context, len(known) > 1, _needed(known, context), budget, tuple(notices))
    shortage = _shortage([target], budget, _least(wanted, asked_tokens))
    raise OutOfMemoryError(f"the model does not fit: {shortage}", FIT_HINT)


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be loaded."""

    target: Need
    draft: Need | None = None
    asked_tokens: int | None = None  # a context that was asked for

    def plan(self, budget: int | None) -> MemoryPlan:
        return plan_memory(self.target, self.draft, budget, self.asked_tokens)

    def smaller(self, failed: MemoryPlan) -> MemoryPlan:
        """What to try when memory ran out although `failed` should have fitted: half the context, then no draft.
        OutOfMemoryError when neither is left."""
        wanted = self.target.context_tokens if self.asked_tokens is None else self.asked_tokens
        least = _least(wanted, self.asked_tokens)
        if failed.context_tokens > least:
            context = max(least, failed.context_tokens // 2 // CONTEXT_STEP_TOKENS * CONTEXT_STEP_TOKENS)
            kept = () if failed.with_draft else failed.notices[:1] if self.draft is not None else ()
            return self._at(context, failed, (*kept, _cut_notice(context, wanted)))
        if not failed.with_draft:
            raise OutOfMemoryError(f"the model does not fit: {_parts([self.target], failed.context_tokens)}", FIT_HINT)
        alone = plan_memory(self.target, None, failed.needed_bytes, self.asked_tokens)
        return replace(alone, notices=("running without the draft model: memory ran out with it", *alone.notices))

    def _at(self, context_tokens: int, failed: MemoryPlan, notices: tuple[str, ...]) -> MemoryPlan:
        models = [self.target, self.draft] if failed.with_draft else [self.target]
        needed = _needed([model for model in models if model is not None], context_tokens)
        return replace(failed, context_tokens=context_tokens, needed_bytes=needed, notices=notices)


def _cut_notice(context: int, wanted: int) -> str:
    return f"context cut to {context} of {wanted} tokens: that is what the free memory holds"


def _least(wanted: int, asked_tokens: int | None) -> int:
    return min(wanted, LEAST_CONTEXT_TOKENS) if asked_tokens is None else wanted


def _context(models: list[Need], budget: int | None, wanted: int, asked: bool) -> int | None:
    """The longest context ≤ wanted that fits, None when the least does not."""
    if budget is None or (asked and _needed(models, wanted) <= budget):
        return wanted
    if asked or _needed(models, min(wanted, LEAST_CONTEXT_TOKENS)) > budget:
        return None
    for_kv = KV_SHARE * (budget - sum(model.fixed_bytes for model in models))
    if sum(model.kv_bytes(wanted) for model in models) <= for_kv:
        return wanted
    steps = range(wanted // CONTEXT_STEP_TOKENS, 0, -1)
    lengths = (step * CONTEXT_STEP_TOKENS for step in steps)
    fitting = (n for n in lengths if n < wanted and sum(model.kv_bytes(n) for model in models) <= for_kv)
    return max(next(fitting, 0), min(wanted, LEAST_CONTEXT_TOKENS))


def _needed(models: list[Need], context: int) -> int:
    return sum(model.fixed_bytes + model.kv_bytes(context) for model in models)


def _shortage(models: list[Need], budget: int | None, context: int) -> str:
    return f"{_parts(models, context)}, and {megabytes(budget or 0)} may be used"


def _parts(models: list[Need], context: int) -> str:
    weights = megabytes(sum(model.weights_bytes for model in models))
    kv = megabytes(sum(model.kv_bytes(context) for model in models))
    workspace = megabytes(sum(model.workspace_bytes for model in models))
    return f"weights {weights}, KV of {context} tokens {kv}, workspace {workspace}"
