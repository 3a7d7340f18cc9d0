"""`specgen profile`: curves of steps, survival and speed, as tables, bars and a picture.

Knows: flags, tables, charts. Does not know: how anything is measured (`specgen.measure.profile`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from specgen.cli.charts import Column, bars, columns_of, print_json, print_lines, progress_bar, table
from specgen.cli.console import Console
from specgen.cli.flags import ModelFlags
from specgen.cli.measure_flags import (
    ReportFlags,
    WorkloadFlags,
    apply_report_flags,
    chosen_workloads,
    fitting_cases,
    measured_session,
)
from specgen.cli.outfile import OutFile
from specgen.cli.plot import draw, plot_format
from specgen.errors import ExitCode, UsageError
from specgen.options import check_range

if TYPE_CHECKING:
    from specgen.measure.profile import Point, Profile, Sweep
    from specgen.measure.workloads import Workload

SCHEMA_VERSION = 1
QUICK_GAMMAS = (1, 2, 4, 8)
TREE_GAMMAS = (2, 4)

_profile = partial(typer.Option, rich_help_panel="Measurement")


@dataclass(frozen=True, slots=True)
class ProfileFlags:
    """What is swept."""

    contexts: Annotated[
        str | None, _profile("--contexts", metavar="N,N,…", help="Context lengths at which steps are timed.")
    ] = None
    max_tokens: Annotated[int, _profile("-n", "--max-tokens", metavar="N", help="Tokens of an answer, at most.")] = 64
    per_kind: Annotated[int, _profile("--per-kind", metavar="N", help="Prompts of each kind.")] = 1
    rounds: Annotated[int, _profile("--rounds", metavar="N", help="Times that every setting is measured.")] = 1
    exhaustive: Annotated[
        bool, _profile("--exhaustive", help="Measure every setting that `tune` searches, not some; this takes long.")
    ] = False
    plot: Annotated[
        str | None, _profile("--plot", metavar="FILE.png|svg", help="Draw the curves (needs specgen[plot]).")
    ] = None


def profile(
    context: typer.Context, model: ModelFlags, texts: WorkloadFlags, flags: ProfileFlags, report: ReportFlags
) -> int:
    """Show what decides the speed: steps by rows, survival by position, speed by γ, the parts of a cycle.

    specgen profile
    specgen profile --contexts 128,4096 --plot profile.png
    specgen profile -m ./target --draft ./small
    specgen profile --exhaustive --rounds 3 --sampling greedy
    """
    console = Console.of(context)
    apply_report_flags(console, report)
    check_range("--rounds", flags.rounds, 1, 1000)
    check_range("--max-tokens", flags.max_tokens, 2, 1_000_000)
    form = None if flags.plot is None else plot_format(flags.plot)
    picture = None if flags.plot is None else OutFile(flags.plot)
    contexts = _contexts(flags.contexts)
    loads = _with_hard_kind(chosen_workloads(texts, flags.per_kind), texts)
    console.answer()
    session = measured_session(context, model)
    from specgen.measure.profile import Profiler

    cases = fitting_cases(console, session, loads, texts, flags.max_tokens)
    drafted = session.speculation.draft is not None
    sweep = _sweep(flags, contexts, session.engine.cache.capacity, drafted=drafted)
    with progress_bar(console) as progress:
        found = Profiler(session, cases, sweep).run(progress)
    if picture is not None and form is not None:
        picture.write(draw(found, f"{session.loaded.name} on {session.scope.device}", form))
    if report.json:
        said = session.report()
        known = {"schema_version": SCHEMA_VERSION, "model": said["model"], "versions": said["versions"]}
        print_json(console, {**known, "profile": found})
    else:
        print_lines(console, _lines(found, columns_of(console)))
    return int(ExitCode.OK)


def _contexts(text: str | None) -> list[int]:
    """Empty: what the model's cache can hold of the usual ones."""
    if text is None:
        return []
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"--contexts is {text!r}", hint="whole numbers with commas, for example 128,1024") from None
    for number in found:
        check_range("--contexts", number, 1, 10_000_000)
    return found


def _with_hard_kind(loads: list[Workload], texts: WorkloadFlags) -> list[Workload]:
    """A profile always has text that cannot be guessed."""
    from specgen.measure.workloads import HARD_KIND, load_workloads

    if texts.prompts is not None or any(load.kind == HARD_KIND for load in loads):
        return loads
    return [*loads, load_workloads((HARD_KIND,))[0]]


