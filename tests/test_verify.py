"""`verify` passes on a sound build, and fails for every fault that is put into one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_session import tiny_cases, tiny_file, tiny_session

from specgen import accept, placement
from specgen.accept import Coupled, Rejection, Verdict, follow_drawn
from specgen.cache import KVCache
from specgen.kernels.base import Truncation
from specgen.kernels.reference import ReferenceKernels
from specgen.measure import verify as verify_module
from specgen.measure.chisquare import consistent, critical_value
from specgen.measure.verify import Claim, Promise, promise, verify
from specgen.session import Session


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_file(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(verify_module, "DRAWS", 400)
    monkeypatch.setattr(verify_module, "GAMMAS", (1, 3, 8))
    monkeypatch.setenv("SPECGEN_DATA", str(tmp_path))


def claims(model_file: Path, tokens: int = 24) -> dict[str, Claim]:
    loaded = tiny_session(model_file)
    return {claim.name: claim for claim in verify(loaded, tiny_cases(loaded, tokens))}


def failed(found: dict[str, Claim]) -> list[str]:
    return [name for name, claim in found.items() if not claim.passed]


def use_kernels(monkeypatch: pytest.MonkeyPatch, kernels: ReferenceKernels) -> None:
    monkeypatch.setattr(placement, "select_kernels", lambda card, threads: (kernels, None))


def test_a_sound_build_passes(model_file: Path) -> None:
    found = claims(model_file)
    assert failed(found) == []
    assert len(found) == 8
    assert all(claim.checked > 0 for claim in found.values())
    assert sum(claim.checked for name, claim in found.items() if "text" in name) >= 30


def test_the_definition_passes_too(model_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_kernels(monkeypatch, ReferenceKernels())
    assert failed(claims(model_file, 8)) == []


class BatchedLinear(ReferenceKernels):
    """Fault: wide steps go through another product, which adds up in another order."""

    def linear(self, x, weight):
        if len(x) <= 4:
            return super().linear(x, weight)
        return (x.double() @ self.decode(weight).double().T).float()


class LooksAhead(ReferenceKernels):
    """Fault: a row's result depends on where the row stands."""

    def rms_norm(self, x, weight, eps):
        y = super().rms_norm(x, weight, eps)
        return torch.cat([y[:1], y[1:] * 1.001]) if len(y) > 1 else y


class ForgetsTopK(ReferenceKernels):
    """Fault: the sampler ignores top-k."""

    def gumbel_argmax(self, logits, cut, noise):
        return super().gumbel_argmax(logits, Truncation(cut.temperature, 0, cut.top_p, cut.min_p), noise)


@pytest.mark.parametrize(
    ("kernels", "broken"),
    [(BatchedLinear, "width"), (LooksAhead, "width"), (LooksAhead, "order"), (ForgetsTopK, "sampler")],
)
def test_a_broken_kernel_fails(
    model_file: Path, monkeypatch: pytest.MonkeyPatch, kernels: type[ReferenceKernels], broken: str
) -> None:
    use_kernels(monkeypatch, kernels())
    assert any(broken in name for name in failed(claims(model_file, 8)))


class PrefillsOtherwise(ReferenceKernels):
    """What is read at the beginning of a text goes through another kernel."""

    def rope_write(self, q, k, v, cos_sin, layer, start):
        return super().rope_write(q, k, v * 1.001 if start == 0 else v, cos_sin, layer, start)


@pytest.mark.parametrize(
    ("kernels", "expected"),
    [
        (ReferenceKernels, Promise.TOKENS),
        (PrefillsOtherwise, Promise.ROWS),
        (LooksAhead, Promise.NONE),
    ],
)
def test_the_promise_that_holds_is_named(
    model_file: Path, monkeypatch: pytest.MonkeyPatch, kernels: type[ReferenceKernels], expected: Promise
) -> None:
    use_kernels(monkeypatch, kernels())
    assert promise(list(claims(model_file, 8).values())) == expected


class AcceptsFirst(Coupled):
    """Fault: the first draft token is always accepted."""

    def drawing(self, sampler):
        return None  # or else the step itself draws, and the rule is not asked

    def __call__(self, draft, logits, position, sampler):
        verdict = super().__call__(draft, logits, position, sampler)
        if draft is not None and not verdict.path:
            return Verdict((0,), sampler.token(logits[1], [draft.tokens[0]], position + 1))
        return verdict


