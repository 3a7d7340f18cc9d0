"""The transform pipeline: penalties as a pure function of a row's prefix, options checked, draws keyed by purpose."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specgen.errors import UsageError
from specgen.kernels.reference import ReferenceKernels
from specgen.options import LoadOptions, NgramOptions, RunOptions, SamplingOptions
from specgen.sampling import NonFiniteLogitsError, Purpose, Sampler

VOCAB = 7
LOGITS = torch.tensor([1.5, -0.5, 0.25, 2.0, -3.0, 0.0, 1.0])


def sampler(options: SamplingOptions, prompt: tuple[int, ...] = (1,), vocab: int = VOCAB) -> Sampler:
    return Sampler(options, ReferenceKernels(), prompt, vocab)


def naive_adjust(options: SamplingOptions, logits: torch.Tensor, prompt: list[int], said: list[int]) -> list[float]:
    """Token by token, from the definitions in SamplingOptions."""
    result = []
    for token, logit in enumerate(logits.tolist()):
        logit += dict(options.logit_bias).get(token, 0.0)
        if token in prompt + said:
            logit = logit / options.repetition_penalty if logit > 0 else logit * options.repetition_penalty
        logit -= options.frequency_penalty * Counter(said)[token]
        logit -= options.presence_penalty * (token in said)
        result.append(logit)
    return result


tokens = st.lists(st.integers(0, VOCAB - 1), max_size=8)


@given(prompt=tokens.filter(bool), said=tokens, path=tokens, repetition=st.floats(0.5, 2), other=st.floats(-1, 1))
@settings(max_examples=100, deadline=None)
def test_penalties_are_a_function_of_the_whole_prefix(prompt, said, path, repetition, other) -> None:
    options = SamplingOptions(
        repetition_penalty=repetition,
        presence_penalty=other,
        frequency_penalty=-other / 2,
        logit_bias=((2, 0.5), (5, -1.0)),
    )
    one = sampler(options, tuple(prompt))
    for token in said:
        one.observe([token])
    adjusted = one.adjust(LOGITS, path)
    assert adjusted.tolist() == pytest.approx(naive_adjust(options, LOGITS, prompt, said + path), abs=1e-5)
    whole = sampler(options, tuple(prompt))
    whole.observe(said + path)
    assert torch.equal(adjusted, whole.adjust(LOGITS)), "draft tokens count like committed ones, bit for bit"
    assert torch.equal(one.adjust(LOGITS), one.adjust(LOGITS, ())), "a path leaves no trace"


def test_padding_of_the_vocabulary_is_never_chosen() -> None:
    padded = torch.cat((LOGITS, torch.tensor([99.0, float("nan")])))
    one = sampler(SamplingOptions())
    assert one.token(padded, [], 3) == 3
    assert len(one.probs(padded, [])) == VOCAB


def test_forbidden_token() -> None:
    one = sampler(SamplingOptions(logit_bias=((3, -math.inf),)))
    assert one.token(LOGITS, [], 3) == 0


def test_bias_behind_the_vocabulary_is_refused() -> None:
    with pytest.raises(UsageError, match="token 7"):
        sampler(SamplingOptions(logit_bias=((VOCAB, 1.0),)))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_logits_are_reported(bad: float) -> None:
    broken = LOGITS.clone()
    broken[1] = bad
    for options in (SamplingOptions(), SamplingOptions(temperature=0.7, top_k=2, seed=1)):
        with pytest.raises(NonFiniteLogitsError):
            sampler(options).token(broken, [], 0)
        with pytest.raises(NonFiniteLogitsError):
            sampler(options).probs(broken, [])


def test_token_is_a_pure_function_of_seed_and_position() -> None:
    options = SamplingOptions(temperature=1.0, seed=2**63 + 5)
    drawn = [sampler(options).token(LOGITS, [], position) for position in range(40)]
    again = sampler(options)
    assert [again.token(LOGITS, [], position) for position in reversed(range(40))] == drawn[::-1]
    assert len(set(drawn)) > 2
    other = SamplingOptions(temperature=1.0, seed=6)
    assert [sampler(other).token(LOGITS, [], position) for position in range(40)] != drawn


def test_purposes_are_independent() -> None:
    one = sampler(SamplingOptions(temperature=1.0, seed=4))
    probs = torch.full((VOCAB,), 1 / VOCAB)
    by_purpose = [tuple(one.draw(probs, position, purpose) for position in range(60)) for purpose in Purpose]
    assert len(set(by_purpose)) == len(Purpose)
    same = sum(a == b for a, b in zip(by_purpose[0], by_purpose[3], strict=True))
    assert same < 25, "60 / 7 expected"


def test_draw_of_the_token_noise_is_the_coupled_token() -> None:
    """A proposer that draws with Purpose.TOKEN from p itself always agrees with the target."""
    one = sampler(SamplingOptions(temperature=0.8, top_p=0.9, seed=9))
    for position in range(50):
        assert one.draw(one.probs(LOGITS, []), position, Purpose.TOKEN) == one.token(LOGITS, [], position)


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": 1.5},
        {"repetition_penalty": 0.0},
        {"seed": -1},
        {"seed": 2**64},
        {"logit_bias": ((1, math.nan),)},
        {"logit_bias": ((1, 1.0), (1, 2.0))},
        {"logit_bias": ((-1, 1.0),)},
    ],
)
def test_sampling_values_out_of_range(bad: dict) -> None:
    with pytest.raises(UsageError):
        SamplingOptions(**bad)


@pytest.mark.parametrize("bad", [{"max_tokens": 0}, {"gamma": -1}, {"gamma": 17}, {"stop": ("",)}, {"accept": "x"}])
def test_run_values_out_of_range(bad: dict) -> None:
    with pytest.raises(UsageError):
        RunOptions(**bad)


def test_other_values_out_of_range() -> None:
    with pytest.raises(UsageError):
        NgramOptions(n_max=2, n_min=3)
    with pytest.raises(UsageError):
        LoadOptions(threads=0)
    with pytest.raises(UsageError) as caught:
        RunOptions(proposer="ngramm")  # type: ignore[arg-type]
    assert "ngram" in (caught.value.hint or "")
