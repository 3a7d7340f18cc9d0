"""The flags that `bench`, `profile`, `tune` and `verify` share, and what they become.

Knows: names and help lines. Does not know: how anything is measured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from specgen.cli.console import Console
from specgen.cli.flags import ModelFlags
from specgen.cli.run import check_draft, find_draft, find_model, load_options, load_session
from specgen.config import ColorName
from specgen.errors import UsageError
from specgen.options import MAX_GAMMA, ProposerName, RunOptions, check_choice, check_range

if TYPE_CHECKING:
    from specgen.measure.runs import Case
    from specgen.measure.workloads import Workload
    from specgen.session import Session
    from specgen.tune.setting import Setting

_texts = partial(typer.Option, rich_help_panel="Prompts")
_output = partial(typer.Option, rich_help_panel="Output")
_setting = partial(typer.Option, rich_help_panel="Speculation")

SAMPLINGS = ("both", "greedy", "own")


@dataclass(frozen=True, slots=True)
class WorkloadFlags:
    """Which prompts."""

    prompts: Annotated[
        str | None,
        _texts("--prompts", metavar="FILE|DIR|JSONL", help="Your own prompts instead of the nine kinds that ship."),
    ] = None
    kind: Annotated[list[str] | None, _texts("--kind", metavar="NAME", help="Only this kind. Repeatable.")] = None
    sampling: Annotated[
        str,
        _texts("--sampling", metavar="|".join(SAMPLINGS), help="At temperature 0, at each prompt's own, or both."),
    ] = "both"


@dataclass(frozen=True, slots=True)
class ReportFlags:
    """How the result is told."""

    json: Annotated[bool, _output("--json", help="One JSON object instead of tables.")] = False
    quiet: Annotated[bool, _output("-q", "--quiet", help="No progress bar and no notes.")] = False
    color: Annotated[
        str, _output("--color", metavar="auto|always|never", help="auto: on a terminal without NO_COLOR.")
    ] = "auto"
    debug: Annotated[bool, _output("--debug", help="Show the traceback of an error.")] = False


@dataclass(frozen=True, slots=True)
class SettingFlags:
    """How to speculate."""

    proposer: Annotated[
        str, _setting("--proposer", metavar="|".join(get_args(ProposerName)), help="What guesses ahead.")
    ] = "auto"
    gamma: Annotated[str, _setting("--gamma", metavar="N|auto", help=f"Tokens guessed ahead, 0 to {MAX_GAMMA}.")] = (
        "auto"
    )
    ngram: Annotated[
        str | None, _setting("--ngram", metavar="MIN-MAX", help="Sizes of n-gram that are looked up, e.g. 2-4.")
    ] = None


def apply_report_flags(console: Console, flags: ReportFlags) -> None:
    check_choice("--color", flags.color, get_args(ColorName))
    console.color = flags.color  # type: ignore[assignment]
    console.quiet = flags.quiet
    console.debug = console.debug or flags.debug


def measured_session(context: typer.Context, flags: ModelFlags) -> Session:
    """The model that is measured, without the store of earlier texts: every prompt is answered several times, and the
    second answer would be looked up in the first."""
    console, ref = Console.of(context), find_model(flags)
    draft, options = find_draft(flags, ref), load_options(flags)
    check_draft(context, RunOptions(), draft, options)
    if options.ngram_store:
        console.note("measured without the n-gram store: repeated answers would be found in it")
    return load_session(console, ref, replace(options, ngram_store=False), draft)


def chosen_setting(flags: SettingFlags) -> Setting | None:
    """None: whatever `specgen run` would do without options."""
    from specgen.cli.run import gamma_choice
    from specgen.tune.setting import Setting

    check_choice("proposer", flags.proposer, get_args(ProposerName))
    gamma = gamma_choice(flags.gamma)
    if flags.proposer == "auto" and gamma is None and flags.ngram is None:
        return None
    n_min, n_max = _sizes(flags.ngram) if flags.ngram is not None else (Setting().n_min, Setting().n_max)
    return Setting(flags.proposer, gamma, n_max, n_min)  # type: ignore[arg-type]


def _sizes(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    try:
        return int(low), int(high or low)
    except ValueError:
        raise UsageError(f"--ngram is {text!r}", hint="it must be MIN-MAX, for example 2-4") from None


def chosen_workloads(flags: WorkloadFlags, per_kind: int | None = None) -> list[Workload]:
    """The prompts that the flags name, in turns over kinds; at most `per_kind` of each."""
    from specgen.measure.workloads import kinds_in_turn, load_workloads

    check_choice("--sampling", flags.sampling, SAMPLINGS)
    if per_kind is not None:
        check_range("--per-kind", per_kind, 1, 1000)
    found = load_workloads(tuple(flags.kind or ()), Path(flags.prompts) if flags.prompts is not None else None)
    if per_kind is None:
        return kinds_in_turn(found)
    counts: dict[str, int] = {}
    kept = []
    for load in found:
        counts[load.kind] = counts.get(load.kind, 0) + 1
        if counts[load.kind] <= per_kind:
            kept.append(load)
    return kinds_in_turn(kept)


def fitting_cases(
    console: Console, session: Session, loads: list[Workload], flags: WorkloadFlags, max_tokens: int
) -> list[Case]:
    """What is measured of `loads`; prompts that the context does not hold are named in a note."""
    from specgen.measure.runs import make_cases

    cases, left_out = make_cases(session, loads, flags.sampling, max_tokens)  # type: ignore[arg-type]
    for load in left_out:
        console.note(f"{load} is left out: it does not fit into the context")
    return cases
