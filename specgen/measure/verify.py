"""Proof of the promises on this machine, with this model: what `specgen verify` runs.

Knows: each promise as a check with counts. Does not know: how results are shown. Every check goes through the code that
`run` uses: the session's runner, cache, kernels, acceptance rules and sampler. The cache is emptied before and after.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from specgen.accept import RULES
from specgen.cancel import Cancel
from specgen.draft import Draft
from specgen.engine import Answer
from specgen.kernels.base import Truncation
from specgen.kernels.reference import truncated_probs
from specgen.measure.chisquare import consistent
from specgen.measure.runs import Case, Report, Run, run_case, silent, trace_of
from specgen.options import MAX_GAMMA, AcceptName, SamplingOptions
from specgen.records import RunRecord
from specgen.sampling import Purpose, Sampler
from specgen.text.answer import AnswerText
from specgen.tune.controller import FixedGamma
from specgen.tune.replay import Drafter, Guess, GuessProposer, PrefixGuesses
from specgen.tune.setting import PLAIN, Setting

if TYPE_CHECKING:
    from specgen.session import Session

GAMMAS = (1, 2, 3, 5, 8, MAX_GAMMA)
WIDEST = MAX_GAMMA + 1
DRAWS = 3000
TINY_VOCAB = 7
FAILURES_SHOWN = 3
HIT_SHARE = 0.75
"""Of the tokens that a scrambled draft has right: most cycles then end in the middle of a draft."""


Topic = Literal["text", "rows", "history", "distribution"]


class Promise(StrEnum):
    """What holds for the logits of this model on this device; each includes those below it."""

    TOKENS = "logits depend on the tokens alone: neither on the rows beside them nor on how the prefix was computed"
    ROWS = "logits do not depend on the rows beside them, but on how the prefix was computed"
    NONE = "logits depend on the rows beside them"


@dataclass(frozen=True, slots=True)
class Claim:
    """One promise, and what was found."""

    name: str
    checked: int
    failures: tuple[str, ...]  # the first few, in words
    failed: int
    skipped: str | None = None  # why nothing was checked
    topic: Topic = "text"

    @property
    def passed(self) -> bool:
        return self.failed == 0 and (self.checked > 0 or self.skipped is not None)


class _Count:
    """Checks of one claim as they happen."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.checked = 0
        self.failures: list[str] = []

    def check(self, ok: bool, what: str) -> None:
        self.checked += 1
        if not ok:
            self.failures.append(what)

    def claim(self) -> Claim:
        return Claim(self.name, self.checked, tuple(self.failures[:FAILURES_SHOWN]), len(self.failures))


def verify(session: Session, cases: Sequence[Case], report: Report = silent) -> Iterator[Claim]:
    """Every claim, as soon as it is known. `cases`: greedy and sampled prompts."""
    greedy = [case for case in cases if case.temperature == "greedy"]
    sampled = [case for case in cases if case.temperature == "sampled"]
    checks: list[tuple[str, Topic, Callable[[], Claim]]] = [
        ("greedy text", "text", lambda: _same_text(session, greedy, "greedy")),
        ("sampled text", "text", lambda: _same_text(session, sampled, "sampled")),
        ("widths", "rows", lambda: _widths(session, cases[0].prompt.ids)),
        ("orders", "rows", lambda: _orders(session, cases[0].prompt.ids)),
        ("histories", "history", lambda: _histories(session, cases[0].prompt.ids)),
        ("sampler", "distribution", lambda: _sampler(session)),
        ("coupled", "distribution", lambda: _rule(session, "coupled")),
        ("rejection", "distribution", lambda: _rule(session, "rejection")),
    ]
    try:
        for number, (what, topic, check) in enumerate(checks):
            report(number, len(checks), what)
            session.engine.rewind(0)
            yield replace(_told(what, check), topic=topic)
        report(len(checks), len(checks), "done")
    finally:
        session.engine.rewind(0)


def promise(claims: Sequence[Claim]) -> Promise:
    """What the checks of rows and histories have found."""
    broken = {claim.topic for claim in claims if not claim.passed}
    if "rows" in broken:
        return Promise.NONE
    return Promise.ROWS if "history" in broken else Promise.TOKENS


def _told(what: str, check: Callable[[], Claim]) -> Claim:
    """The check's claim. A build that is broken enough to raise has broken it too."""
    try:
        return check()
    except Exception as error:
        return Claim(what, 1, (f"{type(error).__name__}: {error}",), 1)


def _same_text(session: Session, cases: Sequence[Case], name: str) -> Claim:
    """Plain decoding's tokens against those of every proposer and γ."""
    count = _Count(f"same {name} text for every proposer and γ")
    for case in cases:
        plain = run_case(session, case, PLAIN, fresh=False)
        expected = plain.finished.token_ids
        for setting in _settings(session):
            found = run_case(session, case, setting, fresh=False).finished.token_ids
            count.check(found == expected, f"{case.id}, {setting.label}: differs at token {_first(found, expected)}")
        for gamma in GAMMAS:
            drafted = _scrambled(session, plain, gamma)
            count.check(
                drafted == expected, f"{case.id}, scrambled γ {gamma}: differs at token {_first(drafted, expected)}"
            )
    return count.claim()


