"""The acceptance rules against the target's exact distribution, over every short sequence of a tiny vocabulary.

The oracle multiplies p(token | prefix) along each sequence. The mutants at the end are wrong rules that the same
chi-square test must catch.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from fakes import FakeRunner, ScriptedProposer, fake_cache, hashed_logits
from scipy.stats import chisquare

from specgen.accept import Coupled, Rejection, Typical, Verdict, residual_probs
from specgen.draft import Draft
from specgen.engine import Answer, Cancel, Engine
from specgen.kernels.reference import ReferenceKernels
from specgen.options import SamplingOptions
from specgen.records import RunRecord
from specgen.sampling import Purpose, Sampler
from specgen.tune.controller import FixedGamma

VOCAB, LENGTH, RUNS = 4, 2, 800
PROMPT = [1, 3]
TARGET = hashed_logits(VOCAB, seed=11, scale=1.2)
Probs = Callable[[tuple[int, ...]], torch.Tensor]


@dataclass(frozen=True)
class Case:
    options: SamplingOptions
    q: str  # how the draft's distribution relates to the target's
    gamma: int = 2


@cache
def target_probs(options: SamplingOptions, prefix: tuple[int, ...]) -> torch.Tensor:
    """p(· | prefix) by the one pipeline of transforms, from a sampler that has only seen the prompt."""
    sampler = Sampler(options, ReferenceKernels(), PROMPT, VOCAB)
    return sampler.probs(TARGET(prefix), prefix[len(PROMPT) :])


@cache
def draft_probs(case: Case, prefix: tuple[int, ...]) -> torch.Tensor:
    p = target_probs(case.options, prefix)
    if case.q == "equal":
        return p
    if case.q == "partial":
        other = torch.softmax(hashed_logits(VOCAB, seed=99, scale=2.5)(prefix), -1)
        return 0.2 * p + 0.8 * other
    if case.q == "disjoint":
        q = (p == 0).float()
        return q / q.sum() if q.sum() else torch.eye(VOCAB)[int(p.argmin())]
    raise AssertionError(case.q)


def drawing_proposer(case: Case, sampler: Sampler, purpose: Purpose) -> ScriptedProposer:
    """A draft model: draws γ tokens one after another, and says from what."""

    def guess(committed: Sequence[int], limit: int) -> Draft | None:
        prefix, tokens, probs = list(committed), [], []
        for _ in range(min(limit, case.gamma)):
            q = draft_probs(case, tuple(prefix))
            tokens.append(sampler.draw(q, len(prefix), purpose))
            probs.append(q)
            prefix.append(tokens[-1])
        return Draft.chain(tokens, probs)

    return ScriptedProposer(guess)


def siblings_proposer(case: Case, sampler: Sampler, purpose: Purpose) -> ScriptedProposer:
    """Two children drawn without replacement, each with one child of its own."""

    def guess(committed: Sequence[int], limit: int) -> Draft | None:
        if limit < 4:
            return None
        q = draft_probs(case, tuple(committed))
        first = sampler.draw(q, len(committed), purpose)
        rest = q.clone()
        rest[first] = 0
        if rest.sum() == 0:
            return Draft.chain([first], [q])
        rest = rest / rest.sum()
        # An independent draw needs a noise of its own.
        second = sampler.draw(rest, len(committed) + 1000, purpose)
        tokens, parents, probs = [first, second], [-1, -1], [q, rest]
        for parent in (0, 1):
            below = draft_probs(case, (*committed, tokens[parent]))
            tokens.append(sampler.draw(below, len(committed) + 1 + 2000 * (parent + 1), purpose))
            parents.append(parent)
            probs.append(below)
        return Draft(tuple(tokens), tuple(parents), tuple(probs))

    return ScriptedProposer(guess)


def sample(case: Case, rule, purpose: Purpose, seed: int, proposer=drawing_proposer) -> tuple[int, ...]:
    options = replace(case.options, seed=seed)
    sampler = Sampler(options, ReferenceKernels(), PROMPT, VOCAB)
    answer = Answer(
        prompt=PROMPT,
        proposer=proposer(case, sampler, purpose),
        policy=FixedGamma(8),
        rule=rule,
        sampler=sampler,
        cut=lambda tokens: (len(tokens), None),
        max_tokens=LENGTH + 4,  # room for a whole draft at every position that is looked at
        cancel=Cancel(),
    )
    engine = Engine(FakeRunner(TARGET), fake_cache())
    record = RunRecord()
    engine.prefill(answer, record)
    tokens: list[int] = []
    for cycle in engine.decode(answer, record):
        tokens.extend(cycle.tokens)
        if len(tokens) >= LENGTH:
            break
    return tuple(tokens[:LENGTH])


def p_value(case: Case, rule, purpose: Purpose, proposer=drawing_proposer, runs: int = RUNS) -> float:
    counts = Counter(sample(case, rule, purpose, seed, proposer) for seed in range(runs))
    expected = {}
    for sequence in itertools.product(range(VOCAB), repeat=LENGTH):
        share, prefix = 1.0, tuple(PROMPT)
        for token in sequence:
            share *= float(target_probs(case.options, prefix)[token])
            prefix = (*prefix, token)
        expected[sequence] = share
    impossible = [sequence for sequence in counts if expected[sequence] == 0]
    if impossible:
        return 0.0
    # Rare sequences are pooled: chi-square wants an expected count of some size in each cell.
    rare = [s for s in expected if expected[s] * runs < 5]
    common = [s for s in expected if expected[s] * runs >= 5]
    observed = [counts[s] for s in common] + [sum(counts[s] for s in rare)]
    wanted = [expected[s] * runs for s in common] + [sum(expected[s] for s in rare) * runs]
    if wanted[-1] < 1e-3:
        observed, wanted = observed[:-1], wanted[:-1]
    scale = sum(observed) / sum(wanted)
    return float(chisquare(observed, [w * scale for w in wanted]).pvalue)


RULES = {"coupled": (Coupled(), Purpose.TOKEN), "rejection": (Rejection(), Purpose.DRAFT)}
T1 = SamplingOptions(temperature=1.0)
CASES = {
    "equal": Case(T1, "equal"),
    "partial": Case(T1, "partial"),
    "disjoint": Case(SamplingOptions(temperature=1.0, top_k=2), "disjoint"),
    "warm": Case(SamplingOptions(temperature=0.6), "partial", gamma=3),
    "top-p, min-p": Case(SamplingOptions(temperature=1.3, top_p=0.9, min_p=0.1), "partial"),
    "penalties and bias": Case(
        SamplingOptions(
            temperature=1.0,
            repetition_penalty=1.4,
            presence_penalty=0.5,
            frequency_penalty=0.4,
            logit_bias=((2, 0.7), (0, -0.5)),
        ),
        "partial",
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("rule", RULES)
def test_output_has_the_targets_distribution(rule: str, name: str) -> None:
    assert p_value(CASES[name], *RULES[rule]) > 1e-3


@pytest.mark.parametrize("rule", RULES)
def test_trees_have_the_targets_distribution(rule: str) -> None:
    assert p_value(CASES["partial"], *RULES[rule], proposer=siblings_proposer) > 1e-3


class CoinIgnoresQ(Rejection):
    """Mutant: accepts with p instead of min(1, p / q)."""

    def _choose(self, draft, children, p, position, sampler):
        token = draft.tokens[children[0]]
        if sampler.coin(position, token) < float(p[token]):
            return children[0], p
        return None, residual_probs(p, draft.probs[children[0]], token)


class NoResidual(Rejection):
    """Mutant: after a rejection the token comes from p itself."""

    def _choose(self, draft, children, p, position, sampler):
        child, _ = super()._choose(draft, children, p, position, sampler)
        return child, p


class AcceptsWhatIsLikely(Coupled):
    """Mutant: a draft token is accepted when the target merely likes it."""

    def __call__(self, draft, logits, position, sampler):
        if draft is None:
            return super().__call__(draft, logits, position, sampler)
        p = sampler.probs(logits[0], [])
        if float(p[draft.tokens[0]]) > 0.1:
            return Verdict((0,), sampler.token(logits[1], [draft.tokens[0]], position + 1))
        return Verdict((), sampler.token(logits[0], [], position))


@pytest.mark.parametrize(
    ("rule", "purpose"),
    [
        (CoinIgnoresQ(), Purpose.DRAFT),
        (NoResidual(), Purpose.DRAFT),
        (AcceptsWhatIsLikely(), Purpose.TOKEN),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, Purpose) else "",
)
def test_mutant_rules_are_caught(rule, purpose: Purpose) -> None:
    assert p_value(CASES["partial"], rule, purpose) < 1e-3


def test_tree_mutant_is_caught() -> None:
    class SecondChildAgainstP(Rejection):
        """Mutant: every sibling is tried against the whole of p."""

        def _choose(self, draft, children, p, position, sampler):
            rest = p
            for child in children:
                token, q = draft.tokens[child], draft.probs[child]
                if sampler.coin(position, token) * float(q[token]) < float(p[token]):
                    return child, p
                rest = residual_probs(rest, q, token)
            return None, rest

    assert p_value(CASES["partial"], SecondChildAgainstP(), Purpose.DRAFT, siblings_proposer, 3 * RUNS) < 1e-3


# One decision at a time.


def sampler_for(options: SamplingOptions, vocab: int = VOCAB) -> Sampler:
    return Sampler(options, ReferenceKernels(), PROMPT, vocab)


def one_hot_logits(*tokens: int, vocab: int = VOCAB) -> torch.Tensor:
    """Rows that each want one token."""
    return torch.nn.functional.one_hot(torch.tensor(tokens), vocab).float() * 10


@pytest.mark.parametrize("rule", [Coupled(), Rejection(), Typical()], ids=lambda rule: rule.name)
@pytest.mark.parametrize(
    ("draft", "path", "next_token"),
    [
        ([3, 3, 3], (), 0),  # first rejection
        ([0, 1, 3], (0, 1), 2),  # later rejection
        ([0, 1, 2], (0, 1, 2), 3),  # full acceptance: a bonus token
    ],
)
def test_greedy_decisions(rule, draft: list[int], path: tuple[int, ...], next_token: int) -> None:
    verdict = rule(Draft.chain(draft), one_hot_logits(0, 1, 2, 3), 2, sampler_for(SamplingOptions()))
    assert verdict == Verdict(path, next_token)


@pytest.mark.parametrize("rule", [Coupled(), Rejection(), Typical()], ids=lambda rule: rule.name)
def test_greedy_follows_the_right_branch(rule) -> None:
    tree = Draft((3, 0, 2, 1), (-1, -1, 0, 1), (None,) * 4)
    logits = one_hot_logits(0, 3, 1, 3, 2)  # pending wants 0; node 1 (token 0) wants 1; node 3 (token 1) wants 2
    assert rule(tree, logits, 2, sampler_for(SamplingOptions())) == Verdict((1, 3), 2)


def test_residual() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2, 0.0]), torch.tensor([0.2, 0.6, 0.2, 0.0])
    assert residual_probs(p, q, 1).tolist() == pytest.approx([1.0, 0.0, 0.0, 0.0])
    assert residual_probs(p, None, 1).tolist() == pytest.approx([0.5 / 0.7, 0.0, 0.2 / 0.7, 0.0])
    assert residual_probs(p, p, 1).tolist() == p.tolist(), "nothing is left: p itself"


def test_rejection_accepts_as_often_as_the_overlap() -> None:
    """The first position is accepted with probability Σ min(p, q)."""
    case = CASES["partial"]
    p, q = target_probs(case.options, tuple(PROMPT)), draft_probs(case, tuple(PROMPT))
    hits = 0
    for seed in range(2000):
        sampler = sampler_for(SamplingOptions(temperature=1.0, seed=seed))
        token = sampler.draw(q, len(PROMPT), Purpose.DRAFT)
        logits = torch.stack([TARGET(tuple(PROMPT)), TARGET((*PROMPT, token))])
        hits += Rejection()(Draft.chain([token], [q]), logits, len(PROMPT), sampler).path == (0,)
    assert hits / 2000 == pytest.approx(float(torch.minimum(p, q).sum()), abs=0.035)


def test_coupled_agreement_is_near_the_overlap() -> None:
    """Pr[match] ≥ (1 - TV) / (1 + TV) when both draw with the same noise (2408.07978)."""
    case = CASES["partial"]
    p, q = target_probs(case.options, tuple(PROMPT)), draft_probs(case, tuple(PROMPT))
    overlap = float(torch.minimum(p, q).sum())
    hits = 0
    for seed in range(2000):
        sampler = sampler_for(SamplingOptions(temperature=1.0, seed=seed))
        token = sampler.draw(q, len(PROMPT), Purpose.TOKEN)
        hits += sampler.token(TARGET(tuple(PROMPT)), [], len(PROMPT)) == token
    assert overlap / (2 - overlap) - 0.03 <= hits / 2000 <= overlap + 0.03


def test_typical_is_labelled_lossy_and_accepts_what_is_typical() -> None:
    assert not Typical.lossless
    logits = torch.log(torch.tensor([[0.55, 0.35, 0.1, 1e-9], [0.25, 0.25, 0.25, 0.25]]))
    sampler = sampler_for(SamplingOptions(temperature=1.0))
    assert Typical()(Draft.chain([1]), logits, 2, sampler).path == (0,)
    assert Typical()(Draft.chain([3]), logits, 2, sampler).path == ()
