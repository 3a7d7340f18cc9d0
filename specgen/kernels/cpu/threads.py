"""How many threads this process may keep busy.

Knows: the affinity mask and the cgroup's CPU quota (v2 and v1). Does not know: what the threads do.
"""

from __future__ import annotations

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")


def default_threads() -> int:
    """CPUs in the affinity mask, or as many as the quota pays for when that is less; at least 1."""
    # macOS has no affinity masks.
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cgroup_quota()
    return max(1, count if quota is None else min(count, int(quota)))


def cgroup_quota() -> float | None:
    """CPUs that the tightest enclosing cgroup pays for; None when nothing limits them."""
    quotas = [quota for folder in _folders() if (quota := _quota(folder)) is not None]
    return min(quotas, default=None)


def _folders() -> list[Path]:
    """This process's cgroup and the ones around it, as this mount namespace shows them."""
    folders = [CGROUP, CGROUP / "cpu"]
    try:
        lines = OWN_CGROUP.read_text().splitlines()
    except OSError:
        return folders
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        inside = (CGROUP / "cpu" if controllers else CGROUP) / path.lstrip("/")
        folders += [inside, *(parent for parent in inside.parents if CGROUP in parent.parents)]
    return folders


def _quota(folder: Path) -> float | None:
    try:
        if (folder / "cpu.max").exists():
            limit, period = (folder / "cpu.max").read_text().split()
        else:
            limit = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text().strip()
        return None if limit in ("max", "-1") else int(limit) / int(period)
    except (OSError, ValueError):
        return None
