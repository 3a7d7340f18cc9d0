"""Stored plans: what is written is read back, and nothing else is."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from specgen.errors import SpecgenError
from specgen.options import RunOptions
from specgen.tune.cost_store import CostStore, Learned
from specgen.tune.export import SERVERS, export
from specgen.tune.plan import Plan, PlanStore, Scope, context_class, temperature_class
from specgen.tune.predict import Costs, ProposeMs
from specgen.tune.setting import PLAIN, Setting
from specgen.tune.skip_search import SkipChoice
from specgen.tune.skip_store import SkipStore

SCOPE = Scope(digest="d" * 64, device="a CPU, 2 threads, kv bf16", versions="specgen 0.1.0, torch 2.13")
PLAN = Plan(
    scope=SCOPE,
    model="tiny",
    temperature="greedy",
    context="short",
    setting=Setting("ngram", 5, 6, 3),
    fixed_gamma=5,
    speedup=(1.1, 1.2, 1.3),
    by_kind={"chat": 1.0, "code": 1.5},
    costs=Costs(
        {128: {1: 10.0, 5: 14.0}, 1024: {1: 12.0}},
        0.1,
        0.2,
        {"ngram": ProposeMs(0.01), "model": ProposeMs(0.2, 1.5, 0.4)},
    ),
    objective="tok/s",
    created="2026-01-02T03:04:05+00:00",
    why="measured",
)


@pytest.fixture
def store(tmp_path: Path) -> PlanStore:
    return PlanStore(tmp_path / "plans")


def test_a_plan_comes_back_as_it_was(store: PlanStore) -> None:
    path = store.save(PLAN)
    assert PlanStore.read(path) == PLAN
    assert store.book(SCOPE).plans == (PLAN,)
    assert [p.name for p in store.folder.iterdir()] == [path.name], "no temporary file stays"


def test_saving_again_replaces(store: PlanStore) -> None:
    store.save(PLAN)
    later = replace(PLAN, setting=PLAIN, created="2026-02-02T00:00:00+00:00")
    store.save(later)
    assert store.book(SCOPE).plans == (later,)


def test_classes_are_kept_apart(store: PlanStore) -> None:
    warm = replace(PLAN, temperature="sampled", setting=PLAIN)
    store.save(PLAN)
    store.save(warm)
    book = store.book(SCOPE)
    assert book.choice(0.0, 100) == PLAN
    assert book.choice(0.8, 100) == warm
    assert book.choice(0.0, 5000) is None
    assert book.costs is not None
    assert (temperature_class(0.0), temperature_class(0.1)) == ("greedy", "sampled")
    assert (context_class(2047), context_class(2048)) == ("short", "long")


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"device": "another CPU"}, "another CPU"),
        ({"versions": "specgen 0.0.9"}, "specgen 0.0.9"),
    ],
)
def test_a_stale_plan_is_ignored_with_a_note(store: PlanStore, change: dict[str, str], word: str) -> None:
    store.save(replace(PLAN, scope=replace(SCOPE, **change)))
    book = store.book(SCOPE)
    assert book.plans == ()
    assert len(book.notes) == 1
    assert word in book.notes[0]


def test_a_fresh_plan_silences_the_stale_one(store: PlanStore) -> None:
    store.save(replace(PLAN, scope=replace(SCOPE, device="another CPU")))
    store.save(PLAN)
    assert store.book(SCOPE).plans == (PLAN,)
    assert store.book(SCOPE).notes == ()


def drafted(setting: Setting, draft: str | None, **changes: str) -> Plan:
    return replace(PLAN, scope=replace(SCOPE, draft=draft), setting=setting, draft=draft and "small", **changes)


def test_a_plan_is_bound_to_its_draft_model(store: PlanStore) -> None:
    with_draft = replace(SCOPE, draft="f" * 64)
    model, lookup = Setting("model", 3), Setting("ngram", 2)
    assert drafted(model, "f" * 64).stale(with_draft) is None
    assert drafted(lookup, "f" * 64).stale(with_draft) is None
    assert drafted(lookup, "f" * 64).stale(SCOPE) is None, "it won beside the draft: it wins without"
    assert "with a draft model" in (drafted(model, "f" * 64).stale(SCOPE) or "")
    assert "without this draft model" in (drafted(lookup, None).stale(with_draft) or "")
    assert "with a draft model" in (drafted(model, "e" * 64).stale(with_draft) or "")


def test_the_plan_of_the_same_draft_comes_first(store: PlanStore) -> None:
    beside, alone = drafted(Setting("ngram", 2), "f" * 64), drafted(Setting("ngram", 3), None)
    for plan in (beside, alone):
        store.save(plan)
    assert len(store.all()) == 2
    assert store.book(SCOPE).choice(0.0, 100) == alone
    assert store.book(beside.scope).plans == (beside,)
    store.forget(SCOPE.digest)
    store.save(beside)
    assert store.book(SCOPE).choice(0.0, 100) == beside
    assert PlanStore.read(store.save(beside)) == beside


def test_a_plan_of_an_older_schema_is_told_and_not_used(store: PlanStore) -> None:
    old = PLAN.to_json()
    del old["draft"]
    store.save(PLAN).write_text(json.dumps({**old, "schema": 1}))
    book = store.book(SCOPE)
    assert book.plans == ()
    assert "schema 1, not 2" in book.notes[0]


def test_plans_of_other_models_are_not_seen(store: PlanStore) -> None:
    store.save(replace(PLAN, scope=replace(SCOPE, digest="e" * 64)))
    assert store.book(SCOPE).plans == ()
    assert store.book(SCOPE).notes == ()


def damaged(**changes: object) -> dict[str, object]:
    return {**PLAN.to_json(), **changes}


@pytest.mark.parametrize(
    ("value", "word"),
    [
        (damaged(colour="blue"), "colour"),
        (damaged(schema=99), "schema"),
        (damaged(temperature="hot"), "class"),
        (damaged(speedup=[1.0]), "speedup"),
        (damaged(speedup=[1.0, -1.0, 2.0]), "number"),
        (damaged(by_kind={"chat": "fast"}), "number"),
        (damaged(why=7), "text"),
        (damaged(draft=7), "text"),
        (damaged(scope={**PLAN.to_json()["scope"], "draft": 7}), "text"),
        (damaged(fixed_gamma=True), "fixed_gamma"),
        (damaged(fixed_gamma=17), "fixed_gamma"),
        (damaged(setting={**PLAN.setting.to_json(), "gamma": 99}), "gamma"),
        (damaged(setting={**PLAN.setting.to_json(), "gama": 2}), "gama"),
        (damaged(setting={"gamma": 2}), "no 'proposer'"),
        (damaged(costs={"steps": {}, "token_ms": 0, "cycle_ms": 0, "propose": {}}), "empty"),
        (damaged(costs={"steps": {"x": {"1": 1}}, "token_ms": 0, "cycle_ms": 0, "propose": {}}), "counts"),
        (damaged(costs={"steps": {"1": {"1": True}}, "token_ms": 0, "cycle_ms": 0, "propose": {}}), "number"),
        ([], "object"),
        ("text", "object"),
    ],
)
def test_a_damaged_plan_is_refused_and_run_goes_on(store: PlanStore, value: object, word: str) -> None:
    path = store.save(PLAN)
    path.write_text(json.dumps(value))
    with pytest.raises(SpecgenError) as failure:
        PlanStore.read(path)
    assert word in failure.value.message
    book = store.book(SCOPE)
    assert book.plans == ()
    assert path.name in book.notes[0]
    assert store.all() == []


@pytest.mark.parametrize("data", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"NaN", b" " * (2 << 20)])
def test_bytes_that_are_no_plan(store: PlanStore, data: bytes) -> None:
    path = store.save(PLAN)
    path.write_bytes(data)
    assert store.book(SCOPE).plans == ()


def test_forget_removes_stale_and_broken_plans_of_that_model_alone(store: PlanStore) -> None:
    other = replace(PLAN, scope=replace(SCOPE, digest="e" * 64))
    store.save(other)
    store.save(replace(PLAN, scope=replace(SCOPE, device="another CPU")))
    store.save(PLAN).write_text("{")
    beside = [
        (CostStore(scope, store.folder), SkipStore(scope.digest, 4, store.folder)) for scope in (SCOPE, other.scope)
    ]
    for costs, skips in beside:
        costs.save(Learned({1: [4.0]}))
        skips.save(SkipChoice(frozenset({("mlp", 1)}), 0.9, 1.1, 2))
    assert store.forget(SCOPE.digest) == 2
    assert store.all() == [other]
    assert [[kept.load() is not None for kept in pair] for pair in beside] == [[False, False], [True, True]]
    assert store.forget(SCOPE.digest) == 0


def test_settings_become_options() -> None:
    options = Setting("ngram", 5, 6, 3).options(RunOptions(max_tokens=7))
    assert (options.proposer, options.gamma, options.ngram.n_max, options.ngram.n_min) == ("ngram", 5, 6, 3)
    assert options.max_tokens == 7
    assert PLAIN.label == "plain"
    assert Setting("ngram", 0).is_plain
    assert Setting().label == "ngram 2-4 γ auto"


def test_export_speaks_the_language_of_each_server() -> None:
    assert set(SERVERS) == {"vllm", "llama.cpp", "sglang"}
    flags, notes = export(PLAN, "vllm")
    assert json.loads(flags.removeprefix("--speculative-config ").strip("'")) == {
        "method": "ngram",
        "num_speculative_tokens": 5,
        "prompt_lookup_max": 6,
        "prompt_lookup_min": 3,
    }
    assert notes == ()
    assert "--spec-ngram-simple-size-n 3 --spec-ngram-simple-size-m 5" in export(PLAN, "llama.cpp")[0]
    assert "--speculative-num-draft-tokens 6" in export(PLAN, "sglang")[0]


def test_export_names_the_draft_model() -> None:
    plan = drafted(Setting("model", 4), "f" * 64)
    flags, notes = export(plan, "vllm")
    config = json.loads(flags.removeprefix("--speculative-config ").strip("'"))
    assert config == {"num_speculative_tokens": 4, "method": "draft_model", "model": "small"}
    assert "by the name small" in notes[0]
    assert export(plan, "llama.cpp")[0] == "--spec-draft-model small --spec-draft-n-max 4"
    assert "STANDALONE --speculative-draft-model-path small" in export(plan, "sglang")[0]
    assert "--speculative-num-steps 4" in export(plan, "sglang")[0]
    hostile = replace(plan, draft="a b'; rm -rf /")
    for server in SERVERS:
        *_, word = [part for part in shlex.split(export(hostile, server)[0]) if "rm -rf" in part]
        assert "a b'; rm -rf /" in word, "one word of the command line"


def test_export_of_what_servers_do_not_have() -> None:
    flags, notes = export(replace(drafted(Setting("mix", None), "f" * 64), fixed_gamma=3), "vllm")
    assert '"num_speculative_tokens": 3' in flags
    assert "draft_model" in flags
    assert "mix" in " ".join(notes)
    flags, notes = export(replace(PLAN, setting=Setting("skip", 6), fixed_gamma=4), "llama.cpp")
    assert "ngram-simple" in flags
    assert "--spec-draft-n-max 4" in flags
    assert "skip" in notes[0]
    flags, notes = export(replace(PLAN, setting=Setting("ngram", 3, tree=2), fixed_gamma=5), "sglang")
    assert "--speculative-num-draft-tokens 6" in flags
    assert "trees" in notes[0]


def test_export_says_what_is_lost() -> None:
    flags, notes = export(replace(PLAN, setting=Setting("ngram", None), fixed_gamma=7), "vllm")
    assert '"num_speculative_tokens": 7' in flags
    assert "auto" in notes[0]
    assert export(replace(PLAN, setting=PLAIN), "sglang") == (
        "",
        ("plain decoding was the fastest here: no flags are needed",),
    )
