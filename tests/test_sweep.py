"""The exhaustive sweep: its table ranks by what was run, and finds the choice of `tune`."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_session import tiny_cases, tiny_file, tiny_session

from specgen.measure.sweep import Sweep, all_settings, show, turn
from specgen.tune.search import candidates
from specgen.tune.setting import PLAIN, Setting

FAST, SLOW = Setting("ngram", 2), Setting("ngram", 8)


def test_every_setting_is_there_once() -> None:
    settings = all_settings()
    assert len(set(settings)) == len(settings)
    assert set(candidates()) < set(settings)
    assert any(setting.tree == 3 for setting in settings)


def test_a_turn_runs_every_setting_after_plain(tmp_path: Path) -> None:
    session = tiny_session(tiny_file(tmp_path))
    settings = [PLAIN, *(Setting("ngram", gamma) for gamma in range(1, 11))]
    for shift in (0, 7, 23):
        found = dict(turn(session, tiny_cases(session, 4)[0], settings, shift))
        assert set(found) == set(settings) - {PLAIN}
        assert all(ratio > 0.0 for ratio in found.values())


def test_the_table_ranks_and_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = tiny_session(tiny_file(tmp_path))
    sweep = Sweep()
    for case in tiny_cases(session, 4):
        for fast, slow in ((1.5, 0.9), (1.6, 0.95)):
            sweep.add(case, FAST, fast)
            sweep.add(case, SLOW, slow)
    for temperature in ("greedy", "sampled"):
        (first, speed, (_, worst)), (last, _, _) = sweep.table(temperature)  # type: ignore[arg-type]
        assert (first, last) == (FAST, SLOW)
        assert speed.low < 1.55 < speed.high
        assert worst > 1.5
    lines = "\n".join(show(sweep, session, most=1))
    assert "below the floor" in lines
    assert "tune's choice" not in lines

    class Plans:
        plans = ()

    class Plan:
        temperature, context, setting = "greedy", "short", SLOW

    Plans.plans = (Plan(),)  # type: ignore[assignment]
    monkeypatch.setattr(session, "plans", Plans)
    assert "0.597 of the best" in "\n".join(show(sweep, session, most=1))
