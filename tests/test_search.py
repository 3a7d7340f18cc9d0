"""Choosing on made-up traces and costs, where the right answer is known."""

from __future__ import annotations

import random
from dataclasses import replace
from math import exp, log

import pytest
from scipy.stats import t as student

from specgen.tune.predict import Costs, ProposeMs
from specgen.tune.replay import Drafter, Guess, PrefixGuesses, Trace
from specgen.tune.search import (
    TREES,
    Confirmed,
    Interval,
    candidates,
    certainty,
    choose,
    drafted_candidates,
    mixed_candidates,
    overall,
    predict,
    ranked,
    search,
    shortlist,
    tree_candidates,
)
from specgen.tune.setting import PLAIN, Setting

LOOP = tuple(range(10, 20)) * 12
RANDOM = tuple(random.Random(1).sample(range(1000, 9000), 120))
FLAT = Costs({0: dict.fromkeys(range(1, 18), 10.0)})
STEEP = Costs({0: {rows: 10.0 * rows for rows in range(1, 18)}})
SLOPED = Costs({0: {rows: 10.0 + 2.0 * (rows - 1) for rows in range(1, 18)}})


def trace(answer: tuple[int, ...]) -> Trace:
    return Trace((1, 2, 3), answer, len(answer), 4096)


def predictions(costs: Costs, **kinds: tuple[int, ...]):
    return list(search(candidates(), {kind: [trace(answer)] for kind, answer in kinds.items()}, costs))


@pytest.mark.parametrize("freedom", [1, 2, 5, 9, 10, 17, 60, 1000])
def test_the_quantile_is_students(freedom: int) -> None:
    assert certainty(freedom) == pytest.approx(student.ppf(0.95, freedom), abs=0.008)


@pytest.mark.parametrize(("kinds", "runs"), [(1, 2), (1, 3), (2, 2), (9, 2)])
def test_few_runs_that_equal_plain_are_seldom_called_faster(kinds: int, runs: int) -> None:
    """One in twenty by the quantile; a normal one would let through up to one in five."""
    rng = random.Random(4)
    trials, lucky, normal = 3000, 0, 0
    for _ in range(trials):
        found = Interval.of_ratios({str(k): [exp(rng.gauss(0, 0.05)) for _ in range(runs)] for k in range(kinds)})
        lucky += found.low > 1.0
        reach = log(found.middle / found.low) / certainty(kinds * (runs - 1))
        normal += log(found.middle) > 1.645 * reach
    assert lucky / trials < 0.065
    assert kinds > 2 or normal / trials > 0.08, "the mutant: a normal quantile"


def test_a_loop_on_flat_costs_wants_the_deepest_draft() -> None:
    found = predictions(FLAT, loop=LOOP)
    best = ranked(found)[0]
    assert best.setting.gamma in (16, None)
    assert best.speedups(found[0])["loop"] > 5
    assert best.yields["loop"] > 5


def test_costs_that_grow_with_rows_leave_plain_the_best() -> None:
    found = predictions(STEEP, loop=LOOP, random=RANDOM)
    assert ranked(found)[0].speedups(found[0]) == pytest.approx({"loop": 1.0, "random": 1.0}, abs=0.02)


def test_text_without_repeats_costs_nothing_to_look_up() -> None:
    found = predictions(SLOPED, random=RANDOM)
    assert all(p.yields["random"] == 1.0 for p in found)
    assert all(p.speedups(found[0])["random"] == pytest.approx(1.0) for p in found)


def test_a_setting_that_hurts_one_kind_ranks_behind_one_that_does_not() -> None:
    # Token 7 comes back all the time and is never followed by the same: single-token lookups fail.
    mocking = tuple(token for pair in zip([7] * 60, range(2000, 2060), strict=True) for token in pair)
    found = predictions(SLOPED, loop=LOOP, mocking=mocking)
    order = ranked(found)
    plain = found[0]
    assert min(order[0].speedups(plain).values()) >= 0.97
    hurting = [p for p in order if min(p.speedups(plain).values()) < 0.97]
    assert hurting, "some setting must be bad, or the test shows nothing"
    assert max(overall(p.speedups(plain)) for p in hurting) > 1.2, "and good on the whole"
    assert order[-len(hurting) :] == hurting


