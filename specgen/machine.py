"""What this machine is called, for what was measured on it and holds on no other.

Knows: the processor's name. Does not know: what was measured.
"""

from __future__ import annotations

import platform
from pathlib import Path


def processor_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Its maker's name for it where the system tells, else the architecture's."""
    try:
        for line in cpuinfo.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Hardware", "cpu model") and value.strip():
                return " ".join(value.split())
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown processor"
