"""How to speculate, as one value: what is searched, measured, stored and applied.

Knows: the fields of `RunOptions` that change speed and not text. Does not know: how fast any of them is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from specgen.errors import SpecgenError, UsageError, nearest
from specgen.options import NgramOptions, ProposerName, RunOptions

_NGRAM = NgramOptions()


@dataclass(frozen=True, slots=True)
class Setting:
    """UsageError for values that `RunOptions` would refuse."""

    proposer: ProposerName = "ngram"
    gamma: int | None = None  # None: chosen each cycle
    n_max: int = _NGRAM.n_max
    n_min: int = _NGRAM.n_min
    tree: int = 1

    def __post_init__(self) -> None:
        self.options(RunOptions())

    @property
    def is_plain(self) -> bool:
        return self.proposer == "none" or self.gamma == 0

    @property
    def label(self) -> str:
        """A few words, the same in tables, charts and notices."""
        if self.is_plain:
            return "plain"
        sizes = f" {self.n_min}-{self.n_max}" if self.proposer in ("ngram", "mix") else ""
        tree = f" tree {self.tree}" if self.tree > 1 else ""
        return f"{self.proposer}{sizes}{tree} γ {'auto' if self.gamma is None else self.gamma}"

    def options(self, base: RunOptions) -> RunOptions:
        """`base` with this way of speculating."""
        ngram = NgramOptions(self.n_max, self.n_min)
        return replace(base, proposer=self.proposer, gamma=self.gamma, ngram=ngram, tree=self.tree)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: object) -> Setting:
        """SpecgenError for anything that `to_json` would not have written."""
        known = [field.name for field in fields(cls)]
        try:
            return cls(**checked_object(value, known, "a setting"))
        except (TypeError, UsageError) as error:
            raise SpecgenError(f"a stored setting is not valid: {error}") from error


PLAIN = Setting("none", 0)


def checked_object(value: object, known: list[str], what: str) -> Mapping[str, Any]:
    """`value` as a JSON object with exactly the keys `known`; SpecgenError names the first that is wrong."""
    if not isinstance(value, dict):
        raise SpecgenError(f"{what} is not an object")
    for key in value:
        if key not in known:
            raise SpecgenError(f"{what} has an unknown key {key!r}", hint=nearest(key, known))
    for key in known:
        if key not in value:
            raise SpecgenError(f"{what} has no {key!r}")
    return value
