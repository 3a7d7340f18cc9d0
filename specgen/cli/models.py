"""`specgen models …`: what there is, what is on this disk, fetching and removing it.

Knows: how to print the registry. Does not know: how anything is fetched (registry) or read (weights, model); torch is
imported by `show` alone, and only for a model that is here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specgen.cli.completion import model_names
from specgen.cli.console import Console, is_terminal, printable
from specgen.cli.fetchbar import fetch_bar
from specgen.cli.report import json_line
from specgen.errors import ModelError, UsageError

if TYPE_CHECKING:
    from specgen.registry import Artefact, Entry, Registry

SCHEMA_VERSION = 1
_NARROW_COLUMNS = 90  # a terminal below this gets two lines for each model instead of columns

models_app = typer.Typer(
    help="List the known models, fetch them, look at them, remove them.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

JsonFlag = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]
FileFlag = Annotated[
    str | None, typer.Option("--models", metavar="FILE", help="A models.toml laid over the built-in one.")
]
NameArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="Name from `specgen models list`.", autocompletion=model_names)
]
ModelArgument = Annotated[
    str, typer.Argument(metavar="NAME|PATH", help="Name, path, or hf:repo.", autocompletion=model_names)
]


@models_app.command("list")
def list_models(context: typer.Context, json_: JsonFlag = False, models: FileFlag = None) -> None:
    """Every known model: whether it is here, how much memory it wants, what it is good for.

    specgen models list
    specgen models list --json | jq -r '.models[].name'
    """
    console, registry = Console.of(context), _registry(models)
    if json_:
        entries = [_entry_object(entry) for entry in registry.entries.values()]
        print_json(console, {"models": entries})
    else:
        _print_table(console, registry)


@models_app.command("show")
def show_model(context: typer.Context, model: ModelArgument, json_: JsonFlag = False, models: FileFlag = None) -> None:
    """One model: where it comes from, and what its files hold if they are here.

    specgen models show smollm2-135m
    specgen models show ./my-model.gguf
    """
    from specgen.registry import find, resolve_model

    console = Console.of(context)
    entry = resolve_model(model, _registry(models)).entry
    shown = _entry_object(entry)
    path = find(entry.target)
    if path is not None:
        with console.busy("reading the weights"):
            shown["found"] = _found_object(path)
    if json_:
        print_json(console, shown)
    else:
        _print_facts(console, shown)


@models_app.command("pull")
def pull_model(
    context: typer.Context,
    model: ModelArgument,
    draft: Annotated[bool, typer.Option("--draft", help="Its draft model too.")] = False,
    json_: JsonFlag = False,
    models: FileFlag = None,
) -> None:
    """Fetch a model's files now; prints where they are.

    specgen models pull smollm2-135m
    """
    from specgen.registry import pull, resolve_model

    console = Console.of(context)
    ref = resolve_model(model, _registry(models))
    if draft and ref.entry.draft is None:
        raise UsageError(f"{ref.name} has no draft model", "leave --draft out")
    with fetch_bar(console) as progress:
        pulled = pull(ref.entry, progress=progress, draft=draft)
    paths = {"target": pulled.target, **({"draft": pulled.draft} if pulled.draft is not None else {})}
    if json_:
        print_json(console, {"name": ref.name, **{role: str(path) for role, path in paths.items()}})
    else:
        _print(console, "\n".join(map(str, paths.values())))


@models_app.command("path")
def model_path(context: typer.Context, model: ModelArgument, json_: JsonFlag = False, models: FileFlag = None) -> None:
    """Where a model's file is, or where it would be put: a place to put it by hand.

    specgen models path smollm2-135m
    """
    from specgen.registry import cache_path, find, kept_here, resolve_model

    console = Console.of(context)
    entry = resolve_model(model, _registry(models)).entry
    found = find(entry.target)
    if found is None and not kept_here(entry.target):
        raise ModelError(f"{entry.name} is not here yet", f"`specgen models pull {model}` fetches it")
    path = found or cache_path(entry.target)
    if json_:
        print_json(console, {"name": entry.name, "path": str(path), "cached": found is not None})
        return
    if found is None:
        console.note(f"{entry.name} is not here yet")
    _print(console, str(path))


@models_app.command("rm")
def remove_model(
    context: typer.Context,
    model: NameArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json_: JsonFlag = False,
    models: FileFlag = None,
) -> None:
    """Remove a model's files from specgen's cache (never your own files, nor Hugging Face's cache).

    specgen models rm smollm2-135m --yes
    """
    from specgen.registry import cache_path, remove

    console = Console.of(context)
    entry = _registry(models).get(model)
    artefacts = [entry.target, *([entry.draft] if entry.draft is not None else [])]
    here = [artefact for artefact in artefacts if cache_path(artefact).is_file()] or [entry.target]
    if all(cache_path(artefact).is_file() for artefact in here):
        _confirm(console, here, yes)
    freed_bytes = sum(remove(artefact) for artefact in here)
    if json_:
        removed = [str(cache_path(artefact)) for artefact in here]
        print_json(console, {"name": entry.name, "removed": removed, "freed_bytes": freed_bytes})
    else:
        _print(console, f"removed {entry.name} ({_size(freed_bytes)})")


def _registry(models: str | None) -> Registry:
    from specgen.registry import load_registry

    return load_registry(Path(models) if models is not None else None)


def _confirm(console: Console, artefacts: list[Artefact], yes: bool) -> None:
    from specgen.registry import cache_path

    if yes:
        return
    if not is_terminal(console.stdin):
        raise UsageError("`specgen models rm` asks before it removes anything", "add --yes")
    names = ", ".join(str(cache_path(artefact)) for artefact in artefacts)
    typer.confirm(f"remove {printable(names)}?", abort=True, err=True)


def _entry_object(entry: Entry) -> dict[str, Any]:
    """An entry for --json; `cached` looks at the disk."""
    from specgen.registry import find

    found = find(entry.target)
    return {
        "name": entry.name,
        "cached": found is not None,
        "path": None if found is None else str(found),
        "good_for": entry.good_for,
        "license": entry.license,
        "card": entry.card,
        "memory_gb": entry.memory_gb,
        "context_tokens": entry.context_tokens,
        "sampling": dict(entry.sampling),
        "target": _artefact_object(entry.target),
        "draft": None if entry.draft is None else _artefact_object(entry.draft),
    }


def _artefact_object(artefact: Artefact) -> dict[str, Any]:
    sources = [[str(source) for source in place] for place in artefact.sources]
    return {"sources": sources, "sha256": artefact.sha256, "bytes": artefact.size_bytes}


def _found_object(path: Path) -> dict[str, Any]:
    """What the files hold. ModelError for files that cannot be loaded."""
    from specgen.model.describe import describe
    from specgen.paths import cache_dir
    from specgen.text.tokenizer import load_tokenizer
    from specgen.weights.checkpoint import open_checkpoint

    found = describe(path)
    spec = found.spec
    try:
        tokenizer = load_tokenizer(open_checkpoint(path), cache_dir() / "tokenizers")
        tokens: dict[str, Any] = {
            "vocabulary": tokenizer.vocab_size,
            "chat_template": tokenizer.chat_template is not None,
        }
    except ModelError as error:  # weights alone are worth showing
        tokens = {"error": error.message}
    return {
        "architecture": spec.family,
        "layers": len(spec.layers),
        "hidden": spec.hidden,
        "heads": spec.heads,
        "kv_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "vocabulary": spec.vocab,
        "context_tokens": spec.context,
        "parameters": found.parameters,
        "formats": dict(found.formats),
        "bits_per_weight": round(found.bits_per_weight, 3),
        "weight_bytes": found.weight_bytes,
        "read_bytes_per_token": found.read_bytes_per_token,
        "kv_bytes_per_token": found.kv_bytes_per_token,
        "tokenizer": tokens,
    }


def _print_facts(console: Console, shown: Mapping[str, Any]) -> None:
    """Aligned `label  value` lines."""
    facts = {
        "name": shown["name"],
        "good for": shown["good_for"],
        "licence": shown["license"],
        "card": shown["card"],
        "memory": _gigabytes(shown["memory_gb"]),
        "context": _tokens(shown["context_tokens"]),
        "sampling": ", ".join(f"{key} {value:g}" for key, value in shown["sampling"].items()) or "greedy",
        "draft": " or ".join(" + ".join(place) for place in (shown["draft"] or {"sources": []})["sources"]),
        "path": shown["path"] or "not here yet: `specgen models pull` fetches it",
    }
    sources = [" + ".join(place) for place in shown["target"]["sources"]]
    lines = [(label, value) for label, value in facts.items() if value]
    lines += [("source" if number == 0 else "or", source) for number, source in enumerate(sources)]
    lines += _found_lines(shown["found"]) if "found" in shown else []
    width = max(len(label) for label, _ in lines)
    _print(console, "\n".join(f"{label:<{width}}  {printable(value)}" for label, value in lines))


def _found_lines(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    tokens = found["tokenizer"]
    chat = "with" if tokens.get("chat_template") else "without"
    return [
        ("architecture", f"{found['architecture']}, {found['layers']} layers of {found['hidden']}"),
        ("attention", f"{found['heads']} heads over {found['kv_heads']} key-value heads of {found['head_dim']}"),
        ("formats", ", ".join(f"{name} ({count})" for name, count in found["formats"].items())),
        ("weights", f"{found['parameters'] / 1e6:.1f} M at {found['bits_per_weight']:.2f} bits, "
                    f"{_size(found['weight_bytes'])}"),
        ("per token", f"reads {_size(found['read_bytes_per_token'])}, writes {found['kv_bytes_per_token'] / 1e3:.1f} kB"
                      " of KV (16-bit)"),
        ("longest", _tokens(found["context_tokens"])),
        ("tokenizer", tokens.get("error") or f"{tokens['vocabulary']} tokens, {chat} chat template"),
    ]  # fmt: skip


def _print_table(console: Console, registry: Registry) -> None:
    rows = [_row(entry) for entry in registry.entries.values()]
    head = ("NAME", "HERE", "SIZE", "MEMORY", "CARD", "LICENCE", "GOOD FOR")
    if is_terminal(console.stdout):
        _rich_table(console, head, rows)
        return
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in (head, *rows)
    ]
    _print(console, "\n".join(lines))


def _row(entry: Entry) -> tuple[str, ...]:
    from specgen.registry import find

    found = find(entry.target)
    size_bytes = entry.target.size_bytes if found is None else _disk_bytes(found)
    return (
        entry.name,
        "yes" if found is not None else "no",
        "-" if size_bytes is None else _size(size_bytes),
        _gigabytes(entry.memory_gb) or "-",
        entry.card or "-",
        printable(entry.license),
        printable(entry.good_for),
    )


def _rich_table(console: Console, head: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    """Columns where they fit; on a narrow terminal two lines for each model."""
    from rich.console import Console as RichConsole
    from rich.table import Table
    from rich.text import Text

    screen = RichConsole(file=console.answer(), no_color=not console.can_color(console.stdout), highlight=False)
    if screen.width < _NARROW_COLUMNS:
        for name, here, _, memory, _, _, good_for in rows:
            screen.print(Text(name, style="bold"), Text(f"{'here' if here == 'yes' else 'not here'}, {memory} memory"))
            screen.print(Text(f"  {good_for}"))
        return
    table = Table(box=None, pad_edge=False)
    for title in head:
        table.add_column(title, no_wrap=title in ("NAME", "HERE", "SIZE", "MEMORY", "CARD"), overflow="fold")
    for name, *cells in rows:
        table.add_row(Text(name, style="bold"), *map(Text, cells))
    screen.print(table)


def _disk_bytes(path: Path) -> int:
    files = [path] if path.is_file() else [file for file in path.iterdir() if file.is_file()]
    return sum(file.stat().st_size for file in files)


def _gigabytes(value: float | None) -> str:
    return "" if value is None else f"{value:g} GB"


def _tokens(value: int | None) -> str:
    return "" if value is None else f"{value} tokens"


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.1f} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:.1f} MB"


def print_json(console: Console, value: Mapping[str, Any]) -> None:
    """One object on stdout, with the version of its schema."""
    _print(console, json_line({"schema_version": SCHEMA_VERSION, **value}))


def _print(console: Console, text: str) -> None:
    stream = console.answer()
    stream.write(text + "\n")
    stream.flush()
