"""Self-speculation: the target without some of its sublayers drafts for itself (Draft & Verify, 2309.08168).

Knows: how the draft reads the target's K and V without changing them, and how often it agrees. Does not know: which
sublayers are best left out (tune.skip_search).

The draft shares weights and cache with the target. It reads the slots that are committed, which hold the target's own K
and V, and writes its own behind them: exactly the slots that the verification then overwrites. So it never has to catch
up, costs no memory, and leaves no trace.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specgen.cache import KVCache
from specgen.errors import UsageError
from specgen.model.decoder import Decoder
from specgen.model.spec import ModelSpec, Skipped, Sublayer
from specgen.propose.model import advance
from specgen.step import EagerRunner, StepRunner

AGREEMENT_TOKENS = 128
"""Of a text, as many of its last tokens are compared."""


class SharedPrefix:
    """A reader (propose.model) over the cache of the target."""

    def __init__(self, runner: StepRunner, target: KVCache, vocab: int) -> None:
        self.vocab = vocab
        self.capacity = target.capacity
        self._runner = runner
        self._target = target
        self._cache = target.shadow()

    def lag(self, committed: Sequence[int], agreed: int) -> int:
        self._cache.follow(self._target)
        assert self._cache.length == len(committed) - 1
        return 1

    def read(self, committed: Sequence[int], count: int) -> Tensor:
        return advance(self._runner, self._cache, committed[-count:])

    def extend(self, token: int) -> Tensor:
        return advance(self._runner, self._cache, [token])


def without(model: Decoder, skipped: Skipped) -> Decoder:
    """`model` without these sublayers, sharing all weights."""
    attention = [index for kind, index in skipped if kind == "attention"]
    return model.skipping(attention, [index for kind, index in skipped if kind == "mlp"])


def sublayers_of(model: Decoder) -> list[Sublayer]:
    """What can be left out: all layers but the first, which makes sense of the embedding. Those of the middle are known
    to matter least, and come first for a search that cannot try them all. UsageError when there are none."""
    if len(model.spec.layers) < 2:
        raise UsageError("a model of one layer has nothing to leave out", hint="leave out --skip or --proposer skip")
    middle = 0.6 * len(model.spec.layers)
    return sorted(_all_sublayers(model.spec, first=1), key=lambda one: abs(one[1] - middle))


def draft_share(model: Decoder, skipped: Skipped) -> float:
    """What a draft step costs as a share of a whole step: the elements of the weights that it still reads."""
    spec = model.spec
    whole = sum(_elements(spec, one) for one in _all_sublayers(spec)) + spec.hidden * spec.vocab  # the head is read too
    return 1.0 - sum(_elements(spec, one) for one in skipped) / whole


def _all_sublayers(spec: ModelSpec, first: int = 0) -> list[Sublayer]:
    layers = range(first, len(spec.layers))
    return [("mlp", index) for index in layers] + [("attention", index) for index in layers]


def _elements(spec: ModelSpec, sublayer: Sublayer) -> int:
    """Of the weights that one token makes the sublayer read."""
    kind, index = sublayer
    if kind == "attention":
        return spec.hidden * spec.head_dim * 2 * (spec.heads + spec.kv_heads)
    moe = spec.layers[index].moe
    return 3 * spec.hidden * (spec.intermediate if moe is None else moe.intermediate * moe.active)


class Agreement:
    """How often the target and the target without some sublayers have the same likeliest token, along one text."""

    def __init__(self, model: Decoder, text: Sequence[int], max_rows: int = 64) -> None:
        """text: ≥ 1 token. Both read it by themselves, in a cache that is thrown away."""
        self._model = model
        self._text = list(text[-AGREEMENT_TOKENS:])
        self._rows = max_rows
        self._wanted = self._choices(model)

    def __call__(self, skipped: Skipped) -> float:
        return float((self._choices(without(self._model, skipped)) == self._wanted).float().mean())

    def _choices(self, model: Decoder) -> Tensor:
        """(tokens,) the likeliest token after each prefix of the text."""
        runner = EagerRunner(model, self._rows)
        cache = model.new_cache(len(self._text))
        found: list[int] = []
        for begin in range(0, len(self._text), self._rows):
            tokens = self._text[begin : begin + self._rows]
            with cache.transaction(len(tokens)):
                out = runner.step(tokens, range(-1, len(tokens) - 1), cache)
                cache.commit(len(tokens))
            found += model.kernels.argmax(out.logits)
        return torch.tensor(found)
