"""Plain decoding against one setting, in one process and in turns.

Knows: which runs are compared and what is made of their records. Does not know: how tables look.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

from specgen.measure.energy import Meter, energy_meter
from specgen.measure.recording import shortened
from specgen.measure.roofline import bandwidth_of, weight_bytes
from specgen.measure.runs import Case, Report, Run, run_case, silent
from specgen.measure.timer import Spread
from specgen.memory import peak_rss_bytes
from specgen.records import RunRecord
from specgen.tune.plan import TemperatureClass
from specgen.tune.search import Interval
from specgen.tune.setting import PLAIN, Setting

if TYPE_CHECKING:
    from specgen.session import Session

WARM_TOKENS = 8
"""Of the answer that warms every setting up."""
SIDES = ("plain", "chosen")


@dataclass(frozen=True, slots=True)
class Figures:
    """What some runs of one setting say. Times in milliseconds."""

    runs: int
    tokens: int
    ttft_ms: Spread | None
    itl_p50_ms: float | None
    itl_p95_ms: float | None
    prefill_tok_s: Spread | None
    decode_tok_s: Spread | None
    yield_tokens: float  # E[Y]
    accepted_lengths: dict[int, int]  # accepted tokens → cycles, of the cycles with a draft
    drafted_per_token: float
    passes_per_token: float  # target steps
    propose_ms: float  # per cycle, mean
    verify_ms: float
    reconcile_ms: float
    kv_tokens: int  # high-water marks
    kv_bytes: int
    joules_per_token: float | None

    @classmethod
    def of(cls, runs: Sequence[tuple[Run, float | None]]) -> Figures:
        """runs: with the joules of each, where they were counted."""
        records = [run.finished.record for run, _ in runs]
        cycles = [cycle for record in records for cycle in record.cycles]
        tokens = sum(record.completion_tokens for record in records)
        pooled = RunRecord(gaps_ms=[gap for record in records for gap in record.gaps_ms])
        joules = [energy for _, energy in runs if energy is not None]
        passes = max(1, len(cycles))
        return cls(
            runs=len(runs),
            tokens=tokens,
            ttft_ms=Spread.of([record.ttft_ms for record in records if record.cycles]),
            itl_p50_ms=pooled.gap_percentile_ms(50),
            itl_p95_ms=pooled.gap_percentile_ms(95),
            prefill_tok_s=Spread.of([speed for r in records if (speed := r.prefill_tok_s) is not None]),
            decode_tok_s=Spread.of([speed for r in records if (speed := r.decode_tok_s) is not None]),
            yield_tokens=tokens / passes,
            accepted_lengths=dict(sorted(Counter(c.accepted for c in cycles if c.proposed).items())),
            drafted_per_token=sum(c.proposed for c in cycles) / max(1, tokens),
            passes_per_token=len(cycles) / max(1, tokens),
            propose_ms=sum(c.propose_ms for c in cycles) / passes,
            verify_ms=sum(c.verify_ms for c in cycles) / passes,
            reconcile_ms=sum(c.reconcile_ms for c in cycles) / passes,
            kv_tokens=max((r.kv_tokens for r in records), default=0),
            kv_bytes=max((r.kv_bytes for r in records), default=0),
            joules_per_token=sum(joules) / tokens if len(joules) == len(runs) and tokens else None,
        )


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of text, or all of them."""

    temperature: TemperatureClass
    kind: str
    plain: Figures
    chosen: Figures
    speedup: Interval  # of decoding: chosen over plain


@dataclass(slots=True)
class BenchResult:
    label: str  # of the chosen setting
    rows: list[Row]  # by temperature and kind
    overall: list[Row]  # one for each temperature, and "all" when there are several
    same_text: int  # pairs whose tokens are equal
    pairs: int
    different: list[str]  # ids of cases with different text
    bandwidth: str  # "read" or "copy": how the next was measured
    read_gbps: float
    roofline_share: float | None  # of plain decoding
    peak_rss_bytes: int
    notes: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Pair:
    """One case in one round, run both ways."""

    case: Case
    runs: dict[str, Run]
    joules: dict[str, float | None]

    @property
    def ratio(self) -> float | None:
        plain, chosen = (self.runs[side].ms_per_token for side in SIDES)
        return None if plain is None or chosen is None else plain / chosen

    @property
    def same_text(self) -> bool:
        return self.runs["plain"].finished.token_ids == self.runs["chosen"].finished.token_ids


