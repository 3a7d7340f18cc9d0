"""The controller on synthetic curves: deep where rows are free, shallow where they cost, 0 for worthless drafts."""

from __future__ import annotations

import itertools
import random

import pytest

from specgen.draft import Draft
from specgen.records import CycleRecord
from specgen.tune.controller import PROBE_FIRST, AutoGamma
from specgen.tune.cost import CostTable
from specgen.tune.survival import SurvivalEstimate, kind_of


def run(policy: AutoGamma, cost, accept, cycles: int, match: int = 4) -> list[int]:
    """γ of each cycle when a draft of 8 is always on offer; `accept(cycle)` is the chance of each position."""
    rng = random.Random(1)
    gammas = []
    for cycle in range(cycles):
        limit = min(8, policy.limit())
        draft = policy.trim(Draft.chain([1] * limit, source="ngram", match=match)) if limit else None
        gamma = len(draft) if draft else 0
        kept = 0
        while kept < gamma and rng.random() < accept(cycle):
            kept += 1
        record = CycleRecord(
            proposed=gamma,
            depth=gamma,
            accepted=kept,
            committed=kept + 1,
            ending="plain" if not gamma else "bonus" if kept == gamma else "corrected",
            propose_ms=0.01,
            verify_ms=cost(1 + gamma),
            reconcile_ms=0.02,
            source="ngram" if gamma else "none",
            match=match if gamma else 0,
        )
        policy.observe(record)
        gammas.append(gamma)
    return gammas


def memory_bound(rows: int) -> float:
    return 5.0 + 0.05 * rows


def compute_bound(rows: int) -> float:
    return 5.0 * rows


def test_memory_bound_and_good_drafts_go_deep() -> None:
    gammas = run(AutoGamma(), memory_bound, lambda _: 0.95, 100)
    assert sum(gammas[50:]) / 50 > 7


def test_steep_cost_goes_shallow() -> None:
    deep = run(AutoGamma(), lambda rows: 5 + 0.4 * rows, lambda _: 0.7, 200)
    shallow = run(AutoGamma(), lambda rows: 5 + 2.0 * rows, lambda _: 0.7, 200)
    assert 0 < sum(shallow[100:]) < sum(deep[100:])


def test_compute_bound_stays_plain() -> None:
    gammas = run(AutoGamma(), compute_bound, lambda _: 0.9, 400)
    assert sum(gamma > 0 for gamma in gammas[100:]) <= 8


def test_worthless_drafts_are_parked_and_probed_rarely() -> None:
    policy = AutoGamma()
    gammas = run(policy, lambda rows: 5 + 0.5 * rows, lambda _: 0.0, 600)
    late = gammas[100:]
    assert 0 < sum(gamma > 0 for gamma in late) <= 8, "probed, but rarely"
    assert policy.reason is not None
    assert "not worth" in policy.reason


def test_a_change_of_text_is_followed() -> None:
    gammas = run(AutoGamma(), memory_bound, lambda cycle: 0.0 if cycle < 100 else 0.95, 400)
    assert sum(gammas[380:]) / 20 > 6
    back = run(AutoGamma(), lambda rows: 5 + 0.5 * rows, lambda cycle: 0.95 if cycle < 100 else 0.0, 200)
    assert sum(gamma > 0 for gamma in back[150:]) <= 6


def test_no_oscillation_on_a_steady_text() -> None:
    gammas = run(AutoGamma(), lambda rows: 5 + 0.3 * rows, lambda _: 0.8, 300)
    drafted = [gamma for gamma in gammas[100:] if gamma]
    assert len(drafted) >= 197, "never parked; plain only to measure it"
    assert max(drafted) - min(drafted) <= 4


def test_kinds_are_judged_apart() -> None:
    policy = AutoGamma()
    run(policy, lambda rows: 5 + 0.6 * rows, lambda _: 0.0, 100, match=2)
    assert policy.best_gamma(kind_of("ngram", 2), 8) == 0
    assert policy.best_gamma(kind_of("ngram", 20), 8) > 0


def test_expected_speed_is_the_formula() -> None:
    """best_gamma against a brute-force E[Y] / t over every γ."""
    policy = AutoGamma(CostTable(known_ms={1: 4.0, 2: 4.4, 5: 6.0, 9: 9.0}))
    kind = kind_of("ngram", 4)
    for accepted in (0, 1, 2, 3, 3, 3, 3, 2):
        policy.survival.observe(kind, 8, accepted)
    shares = policy.survival.survival(kind, 8)
    speeds = {0: 1.03 / policy.costs.step_ms(1)}
    for gamma in range(1, 9):
        speeds[gamma] = (1 + sum(shares[:gamma])) / policy.costs.step_ms(1 + gamma)
    assert policy.best_gamma(kind, 8) == max(speeds, key=lambda gamma: speeds[gamma])


def test_probe_waits_twice_as_long_each_time() -> None:
    policy = AutoGamma(CostTable(known_ms={1: 1.0, 2: 2.0, 9: 9.0}))
    probes = [cycle for cycle, gamma in enumerate(run(policy, compute_bound, lambda _: 0.0, 300)) if gamma]
    gaps = (b - a for a, b in itertools.pairwise(probes))
    waits = list(itertools.dropwhile(lambda gap: gap < PROBE_FIRST, gaps))  # the first few drafts are no probes yet
    assert waits == sorted(waits)
    assert waits[-1] >= 2 * waits[0]


def test_plain_decoding_is_measured_even_when_every_draft_is_good() -> None:
    gammas = run(AutoGamma(), memory_bound, lambda _: 1.0, 400)
    assert gammas[0] == 0, "t(1) is needed before anything can be compared"
    assert 1 <= sum(gamma == 0 for gamma in gammas[1:]) <= 4


def test_cost_interpolates_and_never_falls() -> None:
    table = CostTable(known_ms={1: 4.0, 5: 6.0, 3: 3.0, 9: 10.0})
    values = [table.step_ms(rows) for rows in range(1, 20)]
    assert values == sorted(values)
    assert table.step_ms(7) == pytest.approx(8.0)
    assert table.step_ms(1) == table.step_ms(3) == pytest.approx(3.5), "a dip is pooled with its neighbour"


def test_cost_follows_drift_and_bounds_outliers() -> None:
    table = CostTable()
    for _ in range(20):
        table.observe(1, 5.0)
    table.observe(1, 500.0)
    assert table.step_ms(1) < 7.0
    for _ in range(60):
        table.observe(1, 8.0)
    assert table.step_ms(1) == pytest.approx(8.0, rel=0.01)


def test_survival_is_a_decreasing_product() -> None:
    estimate = SurvivalEstimate()
    kind = kind_of("ngram", 8)
    for _ in range(200):
        estimate.observe(kind, 4, 2)
    s = estimate.survival(kind, 6)
    assert s == sorted(s, reverse=True)
    assert s[1] > 0.8
    assert s[2] < 0.15


def test_a_cut_answer_says_nothing_about_what_was_behind_it() -> None:
    cut, rejected = SurvivalEstimate(), SurvivalEstimate()
    kind = kind_of("ngram", 8)
    cut.observe(kind, 4, 1, cut=True)
    rejected.observe(kind, 4, 1)
    assert cut.survival(kind, 2)[1] > rejected.survival(kind, 2)[1]
