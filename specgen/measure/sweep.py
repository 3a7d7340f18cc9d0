"""Every setting that `tune` could choose without a draft model, really run:
`python -m specgen.measure.sweep --model FILE`.

Knows: the settings and the table of what came out, with the choice of `tune` marked in it. Does not know: how anything
is decoded. It takes many minutes: it is how the predictions of `tune` are judged, not how a setting is found.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from specgen.measure.draft_bench import tok_s
from specgen.measure.recording import shortened
from specgen.measure.runs import Case, first_of_each, make_cases, run_case
from specgen.measure.workloads import load_workloads
from specgen.options import LoadOptions
from specgen.registry import load_registry, resolve_model
from specgen.session import Session, load
from specgen.tune.plan import TemperatureClass, temperature_class
from specgen.tune.search import FLOOR, TREES, Interval, candidates
from specgen.tune.setting import PLAIN, Setting

TREE_CHAINS = tuple(Setting("ngram", gamma, n_max, n_min) for gamma in (2, 3, 4) for n_min, n_max in ((2, 4), (1, 3)))


@dataclass(slots=True)
class Sweep:
    """Ratios of a setting's speed to that of the plain run of the same turn."""

    ratios: dict[tuple[TemperatureClass, Setting], dict[str, list[float]]] = field(default_factory=dict)

    def add(self, case: Case, setting: Setting, ratio: float) -> None:
        key = temperature_class(case.options.sampling.temperature), setting
        self.ratios.setdefault(key, {}).setdefault(case.kind, []).append(ratio)

    def table(self, temperature: TemperatureClass) -> list[tuple[Setting, Interval, tuple[str, float]]]:
        """(setting, speedup over the kinds, its worst kind), the fastest first."""
        rows = []
        for (where, setting), ratios in self.ratios.items():
            if where == temperature:
                rows.append((setting, Interval.of_ratios(ratios), _worst(ratios)))
        return sorted(rows, key=lambda row: row[1].middle, reverse=True)


def _worst(ratios: Mapping[str, Sequence[float]]) -> tuple[str, float]:
    kinds = {kind: Interval.of_ratios({kind: values}).middle for kind, values in ratios.items()}
    return min(kinds.items(), key=lambda item: item[1])


def all_settings() -> list[Setting]:
    """Plain, all chains of `tune`, and the trees of its usual best chains."""
    trees = [Setting(one.proposer, one.gamma, one.n_max, one.n_min, tree) for one in TREE_CHAINS for tree in TREES]
    return [*candidates(), *(tree for tree in trees if tree.gamma and tree.gamma * tree.tree <= 16)]


def turn(session: Session, case: Case, settings: Sequence[Setting], shift: int) -> Iterator[tuple[Setting, float]]:
    """Every setting once on one prompt, plain before each eighth of them; (setting, speed over plain)."""
    run_case(session, shortened(case, 1), PLAIN, fresh=False)  # brings the prompt into the cache
    others = [setting for setting in settings if not setting.is_plain]
    order = others[shift % len(others) :] + others[: shift % len(others)]
    plain = 0.0
    for number, setting in enumerate(order):
        if number % 8 == 0:
            plain = tok_s(run_case(session, case, PLAIN, fresh=False).finished.record)
        yield setting, tok_s(run_case(session, case, setting, fresh=False).finished.record) / plain


def show(sweep: Sweep, session: Session, most: int) -> Iterator[str]:
    for temperature in ("greedy", "sampled"):
        rows = sweep.table(temperature)
        if not rows:
            continue
        tuned = next(
            (
                plan.setting
                for plan in session.plans.plans
                if (plan.temperature, plan.context) == (temperature, "short")
            ),
            None,
        )
        best = rows[0][1].middle
        yield f"{temperature}: {len(rows)} settings, speed over plain decoding (range of the noise), worst kind"
        for rank, (setting, speed, (kind, ratio)) in enumerate(rows, start=1):
            if rank <= most or setting == tuned or rank == len(rows):
                mark = f"   <- tune's choice, {speed.middle / best:.3f} of the best" if setting == tuned else ""
                floor = "" if ratio >= FLOOR else " (below the floor)"
                spread = f"{speed.middle:.3f} ({speed.low:.3f}-{speed.high:.3f})"
                yield f"{rank:3}  {setting.label:24} {spread}  {kind} {ratio:.2f}{floor}{mark}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--ctx", type=int, default=2048)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--tokens", type=int, default=96, help="of an answer")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--most", type=int, default=12, help="lines of each table")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    loading = LoadOptions(threads=options.threads, context_tokens=options.ctx)
    session = load(resolve_model(options.model, load_registry()), loading)
    # The first prompt of each kind, greedy and at its own temperature.
    cases = first_of_each(
        make_cases(session, load_workloads(), "both", options.tokens)[0],
        lambda case: (case.kind, temperature_class(case.options.sampling.temperature)),
    )
    began, sweep, settings = time.perf_counter(), Sweep(), all_settings()
    for number in range(options.rounds):
        for index, case in enumerate(cases):
            for setting, ratio in turn(session, case, settings, 13 * number + 5 * index):
                sweep.add(case, setting, ratio)
        print(f"round {number + 1} of {options.rounds}: {time.perf_counter() - began:.0f} s", flush=True)
    print("\n".join(show(sweep, session, options.most)))
    if options.json is not None:
        rows = [[where, setting.to_json(), ratios] for (where, setting), ratios in sweep.ratios.items()]
        options.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
