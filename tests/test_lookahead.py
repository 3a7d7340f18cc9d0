"""Lookahead decoding: the window hangs on the tree as the paper draws it, and the text is the target's."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from fakes import FakeRunner, hashed_logits
from test_engine import GREEDY, PENALISED, PROMPT, VOCAB, WARM, make, plain, run

from specgen.accept import RULES
from specgen.draft import ROOT, Draft
from specgen.options import SamplingOptions
from specgen.propose.lookahead import LEVELS, MAX_KEYS, PER_TOKEN, LookaheadProposer, NgramPool
from specgen.tune.controller import AutoGamma


@pytest.mark.parametrize("options", [GREEDY, WARM, PENALISED], ids=["greedy", "warm", "penalised"])
@pytest.mark.parametrize("gamma", [1, 3, 8, 16, None])
def test_same_seed_same_tokens(options: SamplingOptions, gamma: int | None) -> None:
    tokens, _, record = run(*make(LookaheadProposer(), gamma, options=options))
    assert tokens == plain(options)
    if gamma == 1:
        assert "lookahead: a draft of 1 has no room for a window" in record.fallbacks()
    elif gamma is not None:
        assert record.proposed > 0


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_runs_it(rule: str) -> None:
    tokens, _, record = run(*make(LookaheadProposer(), 12, rule=RULES[rule]()))
    assert tokens == plain()
    assert record.accepted > 0


def prefix_of(draft: Draft, node: int) -> tuple[int, ...]:
    path: list[int] = []
    while node != ROOT:
        path.append(draft.tokens[node])
        node = draft.parents[node]
    return tuple(reversed(path))


def test_the_window_is_the_papers() -> None:
    """Cell (i, j) follows the guesses before column j, then the levels of its own column."""
    proposer = LookaheadProposer()
    draft = proposer.propose([4, 9, 7, 5, 3], 16)
    assert draft is not None
    window, cells = proposer._window, proposer._cells
    columns = len(cells[0])
    assert columns == 4
    for level in range(LEVELS):
        for column in range(columns):
            seen = [*window[0][1 : column + 1], *(window[above][column] for above in range(1, level + 1))]
            assert prefix_of(draft, cells[level][column]) == tuple(seen)
    assert window[0][0] == 3, "the pending token"


def moved_on(kind: type[LookaheadProposer]) -> bool:
    """Whether one step does what Jacobi iterations, computed one by one from the target's logits, say it does."""
    target = hashed_logits(11, seed=2, order=3)
    committed = [4, 9, 7, 5, 3]
    proposer = kind()
    draft = proposer.propose(committed, 8)
    assert draft is not None
    before = [list(row) for row in proposer._window]
    rows = [target(tuple(committed)), *(target((*committed, *prefix_of(draft, node))) for node in range(len(draft)))]
    proposer.checked(draft, torch.stack(rows))
    right = proposer._window[0][1:] == before[1][1:]
    for column in range(len(before[0])):
        guesses = (*committed, *before[0][1 : column + 1], before[1][column])
        best = int(target(guesses).argmax())
        right &= proposer._window[-1][column] == best
        right &= (before[1][column], best) in proposer._pool.after(before[0][column])
    return right


class Deaf(LookaheadProposer):
    """Mutant: nothing is learned from the rows."""

    def checked(self, draft: Draft, logits: torch.Tensor) -> None:
        pass


class ReadsTheWrongRow(LookaheadProposer):
    """Mutant: the row of a node is taken for that of the node before."""

    def checked(self, draft: Draft, logits: torch.Tensor) -> None:
        super().checked(draft, logits.roll(1, 0))


def test_one_step_moves_the_window_on_and_fills_the_pool() -> None:
    assert moved_on(LookaheadProposer)
    assert not moved_on(Deaf)
    assert not moved_on(ReadsTheWrongRow)


def test_a_loop_is_found_by_the_target_itself() -> None:
    """What the window makes up is proposed before the text has said it."""

    def counting(prefix: tuple[int, ...]) -> torch.Tensor:
        return torch.nn.functional.one_hot(torch.tensor((prefix[-1] + 1) % VOCAB), VOCAB).float() * 9

    def yielded(kind: type[LookaheadProposer]) -> float:
        record = run(*make(kind(), 16, runner=FakeRunner(counting), max_tokens=60))[2]
        return record.yield_tokens or 0.0

    assert yielded(LookaheadProposer) > 2
    assert yielded(LookaheadProposer) > yielded(Deaf)


def test_a_trimmed_draft_teaches_nothing_wrong() -> None:
    proposer = LookaheadProposer()
    draft = proposer.propose([1, 2, 3], 12)
    assert draft is not None
    before = [list(row) for row in proposer._window]
    proposer.checked(draft.first(2), torch.zeros(3, VOCAB))
    assert proposer._window == before


def test_the_policy_takes_it_whole_or_not_at_all() -> None:
    policy = AutoGamma()
    policy._since_plain = 0
    draft = LookaheadProposer().propose(PROMPT, 16)
    assert draft is not None
    assert policy.trim(draft) in (None, draft)
    costly = AutoGamma()
    costly.costs.observe(1, 1.0)
    costly.costs.observe(1 + len(draft), 50.0)
    assert costly.trim(draft) is None


def test_the_pool_is_bounded() -> None:
    pool = NgramPool()
    for number in range(PER_TOKEN + 3):
        pool.add(1, (number,))
    pool.add(1, (5,))
    assert pool.after(1)[:2] == [(5,), (PER_TOKEN + 2,)]
    assert len(pool.after(1)) == PER_TOKEN
    for first in range(MAX_KEYS + 10):
        pool.add(first + 2, (0,))
    assert pool.after(1) == []
    assert len(pool._grams) == MAX_KEYS


@pytest.mark.parametrize("limit", range(1, 33))
def test_every_limit_is_kept(limit: int) -> None:
    proposer = LookaheadProposer()
    committed: list[int] = [1, 2, 3]
    for _ in range(6):
        draft = proposer.propose(committed, limit)
        if draft is None:
            assert limit < 2
            return
        assert len(draft) <= limit
        for node in (ROOT, *range(len(draft))):
            _distinct([draft.tokens[child] for child in draft.children(node)])
        proposer.checked(draft, torch.randn(len(draft) + 1, VOCAB, generator=torch.Generator().manual_seed(limit)))
        committed.append(proposer._window[0][-1])


def _distinct(tokens: Sequence[int]) -> None:
    assert len(set(tokens)) == len(tokens)
