"""Every proposer against plain decoding, by kind of text: `python -m specgen.measure.draft_bench --model FILE`.

Knows: the settings that are compared and the table of what came out. Does not know: how anything is decoded. A model
that has no small relative is drafted for by itself with most layers left out: a poor draft, made of real parts.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median

from specgen.measure.runs import Case, SamplingChoice, make_cases, run_case
from specgen.measure.workloads import load_workloads
from specgen.model.weights import ModelWeights
from specgen.options import LoadOptions
from specgen.propose.model import DraftModel
from specgen.records import RunRecord
from specgen.registry import load_registry, resolve_model
from specgen.session import Session, load
from specgen.speculation import LoadedDraft
from specgen.step import EagerRunner
from specgen.tune.setting import PLAIN, Setting

COPYING = ("code_editing", "rewriting", "grounded", "summarising")
"""Kinds whose answers repeat their prompts."""
LEVELS = 8
SETTINGS = (
    PLAIN,
    *(Setting("ngram", gamma) for gamma in (None, 1, 2, 4, 8)),
    Setting("ngram", None, tree=3),
    *(Setting("model", gamma) for gamma in (None, 2, 4)),
    Setting("model", 2, tree=2),
    Setting("mix", None),
    Setting("skip", None),
    Setting("skip", 2),
    Setting("lookahead", None),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One setting on all prompts of a kind."""

    kind: str
    setting: str
    tok_s: float  # median over the repeats, decoding alone
    against_plain: float  # median over the repeats of the ratio to the plain runs beside it, all prompts together
    yield_tokens: float  # E[Y]
    survival: tuple[float, ...]  # s_1 … s_8
    same_text: bool


def prune(session: Session, kept: Sequence[int]) -> LoadedDraft:
    """The session's own model with the layers `kept` alone: it shares their weights."""
    model = session.speculation.model
    weights = model.weights
    spec = replace(model.spec, layers=tuple(model.spec.layers[index] for index in kept))
    layers = tuple(weights.layers[index] for index in kept)
    small = type(model)(spec, ModelWeights(weights.embedding, layers, weights.norm, weights.head), model.kernels)
    cache = session.engine.cache
    reader = DraftModel(EagerRunner(small), small.new_cache(cache.capacity, cache.layers[0].k.dtype), spec.vocab)
    name, share = f"{len(kept)} layers of {session.loaded.name}", len(kept) / len(model.spec.layers)
    return LoadedDraft(name, reader, share, f"{session.loaded.digest} {sorted(kept)}")


@dataclass(slots=True)
class _Seen:
    """What one setting came to, repeat by repeat."""

    speeds: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    same: bool = True
    all: RunRecord = field(default_factory=RunRecord)  # the cycles of all its runs


def measure(session: Session, cases: Sequence[Case], settings: Sequence[Setting], repeats: int) -> list[Row]:
    """All settings on the prompts of one kind, each run beside a plain one of its own: the machine's pace changes
    within seconds. A ratio compares the time that all prompts took together."""
    seen = {setting: _Seen() for setting in settings}
    for number in range(repeats):
        for setting, found in seen.items():
            own_ms, plain_ms, tokens = 0.0, 0.0, 0
            for case in cases:
                order = (PLAIN, setting) if number % 2 == 0 else (setting, PLAIN)
                runs = {one: run_case(session, case, one).finished for one in order}
                own_ms += decoding_ms(runs[setting].record)
                plain_ms += decoding_ms(runs[PLAIN].record)
                tokens += runs[PLAIN].record.completion_tokens
                found.same &= runs[setting].token_ids == runs[PLAIN].token_ids
                found.all.cycles += runs[setting].record.cycles
            found.speeds.append(1e3 * tokens / own_ms)
            found.ratios.append(plain_ms / own_ms)
    return [_row(cases[0].kind, setting, found) for setting, found in seen.items()]


def _row(kind: str, setting: Setting, found: _Seen) -> Row:
    survival = tuple(round(share, 3) for share in found.all.survival()[:LEVELS])
    figures = median(found.speeds), median(found.ratios), found.all.yield_tokens or 0.0
    return Row(kind, setting.label, *figures, survival, found.same)