def _settings(session: Session) -> Iterator[Setting]:
    for gamma in (None, *GAMMAS):
        yield Setting("ngram", gamma, n_max=3, n_min=1)
    yield Setting("ngram", 8, n_max=3, n_min=1, tree=3)
    if session.speculation.draft is not None:
        for gamma in (None, 1, 4, 8):
            yield Setting("model", gamma)
        yield Setting("mix", None)


def _first(found: Sequence[int], expected: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), len(found))


def _scrambled(session: Session, plain: Run, gamma: int) -> tuple[int, ...]:
    """The answer again, with drafts that are right about as often as a good draft model's."""
    case, trace = plain.case, trace_of(plain, session)
    rng = random.Random(gamma)
    vocab = session.vocab
    guesses = tuple(Guess(t if rng.random() < HIT_SHARE else rng.randrange(vocab)) for t in trace.answer)
    text = AnswerText(session.tokenizer, case.options.stop, turn=case.prompt.turn)
    answer = Answer(
        prompt=case.prompt.ids,
        proposer=GuessProposer("scrambled", len(case.prompt.ids), Drafter(PrefixGuesses(guesses)), filler=0),
        policy=FixedGamma(gamma),
        rule=RULES["coupled"](),
        sampler=Sampler(case.options.sampling, session.kernels, case.prompt.ids, vocab),
        cut=text.cut,
        max_tokens=case.options.max_tokens,
        cancel=Cancel(),
    )
    record = RunRecord()
    session.engine.prefill(answer, record)
    return tuple(token for cycle in session.engine.decode(answer, record) for token in cycle.tokens)


class _Steps:
    """Single steps of the session's model behind a prefix."""

    def __init__(self, session: Session, prefix: Sequence[int]) -> None:
        self._engine = session.engine
        self._engine.rewind(0)
        self.prefix = list(prefix)
        self.append(self.prefix)

    def append(self, tokens: Sequence[int]) -> None:
        """Commit a chain."""
        cache = self._engine.cache
        with cache.transaction(len(tokens)):
            self._engine.runner.prefill(tokens, cache)
            cache.commit(len(tokens))

    def rows(self, tokens: Sequence[int], parents: Sequence[int] | None = None) -> Tensor:
        """Logits (R, V) of rows that are not committed."""
        cache = self._engine.cache
        with cache.transaction(len(tokens)):
            parents = range(-1, len(tokens) - 1) if parents is None else parents
            return self._engine.runner.step(tokens, parents, cache).logits.clone()

    def one(self, token: int) -> Tensor:
        """Logits (V,) of the next token, which is committed: plain decoding."""
        cache = self._engine.cache
        with cache.transaction(1):
            logits = self._engine.runner.step([token], [-1], cache).logits[0].clone()
            cache.commit(1)
        return logits

    def rewind(self) -> None:
        self._engine.cache.rollback(len(self.prefix))

    def keys_and_values(self) -> list[Tensor]:
        """Copies of all that is cached."""
        cache = self._engine.cache
        stored = [t for layer in cache.layers for t in (layer.k, layer.v, layer.k_scale, layer.v_scale)]
        return [tensor[:, : cache.length].clone() for tensor in stored if tensor is not None]


def _prefix_of(session: Session, ids: Sequence[int]) -> list[int]:
    """Of a prompt, what leaves room for the widest step twice."""
    return list(ids[: max(1, session.engine.cache.capacity - 2 * WIDEST - 1)])


def _widest(session: Session) -> int:
    return min(WIDEST, session.engine.runner.widths[-1])


def _widths(session: Session, ids: Sequence[int]) -> Claim:
    """A chain of R rows against R single steps, for every R."""
    count = _Count(f"bitwise equal logits for every width 1 to {_widest(session)}")
    steps = _Steps(session, _prefix_of(session, ids))
    tokens = [(7 * i + 3) % session.vocab for i in range(_widest(session))]
    expected = [steps.one(token) for token in tokens]
    for rows in range(1, len(tokens) + 1):
        steps.rewind()
        logits = steps.rows(tokens[:rows])
        for row in range(rows):
            count.check(torch.equal(logits[row], expected[row]), f"row {row} of {rows} differs from a single step")
    return count.claim()


def _orders(session: Session, ids: Sequence[int]) -> Claim:
    """Siblings in any order against plain decoding of each; where a row stands, and beside what, changes nothing."""
    count = _Count("bitwise equal logits for every order of rows")
    rng = random.Random(1)
    steps = _Steps(session, _prefix_of(session, ids))
    root, siblings = 5 % session.vocab, rng.sample(range(session.vocab), min(_widest(session), session.vocab) - 1)
    steps.one(root)
    alone = {token: steps.rows([token])[0] for token in siblings}
    steps.rewind()
    for rows in range(2, len(siblings) + 2):
        order = rng.sample(siblings, rows - 1)
        logits = steps.rows([root, *order], [-1, *[0] * (rows - 1)])
        for row, token in enumerate(order, start=1):
            count.check(torch.equal(logits[row], alone[token]), f"row {row} of {rows} differs from the row alone")
    return count.claim()