class Bench:
    """Runs the comparison. `chosen` None: whatever `specgen run` would do."""

    def __init__(self, session: Session, cases: Sequence[Case], chosen: Setting | None, rounds: int) -> None:
        self._session = session
        self._cases = cases
        self._settings: dict[str, Setting | None] = {"plain": PLAIN, "chosen": chosen}
        self._rounds = rounds
        self._meter: Meter | None = energy_meter(session.loaded.device)
        self._reading = bandwidth_of(session.kernels)

    def run(self, report: Report = silent) -> BenchResult:
        self._warm_up()
        total = self._rounds * len(self._cases)
        pairs: list[_Pair] = []
        speeds: list[float] = []
        for turn in range(self._rounds):
            for case in self._cases:
                report(len(pairs), total, case.load.id)
                speeds.append(self._reading.gbps())
                # Who goes first changes from pair to pair.
                pairs.append(self._pair(case, reverse=(len(pairs) + turn) % 2 == 1))
        report(total, total, "done")
        return self._result(pairs, median(speeds))

    def _warm_up(self) -> None:
        for setting in self._settings.values():
            run_case(self._session, shortened(self._cases[0], WARM_TOKENS), setting)

    def _pair(self, case: Case, *, reverse: bool) -> _Pair:
        pair = _Pair(case, {}, {})
        for side in reversed(SIDES) if reverse else SIDES:
            before = self._meter() if self._meter else None
            pair.runs[side] = run_case(self._session, case, self._settings[side])
            pair.joules[side] = self._meter() - before if self._meter and before is not None else None
        return pair

    def _result(self, pairs: list[_Pair], gbps: float) -> BenchResult:
        groups: dict[tuple[TemperatureClass, str], list[_Pair]] = {}
        for pair in pairs:
            groups.setdefault((pair.case.temperature, pair.case.kind), []).append(pair)
        rows = [_row(temperature, kind, group) for (temperature, kind), group in groups.items()]
        temperatures = list(dict.fromkeys(row.temperature for row in rows))
        overall = [_row(t, "all", [p for p in pairs if p.case.temperature == t]) for t in temperatures]
        different = list(dict.fromkeys(pair.case.id for pair in pairs if not pair.same_text))
        return BenchResult(
            label=self._label(pairs),
            rows=rows,
            overall=overall,
            same_text=sum(pair.same_text for pair in pairs),
            pairs=len(pairs),
            different=different,
            bandwidth=self._reading.what,
            read_gbps=gbps,
            roofline_share=self._roofline_share(pairs, gbps),
            peak_rss_bytes=peak_rss_bytes(),
        )

    def _label(self, pairs: list[_Pair]) -> str:
        setting = self._settings["chosen"]
        if setting is not None:
            return setting.label
        started = [pair.runs["chosen"].started for pair in pairs]
        return ", ".join(dict.fromkeys(f"{one.proposer} γ {one.gamma}" for one in started)) + " (as `specgen run`)"

    def _roofline_share(self, pairs: list[_Pair], gbps: float) -> float | None:
        """Plain decoding's speed over what reading weights and KV alone would allow."""
        weights = weight_bytes(self._session.speculation.model)
        if weights is None:
            return None
        slot_bytes = self._session.engine.cache.slot_bytes
        shares = []
        for pair in pairs:
            run = pair.runs["plain"]
            if run.ms_per_token is not None:
                moved = weights + slot_bytes * run.finished.record.kv_tokens
                shares.append(moved / (gbps * 1e6) / run.ms_per_token)
        return median(shares) if shares else None


def _row(temperature: TemperatureClass, kind: str, pairs: list[_Pair]) -> Row:
    ratios: dict[str, list[float]] = {}
    for pair in pairs:
        if (ratio := pair.ratio) is not None:
            ratios.setdefault(pair.case.kind, []).append(ratio)
    sides = [Figures.of([(pair.runs[side], pair.joules[side]) for pair in pairs]) for side in SIDES]
    return Row(temperature, kind, sides[0], sides[1], Interval.of_ratios(ratios))
