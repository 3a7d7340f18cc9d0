"""How fast memory alone would let a model be, as findings.

Knows: bytes per token and bandwidth. Does not know: which memory it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import median

from specgen.measure.findings import Fact
from specgen.measure.roofline import Bandwidth
from specgen.memory import megabytes
from specgen.model.describe import Description, describe

READINGS = 7
"""Readings of the memory; the median counts, since other programs read too."""

_described = cache(describe)  # it looks at every weight


def limit_facts(bandwidth: Bandwidth, model: Path | None) -> Iterator[Fact]:
    """The measured bandwidth, and what follows from it for `model`."""
    readings = [bandwidth.gbps() for _ in range(READINGS)]
    gbps = round(median(readings), 2)
    spread = f"median of {READINGS}, {min(readings):.1f} to {max(readings):.1f}"
    yield Fact(f"{bandwidth.what} bandwidth", gbps, f"{gbps:.1f} GB/s ({spread})")
    if model is None:
        return
    found: Description = _described(model)
    size = found.read_bytes_per_token
    limit = round(1e9 * gbps / size, 1)
    yield Fact("bytes per token", size, megabytes(size))
    yield Fact("speed limit", limit, f"{limit:g} tokens per second, plain: every weight is read once for each token")
