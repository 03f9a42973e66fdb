"""A process with a time limit, which leaves no process of its own: one that lived on would keep the device."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import psutil

ROOT = Path(__file__).parents[2]


def run_bounded(
    command: Sequence[str], *, limit_s: float, environment: Mapping[str, str], output: IO[str] | None = None
) -> int | None:
    """Run a command in this checkout; at its limit it and all that it started are killed.

    Args:
        command: Program and arguments.
        limit_s: Longest run.
        environment: Its variables.
        output: File for its standard output; None: this process's.

    Returns:
        The exit code; None after a kill.
    """
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, start_new_session=True)
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.returncode is None:
            # One of them that runs with a limit has a session, and so a group, of its own.
            for each in (parent := psutil.Process(process.pid), *parent.children(recursive=True)):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(os.getpgid(each.pid), signal.SIGKILL)
            process.wait()
