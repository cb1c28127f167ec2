"""How many cores this process may use, and how many it shall."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Cores that the system lets this process run on: in a container often fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def allotted_cores() -> int:
    """Cores that are this process's share: OMP_NUM_THREADS says, where a launcher divides them; else all usable."""
    share = os.environ.get("OMP_NUM_THREADS", "")
    return max(int(share), 1) if share.isdecimal() else usable_cores()
