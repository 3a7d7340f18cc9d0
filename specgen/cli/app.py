"""The command line: commands, global options, help.

Knows: Typer. Does not know: what a command does; each has its own file, and none imports torch before it must.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import specgen
from specgen.cli.commands import EXIT_CODES, HELP_OPTIONS, MODELS_COMMANDS, PLACES, Commands
from specgen.cli.console import ClosedPipeError, Console, guarded
from specgen.cli.interrupt import terminate_politely
from specgen.cli.plain import read_plainly
from specgen.config import flag_defaults

SUMMARY = """Run a quantised language model on this machine: the same text, sooner, by exact speculative decoding.

specgen run -p "Why is the sky blue?"
specgen models list
"""


class Guarded(TyperGroup):
    """Runs every command inside the one error boundary, for the process and for tests alike."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = Commands()

    def main(self, args: Sequence[str] | None = None, *more: Any, **extra: Any) -> Any:
        console = Console.of_process()
        extra["standalone_mode"] = False
        raise SystemExit(guarded(console, lambda: super(Guarded, self).main(args, *more, obj=console, **extra)))

    def get_params(self, ctx: Any) -> Any:
        return read_plainly(super().get_params(ctx))

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            raise ClosedPipeError from error


app = typer.Typer(
    cls=Guarded,
    name="specgen",
    help=SUMMARY,
    epilog=EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings=HELP_OPTIONS,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"specgen {specgen.__version__}")
        raise typer.Exit


@app.callback()
def _global(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Options of every command, and the user's standing choices as the defaults of flags."""
    Console.of(context).debug = debug
    chosen = flag_defaults()
    registry_file = {name: value for name, value in chosen.items() if name == "models"}
    commands = {name: chosen for name, place in PLACES.items() if place.one_model}
    context.default_map = {**commands, "models": dict.fromkeys(MODELS_COMMANDS, registry_file)}


def main() -> None:
    """The `specgen` program."""
    terminate_politely()
    app(prog_name="specgen")
