"""The flags of commands, in groups, and how a command asks for a group.

Knows: names, help lines and help panels. Does not know: what the values mean; ranges are checked in `specgen.options`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import partial, wraps
from typing import Annotated, Any, get_args, get_type_hints

import typer

from specgen.cli.completion import model_names
from specgen.options import MAX_GAMMA, MAX_TREE, WEIGHT_CACHE, AcceptName, KVName, ProposerName, QuantName

_model = partial(typer.Option, rich_help_panel="Model")
_sampling = partial(typer.Option, rich_help_panel="Sampling", show_default=False)
_decoding = partial(typer.Option, rich_help_panel="Speculation")
_output = partial(typer.Option, rich_help_panel="Output")
_prompt = partial(typer.Option, rich_help_panel="Prompt")


@dataclass(frozen=True, slots=True)
class PromptFlags:
    """Where the prompt comes from."""

    prompt_file: Annotated[
        str | None,
        typer.Argument(metavar="PROMPT_FILE|-", help="File with the prompt; - reads standard input to its end."),
    ] = None
    prompt: Annotated[
        str | None,
        _prompt("-p", "--prompt", metavar="TEXT", help="The prompt. A file or piped input is added after it."),
    ] = None
    system: Annotated[
        str | None, _prompt("--system", metavar="TEXT", help="System message, where the chat template has one.")
    ] = None
    raw: Annotated[bool, _prompt("--raw", help="No chat template: continue the prompt as it is (base models).")] = False


@dataclass(frozen=True, slots=True)
class ModelFlags:
    """Which model, and how it is put into memory."""

    model: Annotated[
        str | None,
        _model(
            "-m",
            "--model",
            metavar="NAME|PATH",
            help="Name from `specgen models list`, a path, or hf:repo.",
            autocompletion=model_names,
        ),
    ] = None
    models: Annotated[
        str | None, _model("--models", metavar="FILE", help="A models.toml laid over the built-in one.")
    ] = None
    ctx: Annotated[
        int | None, _model("--ctx", metavar="TOKENS", help="Context length; the model's own by default.")
    ] = None
    device: Annotated[
        str,
        _model(
            "--device",
            metavar="auto|cpu|cuda|cuda:N",
            help="Graphics card or processor; auto takes the first card that can be used.",
        ),
    ] = "auto"
    no_graphs: Annotated[
        bool, _model("--no-graphs", help="On a card: start every kernel by itself, to look for errors.")
    ] = False
    threads: Annotated[
        int | None, _model("--threads", metavar="N", help="CPU threads; by default what the machine allows.")
    ] = None
    kv: Annotated[str, _model("--kv", metavar="|".join(get_args(KVName)), help="Number format of the KV cache.")] = (
        "auto"
    )
    quant: Annotated[
        str | None,
        _model("--quant", metavar="|".join(get_args(QuantName)), help="Quantise a dense model when loading, once."),
    ] = None
    max_memory: Annotated[
        str | None, _model("--max-memory", metavar="SIZE", help="For everything, e.g. 6GB; by default what is free.")
    ] = None
    weight_cache: Annotated[
        str,
        _model(
            "--weight-cache",
            metavar="SIZE",
            help="Disk for weights as they were laid out for this CPU, which a start then only maps; 0 keeps none.",
        ),
    ] = WEIGHT_CACHE
    draft: Annotated[
        str | None,
        _decoding("--draft", metavar="NAME|PATH|none", help="Small model that drafts; by default the model's own."),
    ] = None
    draft_quant: Annotated[
        str | None,
        _decoding("--draft-quant", metavar="|".join(get_args(QuantName)), help="Quantise a dense draft when loading."),
    ] = None
    ngram_store: Annotated[
        bool,
        _decoding(
            "--ngram-store/--no-ngram-store", help="Look in the texts of earlier runs too, and keep this one's on disk."
        ),
    ] = False


@dataclass(frozen=True, slots=True)
class WorkerFlags:
    """What outlives the command."""

    keep_alive: Annotated[
        float | None,
        _model(
            "--keep-alive",
            metavar="MINUTES",
            help="Leave the loaded model behind for so long, for the next run; 0 uses none. See `specgen ps`.",
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class SamplingFlags:
    """How tokens are chosen. None: the model's entry decides, else the value that the help names."""

    temperature: Annotated[
        float | None, _sampling("-t", "--temperature", metavar="X", help="0 takes the likeliest token. Default 0.")
    ] = None
    top_k: Annotated[
        int | None, _sampling("--top-k", metavar="N", help="Only the N likeliest tokens; 0 is off. Default 0.")
    ] = None
    top_p: Annotated[
        float | None, _sampling("--top-p", metavar="X", help="Only the likeliest with total X. Default 1.")
    ] = None
    min_p: Annotated[
        float | None, _sampling("--min-p", metavar="X", help="Only those ≥ X times the likeliest. Default 0.")
    ] = None
    repetition_penalty: Annotated[
        float | None, _sampling("--repetition-penalty", metavar="X", help="1 is off. Default 1.")
    ] = None
    presence_penalty: Annotated[
        float | None, _sampling("--presence-penalty", metavar="X", help="0 is off. Default 0.")
    ] = None
    frequency_penalty: Annotated[
        float | None, _sampling("--frequency-penalty", metavar="X", help="0 is off. Default 0.")
    ] = None
    logit_bias: Annotated[
        list[str] | None,
        _sampling("--logit-bias", metavar="ID=X", help="Add X to a token's logit (-inf forbids it). Repeatable."),
    ] = None
    seed: Annotated[
        int | None,
        _sampling("--seed", metavar="N", help="Same seed, same text, however it is speculated. Default 0."),
    ] = None


