"""Carries injected failures out: waits for the step, finds the process, sends the signal, remembers when."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

from polyreme.local_run.fault_options import Injection
from polyreme.run_files.timeline import Moment, Timeline
from polyreme.views.output import note
from polyreme_api.clock import Clock
from polyreme_api.history import steps_key

POLL_S = 0.02
TAIL_BYTES = 4096
"""More than two step records."""
_SIGNALS = {"kill-rank": signal.SIGKILL, "stop-rank": signal.SIGSTOP, "kill-launcher": signal.SIGKILL}


async def inject(
    injection: Injection,
    root: Path,
    timeline: Timeline,
    clock: Clock,
    *,
    attempt: Callable[[], int],
    find: Callable[[Injection], int | None],
) -> None:
    """Strike once the current attempt has trained the step.

    Args:
        injection: What, whom, when.
        root: The run's checkpoint root.
        timeline: Takes the moment of the strike.
        clock: Wall time.
        attempt: Returns the current attempt's number, 0 before the first.
        find: Returns the target's pid, or None while there is none.
    """
    while True:
        number = attempt()
        path = root / steps_key(number)
        if number and _newest_step(path) >= injection.step:
            pid = find(injection)
            if pid is not None:
                timeline.add(Moment(at_s=clock.now_s(), kind="fault", attempt=number, text=str(injection)))
                os.kill(pid, _SIGNALS[injection.fault])
                note(f"injected: {injection} (pid {pid})")
                return
        await clock.sleep(POLL_S)


def _newest_step(path: Path) -> int:
    """Read the newest whole record from the file's tail: the file grows with every step, this must not."""
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = stream.read().split(b"\n")
    except FileNotFoundError:
        return 0
    return int(json.loads(lines[-2])["step"]) if len(lines) > 1 and lines[-2].startswith(b"{") else 0
