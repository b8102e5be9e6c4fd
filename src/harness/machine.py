"""What this process may use of the machine: memory and cores, container limits included.

Owns no policy; `config.resolve` decides what to do with the figures. Sources: cgroup v2 (kernel documentation,
`admin-guide/cgroup-v2`), psutil.
"""

from __future__ import annotations

import os
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")


def available_memory_bytes(cgroup: Path = _CGROUP) -> int:
    """Memory that can be taken without swapping: the machine's, or the container's where that is less."""
    available = int(psutil.virtual_memory().available)
    try:
        limit = int((cgroup / "memory.max").read_text())
        current = int((cgroup / "memory.current").read_text())
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no cgroup v2, or its limit is the word "max"
        return available
    # page cache is counted as used by the cgroup, but the kernel gives it back on demand
    reclaimable = int(stat.get("inactive_file", 0))
    return max(0, min(available, limit - current + reclaimable))


def num_usable_cores(cgroup: Path = _CGROUP) -> int:
    """Physical cores, at most as many as this process may run on."""
    counts = [psutil.cpu_count(logical=False) or os.cpu_count() or 1]
    if hasattr(os, "sched_getaffinity"):
        counts.append(len(os.sched_getaffinity(0)))
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
        counts.append(int(quota) // int(period))
    except (OSError, ValueError):  # no cgroup v2, or its quota is the word "max"
        pass
    return max(1, min(counts))
