"""The controller on synthetic curves: deep where rows are free, shallow where they cost, 0 for worthless drafts."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from statistics import fmean, median

import pytest

from specgen.draft import Draft
from specgen.records import CycleRecord
from specgen.tune.controller import REST_CYCLES, AutoGamma, DraftCost, FixedGamma
from specgen.tune.cost import CostTable
from specgen.tune.probes import FIRST
from specgen.tune.survival import SurvivalEstimate, all_of, kind_of


def run(policy: AutoGamma, cost, accept, cycles: int, match: int = 4, token_ms: float = 0.02) -> list[int]:
    """γ of each cycle when a draft of 8 is always on offer; `accept(cycle)` is the chance of each position; token_ms:
    what it takes to choose a committed token."""
    rng = random.Random(1)
    gammas = []
    for cycle in range(cycles):
        limit = min(8, policy.limit("ngram"))
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
            reconcile_ms=token_ms * (kept + 1),
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


@pytest.mark.parametrize("share", [0.3, 0.7, 0.95])
def test_what_it_takes_to_choose_a_token_changes_no_choice(share: float) -> None:
    """It is paid for every token, drafted or not."""
    cheap, dear = (
        run(AutoGamma(), lambda rows: 5 + 0.4 * rows, lambda _: share, 200, token_ms=token_ms)
        for token_ms in (0.0, 4.0)
    )
    assert cheap == dear


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
    cost = lambda rows: 5 + 0.2 * rows  # noqa: E731
    probes = [cycle for cycle, gamma in enumerate(run(AutoGamma(), cost, lambda _: 0.0, 900)) if gamma]
    gaps = (b - a for a, b in itertools.pairwise(probes))
    waits = list(itertools.dropwhile(lambda gap: gap < FIRST, gaps))  # the first few drafts are no probes yet
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


def test_the_first_measurement_of_a_width_is_held_against_its_neighbours() -> None:
    table = CostTable(known_ms={1: 4.0, 9: 8.0})
    table.observe(5, 600.0)
    assert table.step_ms(5) <= 12.0, "an outlier may double what was expected"
    plain = CostTable(known_ms={1: 4.0, 9: 8.0})
    plain.observe(5, 7.0)
    assert plain.step_ms(5) == pytest.approx(7.0), "anything likelier is taken as it is"


def test_widths_that_were_not_tried_follow_the_pace_of_the_machine() -> None:
    table = CostTable(known_ms={1: 4.0, 2: 5.0, 9: 12.0})
    for _ in range(12):
        table.observe(1, 8.0)
    assert table.step_ms(9) == pytest.approx(24.0, rel=0.05)
    assert table.ratio(9) == pytest.approx(3.0, rel=0.05)
    for _ in range(40):
        table.observe(1, 8.0)
        table.observe(2, 16.0)
    assert table.ratio(2) == pytest.approx(2.0, rel=0.05), "what only one width shows is its own"


def test_what_is_kept_from_answer_to_answer_does_not_creep() -> None:
    """Answers begin slowly, and end as the machine is; only one and two rows are tried. What was learned is handed on
    through a hundred of them."""
    rng = random.Random(3)
    known: Mapping[int, float | Sequence[float]] = {1: 4.0, 2: 5.0, 3: 6.0, 9: 12.0, 17: 20.0}
    for _ in range(100):
        table = CostTable(known_ms=known)
        for cycle in range(40):
            slow = rng.lognormvariate(0, 0.1) * (1.6 if cycle < 10 else 1.0) * (3.0 if rng.random() < 0.05 else 1.0)
            rows = 1 + cycle % 2
            table.observe(rows, (4.0, 5.0)[rows - 1] * slow)
        known = table.latest
    for rows, ms in {1: 4.0, 2: 5.0, 3: 6.0, 9: 12.0, 17: 20.0}.items():
        assert median(known[rows]) == pytest.approx(ms, rel=0.15)


def test_a_wrong_time_is_outvoted_by_what_a_few_answers_measured() -> None:
    """The first start was disturbed: t(3) looks twice as dear as it is. Each answer tries three rows twice."""
    known: Mapping[int, Sequence[float]] = {1: (4.0,), 3: (10.0, 11.0, 12.0), 9: (12.0,)}
    for _ in range(4):
        table = CostTable(known_ms=known)
        for rows, ms in ((1, 4.0), (3, 6.0), (1, 4.0), (3, 6.0)):
            table.observe(rows, ms)
        known = table.latest
    assert table.step_ms(3) == pytest.approx(6.0)
    assert table.step_ms(9) == pytest.approx(12.0)


def cycles_of_whole_drafts(policy: AutoGamma, cost, accepted: int, cycles: int) -> list[int]:
    """A lookahead's drafts: 15 nodes, 3 levels, useless when they are cut."""
    draft = Draft(tuple(range(15)), (-1,) * 5 + tuple(range(10)), (None,) * 15, "lookahead", indivisible=True)
    sizes = []
    for _ in range(cycles):
        taken = policy.trim(draft) if policy.limit("lookahead") else None
        size = len(taken) if taken else 0
        kept = accepted if taken else 0
        ending = "corrected" if taken else "plain"
        source = "lookahead" if taken else "none"
        policy.observe(CycleRecord(size, 3 if taken else 0, kept, kept + 1, ending, 0.1, cost(1 + size), 0.0, source))
        sizes.append(size)
    return sizes


