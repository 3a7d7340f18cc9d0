"""t(R) as the last answers of a model found it, kept for the next start.

Knows: the file. Does not know: who measured. `specgen tune` measures more exactly: where it was run, its costs are
used.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from specgen.errors import SpecgenError
from specgen.options import MAX_GAMMA, MAX_TREE
from specgen.paths import data_dir
from specgen.tune.plan import Scope, read_json, write_json
from specgen.tune.setting import checked_object

SCHEMA = 1
MOST_ROWS = 1 + MAX_GAMMA * MAX_TREE


class CostStore:
    """The table of one scope. A file that is damaged or another scope's is treated as none."""

    def __init__(self, scope: Scope, folder: Path | None = None) -> None:
        self._scope = scope
        name = hashlib.sha256(json.dumps(asdict(scope)).encode()).hexdigest()[:32]
        # Not *.json: the folder's JSON files are plans.
        self.path = (folder or data_dir() / "plans") / f"{name}.costs"

    def load(self) -> dict[int, float] | None:
        """rows → milliseconds, or None."""
        if not self.path.exists():
            return None
        try:
            known = checked_object(read_json(self.path), ["schema", "scope", "step_ms"], "a cost table")
            if known["schema"] != SCHEMA or known["scope"] != asdict(self._scope):
                return None
            return _table(known["step_ms"])
        except (SpecgenError, TypeError, ValueError, AttributeError):
            return None

    def save(self, known_ms: Mapping[int, float]) -> None:
        """SpecgenError when it cannot be written."""
        table = {str(rows): round(ms, 6) for rows, ms in known_ms.items()}
        write_json(self.path, {"schema": SCHEMA, "scope": asdict(self._scope), "step_ms": table})


def _table(value: object) -> dict[int, float]:
    if not isinstance(value, dict):
        raise ValueError("not a table")
    table = {int(rows): float(ms) for rows, ms in value.items()}
    if not all(1 <= rows <= MOST_ROWS and 0.0 < ms < 1e9 for rows, ms in table.items()):
        raise ValueError("not a cost table")
    return table