def _histories(session: Session, ids: Sequence[int]) -> Claim:
    """Keys, values and the next logits of a prefix, however it was computed."""
    count = _Count("bitwise equal logits and KV however the prefix was computed")
    prefix = _prefix_of(session, ids)
    probe = [(5 * i + 1) % session.vocab for i in range(3)]
    steps = _Steps(session, prefix)
    expected = [steps.rows(probe), *steps.keys_and_values()]
    for name, parts in _chunkings(len(prefix)):
        steps = _Steps(session, prefix[: parts[0]])
        start = parts[0]
        for size in parts[1:]:
            steps.append(prefix[start : start + size])
            start += size
        found = [steps.rows(probe), *steps.keys_and_values()]
        same = all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        count.check(same, f"the prefix computed in {name} differs")
    count.check(_after_rollback(session, prefix, probe, expected), "the prefix after a rollback differs")
    return count.claim()


def _chunkings(tokens: int) -> Iterator[tuple[str, list[int]]]:
    """(in words, sizes that sum to `tokens`)"""
    for size in (1, 2, 7, 16, 64, 100):
        if size < tokens:
            whole, rest = divmod(tokens, size)
            yield f"chunks of {size}", [size] * whole + ([rest] if rest else [])
    rng = random.Random(2)
    sizes: list[int] = []
    while (left := tokens - sum(sizes)) > 0:
        sizes.append(rng.randint(1, min(left, 33)))
    yield "random chunks", sizes


def _after_rollback(session: Session, prefix: Sequence[int], probe: Sequence[int], expected: Sequence[Tensor]) -> bool:
    """The prefix again, with drafts written behind it and taken back in between."""
    half = max(1, len(prefix) // 2)
    steps = _Steps(session, prefix[:half])
    wrong = [(13 * i + 2) % session.vocab for i in range(_widest(session))]
    steps.rows(wrong)
    for token in wrong[:3]:
        steps.one(token)
    steps.rewind()
    if prefix[half:]:
        steps.append(prefix[half:])
    found = [steps.rows(probe), *steps.keys_and_values()]
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


WARM = (
    SamplingOptions(temperature=1.0),
    SamplingOptions(temperature=0.7, top_k=4),
    SamplingOptions(temperature=1.3, top_p=0.8),
    SamplingOptions(temperature=0.9, min_p=0.1),
)


def _tiny_logits(session: Session, seed: int, rows: int = 1) -> Tensor:
    """(rows, TINY_VOCAB), where the session's kernels read them."""
    logits = torch.randn(rows, TINY_VOCAB, generator=torch.Generator().manual_seed(seed)) * 1.5
    return logits.to(session.kernels.device)


def _sampler(session: Session) -> Claim:
    """Draws at many positions against the distribution that they should have."""
    count = _Count(f"the sampler's distribution ({DRAWS} draws each, chi-square)")
    for number, options in enumerate(WARM):
        logits = _tiny_logits(session, number)[0]
        sampler = Sampler(options, session.kernels, [0], TINY_VOCAB)
        tokens = [sampler.token(logits, (), position) for position in range(DRAWS)]
        expected = _probs(logits, options)
        count.check(consistent(tokens, expected.tolist()), f"{_words(options)}: not the distribution it should be")
    return count.claim()


def _probs(logits: Tensor, options: SamplingOptions) -> Tensor:
    return truncated_probs(logits, Truncation(options.temperature, options.top_k, options.top_p, options.min_p))


def _rule(session: Session, name: AcceptName) -> Claim:
    """The first token of a cycle with a draft, over many positions, against plain sampling's distribution."""
    count = _Count(f"the distribution under {name} ({DRAWS} draws each, chi-square)")
    for number, options in enumerate(WARM):
        logits = _tiny_logits(session, 10 + number, rows=2)
        draft_probs = _probs(_tiny_logits(session, 20 + number)[0], options)
        target_probs = _probs(logits[0], options)
        tokens = []
        for position in range(DRAWS):
            sampler = Sampler(options, session.kernels, [0], TINY_VOCAB)
            draft = _drawn(sampler, name, draft_probs, position)
            verdict = RULES[name]()(draft, logits, position, sampler)
            tokens.append(draft.tokens[verdict.path[0]] if verdict.path else verdict.next_token)
        where = f"{_words(options)}: the first token is not distributed as plain sampling's"
        count.check(consistent(tokens, target_probs.tolist()), where)
    return count.claim()


def _drawn(sampler: Sampler, rule: AcceptName, probs: Tensor, position: int) -> Draft:
    """A token from a draft model's distribution, drawn as that rule's draft models draw."""
    if rule == "coupled":
        return Draft.chain([sampler.draw(probs, position, Purpose.TOKEN)])
    return Draft.chain([sampler.draw(probs, position, Purpose.DRAFT)], [probs])


def _words(options: SamplingOptions) -> str:
    default = SamplingOptions()
    names = ("temperature", "top_k", "top_p", "min_p")
    return ", ".join(f"{n} {getattr(options, n):g}" for n in names if getattr(options, n) != getattr(default, n))
