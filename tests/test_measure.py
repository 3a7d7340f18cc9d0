"""Bench, tune and profile on a tiny model: figures that must agree with the records, choices that must follow them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_session import CONTEXT, COPY, tiny_cases, tiny_file, tiny_loads, tiny_session

from specgen.cli.profile import ProfileFlags, _sweep
from specgen.errors import ContextFullError, UsageError
from specgen.measure import calibrate as calibrate_module
from specgen.measure import recording as recording_module
from specgen.measure import tuner as tuner_module
from specgen.measure.bench import Bench
from specgen.measure.calibrate import calibrate, contexts_for, cycle_overheads, medians
from specgen.measure.profile import Point, Profile, Profiler, Sweep
from specgen.measure.recording import in_order, readings_ms
from specgen.measure.runs import make_cases, run_case, trace_of
from specgen.measure.timer import Spread
from specgen.measure.tuner import TuneOptions, Tuner, plans_of
from specgen.measure.tunestate import TuneState
from specgen.measure.workloads import LONG_KIND, Workload
from specgen.options import RunOptions, SamplingOptions
from specgen.propose.model import DraftModel
from specgen.records import RunRecord
from specgen.session import Session
from specgen.speculation import LoadedDraft
from specgen.step import EagerRunner
from specgen.tune.controller import FixedGamma
from specgen.tune.plan import PlanBook, PlanStore
from specgen.tune.predict import Costs
from specgen.tune.replay import replay
from specgen.tune.search import GAMMAS, TREES, Interval, played_proposer
from specgen.tune.setting import PLAIN, Setting
from specgen.tune.skip_store import SkipStore


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("model")
        patch.setenv("SPECGEN_DATA", str(folder / "data"))
        yield tiny_session(tiny_file(folder, layers=2))


@pytest.fixture
def session(loaded: Session) -> Iterator[Session]:
    loaded.use_plans(PlanBook())
    yield loaded
    loaded.use_plans(PlanBook())


def test_cases_are_greedy_and_own(session: Session) -> None:
    cases, left_out = make_cases(session, tiny_loads(), "both", 16)
    assert [(case.kind, case.temperature) for case in cases] == [
        ("copy", "greedy"), ("copy", "sampled"), ("free", "greedy"), ("free", "sampled"),
    ]  # fmt: skip
    assert {case.options.max_tokens for case in cases} == {16}
    assert left_out == []
    assert [case.temperature for case in make_cases(session, tiny_loads(), "own")[0]] == ["sampled"] * 2


def test_prompts_that_do_not_fit_are_named(session: Session) -> None:
    long = Workload("long", "one", "x " * CONTEXT, SamplingOptions())
    cases, left_out = make_cases(session, [long, *tiny_loads()], "greedy")
    assert left_out == ["long/one"]
    assert len(cases) == 2
    with pytest.raises(ContextFullError):
        make_cases(session, [long], "greedy")


@pytest.mark.parametrize(
    "setting",
    [
        Setting("ngram", 1),
        Setting("ngram", 4, 3, 1),
        Setting("ngram", 8),
        Setting("ngram", 3, 3, 1, tree=2),
        Setting("ngram", 4, tree=3),
        PLAIN,
    ],
)
def test_replay_of_a_plain_run_counts_what_the_session_counts(session: Session, setting: Setting) -> None:
    costs = Costs({0: {1: 1.0}})
    for case in tiny_cases(session):
        trace = trace_of(run_case(session, case, PLAIN), session)
        measured = run_case(session, case, setting).finished.record
        assert setting.gamma is not None
        policy = FixedGamma(setting.gamma, setting.tree)
        predicted = replay(trace, played_proposer(setting, trace, policy, costs), policy, costs)
        counts = [[(c.proposed, c.accepted, c.committed, c.ending) for c in r.cycles] for r in (predicted, measured)]
        assert counts[0] == counts[1]
        assert predicted.yield_tokens == measured.yield_tokens


def test_runs_do_not_learn_from_each_other(session: Session) -> None:
    case = tiny_cases(session)[0]
    first, second = (run_case(session, case, Setting("ngram", 4)).finished.record for _ in range(2))
    assert [c.proposed for c in first.cycles] == [c.proposed for c in second.cycles]
    assert second.reused_tokens == 0
    assert run_case(session, case, PLAIN, fresh=False).finished.record.reused_tokens > 0


def test_bench_agrees_with_its_own_records(session: Session) -> None:
    cases = tiny_cases(session)
    result = Bench(session, cases, Setting("ngram", 4, 3, 1), rounds=2).run()
    assert (result.pairs, result.same_text, result.different) == (8, 8, [])
    assert {(row.temperature, row.kind) for row in result.rows} == {(c.temperature, c.kind) for c in cases}
    assert [row.temperature for row in result.overall] == ["greedy", "sampled"]
    for row in (*result.rows, *result.overall):
        for figures in (row.plain, row.chosen):
            assert figures.passes_per_token == pytest.approx(1 / figures.yield_tokens)
            drafted = sum(length * count for length, count in figures.accepted_lengths.items())
            assert drafted < figures.tokens
            assert figures.joules_per_token is None or figures.joules_per_token > 0
            assert figures.kv_bytes == figures.kv_tokens * session.engine.cache.slot_bytes
        assert row.plain.tokens == row.chosen.tokens
        assert row.plain.yield_tokens == 1.0
        assert row.plain.accepted_lengths == {}
    copying = next(row for row in result.rows if row.kind == "copy" and row.temperature == "greedy")
    assert copying.chosen.drafted_per_token > 0
    assert result.read_gbps > 0


def test_bench_notices_another_text(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    from specgen import accept

    class Careless(accept.Coupled):
        def __call__(self, draft, logits, position, sampler):
            verdict = super().__call__(draft, logits, position, sampler)
            return replace(verdict, next_token=0) if draft is not None else verdict

    monkeypatch.setitem(accept.RULES, "coupled", Careless)
    result = Bench(session, tiny_cases(session), Setting("ngram", 4, 3, 1), rounds=1).run()
    assert result.different
    assert result.same_text < result.pairs


def test_calibration_leaves_an_empty_cache(session: Session) -> None:
    times = calibrate(session, contexts_for(CONTEXT), repeats=3, rows=(1, 2, 5))
    assert list(times) == [128]
    assert {rows: len(values) for rows, values in times[128].items()} == {1: 3, 2: 3, 5: 3}
    assert all(ms > 0 for ms in medians(times)[128].values())
    assert (session.engine.cache.length, session.engine.committed) == (0, [])


def test_calibration_takes_turns_over_contexts_too(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    pace = iter([1.0] * 12 + [50.0] * 4 + [1.0] * 4)  # warm-up and three rounds; then a busy moment, as long as a round

    def step_task(engine, rows, vocab):
        return lambda: next(pace) * (rows + engine.cache.length / 100)

    monkeypatch.setattr(calibrate_module, "step_task", step_task)
    found = medians(calibrate(session, (100, 50), repeats=4, rows=(1, 2)))
    assert found == {100: {1: 2.0, 2: 3.0}, 50: {1: 1.5, 2: 2.5}}


def test_contexts_for_a_small_cache() -> None:
    assert contexts_for(8192) == [128, 1024, 4096]
    assert contexts_for(200) == [128]
    assert contexts_for(40) == [23]
    assert contexts_for(8) == [1]


def test_overheads_come_from_plain_cycles(session: Session) -> None:
    record = run_case(session, tiny_cases(session)[0], PLAIN).finished.record
    token_ms, cycle_ms = cycle_overheads([record])
    assert 0 < token_ms < 50
    assert 0 <= cycle_ms < 50
    assert cycle_overheads([RunRecord()]) == (0.0, 0.0)


def tune(session: Session, state: TuneState | None = None, **options) -> tuple[Tuner, object]:
    tuner = Tuner(session, tiny_loads(), TuneOptions(**{"budget_s": 2.0, **options}), state or TuneState())
    return tuner, tuner.run()


def test_tune_chooses_only_what_it_measured(session: Session) -> None:
    _, result = tune(session)
    assert [one.temperature for one in result.tuned] == ["greedy", "sampled"]
    for one in result.tuned:
        assert one.choice.setting in (PLAIN, *(c.setting for c in one.confirmed))
        assert one.choice.setting.is_plain or one.choice.speedup.low > 1.0
        assert {kind for c in one.confirmed for kind in c.ratios} <= {"copy", "free"}
    plans = plans_of(result, session)
    assert [plan.scope for plan in plans] == [session.scope] * 2
    assert {plan.costs.steps.keys() == result.costs.steps.keys() for plan in plans} == {True}


def test_tune_searches_trees(session: Session) -> None:
    _, result = tune(session, sampling="greedy")
    assert {p.setting.tree for p in result.tuned[0].predictions} == {1, *TREES}


def test_a_replay_that_forgets_the_width_counts_differently(session: Session) -> None:
    """Mutant: the tree is replayed as a chain of as many nodes."""
    setting, costs = Setting("ngram", 4, 3, 1, tree=3), Costs({0: {1: 1.0}})
    texts = (
        "hello world 12 hello there 34 hello",
        "ab ac ab ad ab ac ab",
        "hello hello world hello 12 hello fox hello",
    )
    forked = [Workload("forked", str(i), text, SamplingOptions(), 32) for i, text in enumerate(texts)]
    alike: dict[int, list[bool]] = {3: [], 1: []}
    for case in make_cases(session, forked, "greedy")[0]:
        trace = trace_of(run_case(session, case, PLAIN), session)
        measured = [(c.proposed, c.depth) for c in run_case(session, case, setting).finished.record.cycles]
        for width, found in alike.items():
            proposer = played_proposer(replace(setting, tree=width), trace, FixedGamma(4, 3), costs)
            cycles = replay(trace, proposer, FixedGamma(4, 3), costs).cycles
            found.append([(c.proposed, c.depth) for c in cycles] == measured)
    assert all(alike[3])
    assert not all(alike[1])


@pytest.fixture
def drafted(session: Session) -> Iterator[Session]:
    """With a draft that is the model itself."""
    model, dtype = session.speculation.model, session.engine.cache.layers[0].k.dtype
    reader = DraftModel(EagerRunner(model), model.new_cache(CONTEXT, dtype), model.spec.vocab)
    session.speculation.draft = LoadedDraft("twin", reader, 1.0, "cd" * 32)
    yield session
    session.speculation.draft = None


def test_tune_searches_the_draft_model_and_the_mix(drafted: Session, tmp_path: Path) -> None:
    _, result = tune(drafted, sampling="greedy")
    predictions = {p.setting: p for p in result.tuned[0].predictions}
    assert {setting.proposer for setting in predictions} == {"none", "ngram", "model", "mix"}
    gammas = {setting.gamma for setting in predictions if setting.proposer == "model"}
    assert gammas == {None, *GAMMAS}
    # The draft is always right: an answer of n tokens takes n / (γ + 1) cycles.
    for kind, expected in predictions[Setting("model", 1)].yields.items():
        assert expected == pytest.approx(2.0, abs=0.05), kind
    assert result.costs.propose["model"].each > 0
    (plan,) = plans_of(result, drafted)
    assert (plan.scope.draft, plan.draft) == ("cd" * 32, "twin")
    store = PlanStore(tmp_path)
    store.save(replace(plan, setting=Setting("model", 3)))
    drafted.use_plans(store.book(drafted.scope))
    assert drafted.speculation.drafting["model"].level > 0
    events = list(drafted.generate(drafted.prompt_ids(COPY), RunOptions(max_tokens=8)))
    assert (events[0].proposer, events[0].gamma) == ("model", "3")


def test_what_was_confirmed_was_predicted_on_the_same_tokens(drafted: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where drafts and n-grams are known along different lengths of an answer."""
    wanted = [Setting("mix", 3, 3, 1), Setting("model", 2)]
    monkeypatch.setattr(Tuner, "_worth_running", lambda self, predictions: wanted)
    monkeypatch.setattr(tuner_module, "PASS_SHARE", 0.0)  # as little of each answer as there may be
    _, result = tune(drafted, sampling="greedy", budget_s=4.0)
    confirmed = result.tuned[0].confirmed
    assert [one.setting for one in confirmed] == wanted
    for one in confirmed:
        assert set(one.expected or {}) == set(one.by_kind) == {"copy", "free"}
        assert one.predicted > 0