def _sweep(flags: ProfileFlags, contexts: Sequence[int], capacity: int, *, drafted: bool = False) -> Sweep:
    """drafted: with a draft model too."""
    from specgen.measure.calibrate import ROWS, contexts_for
    from specgen.measure.profile import Sweep
    from specgen.tune.search import TREES, candidates, drafted_candidates
    from specgen.tune.setting import PLAIN, Setting

    for number in contexts:
        if number + max(ROWS) > capacity:
            raise UsageError(f"--contexts has {number}, and the context is {capacity} tokens", hint="raise --ctx")
    known = candidates()
    trees = [Setting("ngram", gamma, tree=width) for width in TREES for gamma in TREE_GAMMAS]
    models = drafted_candidates({"model"}) if drafted else []
    mixes = [Setting("mix", gamma) for gamma in (*QUICK_GAMMAS, None)] if drafted else []
    predicted = [*known, *trees, *models, *mixes]
    quick = [PLAIN, *(Setting("ngram", gamma) for gamma in (*QUICK_GAMMAS, None)), *trees]
    if drafted:
        quick += [*(Setting("model", gamma) for gamma in (*QUICK_GAMMAS, None)), Setting("mix", None)]
    measured = predicted if flags.exhaustive else quick
    return Sweep(contexts or contexts_for(capacity), predicted, measured, rounds=flags.rounds)


def _lines(found: Profile, width: int) -> Iterator[str]:
    for context, steps in found.steps.items():
        base = steps[min(steps)].middle
        items = [(str(r), s.middle, f"{s.middle:.1f} ms  {s.middle / base:.2f}x") for r, s in steps.items()]
        yield from bars(f"t(R) after {context} tokens: a step of R rows", items, width)
        yield ""
    yield from _survival_table("n-gram drafts", found.survival, width)
    if found.draft_survival:
        yield ""
        yield from _survival_table("the draft model's drafts", found.draft_survival, width)
    yield ""
    yield from _speed_table(_shown(found.points), width)
    yield ""
    yield from _speed_chart(_shown(found.points), width)
    yield ""
    yield from _cycle_table(found, width)
    yield ""
    yield _best(found.best)


def _best(best: Point) -> str:
    if best.setting.is_plain:
        return "Best: plain; nothing beats it by more than the noise"
    gain = best.measured.middle if best.measured else best.predicted_speedup
    return f"Best: {best.setting.label}, {gain:.2f}x plain ({'measured' if best.measured else 'predicted'})"


def _survival_table(whose: str, survival: Mapping[str, Sequence[float]], width: int) -> list[str]:
    kinds = list(survival)
    positions = [1, 2, 3, 4, 6, 8, 12, 16]
    cells = {k: [_share(survival[kind], k) for kind in kinds] for k in positions}
    columns = [Column("kind", kinds, left=True), *(Column(f"s_{k}", cells[k]) for k in positions)]
    return table(f"Survival of {whose}: accepted up to position k", columns, width)


def _share(shares: Sequence[float], position: int) -> str:
    return f"{shares[position - 1]:.2f}" if position <= len(shares) else "–"


def _shown(points: Sequence[Point]) -> list[Point]:
    """What was measured, and the best of what was not."""
    measured = [p for p in points if p.measured is not None]
    rest = sorted((p for p in points if p.measured is None), key=lambda p: p.predicted_speedup, reverse=True)
    return [*measured, *rest[:5]]


def _speed_table(points: Sequence[Point], width: int) -> list[str]:
    worst = [min(p.measured_by_kind.values(), default=float("nan")) for p in points]
    return table(
        "Speed by setting (over plain, all kinds)",
        [
            Column("setting", [p.setting.label for p in points], left=True),
            Column("predicted", [f"{p.predicted_speedup:.2f}x" for p in points]),
            Column("measured", [f"{p.measured.middle:.2f}x" if p.measured else "" for p in points]),
            Column("error", [f"{100 * p.error:+.0f}%" if p.error is not None else "" for p in points]),
            Column("E[Y]", [f"{sum(p.yields.values()) / len(p.yields):.2f}" for p in points]),
            Column("tok/s", [f"{p.measured_tok_s or p.predicted_tok_s:.1f}" for p in points]),
            Column("worst kind", [f"{value:.2f}x" if value == value else "" for value in worst]),
        ],
        width,
    )


def _speed_chart(points: Sequence[Point], width: int) -> list[str]:
    items = []
    for point in points:
        value = point.measured.middle if point.measured else point.predicted_speedup
        items.append((point.setting.label, value, f"{value:.2f}x{'' if point.measured else ' ?'}"))
    return bars("Times as fast as plain (?: predicted)", items, width)


def _cycle_table(found: Profile, width: int) -> list[str]:
    parts = [one for one in found.cycles if one.measured] or found.cycles[:1]
    return table(
        "Milliseconds of a cycle",
        [
            Column("setting", [one.label for one in parts], left=True),
            Column("total", [f"{one.total_ms:.2f}" for one in parts]),
            Column("verify", [f"{one.verify_ms:.2f}" for one in parts]),
            Column("reconcile", [f"{one.reconcile_ms:.2f}" for one in parts]),
            Column("propose", [f"{one.propose_ms:.2f}" for one in parts]),
            Column("other", [f"{one.other_ms:.2f}" for one in parts]),
        ],
        width,
    )
