"""What a search has measured so far, on disk, so that an interrupted one goes on where it was.

Knows: the file, and for what it holds. Does not know: what the measurements mean. A file that does not fit, or cannot
be read, is as good as none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast, get_args

from specgen.errors import SpecgenError
from specgen.paths import cache_dir
from specgen.tune.plan import TemperatureClass, read_json, write_json
from specgen.tune.predict import ProposeMs
from specgen.tune.setting import Setting

SCHEMA = 3


@dataclass(frozen=True, slots=True)
class Recorded:
    """One plain answer."""

    kind: str
    temperature: TemperatureClass
    max_tokens: int
    answer: tuple[int, ...]
    token_ms: float
    cycle_ms: float
    lookup: ProposeMs
    tok_s: float | None


@dataclass(frozen=True, slots=True)
class Pair:
    """One setting against plain on one case."""

    case: str
    kind: str
    setting: Setting
    turn: int
    ratios: tuple[float, float] | None  # of ms per token, of the p95 gap; None: the answer was too short


@dataclass(slots=True)
class TuneState:
    """path None: not kept."""

    path: Path | None = None
    key: str = ""
    steps: Mapping[int, Mapping[int, float]] = field(default_factory=dict)
    recorded: dict[str, Recorded] = field(default_factory=dict)  # by case
    pairs: list[Pair] = field(default_factory=list)

    @classmethod
    def load(cls, key: str, folder: Path | None = None) -> TuneState:
        """What an earlier search with the same key left. `key` names everything the measurements depend on."""
        digest = hashlib.sha256(key.encode()).hexdigest()
        state = cls((folder or cache_dir() / "tune") / f"{digest[:16]}.json", digest)
        try:
            state._take(read_json(state.path))  # type: ignore[arg-type]
        except (SpecgenError, ValueError, TypeError, KeyError, AttributeError):
            return cls(state.path, digest)
        return state

    def _take(self, value: Mapping[str, Any]) -> None:
        if value["schema"] != SCHEMA or value["key"] != self.key:
            raise ValueError("another search's")
        self.steps = {int(c): {int(r): _positive(ms) for r, ms in t.items()} for c, t in value["steps"].items()}
        for case, one in value["recorded"].items():
            temperature = cast("TemperatureClass", one["temperature"])
            if temperature not in get_args(TemperatureClass):
                raise ValueError(temperature)
            exact = {"answer": tuple(map(int, one["answer"])), "lookup": ProposeMs(**one["lookup"])}
            self.recorded[case] = Recorded(**{**one, **exact})
        for one in value["pairs"]:
            ratios = None if one["ratios"] is None else (_positive(one["ratios"][0]), _positive(one["ratios"][1]))
            self.pairs.append(Pair(**{**one, "setting": Setting.from_json(one["setting"]), "ratios": ratios}))

    def save(self) -> None:
        if self.path is None:
            return
        recorded = {case: asdict(one) for case, one in self.recorded.items()}
        write_json(
            self.path,
            {
                "schema": SCHEMA,
                "key": self.key,
                "steps": self.steps,
                "recorded": recorded,
                "pairs": [asdict(pair) for pair in self.pairs],
            },
        )

    def done(self) -> None:
        """The search is over: the next one measures anew."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def _positive(value: object) -> float:
    number = float(cast("float", value))
    if not 0 < number < float("inf"):
        raise ValueError(value)
    return number