def test_shortlist_holds_an_adaptive_setting_and_no_plain() -> None:
    found = predictions(FLAT, loop=LOOP)
    few = shortlist(found, 2)
    assert len(few) == 2
    assert PLAIN not in few
    assert any(setting.gamma is None for setting in few)


def test_the_best_chains_are_tried_as_trees_within_the_calibrated_rows() -> None:
    found = predictions(FLAT, loop=LOOP)
    trees = tree_candidates(found)
    assert trees
    assert {tree.tree for tree in trees} <= set(TREES)
    assert all(1 + tree.gamma * tree.tree <= max(FLAT.steps[0]) for tree in trees)
    chains = [p.setting for p in ranked(found)]
    assert all(replace(tree, tree=1) in chains for tree in trees)


def test_a_tree_wins_where_the_last_match_misleads_and_rows_are_free() -> None:
    # The same context goes on in two ways in turns: the latest occurrence is always the wrong one.
    forked = (1, 2, 3, 50, 1, 2, 3, 60) * 12
    found = predictions(FLAT, forked=forked)
    trees = list(search(tree_candidates(found), {"forked": [trace(forked)]}, FLAT))
    chain = {p.setting: p for p in found}
    gains = [p.yields["forked"] / chain[replace(p.setting, tree=1)].yields["forked"] for p in trees]
    assert min(gains) >= 1.0
    assert max(gains) > 1.0


def guessed(answer: tuple[int, ...], hits: float, name: str = "model", seed: int = 3) -> Trace:
    """A trace along which a model was right with probability `hits`."""
    rng = random.Random(seed)
    guesses = tuple(Guess(token if rng.random() < hits else 0) for token in answer)
    return replace(trace(answer), drafters={name: Drafter(PrefixGuesses(guesses), at_once=512)})


def drafted_costs(each_ms: float, read_ms: float = 0.0) -> Costs:
    return replace(FLAT, propose={"model": ProposeMs(each=each_ms, read=read_ms), "ngram": ProposeMs(0.01)})


@pytest.mark.parametrize(("each_ms", "hits", "deepest", "pays"), [(0.5, 0.9, True, True), (9.0, 0.4, False, False)])
def test_a_cheap_draft_that_is_right_goes_deep_and_a_dear_one_loses(
    each_ms: float, hits: float, deepest: bool, pays: bool
) -> None:
    found = list(
        search([PLAIN, *drafted_candidates({"model"})], {"a": [guessed(RANDOM, hits)]}, drafted_costs(each_ms))
    )
    fixed = [p for p in found if p.setting.gamma]
    best = max(fixed, key=lambda p: overall(p.speedups(found[0])))
    assert (best.setting.gamma >= 6) == deepest
    assert (overall(best.speedups(found[0])) > 1.0) == pays
    adaptive = next(p for p in found if p.setting.gamma is None)
    assert overall(adaptive.speedups(found[0])) > (1.2 if pays else 0.9), "γ auto keeps away from what loses"


def test_expected_tokens_follow_from_the_bits() -> None:
    """Right, right, wrong, over and over: a draft of two is always whole, and the third token is the target's."""
    answer = RANDOM[:60]
    bits = tuple(Guess(token if index % 3 < 2 else 0) for index, token in enumerate(answer))
    known = replace(trace(answer), drafters={"model": Drafter(PrefixGuesses(bits), at_once=512)})
    for gamma, expected in ((1, 1.5), (2, 3.0), (8, 3.0)):
        found = predict(Setting("model", gamma), {"a": [known]}, drafted_costs(1.0))
        assert found.yields["a"] == pytest.approx(expected, rel=0.05)
    shifted = replace(known, drafters={"model": Drafter(PrefixGuesses(bits[1:] + bits[:1]), at_once=512)})
    assert predict(Setting("model", 2), {"a": [shifted]}, drafted_costs(1.0)).yields["a"] < 2.0, "the mutant"


def test_the_mix_takes_each_where_it_is_good() -> None:
    """Half of the text repeats itself, half of it a model knows."""
    answer = LOOP[:60] + RANDOM[:60]
    guesses = tuple(Guess(token if index >= 60 else 0) for index, token in enumerate(answer))
    known = {"a": [replace(trace(answer), drafters={"model": Drafter(PrefixGuesses(guesses), at_once=512)})]}
    costs = drafted_costs(1.0)
    lookups = list(search(candidates(), known, costs))
    mixes = list(search(mixed_candidates(lookups), known, costs))
    model = predict(Setting("model", 8), known, costs)
    mix = next(p for p in mixes if p.setting.gamma == 8)
    best = ranked(lookups)[0]
    assert mix.yields["a"] > max(model.yields["a"], best.yields["a"])
    assert {p.setting.proposer for p in mixes} == {"mix"}
    assert len({(p.setting.n_min, p.setting.n_max) for p in mixes}) == 2
    sources = {cycle.source for record in mix.records["a"] for cycle in record.cycles}
    assert sources >= {"ngram", "model"}


