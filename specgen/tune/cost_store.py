"""What the last answers of a model taught the controller, kept for the next start.

Knows: the file. Does not know: who measured. `specgen tune` measures more exactly: where it was run, its costs are
used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import get_args

from specgen.errors import SpecgenError
from specgen.options import MAX_GAMMA, MAX_TREE, ProposerName
from specgen.paths import data_dir
from specgen.tune.cost import RECENT
from specgen.tune.plan import Scope, file_key, read_json, write_json
from specgen.tune.setting import checked_object

SCHEMA = 4
MOST_ROWS = 1 + MAX_GAMMA * MAX_TREE


@dataclass(frozen=True, slots=True)
class Learned:
    """t(R), and how often the models that draft were right."""

    step_ms: Mapping[int, Sequence[float]] = field(default_factory=dict)  # latest measurements by rows
    agreement: Mapping[str, float] = field(default_factory=dict)  # 0 … 1, by what drafted: "proposer which"


class CostStore:
    """What was learned in one scope. A file that is damaged or another scope's is treated as none."""

    def __init__(self, scope: Scope, folder: Path | None = None) -> None:
        self._scope = scope
        name = f"{file_key(scope.digest)}-{file_key(json.dumps(asdict(scope)))}"
        # Not *.json: the folder's JSON files are plans.
        self.path = (folder or data_dir() / "plans") / f"{name}.costs"

    def load(self) -> Learned | None:
        if not self.path.exists():
            return None
        try:
            known = checked_object(read_json(self.path), ["schema", "scope", "step_ms", "agreement"], "a cost table")
            if known["schema"] != SCHEMA or known["scope"] != asdict(self._scope):
                return None
            return Learned(_table(known["step_ms"]), _shares(known["agreement"]))
        except (SpecgenError, TypeError, ValueError):
            return None

    def save(self, learned: Learned) -> None:
        """SpecgenError when it cannot be written."""
        table = {str(rows): [round(ms, 6) for ms in times] for rows, times in learned.step_ms.items()}
        shares = {name: round(share, 6) for name, share in learned.agreement.items()}
        known = {"schema": SCHEMA, "scope": asdict(self._scope), "step_ms": table, "agreement": shares}
        write_json(self.path, known)


def _table(value: object) -> dict[int, tuple[float, ...]]:
    if not isinstance(value, dict) or not value:
        raise ValueError("not a table")
    table = {int(rows): tuple(map(float, times)) for rows, times in value.items()}
    for rows, times in table.items():
        if not (1 <= rows <= MOST_ROWS and 1 <= len(times) <= RECENT and all(0.0 < ms < 1e9 for ms in times)):
            raise ValueError("not a cost table")
    return table


def _shares(value: object) -> dict[str, float]:
    if not isinstance(value, dict):
        raise ValueError("not a table")
    known = get_args(ProposerName)
    shares = {name: float(share) for name, share in value.items() if name.partition(" ")[0] in known}
    if not all(0.0 <= share <= 1.0 for share in shares.values()):
        raise ValueError("not shares")
    return shares
