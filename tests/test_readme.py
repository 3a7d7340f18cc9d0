"""The README says what the program does: its help text, its table of commands and every example line.

`SPECGEN_UPDATE_README=1 pytest tests/test_readme.py` writes the generated parts anew.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest
import typer

from specgen.cli.app import app

README = Path(__file__).resolve().parents[1] / "README.md"
TEXT = README.read_text(encoding="utf-8")
ESCAPED_BAR = "\\|"


def help_of(*words: str) -> str:
    """What `specgen … --help` prints into a file."""
    environment = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1", "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(
        [sys.executable, "-m", "specgen", *words, "--help"], capture_output=True, check=True, env=environment
    )
    return done.stdout.decode()


def root() -> click.Group:
    command = typer.main.get_command(app)
    assert hasattr(command, "commands")
    return command  # type: ignore[return-value]


def command_table() -> str:
    rows = ["| command | what it does |", "|---|---|"]
    for name, command in root().commands.items():
        inner = getattr(command, "commands", None)
        shown = " ".join([name, f" {ESCAPED_BAR} ".join(inner)]) if inner else name
        rows.append(f"| `specgen {shown}` | {command.get_short_help_str(200)} |")
    return "\n".join(rows)


def option_table(name: str) -> str:
    """The options of a command as they are declared: the layout of `--help` is the libraries' affair."""
    rows = ["| option | what it does |", "|---|---|"]
    for parameter in root().commands[name].params:
        explained = getattr(parameter, "help", None)  # an argument has none
        if parameter.param_type_name != "option" or not explained:
            continue
        flags = ", ".join(f"`{flag}`" for flag in (*parameter.opts, *parameter.secondary_opts))
        rows.append(f"| {flags} | {' '.join(explained.split()).replace('|', ESCAPED_BAR)} |")
    assert len(rows) > 20, "the options were found"
    return "\n".join(rows)


GENERATED = {"commands": command_table, "options of run": lambda: option_table("run")}


def block(name: str) -> re.Pattern[str]:
    return re.compile(f"(<!-- begin: {name} -->\n)(.*?)(<!-- end: {name} -->)", re.DOTALL)


@pytest.mark.parametrize("name", GENERATED)
def test_generated_parts_are_current(name: str) -> None:
    current = GENERATED[name]() + "\n"
    if os.environ.get("SPECGEN_UPDATE_README"):
        text = README.read_text(encoding="utf-8")
        README.write_text(block(name).sub(lambda found: found[1] + current + found[3], text), encoding="utf-8")
        return
    found = block(name).search(TEXT)
    assert found is not None
    assert found[2] == current, "run SPECGEN_UPDATE_README=1 pytest tests/test_readme.py"


def example_lines() -> list[str]:
    """Every `specgen …` of the shell blocks, without the rest of its pipeline."""
    found = []
    for shell in re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL):
        for line in shell.replace("\\\n", " ").splitlines():
            found += [part.strip() for part in re.split(r"\|\||&&|\||;", line) if part.strip().startswith("specgen ")]
    return found


def parse(command: click.Command, words: list[str], parent: click.Context | None = None) -> None:
    """Parse as the program would, without running anything; click raises on what it does not know."""
    name = words[0]
    context = command.make_context(name, words[1:], parent=parent, resilient_parsing=False, obj=object())
    if isinstance(getattr(command, "commands", None), dict):
        rest = [*context._protected_args, *context.args]
        assert rest, "an example names a command"
        _, inner, _ = command.resolve_command(context, rest)  # type: ignore[attr-defined]
        assert inner is not None
        parse(inner, rest, context)


def test_there_are_examples() -> None:
    assert len(example_lines()) >= 6


@pytest.mark.parametrize("line", example_lines())
def test_examples_parse(line: str) -> None:
    parse(root(), shlex.split(line))


@pytest.mark.parametrize("line", ["specgen run --no-such-flag", "specgen rum -p hello", "specgen run --gama 3 -p x"])
def test_a_wrong_example_would_be_caught(line: str) -> None:
    with pytest.raises(Exception, match=r"(?i)no such"):
        parse(root(), shlex.split(line))


def test_exit_codes_are_those_of_the_help() -> None:
    said = re.search(r"Exit codes: (.*?)\.", " ".join(TEXT.split()))
    assert said is not None
    shown = re.search(r"Exit codes: (.*?)\.", " ".join(help_of().split()))
    assert shown is not None
    assert said[1] == shown[1]


def test_the_toml_example_is_a_valid_registry_file(tmp_path: Path) -> None:
    from specgen.registry import load_registry

    found = re.search(r"```toml\n(.*?)```", TEXT, re.DOTALL)
    assert found is not None
    names = tomllib.loads(found[1])
    path = tmp_path / "models.toml"
    path.write_text(found[1])
    registry = load_registry(path)
    assert all(name in registry.entries for name in names)
