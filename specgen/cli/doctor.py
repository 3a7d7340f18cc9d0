"""`specgen doctor`: what decides the speed here, and what is wrong.

Knows: how findings are shown. Does not know: how they are made (`specgen.measure.doctor`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specgen.cli.charts import print_json, print_lines
from specgen.cli.completion import model_names
from specgen.cli.console import Console, printable
from specgen.cli.fetchbar import fetch_bar
from specgen.cli.models import FileFlag, JsonFlag
from specgen.options import LoadOptions

if TYPE_CHECKING:
    from specgen.measure.findings import Section

SCHEMA_VERSION = 1


def doctor(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Option(
            "-m", "--model", metavar="NAME|PATH", help="Say how fast this model could run.", autocompletion=model_names
        ),
    ] = None,
    threads: Annotated[int | None, typer.Option("--threads", metavar="N", help="CPU threads to look with.")] = None,
    device: Annotated[
        str, typer.Option("--device", metavar="auto|cpu|cuda|cuda:N", help="What a run would be told.")
    ] = "auto",
    json_: JsonFlag = False,
    models: FileFlag = None,
) -> None:
    """Show which kernels run here and why, cards, threads, memory speed, and how fast a model could be.

    specgen doctor
    specgen doctor -m smollm2-135m
    specgen doctor --json | jq .sections
    """
    console = Console.of(context)
    options = LoadOptions(device, threads)
    console.answer()
    path = None if model is None else _fetched(console, model, models)
    with console.busy("measuring"):
        from specgen.kernels import select_kernels
        from specgen.measure.doctor import Patient, examine

        kernels, notice = select_kernels(None, options.threads)
        sections = list(examine(Patient(kernels, notice, options.threads, path, options.device)))
    if json_:
        print_json(console, {"schema_version": SCHEMA_VERSION, "sections": _objects(sections)})
        return
    print_lines(console, _lines(sections))
    for section in sections:
        for fact in section.facts:
            if fact.problem is not None:
                console.warn(f"{fact.name}: {fact.problem}")


def _fetched(console: Console, model: str, models: str | None) -> Path:
    from specgen.registry import load_registry, pull, resolve_model

    ref = resolve_model(model, load_registry(None if models is None else Path(models)))
    with fetch_bar(console) as progress:
        return pull(ref.entry, progress=progress).target


def _objects(sections: list[Section]) -> dict[str, Any]:
    """Section → fact → value, and the problems beside it."""
    found: dict[str, Any] = {}
    for section in sections:
        facts: dict[str, Any] = {fact.name.replace(" ", "_"): fact.value for fact in section.facts}
        facts["problems"] = {fact.name: fact.problem for fact in section.facts if fact.problem is not None}
        found[section.name] = facts
    return found


def _lines(sections: list[Section]) -> list[str]:
    width = max(len(fact.name) for section in sections for fact in section.facts)
    lines = []
    for section in sections:
        lines += [section.name, *(f"  {fact.name:<{width}}  {printable(fact.shown)}" for fact in section.facts)]
    return lines