def test_reading_is_paid_for() -> None:
    """After a lookup the model has tokens to catch up on."""
    answer = LOOP[:60] + RANDOM[:30] + LOOP[:60]
    guesses = tuple(Guess(token) for token in answer)
    known = {"a": [replace(trace(answer), drafters={"model": Drafter(PrefixGuesses(guesses), at_once=512)})]}
    setting = Setting("mix", 4)
    free, dear = (predict(setting, known, drafted_costs(0.5, read)) for read in (0.0, 2.0))
    assert free.yields == dear.yields
    assert free.ms_per_token["a"] < dear.ms_per_token["a"]


def test_the_first_lookup_indexes_the_prompt() -> None:
    costs = replace(FLAT, propose={"ngram": ProposeMs(0.5, read=0.25)})
    (record,) = predict(Setting("ngram", 2), {"a": [trace(RANDOM[:9])]}, costs).records["a"]
    assert record.cycles[0].propose_ms == pytest.approx(0.5 + 2 * 0.25), "three tokens of prompt"
    assert {cycle.propose_ms for cycle in record.cycles[1:-1]} == {0.5}
    assert record.cycles[-1].propose_ms == 0.0, "no room for a draft, no lookup"


def test_p95_prefers_plain_when_wide_steps_are_slow() -> None:
    found = predictions(SLOPED, loop=LOOP)
    plain = found[0]
    deep = next(p for p in found if p.setting.gamma == 1 and p.setting.n_max == 4)
    assert overall(deep.speedups(plain, "p95")) < 1.0 < overall(deep.speedups(plain))


def ratios(centre: float, noise: float, count: int, seed: int = 0) -> dict[str, list[float]]:
    rng = random.Random(seed)
    return {kind: [centre * (1 + rng.gauss(0, noise)) for _ in range(count)] for kind in ("a", "b", "c")}


def test_interval_tightens_with_pairs_and_holds_the_truth() -> None:
    few, many = (Interval.of_ratios(ratios(1.2, 0.05, n)) for n in (3, 30))
    assert few.low < 1.2 < few.high
    assert many.high - many.low < few.high - few.low
    inside = [Interval.of_ratios(ratios(1.0, 0.1, 5, seed)) for seed in range(400)]
    lucky = sum(one.low > 1.0 for one in inside) / 400
    assert lucky < 0.09, "about one in twenty may look better than plain by luck"


def test_one_pair_of_each_kind_proves_nothing() -> None:
    found = Interval.of_ratios({"a": [1.5], "b": [1.4]})
    assert (found.low, found.count) == (0.0, 2)
    assert Interval.of_ratios({}).count == 0


FAST, SLOW = Setting("ngram", 4), Setting("ngram", 2)


def test_the_fastest_sure_setting_is_chosen() -> None:
    choice = choose([Confirmed(SLOW, ratios(1.1, 0.01, 5)), Confirmed(FAST, ratios(1.3, 0.01, 5))])
    assert choice.setting == FAST
    assert 1.25 < choice.speedup.low < 1.3 < choice.speedup.high < 1.35


def test_noise_keeps_plain_and_says_so() -> None:
    choice = choose([Confirmed(FAST, ratios(1.05, 0.4, 3))])
    assert choice.setting == PLAIN
    assert "noise" in choice.why


def test_a_setting_that_slows_a_kind_is_not_chosen() -> None:
    bad = {**ratios(1.4, 0.01, 5), "story": [0.9, 0.91, 0.9]}
    choice = choose([Confirmed(FAST, bad), Confirmed(SLOW, ratios(1.1, 0.01, 5))])
    assert choice.setting == SLOW
    choice = choose([Confirmed(FAST, bad)])
    assert choice.setting == PLAIN
    assert "story" in choice.why


def test_nothing_confirmed_means_plain() -> None:
    assert choose([]).setting == PLAIN
