"""What is said of a finished answer: the object of --json, the one-line summary, the tables of --stats.

Knows: the records of one run and their names in JSON. Does not know: where a report is printed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len

from specgen.cli.status import DRAFT_WORD, Marks, fit, number, percent, rate
from specgen.events import Finished, FinishReason, Started
from specgen.options import RunOptions
from specgen.records import RunRecord
from specgen.text.sanitise import sanitise

if TYPE_CHECKING:
    from rich.table import Table

SCHEMA_VERSION = 1

_ENDINGS = {
    FinishReason.STOP: "stop string",
    FinishReason.GRAMMAR: "end of the grammar",
    FinishReason.LENGTH: "--max-tokens reached",
    FinishReason.CONTEXT: "context full",
    FinishReason.CANCELLED: "interrupted",
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """All that is known when an answer is complete."""

    started: Started
    finished: Finished
    options: RunOptions
    session: Mapping[str, Any]  # Session.report()

    @property
    def record(self) -> RunRecord:
        return self.finished.record


def _rounded(value: float | None, digits: int = 3) -> float | None:
    return None if value is None else round(value, digits)


def answer_object(outcome: Outcome) -> dict[str, Any]:
    """The object of --json. Numbers that were not measured (a single token has no rate) are null."""
    finished, record = outcome.finished, outcome.record
    return {
        "schema_version": SCHEMA_VERSION,
        "model": outcome.session.get("model"),
        "model_digest": outcome.session.get("digest"),
        "text": finished.text,
        "token_ids": list(finished.token_ids),
        "finish_reason": str(finished.reason),
        "complete": finished.complete,
        **({"thinking": finished.thinking} if finished.thinking else {}),
        "prompt_tokens": record.prompt_tokens,
        "reused_tokens": record.reused_tokens,
        "completion_tokens": record.completion_tokens,
        "sampling": asdict(outcome.options.sampling),
        "timings": _timings(outcome),
        "speculation": _speculation(outcome),
        "memory": {
            **outcome.session.get("memory", {}),
            "kv_tokens": record.kv_tokens,
            "kv_used_bytes": record.kv_bytes,
        },
        "notices": list(outcome.started.notices),
        "versions": dict(outcome.session.get("versions", {})),
    }


def _timings(outcome: Outcome) -> dict[str, float | None]:
    record = outcome.record
    return {
        "load_s": _rounded(outcome.session.get("load_s")),
        "prefill_ms": _rounded(record.prefill_ms),
        "ttft_ms": _rounded(record.ttft_ms),
        "decode_ms": _rounded(record.decode_ms),
        "prefill_tok_s": _rounded(record.prefill_tok_s),
        "decode_tok_s": _rounded(record.decode_tok_s),
        "itl_p50_ms": _rounded(record.gap_percentile_ms(50)),
        "itl_p95_ms": _rounded(record.gap_percentile_ms(95)),
    }


def _speculation(outcome: Outcome) -> dict[str, Any]:
    started, record = outcome.started, outcome.record
    endings = [cycle.ending for cycle in record.cycles]
    return {
        "proposer": started.proposer,
        "accept": started.accept,
        "lossless": started.lossless,
        "gamma": int(started.gamma) if started.gamma.isdigit() else started.gamma,
        "cycles": len(record.cycles),
        "proposed": record.proposed,
        "accepted": record.accepted,
        "corrected": endings.count("corrected"),
        "bonus": endings.count("bonus"),
        "yield": _rounded(record.yield_tokens, 4),
        "survival": [round(share, 4) for share in record.survival()],
        "fallback": record.fallbacks(),
        "propose_ms": _rounded(sum(cycle.propose_ms for cycle in record.cycles)),
        "verify_ms": _rounded(sum(cycle.verify_ms for cycle in record.cycles)),
        "reconcile_ms": _rounded(sum(cycle.reconcile_ms for cycle in record.cycles)),
    }


def json_line(value: Mapping[str, Any]) -> str:
    """One line of JSON in UTF-8. What a terminal may obey is escaped, as JSON allows inside its strings."""
    line = json.dumps(value, ensure_ascii=False, allow_nan=False)
    if sanitise(line) == line:
        return line
    return "".join(c if sanitise(c) == c else json.dumps(c)[1:-1] if c != "\x7f" else "\\u007f" for c in line)


def summary(outcome: Outcome, marks: Marks, columns: int) -> str:
    """One line for the scrollback, with the legend of the highlighted text; what does not fit is left out."""
    parts = _summary_parts(outcome, marks)
    line = fit(parts[0], columns)
    for part in parts[1:]:
        longer = f"{line} · {part}"
        if cell_len(longer) <= columns:
            line = longer
    return line.replace(DRAFT_WORD, marks.paint(DRAFT_WORD), 1)


def _summary_parts(outcome: Outcome, marks: Marks) -> list[str]:
    """What is worth saying, the most important first."""
    record, started = outcome.record, outcome.started
    parts = [f"{record.completion_tokens} tokens"]
    if not started.lossless:
        parts.append(f"{started.accept} is lossy")
    if (ending := _ENDINGS.get(outcome.finished.reason)) is not None:
        parts.append(ending)
    if record.decode_tok_s is not None:
        parts.append(rate(record.decode_tok_s))
    if record.proposed:
        parts.append(f"{DRAFT_WORD} {percent(record.accepted / record.proposed)}")
        parts.append(f"{number(record.yield_tokens, 2)} per pass")
    if record.accepted and marks.draft:
        parts.append("underlined: from the draft")
    parts.append(f"{(record.ttft_ms + record.decode_ms) / 1e3:.1f} s")
    parts.append(f"γ {started.gamma}")
    parts.append(f"context {percent(record.kv_tokens / started.context_tokens)}")
    if (reason := main_fallback(record)) is not None:
        parts.append(reason)
    return parts


def main_fallback(record: RunRecord) -> str | None:
    """Why at least half of the cycles went without a draft, if they did."""
    reasons = record.fallbacks()
    if not reasons or 2 * sum(reasons.values()) < len(record.cycles):
        return None
    reason, count = max(reasons.items(), key=lambda item: item[1])
    return f"plain in {count} of {len(record.cycles)} cycles: {reason}"


def stats_tables(outcome: Outcome) -> Iterator[Table]:
    """Tables of times, of speculation and of survival by position."""
    report = answer_object(outcome)
    yield table("Times", {**report["timings"], "prompt_tokens": report["prompt_tokens"]})
    speculation = {**report["speculation"]}
    survival, fallback = speculation.pop("survival"), speculation.pop("fallback")
    yield table("Speculation", speculation)
    if survival:
        yield table("Survival", {f"s_{k}": share for k, share in enumerate(survival, start=1)})
    if fallback:
        yield table("Plain cycles", fallback)
    yield table("Memory", report["memory"])


def table(title: str, rows: Mapping[str, Any]) -> Table:
    """Names and values side by side."""
    from rich.table import Table
    from rich.text import Text

    made = Table(title=title, title_justify="left", show_header=False)
    made.add_column("name")
    made.add_column("value", justify="right")
    for name, value in rows.items():
        made.add_row(Text(str(name)), Text(_shown(value)))
    return made


def _shown(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