class NeverCorrects(Rejection):
    """Fault: after a rejection it draws from p, not from what is left of it."""

    def _choose(self, draft, children, p, position, sampler):
        child, _ = super()._choose(draft, children, p, position, sampler)
        return child, p


@pytest.mark.parametrize(
    ("name", "rule", "broken"),
    [
        ("coupled", AcceptsFirst, ["greedy text", "sampled text", "under coupled"]),
        ("rejection", NeverCorrects, ["under rejection"]),
    ],
)
def test_a_broken_acceptance_rule_fails(
    model_file: Path, monkeypatch: pytest.MonkeyPatch, name: str, rule: type, broken: list[str]
) -> None:
    monkeypatch.setitem(accept.RULES, name, rule)
    names = failed(claims(model_file))
    assert all(any(word in found for found in names) for word in broken)


def test_a_fault_behind_tokens_that_the_step_drew_fails(model_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy tokens come with the logits: the first draft token is always accepted."""

    def follow(draft, drawn):
        verdict = follow_drawn(draft, drawn)
        return Verdict((0,), drawn[1]) if draft is not None and not verdict.path else verdict

    monkeypatch.setattr("specgen.engine.follow_drawn", follow)
    names = failed(claims(model_file))
    assert any("greedy text" in found for found in names)
    assert not any("sampled text" in found for found in names)


def corrupt_commit(original: Callable[..., None]) -> Callable[..., None]:
    """Fault: when more than one row of a draft is kept, the last one is lost."""

    def commit(self: KVCache, rows) -> None:
        original(self, rows)
        if not isinstance(rows, int) and len(rows) > 1:
            for layer in self.layers:
                layer.k[:, self.length - 1] = 0

    return commit


def keep_rolled_back(original: Callable[..., None]) -> Callable[..., None]:
    """Fault: rewinding leaves a slot of the old text in place of the one before it."""

    def rollback(self: KVCache, length: int | None = None) -> None:
        if length is not None and 0 < length < self.length:
            for layer in self.layers:
                layer.v[:, length - 1] = layer.v[:, length]
        original(self, length)

    return rollback


@pytest.mark.parametrize(
    ("method", "fault", "broken"),
    [("commit", corrupt_commit, "text"), ("rollback", keep_rolled_back, "prefix was computed")],
)
def test_a_broken_cache_fails(
    model_file: Path, monkeypatch: pytest.MonkeyPatch, method: str, fault: Callable[..., Callable], broken: str
) -> None:
    monkeypatch.setattr(KVCache, method, fault(getattr(KVCache, method)))
    assert any(broken in name for name in failed(claims(model_file)))


def test_a_check_that_raises_is_a_failure(model_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(loaded: Session) -> Claim:
        raise ZeroDivisionError("bang")

    monkeypatch.setattr(verify_module, "_sampler", explode)
    found = claims(model_file, 8)["sampler"]
    assert not found.passed
    assert "bang" in found.failures[0]


def test_the_cache_is_left_empty(model_file: Path) -> None:
    loaded = tiny_session(model_file)
    next(iter(verify(loaded, tiny_cases(loaded, 8))))
    list(verify(loaded, tiny_cases(loaded, 8)))
    assert (loaded.engine.cache.length, loaded.engine.committed) == (0, [])


def test_critical_values() -> None:
    scipy_stats = pytest.importorskip("scipy.stats")
    for freedom in (1, 2, 5, 20):
        exact = scipy_stats.chi2.isf(1e-5, freedom)
        assert critical_value(freedom) == pytest.approx(exact, rel=0.04)


def test_consistent() -> None:
    fair = [0, 1] * 500
    assert consistent(fair, [0.5, 0.5])
    assert not consistent(fair, [0.6, 0.4])
    assert not consistent([*fair, 2], [0.5, 0.5, 0.0]), "an impossible token"
    assert not consistent([5], [0.5, 0.5]), "a token outside the vocabulary"
    assert consistent([0] * 1000, [0.999, 0.0005, 0.0005])
