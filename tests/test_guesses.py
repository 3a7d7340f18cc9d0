"""What models would have said along a recorded answer, against what they say in a session: cycle by cycle the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import pytest
from tiny import tiny_decoder, tiny_spec
from tiny_session import CONTEXT, tiny_file, tiny_session

from specgen.engine import Engine
from specgen.measure import guesses as guesses_module
from specgen.measure.guesses import draft_cost, model_drafter, skip_drafter
from specgen.measure.recording import shortened
from specgen.measure.runs import Case, make_cases, run_case, trace_of
from specgen.measure.workloads import Workload
from specgen.model.spec import LayerSpec, ModelSpec, Skipped
from specgen.options import SamplingOptions
from specgen.propose import model as model_module
from specgen.propose.model import DraftModel
from specgen.records import RunRecord
from specgen.sampling import Sampler
from specgen.session import Session
from specgen.speculation import LoadedDraft, Speculation
from specgen.step import EagerRunner
from specgen.tune.controller import AutoGamma, FixedGamma
from specgen.tune.predict import Costs, ProposeMs
from specgen.tune.replay import ChainGuesses, Drafter, PrefixGuesses, Trace, replay
from specgen.tune.search import played_proposer, policy_of
from specgen.tune.setting import PLAIN, Setting
from specgen.tune.skip_search import SkipChoice

COSTS = Costs({0: {1: 1.0, 17: 2.0}}, propose={"model": ProposeMs(0.1, 0.2, 0.01)})
TEXTS = ("hello world 12 hello world 12 hello", "ab ac ab ad ab ac ab")
FEW = tuple((token, -float("inf")) for token in range(288) if token not in (10, 20, 30))
"""Three tokens are left: the answer repeats itself."""
SAMPLINGS = (
    SamplingOptions(temperature=0.3, seed=1, logit_bias=FEW),
    SamplingOptions(),
    SamplingOptions(temperature=0.8, top_p=0.95, seed=3),
    SamplingOptions(temperature=0.7, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2, seed=5),
)
GAMMAS = (1, 4)
LAYERS = 2
SKIPPED: Skipped = frozenset({("mlp", 0)})
LONG, LONGER = 16, 32
"""Tokens of an answer; of one that is to repeat itself."""


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    """A tiny model of some layers with the tokenizer of a file, and a draft that is that model without one MLP."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("model")
        patch.setenv("SPECGEN_DATA", str(folder / "data"))
        read = tiny_session(tiny_file(folder))
        model = tiny_decoder(deep_spec(read.loaded.spec.vocab, LAYERS), seed=2)
        engine = Engine(EagerRunner(model), model.new_cache(CONTEXT))
        made = Session(
            Speculation(engine, model, "ab" * 32), model.kernels, read.tokenizer, replace(read.loaded, spec=model.spec)
        )
        made.speculation.draft = near_draft(made)
        made.speculation.use_skips(SkipChoice(SKIPPED, 0.5, 1.0, 0))
        yield made


def deep_spec(vocab: int, layers: int) -> ModelSpec:
    return tiny_spec(vocab=vocab, context=CONTEXT, layers=(LayerSpec(rope=tiny_spec().layers[0].rope),) * layers)


def near_draft(session: Session, capacity: int = CONTEXT) -> LoadedDraft:
    """It agrees now and then."""
    small = session.speculation.model.skipping([], [0])
    reader = DraftModel(EagerRunner(small), small.new_cache(capacity), small.spec.vocab)
    return LoadedDraft("near", reader, 0.5, "ef" * 32)


@pytest.fixture
def own_draft(session: Session) -> Iterator[Session]:
    """A test may give it another draft."""
    before = session.speculation.draft
    yield session
    session.speculation.draft = before


def cases(session: Session, texts: Sequence[str] = TEXTS) -> list[Case]:
    """Every text: greedy, warm, penalised, and of three tokens alone."""
    loads = [
        Workload("tiny", f"{text[:9]} {number}", text, sampling, LONGER if sampling.logit_bias else LONG)
        for text in texts
        for number, sampling in enumerate(SAMPLINGS)
    ]
    return make_cases(session, loads, "own")[0]


def plain_trace(session: Session, case: Case) -> Trace:
    return trace_of(run_case(session, case, PLAIN), session)


def with_drafters(session: Session, case: Case, trace: Trace) -> Trace:
    drafters = {"model": model_drafter(session, case, trace), "skip": skip_drafter(session, case, trace)}
    return replace(trace, drafters=drafters)


def counts(record: RunRecord) -> list[tuple[object, ...]]:
    """All of a cycle but its times and the words for a fallback."""
    return [
        (c.proposed, c.depth, c.source, c.match, c.confidence, c.accepted, c.committed, c.ending) for c in record.cycles
    ]


