"""`bench`, `profile`, `tune` and `verify` as a user types them, on a tiny model."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.cells import cell_len
from tiny_session import COPY, FREE, tiny_file
from typer.testing import CliRunner, Result

from specgen import accept
from specgen.cli.app import app
from specgen.measure import tunestate
from specgen.measure import verify as verify_module

SCHEMA_KEYS = {"schema_version", "model", "versions"}


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_file(tmp_path_factory.mktemp("model"), layers=2)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    lines = [{"text": COPY, "kind": "copy"}, {"text": FREE, "kind": "free", "temperature": 1.0}]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECGEN_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("SPECGEN_CONFIG", str(tmp_path / "config"))
    monkeypatch.setattr(tunestate, "cache_dir", lambda: tmp_path / "cache")
    return tmp_path


class Commands:
    def __init__(self, model: Path, prompts: Path) -> None:
        self.model, self.prompts = model, prompts

    def __call__(self, command: str, *arguments: str, columns: int = 100) -> Result:
        known = ["-m", str(self.model), "--threads", "1"]
        texts = [] if command == "run" else ["--prompts", str(self.prompts)]
        return CliRunner().invoke(app, [command, *known, *texts, *arguments], env={"COLUMNS": str(columns)}, input="")


@pytest.fixture
def specgen(model_file: Path, prompts: Path) -> Commands:
    return Commands(model_file, prompts)


def told(result: Result, code: int, *words: str) -> None:
    assert result.exit_code == code, result.stderr
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr


QUICK_BENCH = ("--rounds", "1", "-n", "16", "--gamma", "4", "--ngram", "1-3")


def test_bench_tells_in_tables(specgen: Commands) -> None:
    result = specgen("bench", *QUICK_BENCH)
    told(result, 0)
    for word in (
        "plain against auto 1-3 γ 4",
        "greedy",
        "sampled",
        "copy",
        "free",
        "E[Y]",
        "same text: 4 of 4",
        "GB/s",
    ):
        assert word.replace("auto 1-3 γ 4", "auto γ 4") in result.stdout or word in result.stdout
    assert "\x1b" not in result.stdout


@pytest.mark.parametrize("columns", [40, 60, 90])
@pytest.mark.parametrize("command", [("bench", *QUICK_BENCH), ("profile", "-n", "8", "--contexts", "64")])
def test_reports_fit_narrow_terminals(specgen: Commands, columns: int, command: tuple[str, ...]) -> None:
    result = specgen(*command, columns=columns)
    told(result, 0)
    tables = [line for line in result.stdout.splitlines() if "─" in line or "█" in line]
    assert tables
    assert all(cell_len(line) <= columns for line in tables)


def test_bench_json_is_one_object(specgen: Commands) -> None:
    result = specgen("bench", *QUICK_BENCH, "--json")
    told(result, 0)
    value = json.loads(result.stdout)
    assert set(value) >= SCHEMA_KEYS
    rows = value["result"]["rows"]
    assert {(row["temperature"], row["kind"]) for row in rows} == {
        (temperature, kind) for temperature in ("greedy", "sampled") for kind in ("copy", "free")
    }
    for row in rows:
        assert row["speedup"]["middle"] > 0
        assert row["chosen"]["tokens"] == row["plain"]["tokens"]
        assert set(row["chosen"]) >= {
            "ttft_ms",
            "itl_p50_ms",
            "itl_p95_ms",
            "accepted_lengths",
            "verify_ms",
            "kv_bytes",
        }


def test_bench_csv_has_a_line_for_each_side(specgen: Commands) -> None:
    result = specgen("bench", *QUICK_BENCH, "--csv", "--sampling", "greedy")
    told(result, 0)
    rows = list(csv.DictReader(io.StringIO(result.stdout)))
    assert [(row["kind"], row["side"]) for row in rows] == [
        (kind, side) for kind in ("copy", "free", "all") for side in ("plain", "chosen")
    ]
    assert all(float(row["yield"]) >= 1 for row in rows)


def test_min_speedup_decides_the_exit_code(specgen: Commands) -> None:
    told(specgen("bench", *QUICK_BENCH, "--min-speedup", "0.0001"), 0)
    result = specgen("bench", *QUICK_BENCH, "--min-speedup", "999")
    told(result, 1, "--min-speedup is 999")
    assert "speedup" in result.stdout, "the table comes first"


class Careless(accept.Coupled):
    """Fault: the target's own token is lost when there is a draft."""

    def drawing(self, sampler):
        return None  # or else the step itself draws, and the rule is not asked

    def __call__(self, draft, logits, position, sampler):
        verdict = super().__call__(draft, logits, position, sampler)
        return accept.Verdict(verdict.path, 0) if draft is not None else verdict


