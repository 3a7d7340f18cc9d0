"""`specgen tune`: find the fastest setting for this model on this machine, and keep it.

Knows: flags, tables, where plans are. Does not know: how the search works (`specgen.measure.tuner`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from specgen.cli.charts import Column, columns_of, print_json, print_lines, progress_bar, table
from specgen.cli.console import Console
from specgen.cli.flags import ModelFlags
from specgen.cli.measure_flags import ReportFlags, WorkloadFlags, apply_report_flags, chosen_workloads, measured_session
from specgen.cli.run import find_model
from specgen.errors import ExitCode, SpecgenError, UsageError
from specgen.options import check_choice, check_range

if TYPE_CHECKING:
    from specgen.measure.tuner import Tuned, TuneOptions, TuneResult
    from specgen.measure.tunestate import TuneState
    from specgen.measure.workloads import Workload
    from specgen.registry import ModelRef
    from specgen.session import Session
    from specgen.tune.plan import Plan
    from specgen.tune.search import Confirmed

SCHEMA_VERSION = 1
SHOWN_PREDICTIONS = 6

_search = partial(typer.Option, rich_help_panel="Search")
_plans = partial(typer.Option, rich_help_panel="Stored plans")


@dataclass(frozen=True, slots=True)
class TuneFlags:
    """How long to search and for what; or what to do with what was found earlier."""

    budget: Annotated[
        float, _search("--budget", metavar="SECONDS", help="About how long to measure; longer is surer.")
    ] = 60.0
    objective: Annotated[
        str, _search("--objective", metavar="tok/s|p95", help="Most tokens a second, or the shortest long pauses.")
    ] = "tok/s"
    skip: Annotated[
        bool, _search("--skip", help="Also search which layers the model could leave out to draft for itself.")
    ] = False
    fresh: Annotated[bool, _search("--fresh", help="Do not go on with a search that was interrupted.")] = False
    show: Annotated[bool, _plans("--show", help="Show the stored plans (of --model, or all).")] = False
    forget: Annotated[bool, _plans("--forget", help="Remove all that was found out about --model.")] = False
    export: Annotated[
        str | None,
        _plans("--export", metavar="vllm|llama.cpp|sglang", help="Print a server's flags for the stored plan."),
    ] = None


def tune(context: typer.Context, model: ModelFlags, texts: WorkloadFlags, flags: TuneFlags, report: ReportFlags) -> int:
    """Find the fastest setting for this model, this machine and your kind of text; `run` then uses it.

    specgen tune
    specgen tune --prompts my_prompts.jsonl --budget 300
    specgen tune -m ./target --draft ./small --skip
    specgen tune --show
    specgen tune --export vllm
    """
    console = Console.of(context)
    apply_report_flags(console, report)
    _check(flags)
    console.answer()
    if flags.show:
        return _show(console, model, json=report.json)
    ref = find_model(model)
    if flags.forget:
        return _forget(console, ref)
    if flags.export is not None:
        return _export(console, ref, flags.export)
    loads = _workloads(texts)  # before the model, which may have to be fetched
    return _tune(console, measured_session(context, model), loads, texts, flags, json=report.json)


def _check(flags: TuneFlags) -> None:
    from specgen.tune.export import SERVERS
    from specgen.tune.search import Objective

    check_range("--budget", flags.budget, 0, 86_400, open_low=True)
    check_choice("--objective", flags.objective, get_args(Objective))
    if flags.export is not None:
        check_choice("--export", flags.export, SERVERS)
    if sum((flags.show, flags.forget, flags.export is not None)) > 1:
        raise UsageError("--show, --forget and --export exclude each other", hint="give one of them")


def _tune(
    console: Console,
    session: Session,
    loads: Sequence[Workload],
    texts: WorkloadFlags,
    flags: TuneFlags,
    *,
    json: bool,
) -> int:
    from specgen.measure.tuner import TuneOptions, Tuner, plans_of
    from specgen.tune.plan import PlanStore

    options = TuneOptions(flags.budget, flags.objective, texts.sampling, flags.skip)  # type: ignore[arg-type]
    state = _state(session, loads, options, fresh=flags.fresh)
    if state.steps:
        console.note("going on with the search that was interrupted (--fresh begins anew)")
    try:
        with progress_bar(console) as progress:
            result = Tuner(session, loads, options, state).run(progress)
    except KeyboardInterrupt:
        if state.steps:
            console.note("interrupted; the same command goes on from here")
        raise
    for note in result.notes:
        console.note(note)
    store = PlanStore()
    plans = plans_of(result, session)
    for plan in plans:
        store.save(plan)
    state.done()
    if json:
        print_json(console, _object(result, plans, session.report()))
    else:
        print_lines(console, _lines(result, columns_of(console)))
    return int(ExitCode.OK)


def _workloads(texts: WorkloadFlags) -> list[Workload]:
    """The prompts that the flags name; long ones too where they name none."""
    from specgen.measure.workloads import LONG_KIND, shipped

    loads = chosen_workloads(texts)
    return loads if texts.prompts is not None or texts.kind else [*loads, *shipped((LONG_KIND,))]


def _state(session: Session, loads: Sequence[Workload], options: TuneOptions, *, fresh: bool) -> TuneState:
    """What an interrupted search for the same thing left."""
    from specgen.measure.tunestate import TuneState
    from specgen.measure.workloads import digest

    key = repr((session.scope, session.engine.cache.capacity, digest(loads), options))
    state = TuneState.load(key)
    if fresh:
        state.done()
        return TuneState.load(key)
    return state


def _object(result: TuneResult, plans: Sequence[Plan], session: dict[str, Any]) -> dict[str, Any]:
    known = {"schema_version": SCHEMA_VERSION, "model": session["model"], "versions": session["versions"]}
    classes = [
        {
            "temperature": one.temperature,
            "context": one.context,
            "choice": one.choice,
            "confirmed": [
                {
                    "setting": c.setting,
                    "speedup": c.speedup,
                    "predicted": c.predicted,
                    "by_kind": c.by_kind,
                    "predicted_by_kind": c.expected,
                }
                for c in one.confirmed
            ],
            "predicted": [
                {"setting": p.setting, "speedup": p.speedups(one.plain, result.objective), "yield": p.yields}
                for p in one.predictions
            ],
        }
        for one in result.tuned
    ]
    rest = {
        "elapsed_s": result.elapsed_s,
        "prompts": result.prompts,
        "objective": result.objective,
        "propose_ms": result.costs.propose,
        "skip": None if result.skip is None else {**asdict(result.skip), "skipped": sorted(result.skip.skipped)},
    }
    return {**known, **rest, "classes": classes, "plans": [plan.to_json() for plan in plans]}


def _lines(result: TuneResult, width: int) -> Iterator[str]:
    yield f"{result.prompts} answers of up to {result.tokens} tokens, {result.elapsed_s:.0f} s"
    yield ""
    yield from _step_table(result, width)
    yield from _propose_lines(result)
    for one in result.tuned:
        yield ""
        yield from _class_lines(one, result, width)


def _step_table(result: TuneResult, width: int) -> list[str]:
    contexts = sorted(result.costs.steps)
    rows = sorted(result.costs.steps[contexts[0]])
    columns = [Column("rows", [str(row) for row in rows])]
    for context in contexts:
        table_ = result.costs.at(context)
        columns.append(Column(f"ms at {context}", [f"{table_.step_ms(row):.1f}" for row in rows]))
        columns.append(Column("x t(1)", [f"{table_.ratio(row):.2f}" for row in rows]))
    return table("A step of the model, by rows and tokens of context", columns, width)


def _propose_lines(result: TuneResult) -> Iterator[str]:
    """What proposing takes."""
    for name, cost in result.costs.propose.items():
        each = f" and {cost.each:.2f} ms a token" if cost.each else ""
        read = f", {cost.read:.3f} ms a token that it has not read" if cost.read else ""
        yield f"{name}: {cost.once:.3f} ms a draft{each}{read}"


def _class_lines(one: Tuned, result: TuneResult, width: int) -> Iterator[str]:
    from specgen.tune.search import overall, ranked

    objective = result.objective
    best = ranked(one.predictions, objective)[:SHOWN_PREDICTIONS]
    measured = {confirmed.setting: confirmed for confirmed in one.confirmed}
    shown = [p.setting for p in best] + [s for s in measured if s not in {p.setting for p in best}]
    predicted = {setting: overall(one.predicted(setting, objective)) for setting in shown}
    yield from table(
        f"Settings, {one.texts} ({objective} over plain, all kinds)",
        [
            Column("setting", [setting.label for setting in shown], left=True),
            Column("predicted", [f"{predicted[setting]:.2f}x" for setting in shown]),
            Column("of what was run", [f"{measured[s].predicted:.2f}x" if s in measured else "" for s in shown]),
            Column("measured", [f"{measured[s].speedup.middle:.2f}x" if s in measured else "" for s in shown]),
            Column("error", [_error(measured.get(setting)) for setting in shown]),
            Column("with the noise", [_noise(measured[s].speedup) if s in measured else "" for s in shown]),
        ],
        width,
    )
    yield from _drafter_lines(one, result)
    if one.confirmed:
        yield ""
        yield from _kind_table(one, result, width)
    yield ""
    yield f"Chosen for {one.texts}: {one.choice.setting.label}"
    yield f"  {one.choice.why}"


def _drafter_lines(one: Tuned, result: TuneResult) -> Iterator[str]:
    """What each kind of drafting is predicted to do with the best γ, whether it is among the best or not."""
    from specgen.tune.search import overall

    speeds = {p.setting: overall(p.speedups(one.plain, result.objective)) for p in one.predictions}
    for name in ("model", "mix", "skip"):
        # γ auto leaves a draft out that does not pay: it would hide what the draft is worth.
        fixed = [setting for setting in speeds if setting.proposer == name and setting.gamma is not None]
        if fixed:
            best = max(fixed, key=lambda setting: speeds[setting])
            yield f"{_drafter(name, result)}: at best {speeds[best]:.2f}x predicted ({best.label})"


def _drafter(name: str, result: TuneResult) -> str:
    if name != "skip" or result.skip is None:
        return {"model": "the draft model alone", "mix": "n-grams, and the draft model where they have nothing"}[name]
    count = len(result.skip.skipped)
    left_out = f"{count} sublayer{'' if count == 1 else 's'} left out"
    return f"the model with {left_out}, right for {result.skip.agreement:.0%} of its own greedy text"


def _error(confirmed: Confirmed | None) -> str:
    """Predicted over measured speed."""
    return "" if confirmed is None else f"{100 * (confirmed.predicted / confirmed.speedup.middle - 1):+.0f}%"


def _kind_table(one: Tuned, result: TuneResult, width: int) -> list[str]:
    plain = one.plain
    kinds = list(plain.ms_per_token)
    columns = [Column("kind", kinds, left=True)]
    for confirmed in one.confirmed:
        expected, by_kind = confirmed.expected or {}, confirmed.by_kind
        columns.append(Column(confirmed.setting.label, [_number(by_kind.get(kind)) for kind in kinds]))
        columns.append(Column("predicted", [_number(expected.get(kind)) for kind in kinds]))
    return table("By kind of text, measured and predicted", columns, width)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}x"


def _noise(speedup: Any) -> str:
    return "unknown" if speedup.high == float("inf") else f"{speedup.low:.2f} to {speedup.high:.2f}"


def _show(console: Console, model: ModelFlags, *, json: bool) -> int:
    from specgen.tune.plan import PlanStore

    digest = None if model.model is None else _digest(find_model(model))
    plans = PlanStore().all(digest)
    if json:
        print_json(console, {"schema_version": SCHEMA_VERSION, "plans": [plan.to_json() for plan in plans]})
    elif plans:
        print_lines(console, _plan_lines(plans, columns_of(console)))
    else:
        print_lines(console, ["no plans are stored; `specgen tune` makes one"])
    return int(ExitCode.OK)


def _plan_lines(plans: Sequence[Plan], width: int) -> Iterator[str]:
    yield from table(
        "Stored plans",
        [
            Column("model", [plan.model for plan in plans], left=True),
            Column("draft", [plan.draft or "–" for plan in plans], left=True),
            Column("text", [f"{plan.temperature}, {plan.context}" for plan in plans], left=True),
            Column("setting", [plan.setting.label for plan in plans], left=True),
            Column("gain", [f"{plan.speedup[1]:.2f}x" for plan in plans]),
            Column("tuned", [plan.created[:10] for plan in plans]),
            Column("for", [plan.objective for plan in plans]),
            Column("with", [plan.scope.versions for plan in plans], left=True),
            Column("on", [plan.scope.device for plan in plans], left=True),
        ],
        width,
    )
    for plan in plans:
        yield ""
        beside = "" if plan.draft is None else f" with {plan.draft}"
        yield f"{plan.model}{beside}, {plan.texts}: {plan.setting.label}"
        yield f"  {plan.why}"


def _forget(console: Console, ref: ModelRef) -> int:
    from specgen.tune.plan import PlanStore

    count = PlanStore().forget(_digest(ref))
    print_lines(console, [f"removed {count} stored plan{'' if count == 1 else 's'} of {ref.name}"])
    return int(ExitCode.OK)


def _export(console: Console, ref: ModelRef, server: str) -> int:
    from specgen.tune.export import export
    from specgen.tune.plan import PlanStore

    plans = PlanStore().all(_digest(ref))
    if not plans:
        raise SpecgenError(f"no plan is stored for {ref.name}", hint="run `specgen tune` first")
    # Servers take one setting for all requests: the newest plan for greedy text after short prompts, else the newest.
    short = [plan for plan in plans if plan.context == "short"] or plans
    plan = next((plan for plan in reversed(short) if plan.temperature == "greedy"), short[-1])
    flags, notes = export(plan, server)
    for note in notes:
        console.note(note)
    print_lines(console, [flags])
    return int(ExitCode.OK)


def _digest(ref: ModelRef) -> str:
    """The digest of a model's files, without loading them."""
    from specgen.registry import pull
    from specgen.weights.checkpoint import open_checkpoint

    return open_checkpoint(pull(ref.entry).target).digest()