def test_tune_searches_what_to_leave_out(session: Session) -> None:
    _, result = tune(session, sampling="greedy", skip=True)
    assert result.skip is not None
    assert SkipStore(session.speculation.digest, len(session.loaded.spec.layers)).load() == result.skip
    skips = [p for p in result.tuned[0].predictions if p.setting.proposer == "skip"]
    assert {p.setting.gamma for p in skips} == {None, *GAMMAS}
    assert all(p.yields for p in skips)
    _, without = tune(session, sampling="greedy")
    assert without.skip is None
    assert "skip" not in {p.setting.proposer for p in without.tuned[0].predictions}


def long_loads() -> list[Workload]:
    """Two long prompts with the same beginning, beside the short ones."""
    document = "hello world 12 " * 12
    long = [Workload(LONG_KIND, name, document + name, SamplingOptions(), 16) for name in ("one", "two")]
    return [*long, *tiny_loads()]


def test_long_prompts_are_a_class_of_their_own(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specgen.tune.plan.LONG_TOKENS", 80)
    found = Tuner(session, long_loads(), TuneOptions(6.0, sampling="greedy"), TuneState()).run()
    assert [(one.temperature, one.context) for one in found.tuned] == [("greedy", "short"), ("greedy", "long")]
    short, long = (set(one.plain.yields) for one in found.tuned)
    assert (short, long) == ({"copy", "free"}, {LONG_KIND})
    plans = plans_of(found, session)
    assert [plan.context for plan in plans] == ["short", "long"]
    book = PlanBook(tuple(plans))
    assert book.choice(0.0, 100) == plans[1]
    assert book.choice(0.0, 10) == plans[0]


def test_long_prompts_follow_the_first_of_every_kind_and_share_their_beginning(session: Session) -> None:
    second = Workload("copy", "two", COPY, SamplingOptions())
    ordered = in_order([*long_loads(), second])
    assert [load.id for load in ordered] == ["copy/one", "free/one", "long/one", "long/two", "copy/two"]
    cases, _ = make_cases(session, ordered, "both")
    reading = dict(zip([case.id for case in cases], readings_ms(cases, {0: {1: 1.0, 10: 10.0}}), strict=True))
    assert reading["long/one at 0"] > 10 * reading["long/two at 0"] > 0
    assert reading["copy/one at 0"] > 0.0


def test_long_prompts_that_the_budget_cannot_pay_for_are_left_out(session: Session) -> None:
    # A millisecond for each row: the document alone takes a tenth of a second to read.
    state = TuneState(steps={128: {1: 1.0, 17: 17.0}})
    found = Tuner(session, long_loads(), TuneOptions(0.5, sampling="greedy"), state).run()
    assert any("long prompts are left out: they need --budget" in note for note in found.notes)
    assert {kind for one in found.tuned for kind in one.plain.yields} == {"copy", "free"}


def test_a_stored_plan_is_used_and_told(session: Session, tmp_path: Path) -> None:
    _, result = tune(session)
    store = PlanStore(tmp_path)
    for plan in plans_of(result, session):
        store.save(replace(plan, setting=Setting("ngram", 3, 3, 1), speedup=(1.1, 1.2, 1.3)))
    session.use_plans(store.book(session.scope))
    prompt = session.prompt_ids(COPY)
    events = list(session.generate(prompt, RunOptions(max_tokens=8)))
    assert (events[0].proposer, events[0].gamma) == ("ngram", "3")
    assert any("1.20x" in notice for notice in events[0].notices)
    chosen_by_user = list(session.generate(prompt, RunOptions(max_tokens=8, gamma=2)))
    assert chosen_by_user[0].gamma == "2"
    assert not any("tuned" in notice for notice in chosen_by_user[0].notices)
    plain = list(session.generate(prompt, PLAIN.options(RunOptions(max_tokens=8))))
    assert plain[-1].token_ids == events[-1].token_ids


def test_a_stale_plan_is_ignored_with_a_notice(session: Session, tmp_path: Path) -> None:
    _, result = tune(session)
    store = PlanStore(tmp_path)
    for plan in plans_of(result, session):
        store.save(replace(plan, scope=replace(plan.scope, device="another machine")))
    session.use_plans(store.book(session.scope))
    events = list(session.generate(session.prompt_ids(COPY), RunOptions(max_tokens=2)))
    assert any("another machine" in notice for notice in events[0].notices)


def test_a_budget_too_small_is_told_with_one_that_is_not(session: Session) -> None:
    with pytest.raises(UsageError) as failure:
        tune(session, budget_s=1e-4)
    assert "too small" in failure.value.message
    assert "--budget" in (failure.value.hint or "")


def test_an_interrupted_search_goes_on(session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    original = run_case

    def counting(session, case, setting, **more):
        ran.append(f"{case.id} {setting.label}")
        if len(ran) == 3:
            raise KeyboardInterrupt
        return original(session, case, setting, **more)

    for module in (recording_module, tuner_module):
        monkeypatch.setattr(module, "run_case", counting)
    with pytest.raises(KeyboardInterrupt):
        tune(session, TuneState.load("key", tmp_path))
    state = TuneState.load("key", tmp_path)
    assert state.steps
    assert len(state.recorded) == 2
    monkeypatch.setattr(tuner_module, "calibrate", None)  # it must not be done again
    _, result = tune(session, state)
    assert result.resumed
    assert set(ran[:2]).isdisjoint(itertools.islice(ran, 3, 5)), "recorded answers are not made again"
    state.done()
    assert not TuneState.load("key", tmp_path).steps


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b'{"schema": 1, "key": "x"}', b"\xff"])
def test_a_damaged_state_is_as_good_as_none(tmp_path: Path, data: bytes) -> None:
    state = TuneState.load("key", tmp_path)
    assert state.path is not None
    state.path.write_bytes(data)
    assert TuneState.load("key", tmp_path).steps == {}


