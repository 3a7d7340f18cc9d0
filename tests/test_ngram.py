"""Prompt lookup against a scan of the whole sequence."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specgen.options import NgramOptions
from specgen.propose.ngram import CANDIDATES, LONGEST_MATCH, NgramIndex, NgramProposer, _shares


def naive(tokens: Sequence[int], limit: int, n_max: int = 4, n_min: int = 2) -> list[int] | None:
    """The longest suffix of n_max … n_min tokens that stood before; of its last occurrences those with the longest
    match behind it (by its number of binary digits), of them the one whose next token is the most frequent, then the
    longest and latest; copied on, through the end."""
    end = len(tokens)
    for n in range(min(n_max, end), n_min - 1, -1):
        starts = [i for i in range(n, end) if tokens[i - n : i] == tokens[end - n : end]][-CANDIDATES:]
        if not starts:
            continue

        def match(begin: int) -> int:
            length = 0
            while length < min(begin, LONGEST_MATCH) and tokens[begin - 1 - length] == tokens[end - 1 - length]:
                length += 1
            return length

        def often(begin: int, starts: Sequence[int] = starts) -> int:
            return sum(tokens[other] == tokens[begin] for other in starts)

        begin = max(starts, key=lambda i: (len(f"{match(i):b}"), often(i), match(i), i))
        draft = list(tokens)
        for index in range(limit):
            draft.append(draft[begin + index])
        return draft[end:]
    return None


def proposed(proposer: NgramProposer, tokens: Sequence[int], limit: int = 5) -> list[int] | None:
    draft = proposer.propose(tokens, limit)
    return list(draft.tokens) if draft else None


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 8))
@settings(max_examples=200, deadline=None)
def test_equals_a_naive_scan(tokens: list[int], limit: int) -> None:
    assert proposed(NgramProposer(), tokens, limit) == naive(tokens, limit)


@given(st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.integers(0, 8)), max_size=12))
@settings(max_examples=100, deadline=None)
def test_growth_and_rollback_leave_no_trace(steps: list[tuple[list[int], int]]) -> None:
    kept, tokens = NgramProposer(), []
    for grown, cut in steps:
        tokens = tokens + grown
        assert proposed(kept, tokens) == proposed(NgramProposer(), tokens)
        tokens = tokens[: max(0, len(tokens) - cut)]
        kept.rollback(len(tokens))
    assert proposed(kept, tokens) == proposed(NgramProposer(), tokens)


def test_a_loop_is_drafted_whole() -> None:
    assert proposed(NgramProposer(), [7, 8, 9, 7, 8, 9, 7, 8], 7) == [9, 7, 8, 9, 7, 8, 9]


def test_the_longest_match_wins_over_the_latest() -> None:
    #         1 2 3 4 → 5            9 2 3 4 → 6       1 2 3 4 → ?
    tokens = [1, 2, 3, 4, 5, 0, 0, 9, 2, 3, 4, 6, 0, 1, 2, 3, 4]
    draft = NgramProposer(NgramOptions(n_max=3, n_min=2)).propose(tokens, 1)
    assert draft is not None
    assert draft.tokens == (5,)
    assert draft.match == 4


def test_of_equal_matches_the_latest_wins() -> None:
    assert proposed(NgramProposer(), [1, 2, 5, 0, 1, 2, 6, 9, 1, 2], 1) == [6]


@pytest.mark.parametrize("tokens", [[], [1], [1, 2], [1, 2, 3, 4]])
def test_nothing_to_propose(tokens: list[int]) -> None:
    assert proposed(NgramProposer(), tokens) is None


def test_work_per_token_does_not_grow_with_the_context() -> None:
    """Counted, not timed: dictionary look-ups per lookup are bounded by n_max and CANDIDATES."""
    rng = random.Random(0)
    proposer = NgramProposer()
    tokens = [rng.randrange(3) for _ in range(20_000)]
    proposer.propose(tokens, 4)
    touched = {"compared": 0}
    original = proposer._here.match_length

    def counting(place: int, suffix: Sequence[int]) -> int:
        touched["compared"] += 1
        return original(place, suffix)

    proposer._here.match_length = counting  # type: ignore[method-assign]
    for _ in range(50):
        tokens.append(rng.randrange(3))
        proposer.propose(tokens, 4)
    assert touched["compared"] <= 50 * CANDIDATES


def test_of_like_matches_the_more_frequent_wins_over_the_latest() -> None:
    assert proposed(NgramProposer(), [1, 2, 5, 0, 1, 2, 5, 3, 1, 2, 6, 9, 1, 2], 1) == [5]


def test_a_much_longer_match_wins_over_a_frequent_one() -> None:
    once = [8, 7, 6, 1, 2, 5]
    often = [1, 2, 9, 0, 1, 2, 9, 3, 1, 2, 9]
    assert proposed(NgramProposer(NgramOptions(2, 2)), [*once, *often, 8, 7, 6, 1, 2], 1) == [5]


def test_branches_go_on_differently_and_the_best_gets_the_most() -> None:
    tokens = [1, 2, 3, 4, 4, 4, 1, 2, 5, 6, 6, 6, 1, 2, 3, 4, 4, 4, 0, 1, 2]
    draft = NgramProposer(width=2).propose(tokens, 8)
    assert draft is not None
    assert len(draft) == 8
    first, second = draft.children(-1)
    assert (draft.tokens[first], draft.tokens[second]) == (3, 5)
    assert draft.depths == sorted(draft.depths), "level by level"
    branch = [first]
    while below := draft.children(branch[-1]):
        branch += below
    assert [draft.tokens[node] for node in branch] == [3, 4, 4, 4, 0, 1]


@given(st.lists(st.integers(0, 3), min_size=4, max_size=60), st.integers(1, 12), st.integers(1, 4))
@settings(max_examples=100, deadline=None)
def test_trees_are_well_formed_and_begin_with_the_chain(tokens: list[int], limit: int, width: int) -> None:
    chain, tree = NgramProposer().propose(tokens, limit), NgramProposer(width=width).propose(tokens, limit)
    assert (chain is None) == (tree is None)
    if chain is None or tree is None:
        return
    assert len(tree) <= limit
    assert tree.tokens[0] == chain.tokens[0]
    for node in range(-1, len(tree)):
        siblings = [tree.tokens[child] for child in tree.children(node)]
        assert len(set(siblings)) == len(siblings) <= width


@pytest.mark.parametrize(("limit", "count"), [(1, 1), (8, 1), (8, 2), (8, 4), (3, 3), (4, 4), (63, 8)])
def test_every_branch_gets_a_node(limit: int, count: int) -> None:
    shares = _shares(limit, count)
    assert sum(shares) == limit
    assert min(shares) >= 1


def test_earlier_texts_are_looked_in_and_end_where_they_end() -> None:
    earlier = NgramIndex(NgramOptions(), [[5, 6, 7, 8], [1, 2, 3, 9]])
    proposer = NgramProposer(earlier=earlier)
    assert proposed(proposer, [0, 5, 6], 5) == [7, 8]
    assert proposed(proposer, [0, 5, 6, 7, 8], 5) is None, "nothing follows the end of a text"
    assert proposed(NgramProposer(earlier=earlier), [1, 2, 4, 4, 1, 2], 1) == [4], "this text comes first"
    assert len(earlier.tokens) == 10, "they are never changed"
