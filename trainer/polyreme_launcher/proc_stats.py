"""Process statistics of the ranks from the kernel (proc(5)): the second signal of a hang."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from polyreme_launcher.protocol.follower import RanksSampled

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

    def sample(self, pids: Mapping[int, int]) -> RanksSampled:
        """Sample the living ranks, pids by rank. One that is seen for the first time is not idle."""
        before, self._ticks = self._ticks, {}
        idle, stopped = 0, []
        for rank, pid in pids.items():
            fields = _stat(pid)
            if fields is None:
                continue
            ticks = int(fields[_USER]) + int(fields[_SYSTEM])
            self._ticks[pid] = ticks
            if fields[_STATE] in _STOPPED:
                stopped.append(rank)
            idle += pid in before and ticks - before[pid] <= IDLE_TICKS_MAX
        return RanksSampled(idle=idle, stopped=tuple(sorted(stopped)))


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
