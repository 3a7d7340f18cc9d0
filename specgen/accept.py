"""What authorises output: the acceptance rules.

Knows: a draft, the target's logits for its rows, and how the target's tokens are drawn. Does not know: caches, text.
Row 0 of the logits follows the pending token; row i + 1 follows draft node i. DESIGN: rules return the accepted path
and the target's own token behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specgen.draft import ROOT, Draft
from specgen.options import AcceptName
from specgen.sampling import Drawing, Purpose, Sampler, finite


@dataclass(frozen=True, slots=True)
class Verdict:
    path: tuple[int, ...]  # accepted nodes from the root down
    next_token: int  # the target's: corrected, bonus, or plain when there was no draft


class AcceptRule(Protocol):
    name: AcceptName
    lossless: bool  # whether the output has the target's distribution

    def drawing(self, sampler: Sampler) -> Drawing | None:
        """How a device can draw the target's token of every row by itself, where that decides what is accepted."""
        ...

    def __call__(self, draft: Draft | None, logits: Tensor, position: int, sampler: Sampler) -> Verdict:
        """logits (1 + N, V); `position` is that of the first token to be chosen."""
        ...


def follow(draft: Draft | None, token_after: Callable[[int, Sequence[int]], int]) -> Verdict:
    """The path of nodes that are the target's own samples. `token_after(node, path)`: the target's token behind a node
    (ROOT: behind the pending token), where `path` are the draft tokens up to it."""
    path: list[int] = []
    tokens: list[int] = []
    node = ROOT
    while True:
        token = token_after(node, tokens)
        children = draft.children(node) if draft else []
        child = next((c for c in children if draft and draft.tokens[c] == token), None)
        if child is None:
            return Verdict(tuple(path), token)
        path.append(child)
        tokens.append(token)
        node = child


def follow_drawn(draft: Draft | None, drawn: Sequence[int]) -> Verdict:
    """The same where the target's token of each row is drawn already (R,); NonFiniteLogitsError when the path meets a
    row that has none."""
    return follow(draft, lambda node, _: finite(drawn[node + 1]))


class Coupled:
    """A node is accepted iff it is the target's own sample, so the text is the same for every proposer and γ.

    Drafter-invariant speculative decoding: Daliri, Musco, Suresh, 2408.07978.
    """

    name: AcceptName = "coupled"
    lossless = True

    def drawing(self, sampler: Sampler) -> Drawing | None:
        return sampler.drawing

    def __call__(self, draft: Draft | None, logits: Tensor, position: int, sampler: Sampler) -> Verdict:
        if sampler.draws_rows:
            positions = [position, *(position + depth for depth in draft.depths)] if draft else [position]
            return follow_drawn(draft, sampler.tokens(logits, positions))
        return follow(draft, lambda node, path: sampler.token(logits[node + 1], path, position + len(path)))


class Rejection:
    """Speculative sampling: accept with min(1, p/q), else draw from the positive part of p - q.

    Leviathan et al. 2211.17192, Chen et al. 2302.01318. Siblings are tried in order, each against what the earlier
    ones left of p (each was drawn from its own `draft_probs`: without replacement, from q without the earlier ones).
    """

    name: AcceptName = "rejection"
    lossless = True

    def drawing(self, sampler: Sampler) -> Drawing | None:
        return None  # the target's probabilities decide, not its sample

    def __call__(self, draft: Draft | None, logits: Tensor, position: int, sampler: Sampler) -> Verdict:
        path: list[int] = []
        tokens: list[int] = []
        node = ROOT
        while draft is not None and (children := draft.children(node)):
            p = sampler.probs(logits[node + 1], tokens)
            child, residual = self._choose(draft, children, p, position + len(tokens), sampler)
            if child is None:
                token = sampler.draw(residual, position + len(tokens), Purpose.RESIDUAL)
                return Verdict(tuple(path), token)
            path.append(child)
            tokens.append(draft.tokens[child])
            node = child
        return Verdict(tuple(path), sampler.token(logits[node + 1], tokens, position + len(tokens)))

    def _choose(
        self, draft: Draft, children: Sequence[int], p: Tensor, position: int, sampler: Sampler
    ) -> tuple[int | None, Tensor]:
        """The accepted child, or None and what is left of p (V,), normalised."""
        for child in children:
            token = draft.tokens[child]
            q = draft.probs[child]
            drawn_from = 1.0 if q is None else float(q[token])
            if sampler.coin(position, token) * drawn_from < float(p[token]):
                return child, p
            p = residual_probs(p, q, token)
        return None, p


def residual_probs(p: Tensor, q: Tensor | None, token: int) -> Tensor:
    """norm(max(p - q, 0)) (V,); q None is the point mass on `token`."""
    if q is None:
        rest = p.clone()
        rest[token] = 0.0
    else:
        rest = (p - q).clamp(min=0.0)
        # In exact arithmetic a rejected token has p < q; rounding must not let it come back.
        rest[token] = 0.0
    total = float(rest.sum())
    # p = q up to rounding: a rejection then has probability 0 in exact arithmetic, and p itself is right.
    return rest / total if total > 0.0 else p


class Typical:
    """Medusa's typical acceptance (2401.10774): a node is accepted iff p(token) > min(ε, δ · exp(-H(p))). Lossy."""

    name: AcceptName = "typical"
    lossless = False

    def drawing(self, sampler: Sampler) -> Drawing | None:
        return None  # the target's probabilities decide, not its sample

    def __init__(self, epsilon: float = 0.09, delta: float = 0.3) -> None:
        self.epsilon = epsilon
        self.delta = delta

    def __call__(self, draft: Draft | None, logits: Tensor, position: int, sampler: Sampler) -> Verdict:
        path = self._longest(draft, ROOT, logits, (), sampler) if draft else ()
        tokens = [draft.tokens[node] for node in path] if draft else []
        row = path[-1] + 1 if path else 0
        return Verdict(path, sampler.token(logits[row], tokens, position + len(path)))

    def _longest(
        self, draft: Draft, node: int, logits: Tensor, tokens: tuple[int, ...], sampler: Sampler
    ) -> tuple[int, ...]:
        """The longest path of accepted nodes below `node`; the earliest proposed of equals."""
        best: tuple[int, ...] = ()
        children = draft.children(node)
        if not children:
            return best
        p = sampler.probs(logits[node + 1], tokens)
        threshold = self._threshold(p)
        for child in children:
            token = draft.tokens[child]
            if float(p[token]) > threshold:
                below = (child, *self._longest(draft, child, logits, (*tokens, token), sampler))
                best = max(best, below, key=len)
        return best

    def _threshold(self, p: Tensor) -> float:
        entropy = -float(torch.special.xlogy(p, p).sum())
        return min(self.epsilon, self.delta * float(torch.exp(torch.tensor(-entropy))))


RULES: dict[AcceptName, type[Coupled] | type[Rejection] | type[Typical]] = {
    "coupled": Coupled,
    "rejection": Rejection,
    "typical": Typical,
}