def test_bench_fails_when_the_text_changes(specgen: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(accept.RULES, "coupled", Careless)
    told(specgen("bench", *QUICK_BENCH), 1, "the text depends on how it is speculated", "specgen verify")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["bench", "--rounds", "0"], ["--rounds is 0"]),
        (["bench", "--csv", "--json"], ["exclude"]),
        (["bench", "--ngram", "x"], ["--ngram", "2-4"]),
        (["bench", "--ngram", "4-2"], ["n-gram"]),
        (["bench", "--gamma", "99"], ["gamma is 99"]),
        (["bench", "--proposer", "ngramm"], ["ngram"]),
        (["bench", "--kind", "copi"], ["copi", "copy"]),
        (["bench", "--sampling", "warm"], ["--sampling"]),
        (["bench", "--per-kind", "0"], ["--per-kind"]),
        (["tune", "--budget", "0"], ["--budget"]),
        (["tune", "--budget", "nan"], ["--budget"]),
        (["tune", "--budget", "0.00001"], ["too small", "--budget"]),
        (["tune", "--objective", "p96"], ["p95"]),
        (["tune", "--export", "vlm"], ["vllm"]),
        (["tune", "--show", "--forget"], ["exclude"]),
        (["profile", "--contexts", "1,x"], ["--contexts"]),
        (["profile", "--contexts", "999999"], ["--ctx"]),
        (["profile", "--plot", "curve.pdf"], [".png", ".svg"]),
        (["verify", "--count", "0"], ["--count"]),
    ],
)
def test_options_that_make_no_sense_are_usage_errors(specgen: Commands, arguments: list[str], words: list[str]) -> None:
    told(specgen(*arguments), 2, *words)


def test_bad_prompts_are_told_with_lines(specgen: Commands, tmp_path: Path) -> None:
    specgen.prompts = tmp_path / "bad.jsonl"
    specgen.prompts.write_text('{"text": "a"}\n{"txt": "b"}\n')
    for command in ("bench", "tune", "profile", "verify"):
        told(specgen(command), 2, "line 2", "'txt'", "did you mean 'text'?")


def test_tune_then_run_then_forget(specgen: Commands, model_file: Path) -> None:
    result = specgen("tune", "--budget", "3")
    told(result, 0)
    for word in ("t(1)", "Chosen for greedy text", "Chosen for sampled text", "predicted"):
        assert word in result.stdout
    used = specgen("run", "-p", COPY, "-n", "4")
    told(used, 0, "tuned:", "greedy text")
    shown = CliRunner().invoke(app, ["tune", "--show"])
    assert "greedy" in shown.stdout
    plans = json.loads(CliRunner().invoke(app, ["tune", "--show", "--json"]).stdout)["plans"]
    assert {plan["temperature"] for plan in plans} == {"greedy", "sampled"}
    told(specgen("tune", "--export", "vllm"), 0)
    forgotten = CliRunner().invoke(app, ["tune", "-m", str(model_file), "--forget"])
    assert "removed 2 stored plans" in forgotten.stdout
    assert "no plans" in CliRunner().invoke(app, ["tune", "--show"]).stdout
    assert "tuned:" not in specgen("run", "-p", COPY, "-n", "4").stderr
    told(specgen("tune", "--export", "sglang"), 1, "no plan is stored", "specgen tune")


def test_tune_json(specgen: Commands) -> None:
    result = specgen("tune", "--budget", "3", "--sampling", "greedy", "--objective", "p95", "--json")
    told(result, 0)
    value = json.loads(result.stdout)
    assert set(value) >= {*SCHEMA_KEYS, "classes", "plans", "elapsed_s"}
    (found,) = value["classes"]
    assert found["predicted"][0]["setting"]["proposer"] == "none"
    assert value["objective"] == value["plans"][0]["objective"] == "p95"


def test_tune_with_a_draft_model(specgen: Commands, model_file: Path) -> None:
    draft = ("--draft", str(model_file))
    result = specgen("tune", "--budget", "4", "--sampling", "greedy", "--skip", *draft)
    told(result, 0)
    for word in (
        "ms a token",
        "the draft model alone: at best",
        "n-grams, and the draft model where they have nothing: at best",
        "left out, right for",
        "(skip γ",
    ):
        assert word in result.stdout
    shown = CliRunner().invoke(app, ["tune", "--show"], env={"COLUMNS": "200"})
    assert f"with {model_file.stem}" in shown.stdout
    (plan,) = json.loads(CliRunner().invoke(app, ["tune", "--show", "--json"]).stdout)["plans"]
    assert plan["draft"] == model_file.stem
    assert plan["scope"]["draft"]
    assert "tuned:" in specgen("run", "-p", COPY, "-n", "4", *draft).stderr
    told(specgen("tune", "--export", "vllm"), 0)


def test_a_model_of_one_layer_has_nothing_to_leave_out(specgen: Commands, tmp_path: Path) -> None:
    specgen.model = tiny_file(tmp_path)
    told(specgen("tune", "--skip"), 2, "one layer", "--skip")
    told(specgen("run", "-p", COPY, "-n", "4", "--proposer", "skip"), 2, "one layer")