def decoding_ms(record: RunRecord) -> float:
    """By the engine's own clock: cycles alone, without text and screen."""
    return sum(cycle.propose_ms + cycle.verify_ms + cycle.reconcile_ms for cycle in record.cycles)


def tok_s(record: RunRecord) -> float:
    """Committed tokens per second of decoding alone."""
    return 1e3 * record.completion_tokens / decoding_ms(record)


def verdicts(rows: Sequence[Row]) -> list[str]:
    """The two goals: auto in its worst kind, and against the best fixed γ where answers copy."""
    by_setting: dict[str, dict[str, float]] = {}
    for row in rows:
        by_setting.setdefault(row.setting, {})[row.kind] = row.against_plain
    lines = []
    for label, ratios in by_setting.items():
        if "auto" not in label:
            continue
        worst = min(ratios, key=lambda kind: ratios[kind])
        lines.append(f"{label}: worst kind {worst} at {ratios[worst]:.3f} of plain")
        fixed = {name: found for name, found in by_setting.items() if _is_fixed_twin(name, label)}
        for kind in ratios.keys() & set(COPYING) if fixed else ():
            best = max(found[kind] for found in fixed.values())
            lines.append(f"{label}: {kind} at {ratios[kind] / best:.3f} of the best fixed γ ({best:.2f} of plain)")
    return lines


def _is_fixed_twin(name: str, auto: str) -> bool:
    return name != auto and "auto" not in name and name.rsplit(" ", 1)[0] == auto.rsplit(" ", 1)[0]


def show(row: Row) -> str:
    survival = " ".join(f"{share:.2f}" for share in row.survival)
    mark = "" if row.same_text else "  TEXT DIFFERS"
    return (
        f"{row.kind:13} {row.setting:20} {row.tok_s:7.1f} tok/s {row.against_plain:6.3f} of plain  "
        f"E[Y] {row.yield_tokens:5.2f}  s {survival}{mark}"
    )


def _settings(wanted: Sequence[str]) -> list[Setting]:
    return [setting for setting in SETTINGS if setting.is_plain or not wanted or setting.proposer in wanted]


def _session(options: argparse.Namespace) -> Session:
    registry = load_registry()
    draft = None if options.draft is None else resolve_model(options.draft, registry)
    threads = 1 if options.cpu_time else options.threads
    loading = LoadOptions(threads=threads, context_tokens=options.ctx)
    session = load(resolve_model(options.model, registry), loading, draft=draft)
    if options.cpu_time:
        session.engine.clock = time.thread_time
    if draft is None:
        layers = len(session.loaded.spec.layers)
        ends = options.layers // 2
        session.speculation.draft = prune(session, [*range(options.layers - ends), *range(layers - ends, layers)])
    return session


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft", help="a real draft model; without, some layers of the model draft for it")
    parser.add_argument("--layers", type=int, default=8, help="of the pruned draft")
    parser.add_argument("--threads", type=int)
    parser.add_argument(
        "--cpu-time", action="store_true", help="one thread, by the processor's clock: where other programs run too"
    )
    parser.add_argument("--ctx", type=int, default=2048)
    parser.add_argument("--kinds", nargs="*", default=[])
    parser.add_argument("--proposers", nargs="*", default=[])
    parser.add_argument("--prompts", type=int, default=4, help="of each kind, at most")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sampled", action="store_true", help="at each prompt's own temperature, not greedily")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    session = _session(options)
    began = time.perf_counter()
    rows: list[Row] = []
    for cases in _by_kind(session, options):
        rows += measure(session, cases, _settings(options.proposers), options.repeats)
        print("\n".join(map(show, rows[-len(_settings(options.proposers)) :])), flush=True)
    print("\n".join(verdicts(rows)))
    print(f"{time.perf_counter() - began:.0f} s, medians of {options.repeats}, {session.kernels.name}")
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


def _by_kind(session: Session, options: argparse.Namespace) -> list[list[Case]]:
    sampling: SamplingChoice = "own" if options.sampled else "greedy"
    cases, _ = make_cases(session, load_workloads(options.kinds), sampling, options.tokens)
    found: dict[str, list[Case]] = {}
    for case in cases:
        found.setdefault(case.kind, []).append(case)
    return [of_kind[: options.prompts] for of_kind in found.values()]


if __name__ == "__main__":
    main()
