"""What the shell sees before a command runs: completion, values, help; and that none of it is slow."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import typer
from test_layers import heavy_after
from typer.testing import CliRunner

import specgen
from specgen.cli.app import app
from specgen.cli.commands import MODELS_COMMANDS, PLACES, Commands


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECGEN_CONFIG", str(tmp_path))
    return tmp_path


def _completed(*words: str) -> list[str]:
    """What bash is offered for the last word."""
    environ = {"_SPECGEN_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
    return CliRunner().invoke(app, [], env=environ, prog_name="specgen").stdout.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("specgen", "do"), "doctor"),
        (("specgen", "run", "--keep"), "--keep-alive"),
        (("specgen", "run", "-m", "smol"), "smollm2-135m"),
        (("specgen", "models", "sho"), "show"),
        (("specgen", "models", "show", "smol"), "smollm2-135m"),
        (("specgen", "doctor", "--model", "smol"), "smollm2-135m"),
    ],
)
def test_completion(words: tuple[str, ...], offered: str) -> None:
    assert offered in _completed(*words)
    assert offered not in _completed(*words[:-1], "zzz")


def test_a_broken_registry_completes_to_nothing(config: Path) -> None:
    (config / "models.toml").write_text("= broken")
    assert _completed("specgen", "run", "-m", "smol") == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("run -p x --threads two", "'two' is not a whole number"),
        ("run -p x -n 1.5", "'1.5' is not a whole number"),
        ("run -p x -t hot", "'hot' is not a number"),
        ("run -p x --keep-alive long", "'long' is not a number"),
        ("doctor --threads 1e3", "'1e3' is not a whole number"),
    ],
)
def test_a_value_of_the_wrong_type_is_told(line: str, message: str) -> None:
    result = CliRunner().invoke(app, line.split())
    assert result.exit_code == 2
    assert message in result.stderr
    assert "hint: see `specgen" in result.stderr


def test_values_are_read_without_pydantic(tmp_path: Path) -> None:
    code = (
        "import sys, specgen.cli.app as a\n"
        "sys.argv = ['specgen', 'run', '-p', 'x', '-t', '0.5', '--stop', 'a', '--threads', '1', '-m', './none.gguf']\n"
        "try: a.main()\n"
        "except SystemExit as end: assert end.code == 3, end.code\n"
        "assert 'pydantic' not in sys.modules\n"
    )
    assert "torch" not in heavy_after(code, tmp_path)


def test_commands_are_made_when_they_are_wanted(tmp_path: Path) -> None:
    code = "from specgen.cli.app import app, main\nimport sys\nassert 'specgen.cli.run' not in sys.modules"
    assert heavy_after(code, tmp_path) == set()
    commands = Commands()
    assert list(commands) == list(PLACES)
    assert commands["run"] is commands.get("run")
    assert commands.get("rum") is None
    assert [command.name for command in commands.values()] == list(PLACES)


def _all_commands() -> list[str]:
    return [*(name for name in PLACES if name != "models"), *(f"models {name}" for name in MODELS_COMMANDS)]


@pytest.mark.parametrize("name", _all_commands())
def test_help_begins_with_what_it_does_and_examples(name: str) -> None:
    command = typer.main.get_command(app)
    for word in name.split():
        command = command.commands[word]  # type: ignore[attr-defined]
    first, *examples = (command.help or "").strip().split("\n\n")[:2]
    assert first.endswith(".")
    assert examples, "help without an example"
    assert any(f"specgen {name}" in line for line in examples[0].splitlines())


def test_version_and_module() -> None:
    done = subprocess.run([sys.executable, "-m", "specgen", "--version"], capture_output=True, check=True)
    assert done.stdout.decode() == f"specgen {specgen.__version__}\n"
