"""From logits to a token, the same way for target and draft.

Knows: the one pipeline of transforms (bias, penalties, temperature, top-k, top-p, min-p) and where randomness comes
from: a pure function of (seed, position, token id, purpose), so that nothing has to be rolled back. Does not know:
drafts, acceptance, text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import torch
from torch import Tensor

from specgen.errors import ExitCode, SpecgenError, UsageError
from specgen.kernels.base import NON_FINITE, Noise, SamplesRows, Truncation
from specgen.kernels.philox import uniform
from specgen.kernels.reference import race, race_order, truncated_probs
from specgen.options import SamplingOptions


class Purpose(IntEnum):
    """What a draw is for. Draws with different purposes are independent."""

    TOKEN = 0  # the target's token; a draft model draws with the same noise under `coupled`
    ACCEPT = 1  # the coin of the rejection rule
    RESIDUAL = 2  # the token after a rejection
    DRAFT = 3  # a draft model's own draw under `rejection`


class SamplingKernels(Protocol):
    """The two ops of `kernels.base.Kernels` that choose tokens."""

    device: torch.device

    def gumbel_argmax(self, logits: Tensor, cut: Truncation, noise: Noise) -> int: ...

    def argmax(self, logits: Tensor) -> list[int]: ...


class Constraint(Protocol):
    """Which tokens an answer may go on with: a function of the answer, so that each row of a step has its own."""

    def allowed(self, path: Sequence[int]) -> Tensor:
        """(≥ V,) bool: what may follow the committed answer and `path`. At least one token may."""
        ...

    def commit(self, tokens: Sequence[int]) -> None:
        """Tokens of the answer were committed."""
        ...


class NonFiniteLogitsError(SpecgenError):
    """A row of logits held NaN or +inf, or nothing but -inf. The engine adds the layer's name."""

    code = ExitCode.MODEL


@dataclass(frozen=True, slots=True)
class Drawing:
    """How tokens are drawn where a row's logits alone decide: all that a device needs to do it by itself."""

    cut: Truncation
    seed: int
    vocab: int  # logits behind it are padding


def finite(token: int) -> int:
    """`token`, or NonFiniteLogitsError where an op said NON_FINITE."""
    if token == NON_FINITE:
        raise NonFiniteLogitsError("the model's logits are not finite", hint="the weights may be damaged")
    return token


