"""How much memory there is and how much is used.

Knows: the limits of this machine and process. Does not know: what the memory is for.
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path


def available_bytes() -> int | None:
    """What could still be allocated without swapping: the system's own estimate, or the cgroup's limit where that is
    lower. None when the system does not say."""
    found = [size for size in (_meminfo_available(), _cgroup_left()) if size is not None]
    return min(found) if found else None


def _meminfo_available() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        return None


def _cgroup_left() -> int | None:
    folder = Path("/sys/fs/cgroup")
    try:
        limit = (folder / "memory.max").read_text().strip()
        return None if limit == "max" else max(0, int(limit) - int((folder / "memory.current").read_text()))
    except (OSError, ValueError):
        return None


def peak_rss_bytes() -> int:
    """The largest resident size of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def megabytes(size: float) -> str:
    """For messages: decimal megabytes."""
    return f"{size / 1e6:,.0f} MB"
