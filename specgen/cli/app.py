"""The command line: commands, global options, help.

Knows: Typer. Does not know: what a command does; each has its own file, and none imports torch before it must.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import specgen
from specgen.cli.bench import bench
from specgen.cli.console import ClosedPipeError, Console, guarded
from specgen.cli.flags import grouped
from specgen.cli.interrupt import terminate_politely
from specgen.cli.models import models_app
from specgen.cli.profile import profile
from specgen.cli.run import run
from specgen.cli.tune import tune
from specgen.cli.verify import verify
from specgen.cli.worker import list_workers, stop_workers
from specgen.config import flag_defaults

SUMMARY = """Run a quantised language model on this machine: the same text, sooner, by exact speculative decoding.

specgen run -p "Why is the sky blue?"
specgen models list
"""

EXIT_CODES = (
    "[bold]Exit codes[/bold]: 0 done, 1 failed, 2 usage or prompt, 3 model or weights, 4 memory, 5 context full, "
    "6 a constrained answer was cut, "
    "130 interrupted (143 by SIGTERM), 141 the reader of the output went away."
)


class Guarded(TyperGroup):
    """Runs every command inside the one error boundary, for the process and for tests alike."""

    def main(self, args: Sequence[str] | None = None, *more: Any, **extra: Any) -> Any:
        console = Console.of_process()
        extra["standalone_mode"] = False
        raise SystemExit(guarded(console, lambda: super(Guarded, self).main(args, *more, obj=console, **extra)))

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
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("run", epilog=EXIT_CODES)(grouped(run))
app.command("tune", epilog=EXIT_CODES)(grouped(tune))
app.command("bench", epilog=EXIT_CODES)(grouped(bench))
app.command("profile", epilog=EXIT_CODES)(grouped(profile))
app.command("verify", epilog=EXIT_CODES)(grouped(verify))
app.command("ps", epilog=EXIT_CODES)(list_workers)
app.command("stop", epilog=EXIT_CODES)(stop_workers)
app.add_typer(models_app, name="models")
_ONE_MODEL_COMMANDS = ("run", "tune", "bench", "profile", "verify")
_MODELS_COMMANDS = ("list", "show", "pull", "rm", "path")


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
    commands = dict.fromkeys(_ONE_MODEL_COMMANDS, chosen)
    context.default_map = {**commands, "models": dict.fromkeys(_MODELS_COMMANDS, registry_file)}


def main() -> None:
    """The `specgen` program."""
    terminate_politely()
    app(prog_name="specgen")
