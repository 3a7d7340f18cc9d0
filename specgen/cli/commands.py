"""Every command by name, made when it is wanted: `specgen run` need not wait for the flags of all the others.

Knows: where each command's function is. Does not know: what it does.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import typer

from specgen.cli.flags import grouped
from specgen.cli.plain import PlainCommand

EXIT_CODES = (
    "[bold]Exit codes[/bold]: 0 done, 1 failed, 2 usage or prompt, 3 model or weights, 4 memory, 5 context full, "
    "6 a constrained answer was cut, "
    "130 interrupted (143 by SIGTERM), 141 the reader of the output went away."
)

HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a command is: a function, or a Typer with commands of its own."""

    module: str  # in specgen.cli
    name: str
    one_model: bool = False  # takes groups of flags, whose defaults may be in the user's config

    def command(self, name: str) -> Any:
        found = getattr(import_module(f"specgen.cli.{self.module}"), self.name)
        if not isinstance(found, typer.Typer):
            alone = typer.Typer(add_completion=False, rich_markup_mode="rich", context_settings=HELP_OPTIONS)
            alone.command(name, cls=PlainCommand, epilog=EXIT_CODES)(grouped(found) if self.one_model else found)
            found = alone
        made = typer.main.get_command(found)
        made.name = name
        return made


PLACES = {
    "run": Place("run", "run", one_model=True),
    "chat": Place("chat", "chat", one_model=True),
    "tune": Place("tune", "tune", one_model=True),
    "bench": Place("bench", "bench", one_model=True),
    "profile": Place("profile", "profile", one_model=True),
    "verify": Place("verify", "verify", one_model=True),
    "doctor": Place("doctor", "doctor"),
    "ps": Place("worker", "list_workers"),
    "stop": Place("worker", "stop_workers"),
    "models": Place("models", "models_app"),
}

MODELS_COMMANDS = ("list", "show", "pull", "rm", "path")


class Commands(dict[str, Any]):
    """Name → command. A name's value is None until it is asked for."""

    def __init__(self) -> None:
        super().__init__(dict.fromkeys(PLACES))

    def __getitem__(self, name: str) -> Any:
        found = super().__getitem__(name)
        if found is None:
            found = self[name] = PLACES[name].command(name)
        return found

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self[name]
        except KeyError:
            return default

    def items(self) -> Any:
        return {name: self[name] for name in self}.items()

    def values(self) -> Any:
        return {name: self[name] for name in self}.values()
