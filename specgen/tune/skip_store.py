"""The sublayers that a model leaves out to draft for itself, kept beside its tuned settings.

Knows: the file. Does not know: how the set was found (skip_search).
"""

from __future__ import annotations

from pathlib import Path

from specgen.errors import SpecgenError
from specgen.model.spec import Skipped
from specgen.paths import data_dir
from specgen.tune.plan import file_key, read_json, write_json
from specgen.tune.setting import checked_object
from specgen.tune.skip_search import SkipChoice

SCHEMA = 1


class SkipStore:
    """The set of one model. A file that is damaged or another model's is treated as none."""

    def __init__(self, digest: str, layers: int, folder: Path | None = None) -> None:
        self._digest = digest
        self._layers = layers
        # Not *.json: the folder's JSON files are plans.
        self.path = (folder or data_dir() / "plans") / f"{file_key(digest)}.skip"

    def load(self) -> SkipChoice | None:
        """What was stored last, or None."""
        if not self.path.exists():
            return None
        try:
            return self._choice(read_json(self.path))
        except (SpecgenError, TypeError, ValueError):
            return None

    def save(self, choice: SkipChoice) -> None:
        """SpecgenError when it cannot be written."""
        skipped = sorted([kind, index] for kind, index in choice.skipped)
        measured = {"agreement": choice.agreement, "speedup": choice.speedup, "gamma": choice.gamma}
        write_json(self.path, {"schema": SCHEMA, "digest": self._digest, "skipped": skipped, **measured})

    def _choice(self, value: object) -> SkipChoice:
        known = checked_object(value, ["schema", "digest", "skipped", "agreement", "speedup", "gamma"], "a skip set")
        if known["schema"] != SCHEMA or known["digest"] != self._digest:
            raise ValueError("of another model")
        return SkipChoice(
            self._skipped(known["skipped"]), float(known["agreement"]), float(known["speedup"]), int(known["gamma"])
        )

    def _skipped(self, value: object) -> Skipped:
        if not isinstance(value, list) or not value:
            raise ValueError("nothing is left out")
        found = set()
        for kind, index in value:
            if kind not in ("attention", "mlp") or type(index) is not int or not 0 <= index < self._layers:
                raise ValueError("no such sublayer")
            found.add((kind, index))
        return frozenset(found)
