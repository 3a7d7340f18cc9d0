"""The figures of a run, from cycles made by hand."""

from __future__ import annotations

import pytest

from specgen.records import CycleRecord, RunRecord


def cycle(depth: int, accepted: int, ending: str, committed: int | None = None, fallback: str | None = None):
    return CycleRecord(
        proposed=depth,
        depth=depth,
        accepted=accepted,
        committed=accepted + 1 if committed is None else committed,
        ending=ending,  # type: ignore[arg-type]
        propose_ms=0.1,
        verify_ms=5.0,
        reconcile_ms=0.2,
        fallback=fallback,
    )


def test_figures() -> None:
    record = RunRecord(prompt_tokens=11, prefill_ms=100.0, ttft_ms=105.0, decode_ms=20.0)
    record.cycles = [cycle(0, 0, "plain"), cycle(4, 4, "bonus"), cycle(4, 1, "corrected"), cycle(2, 0, "corrected")]
    record.gaps_ms = [6.0, 0, 0, 0, 0, 8.0, 0, 6.0]
    assert record.completion_tokens == 9
    assert (record.proposed, record.accepted) == (10, 5)
    assert record.yield_tokens == 9 / 4
    assert record.survival() == [pytest.approx(2 / 3), pytest.approx(1 / 3), 0.5, 0.5]
    assert record.decode_tok_s == pytest.approx(8 / 0.020)
    assert record.prefill_tok_s == pytest.approx(100.0)
    assert record.gap_percentile_ms(50) == 0
    assert record.gap_percentile_ms(95) == 8.0


def test_survival_never_rises_with_a_steady_depth_and_ignores_what_a_cut_hides() -> None:
    record = RunRecord(cycles=[cycle(4, 4, "bonus"), cycle(4, 2, "cut", committed=2), cycle(4, 3, "corrected")])
    assert record.survival() == [1.0, 1.0, 1.0, 0.5]


def test_nothing_measured_is_none() -> None:
    record = RunRecord(cycles=[cycle(0, 0, "plain")])
    assert record.decode_tok_s is None
    assert record.prefill_tok_s is None
    assert record.gap_percentile_ms(50) is None
    assert RunRecord().yield_tokens is None
    assert record.survival() == []


def test_percentiles_are_nearest_rank() -> None:
    record = RunRecord(gaps_ms=[float(value) for value in range(20, 0, -1)])
    assert record.gap_percentile_ms(95) == 19.0, "the 19th of 20"
    assert record.gap_percentile_ms(100) == 20.0
    assert record.gap_percentile_ms(1) == 1.0


def test_fallbacks_are_counted_by_reason() -> None:
    record = RunRecord(
        cycles=[cycle(0, 0, "plain", fallback="a"), cycle(0, 0, "plain", fallback="a"), cycle(1, 1, "bonus")]
    )
    assert record.fallbacks() == {"a": 2}