def test_a_draft_that_cannot_be_cut_is_tried_when_its_loss_was_saved_up() -> None:
    policy = AutoGamma(CostTable(known_ms={1: 5.0, 2: 7.0, 17: 30.0}))
    sizes = cycles_of_whole_drafts(policy, lambda rows: 5.0 + 1.6 * (rows - 1), 0, 3000)
    tried = [cycle for cycle, size in enumerate(sizes) if size]
    assert tried
    assert tried[0] > 300, "24 ms of loss are 1 % of 480 cycles"
    assert all(size in (0, 15) for size in sizes)
    lost = len(tried) * 24.0
    assert lost < 0.02 * 3000 * 5.0


def test_a_draft_that_cannot_be_cut_is_taken_up_where_it_pays() -> None:
    policy = AutoGamma(CostTable(known_ms={1: 5.0, 2: 5.1, 17: 6.0}))
    sizes = cycles_of_whole_drafts(policy, lambda rows: 5.0 + 0.06 * (rows - 1), 2, 200)
    assert sum(size > 0 for size in sizes) > 190


def test_a_refused_model_is_thought_about_rarely() -> None:
    policy = AutoGamma(CostTable(known_ms={1: 5.0, 2: 6.0, 9: 12.0}), drafting={"skip": DraftCost(0.9, agreement=0.5)})
    asked, think = [], policy.best_depth
    policy.best_depth = lambda source: asked.append(source) or think(source)  # type: ignore[method-assign,func-returns-value]
    for _ in range(180):
        assert policy.limit("skip") == 0 or policy._probing
        policy.observe(CycleRecord(0, 0, 0, 1, "plain", 0.0, 5.0, 0.0))
    assert len(asked) <= 180 / REST_CYCLES


def test_measured_agreement_takes_the_place_of_the_prior() -> None:
    costs = {1: 5.0, 2: 5.2, 5: 6.0, 9: 7.0}
    hopeless = AutoGamma(CostTable(known_ms=costs), drafting={"skip": DraftCost(0.9, agreement=0.2)})
    assert hopeless.limit("skip") == 0
    good = AutoGamma(CostTable(known_ms=costs), drafting={"skip": DraftCost(0.2, agreement=0.95)})
    assert good.limit("skip") > 0
    unknown = AutoGamma(CostTable(known_ms=costs), drafting={"skip": DraftCost(0.3)})
    assert unknown.limit("skip") > 0, "without a measurement it is tried"


