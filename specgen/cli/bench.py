"""`specgen bench`: plain decoding against a setting, on many kinds of text.

Knows: flags, tables, exit codes. Does not know: how anything is measured (`specgen.measure.bench`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specgen.cli.bench_shape import ShapeFlags, bench_shape
from specgen.cli.charts import Column, bars, columns_of, print_csv, print_json, print_lines, progress_bar, table
from specgen.cli.console import Console
from specgen.cli.flags import ModelFlags
from specgen.cli.measure_flags import (
    ReportFlags,
    SettingFlags,
    WorkloadFlags,
    apply_report_flags,
    chosen_setting,
    chosen_workloads,
    fitting_cases,
    measured_session,
)
from specgen.errors import ExitCode, SpecgenError, UsageError
from specgen.options import check_range

if TYPE_CHECKING:
    from specgen.measure.bench import BenchResult, Figures, Row
    from specgen.measure.timer import Spread
    from specgen.tune.search import Interval

SCHEMA_VERSION = 1

_bench = partial(typer.Option, rich_help_panel="Measurement")


@dataclass(frozen=True, slots=True)
class BenchFlags:
    """How much is measured, and what is asked of the result."""

    per_kind: Annotated[int, _bench("--per-kind", metavar="N", help="Prompts of each kind.")] = 1
    rounds: Annotated[int, _bench("--rounds", metavar="N", help="Times that everything is measured.")] = 3
    max_tokens: Annotated[int, _bench("-n", "--max-tokens", metavar="N", help="Tokens of an answer, at most.")] = 128
    min_speedup: Annotated[
        float | None, _bench("--min-speedup", metavar="X", help="Fail when decoding is not X times as fast as plain.")
    ] = None
    csv: Annotated[bool, _bench("--csv", help="One line of CSV for each kind and side.")] = False
    shape: Annotated[
        str | None,
        _bench(
            "--shape",
            metavar="NAME",
            help="No files: random weights at a real model's sizes, packed as --quant says; kernels, steps, cycles.",
        ),
    ] = None


def bench(
    context: typer.Context,
    model: ModelFlags,
    texts: WorkloadFlags,
    setting: SettingFlags,
    flags: BenchFlags,
    report: ReportFlags,
) -> int:
    """Measure plain decoding against a setting, in turns, on nine kinds of text.

    specgen bench
    specgen bench --kind code_editing --gamma 8 --sampling greedy
    specgen bench --prompts my_prompts.jsonl --json
    specgen bench --shape llama-3.1-8b --quant awq
    """
    console = Console.of(context)
    apply_report_flags(console, report)
    if flags.shape is not None:
        check_range("--rounds", flags.rounds, 1, 1000)
        return bench_shape(context, console, model, ShapeFlags(flags.shape, setting.gamma, flags.rounds, report.json))
    _check(flags, json=report.json)
    chosen = chosen_setting(setting)
    loads = chosen_workloads(texts, flags.per_kind)
    console.answer()
    session = measured_session(context, model)
    from specgen.measure.bench import Bench

    cases = fitting_cases(console, session, loads, texts, flags.max_tokens)
    with progress_bar(console) as progress:
        result = Bench(session, cases, chosen, flags.rounds).run(progress)
    _tell(console, result, session.report(), flags, json=report.json)
    _judge(result, flags.min_speedup)
    return int(ExitCode.OK)


def _check(flags: BenchFlags, *, json: bool) -> None:
    check_range("--rounds", flags.rounds, 1, 1000)
    check_range("--max-tokens", flags.max_tokens, 2, 1_000_000)
    if flags.min_speedup is not None:
        check_range("--min-speedup", flags.min_speedup, 0, 1000)
    if flags.csv and json:
        raise UsageError("--csv and --json exclude each other", hint="leave one of them out")


def _tell(console: Console, result: BenchResult, session: dict[str, Any], flags: BenchFlags, *, json: bool) -> None:
    if json:
        known = {"schema_version": SCHEMA_VERSION, "model": session["model"], "digest": session["digest"]}
        print_json(console, {**known, "versions": session["versions"], "result": result})
    elif flags.csv:
        print_csv(console, [row for one in (*result.rows, *result.overall) for row in _csv_rows(one)])
    else:
        print_lines(console, _lines(result, columns_of(console)))


def _judge(result: BenchResult, wanted: float | None) -> None:
    """SpecgenError when the result is not what it must be."""
    if result.different:
        raise SpecgenError(
            f"the text depends on how it is speculated: {', '.join(result.different[:3])}",
            hint="`specgen verify` shows which promise is broken",
        )
    if wanted is None:
        return
    for row in result.overall:
        if row.speedup.middle < wanted:
            raise SpecgenError(f"{row.temperature}: {row.speedup.middle:.3f}x plain, and --min-speedup is {wanted:g}")


def _lines(result: BenchResult, width: int) -> Iterator[str]:
    yield f"plain against {result.label}"
    for overall in result.overall:
        rows = [row for row in result.rows if row.temperature == overall.temperature]
        yield ""
        yield from _speed_table(overall, [*rows, overall], width)
        yield ""
        yield from _cycle_table([*rows, overall], width)
        yield ""
        yield from _accepted_chart(overall.chosen, width)
    yield ""
    yield from _facts(result)


def _speed_table(overall: Row, rows: list[Row], width: int) -> list[str]:
    return table(
        f"Decoding, {overall.temperature} (chosen over plain)",
        [
            Column("kind", [row.kind for row in rows], left=True),
            Column("speedup", [_ratio(row.speedup) for row in rows]),
            Column("tok/s", [_middle(row.chosen.decode_tok_s) for row in rows]),
            Column("plain", [_middle(row.plain.decode_tok_s) for row in rows]),
            Column("range", [_range(row.speedup) for row in rows]),
            Column("itl p50 ms", [_number(row.chosen.itl_p50_ms) for row in rows]),
            Column("p95", [_number(row.chosen.itl_p95_ms) for row in rows]),
            Column("plain p95", [_number(row.plain.itl_p95_ms) for row in rows]),
            Column("ttft ms", [_middle(row.chosen.ttft_ms) for row in rows]),
            Column("prefill tok/s", [_middle(row.chosen.prefill_tok_s) for row in rows]),
        ],
        width,
    )


def _cycle_table(rows: list[Row], width: int) -> list[str]:
    figures = [row.chosen for row in rows]
    return table(
        "Cycles of the chosen setting",
        [
            Column("kind", [row.kind for row in rows], left=True),
            Column("E[Y]", [f"{one.yield_tokens:.2f}" for one in figures]),
            Column("drafted/token", [f"{one.drafted_per_token:.2f}" for one in figures]),
            Column("passes/token", [f"{one.passes_per_token:.2f}" for one in figures]),
            Column("propose ms", [f"{one.propose_ms:.2f}" for one in figures]),
            Column("verify", [f"{one.verify_ms:.2f}" for one in figures]),
            Column("reconcile", [f"{one.reconcile_ms:.2f}" for one in figures]),
            Column("kv tokens", [str(one.kv_tokens) for one in figures]),
            *_energy(figures),
        ],
        width,
    )


def _energy(figures: list[Figures]) -> list[Column]:
    """Only where the platform counts it."""
    if any(one.joules_per_token is None for one in figures):
        return []
    return [Column("J/token", [_number(one.joules_per_token, 3) for one in figures])]


def _accepted_chart(figures: Figures, width: int) -> list[str]:
    total = sum(figures.accepted_lengths.values())
    if not total:
        return ["No drafts were checked."]
    items = [
        (str(length), float(count), f"{count} ({100 * count / total:.0f}%)")
        for length, count in figures.accepted_lengths.items()
    ]
    return bars("Tokens accepted of a draft (cycles)", items, width)


def _facts(result: BenchResult) -> Iterator[str]:
    yield f"same text: {result.same_text} of {result.pairs} pairs"
    share = "" if result.roofline_share is None else f"; plain reaches {100 * result.roofline_share:.0f}% of it"
    yield f"memory {result.bandwidth} bandwidth: {result.read_gbps:.1f} GB/s{share}"
    kv = max(row.chosen.kv_bytes for row in result.overall)
    yield f"memory: {result.peak_rss_bytes / 1e6:.0f} MB in all, KV {kv / 1e6:.1f} MB"


def _csv_rows(row: Row) -> Iterator[dict[str, Any]]:
    for side, figures in (("plain", row.plain), ("chosen", row.chosen)):
        yield {
            "temperature": row.temperature,
            "kind": row.kind,
            "side": side,
            "speedup": "" if side == "plain" else f"{row.speedup.middle:.4f}",
            "runs": figures.runs,
            "tokens": figures.tokens,
            "decode_tok_s": _middle(figures.decode_tok_s, 3),
            "prefill_tok_s": _middle(figures.prefill_tok_s, 3),
            "ttft_ms": _middle(figures.ttft_ms, 3),
            "itl_p50_ms": _number(figures.itl_p50_ms, 3),
            "itl_p95_ms": _number(figures.itl_p95_ms, 3),
            "yield": f"{figures.yield_tokens:.4f}",
            "drafted_per_token": f"{figures.drafted_per_token:.4f}",
            "passes_per_token": f"{figures.passes_per_token:.4f}",
            "propose_ms": f"{figures.propose_ms:.4f}",
            "verify_ms": f"{figures.verify_ms:.4f}",
            "reconcile_ms": f"{figures.reconcile_ms:.4f}",
            "kv_bytes": figures.kv_bytes,
            "joules_per_token": _number(figures.joules_per_token, 4),
        }


def _ratio(speedup: Interval) -> str:
    return f"{speedup.middle:.2f}x" if speedup.count else "–"


def _range(speedup: Interval) -> str:
    if not speedup.count or speedup.high == float("inf"):
        return "–"
    return f"{speedup.low:.2f}-{speedup.high:.2f}"


def _middle(spread: Spread | None, digits: int = 1) -> str:
    return _number(None if spread is None else spread.middle, digits)


def _number(value: float | None, digits: int = 1) -> str:
    return "–" if value is None else f"{value:.{digits}f}"