def test_a_state_comes_back_as_it_was(session: Session, tmp_path: Path) -> None:
    state = TuneState.load("key", tmp_path)
    tune(session, state)
    again = TuneState.load("key", tmp_path)
    assert (again.steps, again.recorded, again.pairs) == (state.steps, state.recorded, state.pairs)
    assert TuneState.load("other", tmp_path).steps == {}


def test_noise_keeps_plain(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which the same run takes wildly different times."""
    factors = itertools.cycle([0.2, 3.0, 0.5, 1.7, 0.3])
    monkeypatch.setattr(tuner_module, "_figures", lambda record: (next(factors), next(factors)))
    _, result = tune(session, sampling="greedy")
    assert result.tuned[0].choice.setting == PLAIN


def test_every_tree_that_profile_shows_is_measured() -> None:
    for flags, drafted in itertools.product((ProfileFlags(), ProfileFlags(exhaustive=True)), (False, True)):
        sweep = _sweep(flags, [], CONTEXT, drafted=drafted)
        assert sweep.drafted == drafted
        trees = {setting for setting in sweep.predicted if setting.tree > 1}
        assert {setting.tree for setting in trees} == set(TREES)
        assert trees <= set(sweep.measured) <= set(sweep.predicted)


def test_profile_sweeps_the_draft_model(drafted: Session) -> None:
    known = [PLAIN, Setting("model", 2), Setting("mix", 2), Setting("model", None)]
    found = Profiler(drafted, tiny_cases(drafted)[:2], Sweep([64], known, known[:2], repeats=2)).run()
    assert [point.setting for point in found.points] == known
    assert found.points[1].measured is not None
    # The draft is always right.
    assert set(found.draft_survival["copy"]) == {1.0}
    assert all(expected == pytest.approx(3.0, abs=0.2) for expected in found.points[1].yields.values())
    assert not Profiler(drafted, tiny_cases(drafted)[:1], Sweep([64], known[:1], [], repeats=2)).run().draft_survival


def test_profile_sweeps_predicted_and_measured(session: Session) -> None:
    known = [PLAIN, Setting("ngram", 2), Setting("ngram", 2, tree=2), Setting("ngram", None)]
    sweep = Sweep([64, 128], known, known[:2], repeats=2)
    found = Profiler(session, tiny_cases(session), sweep).run()
    assert list(found.steps) == [64, 128]
    assert isinstance(found.steps[64][1], Spread)
    assert [point.setting for point in found.points] == known
    assert [point.measured is not None for point in found.points] == [True, True, False, False]
    assert found.points[0].predicted_speedup == pytest.approx(1.0)
    assert found.points[0].error == pytest.approx(0.0)
    assert set(found.survival) == {"copy", "free"}
    assert all(a >= b for a, b in itertools.pairwise(found.survival["copy"]) if a > 0.999)
    assert all(parts.total_ms > 0 for parts in found.cycles)


def test_the_best_of_a_profile_beats_plain_by_more_than_the_noise() -> None:
    def point(setting: Setting, *measured: float) -> Point:
        return Point(setting, 1.2, 10.0, {}, {}, Interval(*measured, count=4) if measured else None)

    plain, lucky, sure = (
        point(PLAIN, 1.0, 1.0, 1.0),
        point(Setting("ngram", 4), 0.7, 2.2, 6.0),
        point(Setting("ngram", 2), 1.1, 1.2, 1.3),
    )
    unmeasured = point(Setting("ngram", 8))
    assert Profile({}, {}, [plain, lucky, sure, unmeasured], [], 0).best is sure
    assert Profile({}, {}, [plain, lucky, unmeasured], [], 0).best is plain
    assert Profile({}, {}, [unmeasured], [], 0).best is unmeasured
