"""`specgen run` under a schema, an expression or a grammar: what comes out parses, and its exit code says if not."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

import pytest
from fake_session import Script, install
from gguf_files import chat_file
from typer.testing import CliRunner, Result

from specgen.cli.app import app
from specgen.cli.console import Console
from specgen.cli.view import choose_view
from specgen.events import Piece
from specgen.options import ConstraintOptions, LoadOptions, RunOptions, SamplingOptions
from specgen.registry import load_registry, resolve_model
from specgen.session import Session, load

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "colours": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
    },
    "required": ["name", "age", "colours"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_file(tmp_path_factory.mktemp("model") / "tiny.gguf", context_length=2048)


@pytest.fixture
def schema(tmp_path: Path) -> Path:
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(SCHEMA))
    return path


def run(model: Path, *arguments: str, stdin: str = "") -> Result:
    line = ["run", "-m", str(model), "--device", "cpu", "--threads", "1", *arguments]
    return CliRunner().invoke(app, line, input=stdin)


def check(text: str) -> None:
    value = json.loads(text)
    assert set(value) == {"name", "age", "colours"}
    assert isinstance(value["name"], str)
    assert 0 <= value["age"] <= 120
    assert set(value["colours"]) <= {"red", "green"}


@pytest.mark.parametrize("raw", [[], ["--raw"]])
@pytest.mark.parametrize("seed", range(3))
def test_a_schema_holds_for_a_random_model(model: Path, schema: Path, raw: list[str], seed: int) -> None:
    texts = set()
    for speculation in (["--gamma", "0"], ["--gamma", "4"], [], ["--proposer", "none"]):
        result = run(model, "--json-schema", str(schema), "-p", "x", "-t", "1", "--seed", str(seed), *raw, *speculation)
        assert result.exit_code == 0, result.stderr
        texts.add(result.stdout)
    (text,) = texts
    check(text)


def test_a_schema_from_a_pipe(model: Path) -> None:
    result = run(model, "--json-schema", "-", "-p", "x", stdin=json.dumps(SCHEMA))
    assert result.exit_code == 0, result.stderr
    check(result.stdout)


def test_an_answer_that_is_cut_has_a_code_of_its_own(model: Path, schema: Path) -> None:
    result = run(model, "--json-schema", str(schema), "-p", "x", "-n", "5")
    assert result.exit_code == 6
    assert "does not parse" in result.stderr
    shown = run(model, "--json-schema", str(schema), "-p", "x", "-n", "5", "--json")
    assert shown.exit_code == 6
    assert json.loads(shown.stdout)["complete"] is False


def test_a_cut_where_the_grammar_may_end_is_no_failure(model: Path) -> None:
    result = run(model, "--regex", "[0-9]+", "-p", "x", "-n", "5", "--logit-bias", "258=-inf")
    assert result.exit_code == 0, result.stderr
    assert re.fullmatch("[0-9]+", result.stdout)


def test_expressions_and_grammars(model: Path, tmp_path: Path) -> None:
    assert run(model, "--regex", "(yes|no)!", "-p", "x").stdout in ("yes!", "no!")
    for name, text in (("a.lark", 'start: "<" /[a-c]{2,4}/ ">"'), ("a.gbnf", 'root ::= "<" [a-c] [a-c] ">"')):
        (tmp_path / name).write_text(text)
        result = run(model, "--grammar", str(tmp_path / name), "-p", "x")
        assert re.fullmatch("<[a-c]{2,4}>", result.stdout), result.stderr


def test_stop_strings_and_penalties_together(model: Path) -> None:
    line = ["--regex", "(ab){3}c[ab]{40}", "-p", "x", "--stop", "bc", "--repetition-penalty", "1.5"]
    result = run(model, *line)
    assert result.stdout == "ababa"
    assert result.exit_code == 6, "the stop string came before the end of the grammar"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--regex", "(a"], "--regex cannot be used: unclosed group"),
        (["--regex", "a", "--json-object"], "exclude each other"),
        (["--json-schema", "/no/such"], "cannot read --json-schema /no/such"),
        (["--json-schema", "-", "-"], "cannot both be standard input"),
        (["--json-object", "--ignore-eos"], "--ignore-eos"),
        (["--think", "maybe"], "--think is 'maybe'"),
    ],
)
def test_mistakes_are_told_before_a_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    session = install(Script(), lambda name, module: monkeypatch.setitem(sys.modules, name, module))
    prompt = [] if "-" in arguments[2:] else ["-p", "x"]
    result = CliRunner().invoke(app, ["run", *prompt, *arguments], input="{}")
    assert result.exit_code == 2
    assert message in result.stderr
    assert session.calls == []


def test_a_broken_schema_is_told_before_a_model_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = install(Script(), lambda name, module: monkeypatch.setitem(sys.modules, name, module))
    (tmp_path / "s.json").write_text('{"type": "nonsense"}')
    result = CliRunner().invoke(app, ["run", "-p", "x", "--json-schema", str(tmp_path / "s.json")])
    assert result.exit_code == 2
    assert "Invalid type: nonsense" in result.stderr
    assert session.calls == []


def test_thoughts_are_not_on_stdout() -> None:
    out = io.StringIO()
    view = choose_view(Console(None, out, io.StringIO(), environ={}), whole=False)
    for piece in (Piece("hm", False, thinking=True), Piece("yes", True), Piece("!", False)):
        view.show(piece)
    view.close()
    assert out.getvalue() == "yes!"


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_default_model_keeps_to_a_schema(smollm2_path: Path, temperature: float) -> None:
    session: Session = load(resolve_model(str(smollm2_path), load_registry()), LoadOptions(context_tokens=1024))
    constraint = ConstraintOptions("json-schema", json.dumps(SCHEMA))
    texts, accepted = set(), 0
    for gamma in (0, 3, 8, None):
        options = RunOptions(
            SamplingOptions(temperature=temperature, seed=1), max_tokens=200, gamma=gamma, constraint=constraint
        )
        prompt = session.prompt_ids("Describe a person named Alice as JSON.")
        *_, finished = session.generate(prompt, options)
        assert finished.complete
        check(finished.text)
        texts.add(finished.text)
        accepted += sum(cycle.accepted for cycle in finished.record.cycles if cycle.source == "forced")
    assert len(texts) == 1
    assert accepted > 10, "keys and punctuation are free"