def played(trace: Trace, setting: Setting) -> list[tuple[object, ...]]:
    assert setting.gamma is not None
    policy = FixedGamma(setting.gamma)
    return counts(replay(trace, played_proposer(setting, trace, policy, COSTS), policy, COSTS))


def measured(session: Session, case: Case, setting: Setting) -> list[tuple[object, ...]]:
    return counts(run_case(session, case, setting).finished.record)


def settings(gammas: Sequence[int] = GAMMAS) -> list[Setting]:
    """Every proposer that has a model."""
    drafted = [Setting(name, gamma) for name in ("model", "skip") for gamma in gammas]
    return [*drafted, *(Setting("mix", gamma, n_max, n_min) for n_min, n_max in ((1, 3), (2, 6)) for gamma in gammas)]


def test_one_pass_counts_what_the_session_counts(session: Session) -> None:
    accepted: dict[str, int] = {}
    for case in cases(session):
        trace = with_drafters(session, case, plain_trace(session, case))
        for setting in settings():
            found = measured(session, case, setting)
            assert played(trace, setting) == found, (case.id, setting.label)
            for cycle in found:
                accepted[str(cycle[2])] = accepted.get(str(cycle[2]), 0) + int(cycle[5])
    assert min(accepted[source] for source in ("model", "skip", "ngram")) > 0, "or nothing was tested"


def shifted(drafter: Drafter) -> Drafter:
    """Mutant: every guess is taken for the next place's."""
    guesses = drafter.guesses
    if isinstance(guesses, PrefixGuesses):
        return replace(drafter, guesses=PrefixGuesses((guesses.tokens[0], *guesses.tokens[:-1])))
    assert isinstance(guesses, ChainGuesses)
    return replace(drafter, guesses=ChainGuesses((guesses.chains[0], *guesses.chains[:-1])))


class Deaf(Sampler):
    """Mutant: the sampler of the pass is not told what was committed, so that penalties do not count it."""

    def observe(self, tokens: Sequence[int]) -> None:
        pass


def skip_by_prefix(session: Session, case: Case, trace: Trace) -> Drafter:
    """Mutant: `skip` is taken for a model whose guess does not depend on where its draft began."""
    chains = skip_drafter(session, case, trace).guesses
    assert isinstance(chains, ChainGuesses)
    return Drafter(PrefixGuesses(tuple(chain[0] for chain in chains.chains)))


def agrees(session: Session, setting: Setting, drafter: Callable[[Session, Case, Trace], Drafter]) -> bool:
    """Whether the replay counts what the session counts in every case."""
    name = "skip" if setting.proposer == "skip" else "model"
    for case in cases(session):
        trace = plain_trace(session, case)
        trace = replace(trace, drafters={name: drafter(session, case, trace)})
        if played(trace, setting) != measured(session, case, setting):
            return False
    return True


@pytest.mark.parametrize("name", ["model", "mix", "skip"])
def test_guesses_that_are_shifted_count_differently(session: Session, name: str) -> None:
    make = skip_drafter if name == "skip" else model_drafter
    setting = Setting(name, 3)  # type: ignore[arg-type]
    assert agrees(session, setting, make)
    assert not agrees(session, setting, lambda *given: shifted(make(*given)))


