"""Identity of processes: a pid alone may by now belong to another one."""

from __future__ import annotations

import psutil

START_TOLERANCE_S = 0.05
"""Start times are counted in clock ticks; nearer than this is the same process."""


def started_at_s(pid: int) -> float | None:
    """When a process started [s since the epoch]; None when there is none."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        return process.create_time()
    except psutil.Error:
        return None


def is_same_process(pid: int | None, process_started_s: float | None) -> bool:
    """Tell whether a recorded process still runs, by pid and start time."""
    if pid is None or process_started_s is None:
        return False
    found = started_at_s(pid)
    return found is not None and abs(found - process_started_s) <= START_TOLERANCE_S
