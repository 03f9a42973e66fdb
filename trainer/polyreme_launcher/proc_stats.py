"""State and CPU time of the ranks' processes, from the kernel (proc(5))."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from polyreme_api.rank_state import RankState

SAMPLE_INTERVAL_S = 2.0
IDLE_TICKS_MAX = 1
"""CPU time between two samples, in ticks of 10 ms, that a waiting process may use: its background threads wake up."""
_STATE, _PARENT, _USER, _SYSTEM = 0, 1, 11, 12
"""Positions after the name: state, parent, and CPU time in user and in system mode."""
_STOPPED = frozenset("Tt")


class ProcessSampler:
    """Samples processes, and remembers their CPU time until the next sample."""

    def __init__(self) -> None:
        self._ticks: dict[int, int] = {}

    def sample(self, pids: Mapping[int, int], pages: Mapping[int, RankState]) -> tuple[RankState, ...]:
        """Add what the kernel knows of the living ranks to their pages; a process seen for the first time isn't idle.

        Args:
            pids: Pid by rank.
            pages: What their pages say, by rank.
        """
        before, self._ticks = self._ticks, {}
        found = []
        for rank, pid in sorted(pids.items()):
            fields = _stat(pid)
            if fields is None:
                continue
            ticks = int(fields[_USER]) + int(fields[_SYSTEM])
            self._ticks[pid] = ticks
            idle = pid in before and ticks - before[pid] <= IDLE_TICKS_MAX
            known = pages.get(rank) or RankState(rank=rank, watched=False)
            found.append(dataclasses.replace(known, idle=idle, stopped=fields[_STATE] in _STOPPED))
        return tuple(found)


def state_of(pid: int) -> str:
    """Return a process's state, as ``R`` or ``D``; empty if there is no such process."""
    fields = _stat(pid)
    return "" if fields is None else fields[_STATE]


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped (state T)."""
    return state_of(pid) in _STOPPED


def parent_of(pid: int) -> int | None:
    """Pid of a process's parent; None if there is no such process."""
    fields = _stat(pid)
    return None if fields is None else int(fields[_PARENT])


def cpu_ticks(pid: int) -> int | None:
    """CPU time that a process has used, in ticks of 10 ms; None if there is no such process."""
    fields = _stat(pid)
    return None if fields is None else int(fields[_USER]) + int(fields[_SYSTEM])


def _stat(pid: int) -> list[str] | None:
    """Fields of a process after its name, which may contain anything; None if there is no such process or no /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
