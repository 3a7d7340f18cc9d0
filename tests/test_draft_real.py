"""Proposers on the default model: the same text, whoever drafts, and the goals' arithmetic of the benchmark."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_session import COPY, FREE, tiny_file, tiny_session

from specgen.errors import ModelError
from specgen.events import Finished
from specgen.measure.draft_bench import Row, measure, prune, verdicts
from specgen.measure.runs import make_cases
from specgen.measure.workloads import Workload
from specgen.options import LoadOptions, ProposerName, RunOptions, SamplingOptions
from specgen.registry import ModelRef, load_registry, resolve_model
from specgen.session import Session, load
from specgen.tune.setting import PLAIN, Setting

TEXT = "List three fruits, then list the same three fruits again."
WARM = SamplingOptions(temperature=0.8, seed=2)


@pytest.fixture(scope="module")
def ref(smollm2_path: Path) -> ModelRef:
    return resolve_model(str(smollm2_path), load_registry())


def answer(session: Session, proposer: ProposerName, **more) -> tuple[tuple[int, ...], Finished]:
    options = RunOptions(WARM, 32, proposer=proposer, **more)
    last = list(session.generate(session.prompt_ids(TEXT), options))[-1]
    assert isinstance(last, Finished)
    return last.token_ids, last


@pytest.mark.slow
def test_every_proposer_says_the_same(ref: ModelRef, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECGEN_DATA", str(tmp_path))
    monkeypatch.setattr("specgen.speculation.SKIP_SEARCH_S", 0.5)
    session = load(ref, LoadOptions(context_tokens=512), draft=ref)
    plain, _ = answer(session, "none")
    for proposer in ("ngram", "model", "mix", "skip", "lookahead"):
        for tree in (1, 3):
            tokens, finished = answer(session, proposer, gamma=4, tree=tree)
            assert tokens == plain
            if proposer == "model":
                # The draft is the target itself, and draws with its noise: all of the first branch is right.
                cycles = finished.record.cycles[:-1]
                assert all(cycle.accepted == cycle.depth for cycle in cycles if cycle.proposed)
    assert session.report()["draft"] == ref.name


@pytest.mark.slow
def test_a_pruned_model_drafts_badly_and_changes_nothing(ref: ModelRef) -> None:
    session = load(ref, LoadOptions(context_tokens=512, kv="int8"))
    plain, _ = answer(session, "none")
    layers = len(session.loaded.spec.layers)
    session.speculation.draft = prune(session, [index for index in range(layers) if index != layers - 4])
    tokens, finished = answer(session, "model", gamma=3)
    assert tokens == plain
    assert 0 < finished.record.accepted < finished.record.proposed


@pytest.mark.slow
def test_a_draft_of_another_family_is_refused(ref: ModelRef, checkpoints_dir: Path) -> None:
    other = resolve_model(str(checkpoints_dir / "llama-base"), load_registry())
    with pytest.raises(ModelError, match=r"has another tokenizer: .* ids differ"):
        load(ref, LoadOptions(context_tokens=512), draft=other)


def test_a_row_takes_all_prompts_of_a_kind_together(tmp_path: Path) -> None:
    session = tiny_session(tiny_file(tmp_path))
    loads = [Workload("loops", name, text, SamplingOptions(), 250) for name, text in (("a", COPY), ("b", FREE))]
    rows = measure(session, make_cases(session, loads, "greedy")[0], [PLAIN, Setting("ngram", 2)], repeats=2)
    assert [row.setting for row in rows] == ["plain", "ngram 2-4 γ 2"]
    assert all(row.kind == "loops" and row.same_text and row.tok_s > 0.0 for row in rows)
    assert rows[0].yield_tokens == 1.0 < rows[1].yield_tokens
    assert 0.0 < rows[1].survival[0] <= 1.0


def row(kind: str, setting: str, ratio: float) -> Row:
    return Row(kind, setting, 1.0, ratio, 1.0, (), True)


def test_the_verdicts_compare_auto_with_plain_and_with_the_best_fixed_gamma() -> None:
    rows = [row("story", "ngram 2-4 γ auto", 0.98), row("grounded", "ngram 2-4 γ auto", 1.5)]
    rows += [row("grounded", "ngram 2-4 γ 4", 1.6), row("grounded", "ngram 2-4 γ 8", 1.2)]
    rows += [row("grounded", "model γ 4", 3.0)]
    assert verdicts(rows) == [
        "ngram 2-4 γ auto: worst kind story at 0.980 of plain",
        "ngram 2-4 γ auto: grounded at 0.938 of the best fixed γ (1.60 of plain)",
    ]
