"""What the models that draft would have said along a recorded answer, and how long that takes them.

Knows: the session's models and samplers, so that the guesses are those of a real answer. Does not know: what is made
of them (`tune.replay`). They are exact where the kernels keep history; on a card that prefills by other kernels those
of `skip` are of a text that was read at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

from specgen.engine import Engine
from specgen.measure.runs import Case, Run, run_case
from specgen.options import MAX_GAMMA, DraftOptions, ProposerName
from specgen.propose.draw import SharedNoise
from specgen.propose.model import CATCH_UP_TOKENS, ModelProposer, Reader
from specgen.sampling import Sampler
from specgen.tune.predict import Costs, ProposeMs
from specgen.tune.replay import ChainGuesses, Drafter, Guess, Trace, teacher_forced
from specgen.tune.setting import Setting

if TYPE_CHECKING:
    from torch import Tensor

    from specgen.session import Session

SHALLOW, DEEP = 1, 8
"""Levels of the drafts that are timed."""
TIMED_TOKENS = 24
"""Of an answer that is run for its times."""


def model_drafter(session: Session, case: Case, trace: Trace) -> Drafter:
    """The draft model along `trace`, teacher-forced: with the noise and the transforms of the answer itself."""
    draft = session.speculation.draft
    assert draft is not None
    sampler = _sampler(session, case)
    proposer = ModelProposer("model", draft.reader, sampler, SharedNoise(sampler), DraftOptions())
    draft.reader.forget()
    for _ in range(0, len(trace.prompt), CATCH_UP_TOKENS):  # a long prompt is read over several drafts
        proposer.propose(trace.prompt, 1)
    guesses = teacher_forced(proposer, trace, sampler.observe)
    return Drafter(guesses, draft.reader.capacity, CATCH_UP_TOKENS)


def skip_drafter(session: Session, case: Case, trace: Trace) -> Drafter:
    """The target without the session's skip set along `trace`: a draft from every place, up to its first wrong token.

    The draft reads the target's keys and values up to where it begins, and overwrites what is behind: so the places are
    gone through from the last to the first, with the whole text in the target's cache at the beginning.
    """
    engine, reader = session.engine, session.speculation.skip_reader()
    text = [*trace.prompt, *trace.answer]
    _bring(engine, text[:-1])
    chains: list[tuple[Guess, ...]] = []
    for begin in reversed(range(len(trace.answer))):
        committed = text[: len(trace.prompt) + begin]
        engine.cache.rollback(len(committed) - 1)
        sampler = _sampler(session, case)
        sampler.observe(trace.answer[:begin])
        draft = _UntilWrong(reader, sampler, trace.answer[begin:]).propose(committed, MAX_GAMMA)
        chains.append(() if draft is None else tuple(Guess(token, draft.confidence) for token in draft.tokens))
    engine.rewind(0)
    return Drafter(ChainGuesses(tuple(reversed(chains))), reader.capacity)


class _UntilWrong(ModelProposer):
    """Drafts along a text that is known, and ends with the first token that is not in it."""

    def __init__(self, reader: Reader, sampler: Sampler, upcoming: Sequence[int]) -> None:
        super().__init__("skip", reader, sampler, SharedNoise(sampler), DraftOptions())
        self._upcoming = upcoming

    def _doubtful(self, logits: Tensor, path: Sequence[int], token: int) -> bool:
        place = len(path)
        return place + 1 >= len(self._upcoming) or token != self._upcoming[place]


def _sampler(session: Session, case: Case) -> Sampler:
    return Sampler(case.options.sampling, session.kernels, case.prompt.ids, session.vocab)


def _bring(engine: Engine, tokens: Sequence[int]) -> None:
    """These tokens, and no others, into the target's cache."""
    engine.rewind(0)
    with engine.cache.transaction(len(tokens)):
        engine.runner.prefill(tokens, engine.cache)
        engine.cache.commit(len(tokens))


def draft_cost(session: Session, cases: Sequence[Case], name: ProposerName, costs: Costs) -> ProposeMs:
    """Of a proposer that pays for every token: by short answers with shallow and with deep drafts."""
    shallow, deep = (
        [_short_run(session, case, Setting(name, levels), costs) for case in cases] for levels in (SHALLOW, DEEP)
    )
    return _fitted(_drafts_ms(shallow, SHALLOW), _drafts_ms(deep, DEEP), shallow, costs.step_ms(1, 0))


def _fitted(one: Sequence[float], many: Sequence[float], shallow: Sequence[Run], plain_ms: float) -> ProposeMs:
    """The line through drafts of two depths, and what reading a token took where the prompt was read.

    plain_ms: stands for a level where the answers were too short for a draft.
    """
    if not one:
        return ProposeMs(0.0, plain_ms, plain_ms)
    shallow_ms = median(one)
    each = max(0.0, median(many) - shallow_ms) / (DEEP - SHALLOW) if many else shallow_ms / SHALLOW
    once = max(0.0, shallow_ms - SHALLOW * each)
    reading: list[float] = []
    for run in shallow:
        read = min(CATCH_UP_TOKENS, run.started.prompt_tokens)
        reading.append((run.finished.record.cycles[0].propose_ms - shallow_ms) / read)
    return ProposeMs(once, each, max(0.0, median(reading)))


def _drafts_ms(runs: Iterable[Run], levels: int) -> list[float]:
    """Of each draft of so many levels. The first of an answer is another matter: the prompt is read for it."""
    return [cycle.propose_ms for run in runs for cycle in run.finished.record.cycles[1:] if cycle.depth == levels]


def _short_run(session: Session, case: Case, setting: Setting, costs: Costs) -> Run:
    budget = min(TIMED_TOKENS, case.options.max_tokens or TIMED_TOKENS)
    short = replace(case, options=replace(case.options, max_tokens=budget))
    return run_case(session, short, setting, fresh=False, costs=costs)