def test_survival_is_a_decreasing_product() -> None:
    estimate = SurvivalEstimate()
    kind = kind_of("model", 0, 0.9)
    for _ in range(200):
        estimate.observe(kind, 4, 2)
    s = estimate.survival(kind, 6)
    assert s == sorted(s, reverse=True)
    assert s[1] > 0.8
    assert s[2] < 0.15


def test_one_failure_deep_down_does_not_keep_drafts_shallow_for_ever() -> None:
    """A draft failed at its third place. Those after it are right but too short to say so: what was seen there is
    forgotten, and what is expected of such drafts comes back."""
    estimate = SurvivalEstimate()
    kind = kind_of("model", 0, 0.99)
    before = estimate.survival(kind, 3)[2]
    estimate.observe(kind, 16, 2)
    after = estimate.survival(kind, 3)[2]
    assert after < 0.8 * before
    for _ in range(40):
        estimate.observe(kind, 2, 2)
    assert estimate.survival(kind, 3)[2] > 0.9
    for _ in range(40):
        estimate.observe(kind, 3, 2)
    assert estimate.survival(kind, 3)[2] < 0.05, "where it is tried the prior fades"


def test_places_that_rest_on_like_matches_speak_for_each_other() -> None:
    """Behind three accepted tokens a match of 5 is one of 8."""
    estimate = SurvivalEstimate()
    before = [estimate.survival(kind_of("ngram", match), 1)[0] for match in (2, 4, 8, 32)]
    assert before == sorted(set(before)), "longer matches are trusted more"
    assert estimate.survival(kind_of("ngram", 6), 3)[2] == pytest.approx(before[1] ** 2 * before[2])
    for _ in range(30):
        estimate.observe(kind_of("ngram", 5), 16, 3)
    after = [estimate.survival(kind_of("ngram", match), 1)[0] for match in (2, 4, 8, 32)]
    assert after[0] == before[0]
    assert after[1] > 0.95, "places on 5, 6 and 7 tokens"
    assert after[2] < 0.2, "the place on 8"
    assert after[3] == before[3]
    assert estimate.survival(kind_of("other", 8), 1)[0] == before[2], "proposers are judged apart"


def test_a_draft_of_lookups_is_one_observation() -> None:
    """After as many good drafts as bad ones the last ones weigh more, whichever they were."""
    kind = kind_of("ngram", 16)
    good, bad = SurvivalEstimate(), SurvivalEstimate()
    for _ in range(30):
        good.observe(kind, 16, 16)
    for _ in range(10):
        good.observe(kind, 16, 0)
        bad.observe(kind, 16, 16)
    assert good.survival(kind, 1)[0] < 0.6 < bad.survival(kind, 1)[0]


def test_the_prior_fades() -> None:
    """Worthless drafts are refused even where a row costs very little more."""
    gammas = run(AutoGamma(), lambda rows: 5 + 0.25 * rows, lambda _: 0.0, 400)
    assert sum(gamma > 0 for gamma in gammas[60:]) <= 12


def test_a_cut_answer_says_nothing_about_what_was_behind_it() -> None:
    cut, rejected = SurvivalEstimate(), SurvivalEstimate()
    kind = kind_of("ngram", 8)
    cut.observe(kind, 4, 1, cut=True)
    rejected.observe(kind, 4, 1)
    assert cut.survival(kind, 2)[1] > rejected.survival(kind, 2)[1]


# A draft model pays for every level, so its γ is chosen before it begins.