@pytest.mark.parametrize("name", ["model", "skip"])
def test_a_sampler_that_is_not_told_counts_differently(
    session: Session, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = skip_drafter if name == "skip" else model_drafter
    monkeypatch.setattr(guesses_module, "Sampler", Deaf)
    assert not agrees(session, Setting(name, 8), make)  # type: ignore[arg-type]


def test_skip_depends_on_where_a_draft_began(session: Session) -> None:
    assert not agrees(session, Setting("skip", 8), skip_by_prefix)


def test_the_end_of_the_drafts_context(own_draft: Session) -> None:
    shorter, refused, differs = 0, 0, 0
    for case in cases(own_draft):
        capacity = len(case.prompt.ids) + 12
        own_draft.speculation.draft = near_draft(own_draft, capacity)
        trace = plain_trace(own_draft, case)
        drafter = model_drafter(own_draft, case, trace)
        for setting in (Setting("model", 3), Setting("model", 8), Setting("mix", 3, 3, 1)):
            found = measured(own_draft, case, setting)
            assert played(replace(trace, drafters={"model": drafter}), setting) == found
            endless = replace(trace, drafters={"model": replace(drafter, capacity=None)})
            differs += played(endless, setting) != found
            if setting.proposer == "model":
                proposed = [int(cycle[0]) for cycle in found]  # type: ignore[call-overload]
                shorter += any(0 < count < setting.gamma for count in proposed[:-2])
                refused += len(trace.answer) == LONG and proposed[-2:] == [0, 0]
    assert shorter > 0
    assert refused > 0
    assert differs > 0, "the mutant: a draft without an end"


@pytest.fixture
def slow_reader(session: Session, monkeypatch: pytest.MonkeyPatch) -> Session:
    """Its draft reads 7 tokens in a cycle, so that it is still reading while the answer goes on."""
    for module in (model_module, guesses_module):
        monkeypatch.setattr(module, "CATCH_UP_TOKENS", 7)
    return session


def test_a_draft_that_is_still_reading(slow_reader: Session) -> None:
    behind = False
    for case in cases(slow_reader):
        trace = plain_trace(slow_reader, case)
        trace = replace(trace, drafters={"model": model_drafter(slow_reader, case, trace)})
        for setting in settings((1, 4)):
            if setting.proposer == "skip":
                continue
            found = measured(slow_reader, case, setting)
            assert played(trace, setting) == found, (case.id, setting.label)
            behind |= setting.proposer == "model" and found[0][0] == found[1][0] == 0 < found[-2][0]
    assert behind, "some draft must have been late"
    assert not agrees(slow_reader, Setting("model", 4), lambda *given: replace(model_drafter(*given), at_once=None))


def test_a_token_that_the_draft_does_not_know(own_draft: Session) -> None:
    """Its embedding ends before the target's: from such a token on there are no drafts."""
    small = tiny_decoder(deep_spec(own_draft.loaded.spec.vocab, 1))
    refused = 0
    for vocab in (267, 275, 283):  # the prompt's own tokens are smaller
        reader = DraftModel(EagerRunner(small), small.new_cache(CONTEXT), vocab)
        own_draft.speculation.draft = LoadedDraft("small", reader, 0.5, "12" * 32)
        for case in cases(own_draft):
            trace = plain_trace(own_draft, case)
            trace = replace(trace, drafters={"model": model_drafter(own_draft, case, trace)})
            for setting in (Setting("model", 3), Setting("mix", 3)):
                found = measured(own_draft, case, setting)
                assert played(trace, setting) == found
                proposed = [cycle[0] for cycle in found]
                refused += setting.proposer == "model" and proposed[0] != 0 and proposed[-3:] == [0, 0, 0]
    assert refused > 0


def test_the_pass_leaves_no_trace(session: Session) -> None:
    case = cases(session)[1]
    trace = plain_trace(session, case)
    with_drafters(session, case, trace)
    assert (session.engine.cache.length, session.engine.committed) == (0, [])
    assert run_case(session, case, PLAIN).finished.token_ids == trace.answer


def test_times_of_a_played_model(session: Session) -> None:
    """What it reads and drafts is what its proposing costs."""
    case = cases(session)[0]
    trace = plain_trace(session, case)
    trace = replace(trace, drafters={"model": model_drafter(session, case, trace)})
    policy = FixedGamma(2)
    record = replay(trace, played_proposer(Setting("model", 2), trace, policy, COSTS), policy, COSTS)
    unread = len(trace.prompt)
    for cycle in record.cycles:
        if cycle.proposed:
            assert cycle.propose_ms == pytest.approx(0.1 + 0.2 * cycle.proposed + 0.01 * (unread - 1))
        # A draft's last token is not read for it; the target's own never is.
        unread = 2 if cycle.accepted == cycle.proposed == 2 else 1


def test_a_draft_cost_is_a_line(session: Session) -> None:
    found = draft_cost(session, cases(session)[:2], "model", COSTS)
    assert found.once >= 0
    assert found.each > 0
    assert found.read >= 0
    costs = replace(COSTS, propose={"model": found})
    drafting = costs.drafting()
    assert drafting["model"].level == pytest.approx((found.once + 2 * found.each) / 2)
    policy = policy_of(Setting("mix", None), costs, 10)
    assert isinstance(policy, AutoGamma)
    assert policy.limit("model") <= 16


def test_a_draft_cost_without_any_draft_is_a_step(session: Session) -> None:
    """Answers of one token have no drafts to time."""
    found = draft_cost(session, [shortened(cases(session)[1], 1)], "model", COSTS)
    assert found == ProposeMs(0.0, 1.0, 1.0)


def test_costs_tell_who_pays_for_every_token() -> None:
    known: Mapping[str, ProposeMs] = {"ngram": ProposeMs(0.3), "skip": ProposeMs(0.0, 0.5)}
    assert set(Costs({0: {1: 2.0}}, propose=known).drafting()) == {"skip"}