def test_tune_json_tells_what_drafting_takes(specgen: Commands, model_file: Path) -> None:
    arguments = ("tune", "--budget", "4", "--sampling", "greedy", "--draft", str(model_file), "--skip", "--json")
    value = json.loads(specgen(*arguments).stdout)
    assert set(value["propose_ms"]) == {"ngram", "model", "skip"}
    assert value["propose_ms"]["model"]["each"] > 0
    assert value["skip"]["skipped"]
    settings = {one["setting"]["proposer"] for one in value["classes"][0]["predicted"]}
    assert settings == {"none", "ngram", "model", "mix", "skip"}


def test_verify_passes_and_fails_by_exit_code(specgen: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_module, "DRAWS", 50)
    arguments = ("verify", "--count", "1", "-n", "12")
    result = specgen(*arguments)
    told(result, 0)
    assert result.stdout.count("PASS") == 8
    assert "every promise holds" in result.stdout
    assert "logits depend on the tokens alone" in result.stdout
    monkeypatch.setitem(accept.RULES, "coupled", Careless)
    result = specgen(*arguments)
    told(result, 1)
    assert "FAIL  same greedy text" in result.stdout
    broken = specgen(*arguments, "--json")
    told(broken, 1)
    value = json.loads(broken.stdout)
    assert value["passed"] is False
    assert (value["device"], value["promise"]) == ("cpu", "tokens")
    assert [claim["passed"] for claim in value["claims"]].count(False) >= 1


@pytest.mark.parametrize("name", ["curves.png", "curves.svg"])
def test_profile_draws_a_picture(specgen: Commands, tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / name
    result = specgen("profile", "-n", "12", "--contexts", "64", "--plot", str(path), "--json")
    told(result, 0)
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG") if name.endswith("png") else b"<svg" in data[:1000]
    value = json.loads(result.stdout)["profile"]
    assert list(value["steps"]) == ["64"]
    assert value["points"][0]["setting"]["proposer"] == "none"


def test_profile_of_a_draft_model(specgen: Commands, model_file: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    arguments = ("profile", "-n", "8", "--contexts", "64", "--sampling", "greedy", "--draft", str(model_file))
    result = specgen(*arguments, "--plot", str(tmp_path / "curves.svg"))
    told(result, 0)
    for word in ("the draft model's drafts", "model γ 8", "mix 2-4 γ auto"):
        assert word in result.stdout
    assert "draft model" in (tmp_path / "curves.svg").read_text()


def test_profile_without_matplotlib_says_what_to_install(specgen: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    told(specgen("profile", "--plot", "x.png"), 1, "matplotlib", "specgen[plot]")


def test_profile_always_has_text_that_cannot_be_guessed(model_file: Path) -> None:
    arguments = ["profile", "-m", str(model_file), "--kind", "structured", "-n", "4", "--contexts", "32", "--json"]
    result = CliRunner().invoke(app, arguments)
    told(result, 0)
    assert "story" in json.loads(result.stdout)["profile"]["survival"]


def test_a_closed_pipe_ends_quietly(specgen: Commands) -> None:
    command = [sys.executable, "-m", "specgen", "bench", "-m", str(specgen.model), "--prompts", str(specgen.prompts)]
    command += ["--threads", "1", *QUICK_BENCH]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait() == 141


@pytest.mark.parametrize("command", [("bench", *QUICK_BENCH), ("verify", "--count", "1", "-n", "8")])
def test_nothing_is_measured_with_its_own_earlier_answers(
    specgen: Commands, folders: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.setattr(verify_module, "DRAWS", 50)
    (folders / "config").mkdir()
    (folders / "config" / "config.toml").write_text("ngram_store = true\n")
    result = specgen(*command)
    told(result, 0, "measured without the n-gram store")
    assert not (folders / "data" / "ngrams").exists()


@pytest.mark.parametrize("command", ["bench", "profile", "tune", "verify"])
def test_how_to_quantise_no_draft_is_refused(specgen: Commands, command: str) -> None:
    told(specgen(command, "--draft-quant", "int4"), 2, "--draft-quant needs a draft model", "--draft NAME|PATH")


def test_prompts_are_read_before_the_model(specgen: Commands, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "no.gguf").write_text("no model")
    told(specgen("tune", "-m", str(tmp_path / "no.gguf"), "--prompts", str(tmp_path / "empty.txt")), 2, "is empty")


def test_tune_says_that_it_can_go_on(specgen: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    short = ("tune", "--budget", "5", "--sampling", "greedy")
    with monkeypatch.context() as patch:
        patch.setattr("specgen.measure.recording.run_case", interrupt)
        told(specgen(*short), 130, "the same command goes on")
    told(specgen(*short), 0, "going on with the search")
    with monkeypatch.context() as patch:
        patch.setattr("specgen.measure.tuner.calibrate", interrupt)
        result = specgen(*short)
    told(result, 130)
    assert "goes on" not in result.stderr, "nothing was measured yet"