class Bench:
    """Cycles of a policy against a synthetic draft model: t_propose = levels · draft_ms (+ what it has not read)."""

    def __init__(
        self, policy: AutoGamma, draft_ms: float, cost=lambda rows: 10 + 0.3 * rows, read_ms: float = 0.0, seed: int = 2
    ):
        self.policy, self.draft_ms, self.cost, self.read_ms = policy, draft_ms, cost, read_ms
        self.rng = random.Random(seed)
        self.unread = 0
        self.ms = 0.0
        self.tokens = 0

    def cycle(self, accept: float, confidence: float | None = None, stop: int | None = None) -> int:
        """Levels that were asked for; `stop`: the draft ends after so many of its own accord."""
        limit = self.policy.limit("model")
        levels = limit // self.policy.width
        draft, propose_ms = None, 0.0
        if levels:
            propose_ms = levels * self.draft_ms + self.unread * self.read_ms
            self.unread = 0
            draft = self.policy.trim(comb(min(levels, stop or levels), self.policy.width, confidence))
        depth = draft.depth if draft else 0
        kept = 0
        while kept < depth and self.rng.random() < accept:
            kept += 1
        record = CycleRecord(
            proposed=len(draft) if draft else 0,
            depth=depth,
            accepted=kept,
            committed=kept + 1,
            ending="plain" if not draft else "bonus" if kept == depth else "corrected",
            propose_ms=propose_ms,
            verify_ms=self.cost(1 + (len(draft) if draft else 0)),
            reconcile_ms=0.0,
            source="model" if draft else "none",
            confidence=confidence if draft else None,
        )
        self.policy.observe(record)
        self.unread += kept + 1
        self.ms += record.propose_ms + record.verify_ms
        self.tokens += kept + 1
        return levels

    def cycles(self, count: int, accept: float, **more) -> list[int]:
        return [self.cycle(accept, **more) for _ in range(count)]

    @property
    def against_plain(self) -> float:
        """Speed over plain decoding's."""
        return self.tokens * self.cost(1) / self.ms


def comb(levels: int, width: int, confidence: float | None = None) -> Draft:
    """A chain of which every token has width - 1 siblings."""
    parents = [-1 if level == 0 else (level - 1) * width for level in range(levels) for _ in range(width)]
    tokens = tuple(range(len(parents)))
    return Draft(tokens, tuple(parents), (None,) * len(parents), "model", confidence=confidence)


def model_policy(share: float = 0.1, width: int = 1, read: float = 0.0) -> AutoGamma:
    return AutoGamma(width=width, drafting={"model": DraftCost(share, read)})


def test_a_cheap_good_draft_goes_deep_and_a_dear_one_shallow() -> None:
    cheap = Bench(model_policy(), 0.2).cycles(200, 0.9)
    dear = Bench(model_policy(), 4.0).cycles(200, 0.9)
    assert sum(cheap[100:]) > 1.5 * sum(dear[100:]) > 0


def test_the_depth_is_near_the_best_fixed_one() -> None:
    for draft_ms, accept in ((0.5, 0.8), (2.0, 0.8), (1.0, 0.5), (3.0, 0.9)):
        found = []
        for seed in range(4):
            auto = Bench(model_policy(), draft_ms, seed=seed)
            auto.cycles(2000, accept)
            found.append(auto.against_plain)
        speeds = []
        for gamma in range(17):
            expected = sum(accept**k for k in range(gamma + 1))
            speeds.append(expected * auto.cost(1) / (auto.cost(1 + gamma) + gamma * draft_ms))
        assert fmean(found) > 0.955 * max(speeds)


@pytest.mark.parametrize("draft_ms", [2.0, 9.0])
@pytest.mark.parametrize("read_ms", [0.0, 0.05, 2.0])
def test_a_worthless_model_costs_less_than_three_percent(draft_ms: float, read_ms: float) -> None:
    """Even when a probe must first read all that was committed since the last one: dear reading is not tried again."""
    bench = Bench(model_policy(0.3), draft_ms, read_ms=read_ms)
    levels = bench.cycles(1500, 0.02)
    assert bench.against_plain > 0.97
    assert sum(level > 0 for level in levels[200:]) <= 16
    if read_ms < 1.0:
        assert any(levels[200:]), "probed, if rarely"
    assert bench.policy.reason == "model: drafts are not worth their cost here"


