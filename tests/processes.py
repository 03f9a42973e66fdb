"""Signals to processes of a test that may have ended by themselves."""

import contextlib
import os
import signal
from pathlib import Path


def wake(pid: int) -> None:
    """Let a stopped process run again; a process that woke before may have ended it."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def is_stopped(pid: int) -> bool:
    """Whether all threads of a process are stopped, or it has ended.

    Until the last one is, a signal that comes later can be handled first: SIGTERM has a lower number than SIGSTOP.
    """
    try:
        states = [stat.read_text().rpartition(")")[2].split()[0] for stat in Path(f"/proc/{pid}/task").glob("*/stat")]
    except (FileNotFoundError, ProcessLookupError):
        return not Path(f"/proc/{pid}").exists()
    return set(states) <= {"T", "Z", "X"}


def is_asked_to_end(pid: int) -> bool:
    """Whether SIGTERM waits for a process that is stopped, or it has been ended."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    fields = dict(line.split(":", 1) for line in text.splitlines())
    return bool(int(fields["ShdPnd"], 16) & 1 << (signal.SIGTERM - 1))
