"""The memory plan on made-up sizes: the context is cut first, then the draft goes, then the run is refused."""

from __future__ import annotations

import mmap
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specgen import memory
from specgen.errors import ExitCode, OutOfMemoryError, UsageError
from specgen.memory import LEAST_CONTEXT_TOKENS, Need, budget_bytes, plan_memory, rss_bytes
from specgen.options import parse_size

TARGET = Need(weights_bytes=1000_000, slot_bytes=100, workspace_bytes=10_000, context_tokens=8192)
DRAFT = Need(weights_bytes=300_000, slot_bytes=20, workspace_bytes=5_000, context_tokens=2048)


def test_everything_fits() -> None:
    plan = plan_memory(TARGET, DRAFT, 10_000_000)
    assert (plan.context_tokens, plan.with_draft, plan.notices) == (8192, True, ())
    assert plan.needed_bytes == 1_010_000 + 8192 * 100 + 305_000 + 2048 * 20, "the draft's KV ends at its own context"


def test_unknown_memory_is_no_limit() -> None:
    plan = plan_memory(TARGET, DRAFT, None)
    assert (plan.context_tokens, plan.with_draft) == (8192, True)


def test_the_context_is_cut_first() -> None:
    plan = plan_memory(TARGET, DRAFT, 1_315_000 + 400_000)
    assert plan.with_draft
    assert LEAST_CONTEXT_TOKENS <= plan.context_tokens < 8192
    assert plan.context_tokens % 256 == 0
    assert plan.notices == (f"context cut to {plan.context_tokens} of 8192 tokens: that is what the free memory holds",)


def test_then_the_draft_goes_with_its_numbers() -> None:
    plan = plan_memory(TARGET, DRAFT, 1_315_000)
    assert not plan.with_draft
    assert plan.context_tokens >= LEAST_CONTEXT_TOKENS
    assert plan.notices[0].startswith("running without the draft model: weights 1 MB, KV of 512 tokens 0 MB")


def test_nothing_fits() -> None:
    with pytest.raises(OutOfMemoryError, match="the model does not fit: weights 1 MB") as caught:
        plan_memory(TARGET, DRAFT, 900_000)
    assert caught.value.code == ExitCode.MEMORY == 4
    assert caught.value.hint is not None
    assert "--ctx" in caught.value.hint


def test_a_context_that_was_asked_for_is_never_cut() -> None:
    enough = 1_315_000 + 4096 * 100 + 2048 * 20
    assert plan_memory(TARGET, DRAFT, enough, 4096).with_draft
    without = plan_memory(TARGET, DRAFT, enough - 1, 4096)
    assert (without.context_tokens, without.with_draft) == (4096, False)
    with pytest.raises(OutOfMemoryError, match="KV of 4096 tokens"):
        plan_memory(TARGET, DRAFT, 1_010_000 + 4096 * 100 - 1, 4096)


@given(st.integers(0, 4_000_000), st.booleans(), st.none() | st.integers(8, 8192))
def test_a_plan_keeps_its_budget(budget: int, with_draft: bool, asked: int | None) -> None:
    try:
        plan = plan_memory(TARGET, DRAFT if with_draft else None, budget, asked)
    except OutOfMemoryError:
        assert budget < 1_010_000 + 100 * (LEAST_CONTEXT_TOKENS if asked is None else asked)
        return
    assert plan.needed_bytes <= budget
    assert plan.context_tokens == (asked or plan.context_tokens)
    more = plan_memory(TARGET, DRAFT if with_draft else None, budget + 50_000, asked)
    assert (more.with_draft, more.context_tokens) >= (plan.with_draft, 0), "more memory never costs the draft"


def test_a_limit_counts_what_the_process_has_already(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 5_000_000_000)
    used = rss_bytes()
    assert 10_000_000 < used < 100_000_000_000
    limited = budget_bytes(used + 1_000_000_000)
    assert limited is not None
    assert 0.5e9 < limited < 1.5e9
    assert budget_bytes(1) == 0
    assert budget_bytes(None) == budget_bytes(1 << 60) == 5_000_000_000


def test_resident_size_grows_with_what_is_touched() -> None:
    if not os.path.exists("/proc/self/statm"):
        pytest.skip("the system does not say how large a process is now")
    with mmap.mmap(-1, 50_000_000) as block:  # fresh pages, which an allocator's reserve would not be
        before = rss_bytes()
        block.write(b"x" * len(block))
        assert rss_bytes() - before > 40_000_000


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("6GB", 6 * 10**9),
        ("6g", 6 * 10**9),
        ("1.5 GiB", 3 << 29),
        ("512MiB", 512 << 20),
        ("800 kB", 800_000),
        ("123", 123),
        ("7B", 7),
        ("2Ti", 2 << 40),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size("--max-memory", text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "6 XB", "1e9", "6GBs", "6iB", "nan"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="--max-memory is"):
        parse_size("--max-memory", text)
