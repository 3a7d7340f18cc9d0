"""`specgen bench --shape`: a real model's sizes with random weights, so that nothing need be downloaded.

Knows: flags that make sense here, tables, goals. Does not know: how anything is measured (measure.shape_bench).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import typer

from specgen.cli.charts import Column, columns_of, print_json, print_lines, progress_bar, table
from specgen.cli.console import Console
from specgen.cli.flags import ModelFlags, on_command_line
from specgen.cli.run import gamma_choice, load_options
from specgen.errors import ExitCode, UsageError
from specgen.options import MAX_GAMMA, LoadOptions, check_choice, check_range

if TYPE_CHECKING:
    from specgen.measure.compiled import CompiledSpeed
    from specgen.measure.shape_bench import CycleSpeed, ShapeRequest, ShapeResult, StepSpeed
    from specgen.measure.synthetic import SyntheticRow

SCHEMA_VERSION = 1
DEFAULT_QUANT = "awq"
DEFAULT_CONTEXT_TOKENS = 256
DEFAULT_GAMMA = 4
HONOURED = {
    *("shape", "quant", "draft", "ctx", "device", "threads", "kv", "no_graphs"),
    *("gamma", "rounds", "json", "quiet", "color", "debug"),
}
SHOWN_GAMMAS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class ShapeFlags:
    """What `--shape` takes of all the flags of `bench`."""

    shape: str
    gamma: str
    rounds: int
    json: bool


def bench_shape(context: typer.Context, console: Console, model: ModelFlags, flags: ShapeFlags) -> int:
    """Measure kernels, steps and cycles of a shape, and tell."""
    _check_given(context)
    options = load_options(replace(model, quant=None))  # the words of --quant are others here
    gamma = _gamma(flags.gamma)
    console.answer()
    request = _request(model, flags, options, gamma)
    from specgen.kernels.card_memory import shortage_told
    from specgen.measure.compiled import measure_compiled
    from specgen.measure.shape_bench import ShapeBench
    from specgen.placement import placements

    placement = next(placements(options))
    for notice in placement.notices:
        console.note(notice)
    with shortage_told(f"measuring {request.shape.name} on {placement.device}"):
        with console.busy(f"making weights like those of {request.shape.name}"):
            bench = ShapeBench(request, placement)
        with progress_bar(console) as progress:
            result = bench.run(progress)
        for notice in result.notices:
            console.note(notice)
        del bench  # the card need not hold both at once
        compiled = measure_compiled(request, placement)
    if flags.json:
        print_json(console, {"schema_version": SCHEMA_VERSION, "result": result, "compiled": compiled})
    else:
        print_lines(console, [*_lines(result, columns_of(console)), *_compiled_lines(compiled, result)])
    return int(ExitCode.OK)


def _check_given(context: typer.Context) -> None:
    """Every option is honoured or refused."""
    for name in context.params:
        if on_command_line(context, name) and name not in HONOURED:
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"{flag} means nothing with --shape", hint="a shape has no files, prompts or answers")


def _gamma(text: str) -> int:
    gamma = gamma_choice(text)
    gamma = DEFAULT_GAMMA if gamma is None else gamma
    check_range("--gamma", gamma, 1, MAX_GAMMA)
    return gamma


def _request(model: ModelFlags, flags: ShapeFlags, options: LoadOptions, gamma: int) -> ShapeRequest:
    from specgen.measure.random_weights import find_packing
    from specgen.measure.shape_bench import ShapeRequest
    from specgen.measure.shapes import SHAPES, find_shape

    shape, packing = find_shape(flags.shape), find_packing(model.quant or DEFAULT_QUANT)
    named = shape.draft if model.draft is None else model.draft
    if named not in (None, "none"):
        check_choice("--draft", str(named), ["none", *SHAPES])
    return ShapeRequest(
        shape=shape,
        packing=packing,
        draft=None if named in (None, "none") else find_shape(str(named)),
        context_tokens=options.context_tokens or DEFAULT_CONTEXT_TOKENS,
        gamma=gamma,
        repeats=flags.rounds,
        kv="bf16" if options.kv == "auto" else options.kv,
        graphs=options.graphs,
    )


def _lines(result: ShapeResult, width: int) -> Iterator[str]:
    draft = f", draft {result.draft}" if result.draft else ""
    yield f"{result.shape} in {result.packing}, random weights{draft}: {result.kernels} on {result.place}"
    weights = "" if result.weights_bytes is None else f"a step reads {result.weights_bytes / 1e6:,.0f} MB of weights, "
    yield f"{weights}a cached token {result.slot_bytes / 1e3:,.1f} kB; memory {result.bandwidth} " + (
        f"{result.bandwidth_gbps:,.1f} GB/s"
    )
    for part in (_linear_table, _step_table, _cycle_table):
        yield ""
        yield from part(result, width)
    tables = [("with free drafts, as n-gram's are", result.free_drafts)]
    if result.with_draft:
        tables.insert(0, (f"with {result.draft} as draft", result.with_draft))
    for title, rows in tables:
        yield ""
        yield from _synthetic_table(f"Tokens per second if each draft token is right this often, {title}", rows, width)
    yield ""
    yield from _goals(result)


def _linear_table(result: ShapeResult, width: int) -> list[str]:
    linears = result.linears
    columns = [
        Column("linear", [linear.role for linear in linears], left=True),
        Column("N", [str(linear.outputs) for linear in linears]),
        Column("K", [str(linear.inputs) for linear in linears]),
        Column("count", [str(linear.count) for linear in linears]),
        Column("MB", [f"{linear.nbytes / 1e6:,.1f}" for linear in linears]),
    ]
    for rows in linears[0].gbps:
        shares = [f"{100 * linear.gbps[rows] / result.bandwidth_gbps:.0f}%" for linear in linears]
        columns.append(Column(f"R={rows} GB/s", [f"{linear.gbps[rows]:,.1f}" for linear in linears]))
        columns.append(Column(f"of {result.bandwidth}", shares))
    return table("Linear kernels", columns, width)


def _step_table(result: ShapeResult, width: int) -> list[str]:
    steps = result.steps
    one = steps[0].ms.middle
    columns = [
        Column("rows", [str(step.rows) for step in steps]),
        Column("ms", [f"{step.ms.middle:.3f}" for step in steps]),
        Column("x t(1)", [f"{step.ms.middle / one:.2f}" for step in steps]),
        Column("quartiles", [f"{step.ms.low:.3f}-{step.ms.high:.3f}" for step in steps]),
    ]
    if result.reading_ms is not None:
        columns.insert(3, Column("x reading", [f"{step.ms.middle / result.reading_ms:.2f}" for step in steps]))
    if steps[0].device_ms is not None:
        columns.insert(2, Column("device ms", [_ms(step.device_ms) for step in steps]))
    lines = table(f"Steps after {result.context_tokens} tokens", columns, width)
    return lines if result.draft_step is None else [*lines, _draft_line(result.draft_step)]


def _draft_line(step: StepSpeed) -> str:
    device = "" if step.device_ms is None else f", the device's own {step.device_ms:.3f} ms"
    return f"a step of the draft: {step.ms.middle:.3f} ms{device}"


def _cycle_table(result: ShapeResult, width: int) -> list[str]:
    cycles = result.cycles
    return table(
        "Cycles (medians, ms)",
        [
            Column("cycle", [_label(cycle) for cycle in cycles], left=True),
            Column("ms", [f"{cycle.ms:.3f}" for cycle in cycles]),
            Column("propose", [f"{cycle.propose_ms:.3f}" for cycle in cycles]),
            Column("verify", [f"{cycle.verify_ms:.3f}" for cycle in cycles]),
            Column("reconcile", [f"{cycle.reconcile_ms:.3f}" for cycle in cycles]),
            Column("parts", [f"{cycle.parts_ms:.3f}" for cycle in cycles]),
            Column("x parts", [f"{cycle.ms / cycle.parts_ms:.2f}" for cycle in cycles]),
            Column("host", [f"{cycle.host_ms:.3f}" for cycle in cycles]),
        ],
        width,
    )


def _label(cycle: CycleSpeed) -> str:
    return cycle.label if cycle.gamma == 0 else f"{cycle.label} γ {cycle.gamma}"


def _synthetic_table(title: str, rows: Sequence[SyntheticRow], width: int) -> list[str]:
    columns = [
        Column("right", [f"{row.acceptance:.1f}" for row in rows]),
        Column("best γ", [str(row.gamma) for row in rows]),
        Column("E[Y]", [f"{row.yield_tokens:.2f}" for row in rows]),
        Column("tok/s", [f"{row.tok_s:,.1f}" for row in rows]),
        Column("x plain", [f"{row.speedup:.2f}" for row in rows]),
    ]
    for gamma in SHOWN_GAMMAS:
        columns.append(Column(f"γ {gamma}", [f"{row.tok_s_by_gamma[gamma - 1]:,.1f}" for row in rows]))
    return table(title, columns, width)


def _goals(result: ShapeResult) -> Iterator[str]:
    """The figures that decide, beside what a card should reach."""
    ms = {step.rows: step.ms.middle for step in result.steps}
    on_card = result.device != "cpu"
    if result.reading_ms is not None:
        yield _goal("t(1) against reading its bytes", ms[1] / result.reading_ms, 1.25, on_card)
    for rows, most in ((5, 1.1), (9, 1.2)):
        if rows in ms:
            yield _goal(f"t({rows}) against t(1)", ms[rows] / ms[1], most, on_card)
    last = result.cycles[-1]
    yield _goal(f"cycle of {_label(last)} against its parts", last.ms / last.parts_ms, 1.05, on_card)
    yield f"host time of a cycle: {1e3 * last.host_ms:,.0f} µs" + (" (goal: under 100)" if on_card else "")


def _goal(what: str, ratio: float, most: float, on_card: bool) -> str:
    return f"{what}: {ratio:.2f}x" + (f" (goal: {most:g} at most)" if on_card else "")


def _compiled_lines(compiled: CompiledSpeed, result: ShapeResult) -> list[str]:
    if compiled.tok_s is None:
        return [f"torch.compile, int4: not measured: {compiled.skipped}"]
    plain = 1e3 / result.cycles[0].ms
    against = f"specgen's plain decoding {plain:,.1f}, {plain / compiled.tok_s:.2f}x"
    return [f"torch.compile, int4 (as gpt-fast does it): {compiled.tok_s:,.1f} tok/s; {against}"]


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