class Sampler:
    """Chooses the tokens of one answer.

    The penalties of a row are a function of the row's whole prefix: prompt, committed answer, and the `path` of draft
    tokens before it.
    """

    def __init__(
        self,
        options: SamplingOptions,
        kernels: SamplingKernels,
        prompt: Sequence[int],
        vocab: int,  # the tokenizer's; logits behind it are padding and never chosen
        constraint: Constraint | None = None,
    ) -> None:
        self.options = options
        self.vocab = vocab
        self._kernels = kernels
        self._cut = Truncation(options.temperature, options.top_k, options.top_p, options.min_p)
        self._bias = self._dense_bias()
        self._forbids = self._bias is not None and bool((self._bias == -torch.inf).any())
        penalised = options.has_penalties
        self._seen = self._counts(prompt) if penalised else None  # (V,) in prompt and answer
        self._said = torch.zeros(vocab, device=kernels.device) if penalised else None  # (V,) in the answer
        self._constraint = constraint
        # Whether what stands before a row changes nothing but its logits.
        self._by_row = not penalised and constraint is None
        self._rows = kernels if self._by_row and isinstance(kernels, SamplesRows) else None

    def _dense_bias(self) -> Tensor | None:
        if not self.options.logit_bias:
            return None
        bias = torch.zeros(self.vocab)
        for token, value in self.options.logit_bias:
            if token >= self.vocab:
                raise UsageError(f"logit bias names token {token}", hint=f"token ids end at {self.vocab - 1}")
            bias[token] = value
        return bias.to(self._kernels.device)

    def _counts(self, tokens: Sequence[int]) -> Tensor:
        counts = torch.bincount(torch.tensor(tokens, dtype=torch.long), minlength=self.vocab)
        return counts.float()[: self.vocab].to(self._kernels.device)

    @property
    def drawing(self) -> Drawing | None:
        """What a device must know to draw the target's tokens itself; None where it takes more than a row's logits."""
        return Drawing(self._cut, self.options.seed, self.vocab) if self._by_row and self._bias is None else None

    def observe(self, tokens: Sequence[int]) -> None:
        """Tokens of the answer were committed."""
        if self._seen is not None and self._said is not None:
            counts = self._counts(tokens)
            self._seen += counts
            self._said += counts
        if self._constraint is not None:
            self._constraint.commit(tokens)

    def adjust(self, logits: Tensor, path: Sequence[int] = ()) -> Tensor:
        """(≥ V,) logits of the row that follows committed + `path` → (V,) with bias, penalties and grammar applied."""
        adjusted = self._penalised(logits, path)
        if self._constraint is None:
            return adjusted
        allowed = self._constraint.allowed(path)[: self.vocab].to(adjusted.device)
        adjusted = adjusted.masked_fill(~allowed, -torch.inf)
        if self._forbids and float(adjusted.max()) == -torch.inf:
            raise SpecgenError("the grammar and --logit-bias together leave no token to go on with")
        return adjusted

    def _penalised(self, logits: Tensor, path: Sequence[int]) -> Tensor:
        adjusted = logits[: self.vocab]
        if self._bias is not None:
            adjusted = adjusted + self._bias
        if self._seen is None or self._said is None:
            return adjusted
        seen, said = self._seen, self._said
        if path:
            counts = self._counts(path)
            seen, said = seen + counts, said + counts
        repetition = self.options.repetition_penalty
        repeated = torch.where(adjusted > 0, adjusted / repetition, adjusted * repetition)
        adjusted = torch.where(seen > 0, repeated, adjusted)
        return adjusted - said * self.options.frequency_penalty - (said > 0) * self.options.presence_penalty

    def token(self, logits: Tensor, path: Sequence[int], position: int) -> int:
        """The target's own token at `position`: argmax(log p + G(seed, position, ·))."""
        noise = Noise(self.options.seed, position, Purpose.TOKEN)
        return finite(self._kernels.gumbel_argmax(self.adjust(logits, path), self._cut, noise))

    @property
    def draws_rows(self) -> bool:
        """Whether the kernels gain by many rows at once, and the path before a row does not matter."""
        return self._rows is not None

    def tokens(self, logits: Tensor, positions: Sequence[int]) -> list[int]:
        """`token` of every row of logits (R, ≥ V) at its position, NON_FINITE where that would raise."""
        assert self._rows is not None, "see draws_rows"
        adjusted = logits[:, : self.vocab]
        if self._bias is not None:
            adjusted = adjusted + self._bias
        return self._rows.gumbel_argmax_rows(adjusted, self._cut, self.options.seed, positions)

    def probs(self, logits: Tensor, path: Sequence[int]) -> Tensor:
        """(V,) float32 distribution after all transforms: `target_probs` of the target, `draft_probs` of a draft."""
        adjusted = self.adjust(logits, path)
        finite(self._kernels.argmax(adjusted[None])[0])
        return truncated_probs(adjusted, self._cut)

    def likelihood(self, logits: Tensor, path: Sequence[int], token: int | None = None) -> float:
        """The probability of `token` (None: of the likeliest) before truncation; at temperature 0 as if it were 1."""
        adjusted = self.adjust(logits, path)
        scaled = adjusted / (self.options.temperature or 1.0)
        chosen = scaled.max() if token is None else scaled[token]
        return float((chosen - scaled.logsumexp(-1)).exp())

    def draw(self, probs: Tensor, position: int, purpose: Purpose) -> int:
        """A token drawn from an explicit (V,) distribution (need not be normalised)."""
        return race(probs, Noise(self.options.seed, position, purpose))

    def order(self, probs: Tensor, position: int, purpose: Purpose, count: int) -> list[int]:
        """At most `count` tokens drawn without replacement; the first is what `draw` would give."""
        return race_order(probs, Noise(self.options.seed, position, purpose), count)

    def coin(self, position: int, token: int) -> float:
        """Uniform in (0, 1): decides whether a drafted `token` at `position` is accepted under `rejection`."""
        return uniform(Noise(self.options.seed, position, Purpose.ACCEPT), token)