def test_probes_without_a_budget_would_cost_more() -> None:
    """The mutant of the bound above: probes by count alone."""
    bench = Bench(model_policy(0.3), 9.0, read_ms=2.0)
    bench.policy._probes._saved_ms = float("inf")
    bench.policy._observe_proposing = lambda source, ms: None  # type: ignore[method-assign]
    bench.cycles(1500, 0.02)
    assert bench.against_plain < 0.95


def test_a_draft_that_cannot_pay_does_not_even_read_the_prompt() -> None:
    """As dear as the target: a probe would first read 400 tokens, which no answer pays back. One that never has to
    catch up (the mutant of this estimate) is tried."""
    for read, tried in ((0.2, False), (0.0, True)):
        policy = model_policy(0.9, read=read)
        policy.new_text(400)
        bench = Bench(policy, 9.0, read_ms=10.3 * read)
        bench.unread = 400
        assert any(bench.cycles(200, 0.5)) == tried
        assert bench.against_plain > 0.97


def test_a_change_of_text_is_followed_by_a_model() -> None:
    bench = Bench(model_policy(), 0.5)
    bench.cycles(150, 0.0)
    assert sum(bench.cycles(120, 0.9)[60:]) / 60 > 4
    assert sum(level > 0 for level in bench.cycles(120, 0.0)[40:]) <= 10


def test_no_oscillation_where_a_draft_just_pays() -> None:
    levels = Bench(model_policy(), 1.0).cycles(600, 0.6)[200:]
    changes = sum((a > 0) != (b > 0) for a, b in itertools.pairwise(levels))
    assert changes <= 24


def test_confidence_is_judged_apart() -> None:
    policy = model_policy()
    bench = Bench(policy, 0.2, cost=lambda rows: 10 + 2.0 * rows)
    for _ in range(150):
        bench.cycle(0.95, confidence=0.99)
        bench.cycle(0.0, confidence=0.1)
    assert policy.survival.survival(kind_of("model", 0, 0.99), 2)[1] > 0.7
    assert policy.survival.survival(kind_of("model", 0, 0.1), 1)[0] < 0.2
    assert policy.worth(comb(4, 1, 0.99))
    assert not policy.worth(comb(4, 1, 0.1))


def test_drafts_that_stop_early_are_not_asked_for_depth() -> None:
    patient, hasty = (Bench(model_policy(), 1.5) for _ in range(2))
    patient.cycles(200, 0.95)
    hasty.cycles(200, 0.95, stop=2)
    assert hasty.policy.best_depth("model") < patient.policy.best_depth("model")
    assert hasty.policy.survival.survival(all_of("model"), 4)[2] < 0.5


def test_a_trees_rows_are_paid_for() -> None:
    """The same acceptance by level: a wider tree is shallower, and is cut at whole levels."""
    chain, tree = (Bench(model_policy(width=width), 0.2, cost=lambda rows: 10 + 1.0 * rows) for width in (1, 3))
    depths = [sum(bench.cycles(200, 0.85)[100:]) for bench in (chain, tree)]
    assert 0 < depths[1] < depths[0]
    trimmed = tree.policy.trim(comb(8, 3))
    assert trimmed is not None
    assert len(trimmed) % 3 == 0


def test_lookup_in_a_mix_is_not_charged_for_the_model() -> None:
    policy = model_policy()
    run(policy, memory_bound, lambda _: 0.9, 50)
    assert policy._lookup_ms < 0.02
    assert policy.limit("ngram") == policy.most
    assert policy._propose["model"].known == {}


def test_fixed_gamma_is_a_number_of_levels() -> None:
    assert FixedGamma(3, width=2).limit("model") == 6
    assert FixedGamma(0).limit() == 0
    assert FixedGamma(0).reason == "gamma is 0"


def test_another_answer_forgets_parking_but_not_costs() -> None:
    bench = Bench(model_policy(), 2.0)
    bench.cycles(400, 0.0)
    known = bench.policy.costs.known
    bench.policy.new_text()
    assert bench.policy.costs.known == known
    assert any(bench.cycles(FIRST + 60, 0.0)), "tried again soon"