@dataclass(frozen=True, slots=True)
class DecodingFlags:
    """When the answer ends and how it is speculated."""

    max_tokens: Annotated[
        int | None,
        _sampling("-n", "--max-tokens", metavar="N", help="Stop after N tokens; by default when the context is full."),
    ] = None
    stop: Annotated[
        list[str] | None,
        _sampling("--stop", metavar="TEXT", help=r"End before TEXT; \n, \t and \\ are understood. Repeatable."),
    ] = None
    ignore_eos: Annotated[bool, _sampling("--ignore-eos", help="Go on after the model ends its answer.")] = False
    proposer: Annotated[
        str, _decoding("--proposer", metavar="|".join(get_args(ProposerName)), help="What guesses ahead.")
    ] = "auto"
    gamma: Annotated[
        str,
        _decoding(
            "--gamma", metavar="N|auto", help=f"Tokens guessed ahead, 0 to {MAX_GAMMA}; auto measures each cycle."
        ),
    ] = "auto"
    tree: Annotated[
        int,
        _decoding("--tree", metavar="WIDTH", help=f"Continuations tried at each place, 1 to {MAX_TREE}; 1 is a chain."),
    ] = 1
    draft_stop: Annotated[
        float,
        _decoding("--draft-stop", metavar="P", help="End a model's draft at a token to which it gives less than P."),
    ] = 0.0
    accept: Annotated[
        str,
        _decoding(
            "--accept",
            metavar="|".join(get_args(AcceptName)),
            help="Acceptance rule: coupled and rejection are exact, typical is lossy.",
        ),
    ] = "coupled"


@dataclass(frozen=True, slots=True)
class OutputFlags:
    """Where the answer goes and what is said about it."""

    json: Annotated[bool, _output("--json", help="One JSON object when the answer is complete, instead of text.")] = (
        False
    )
    stats: Annotated[bool, _output("--stats", help="Tables of what happened, on standard error.")] = False
    output: Annotated[
        str | None,
        _output(
            "-o",
            "--output",
            metavar="FILE",
            help="Write the answer there instead, all at once; after Ctrl-C what was said until then.",
        ),
    ] = None
    quiet: Annotated[bool, _output("--quiet/--no-quiet", "-q", help="No status line, summary, notes, highlights.")] = (
        False
    )
    color: Annotated[
        str, _output("--color", metavar="auto|always|never", help="auto: on a terminal without NO_COLOR.")
    ] = "auto"
    debug: Annotated[bool, _output("--debug", help="Show the traceback of an error.")] = False


def on_command_line(context: typer.Context, name: str) -> bool:
    """Whether the option `name` was typed; a standing choice was not."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def grouped(command: Callable[..., int]) -> Callable[..., int]:
    """`command(context, group, …)` with dataclasses of flags → the flat function that Typer wants."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    flat = [inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    for group in groups.values():
        field_hints = get_type_hints(group, include_extras=True)
        for item in fields(group):
            flat.append(
                inspect.Parameter(
                    item.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=item.default,
                    annotation=field_hints[item.name],
                )
            )

    @wraps(command)
    def flattened(**values: Any) -> int:
        made = {
            name: group(**{item.name: values[item.name] for item in fields(group)}) for name, group in groups.items()
        }
        return command(context=values["context"], **made)

    flattened.__signature__ = inspect.Signature(flat)  # type: ignore[attr-defined]
    flattened.__annotations__ = {parameter.name: parameter.annotation for parameter in flat}
    return flattened
