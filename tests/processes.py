"""Signals to processes of a test that may have ended by themselves."""

import contextlib
import os
import signal
from pathlib import Path


def wake(pid: int) -> None:
    """Let a stopped process run again; a process that woke before may have ended it."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def is_asked_to_end(pid: int) -> bool:
    """Whether SIGTERM waits for a process that is stopped, or it has been ended."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    fields = dict(line.split(":", 1) for line in text.splitlines())
    return bool(int(fields["ShdPnd"], 16) & 1 << (signal.SIGTERM - 1))
