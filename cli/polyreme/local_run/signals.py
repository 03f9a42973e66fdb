"""The signals that stop a command: Ctrl-C, a request of the system, a terminal that was closed."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable
from types import FrameType


def stop_signals() -> list[signal.Signals]:
    """Return the signals that stop a run. One that is ignored, as SIGHUP under ``nohup``, stays ignored."""
    asked = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    return [number for number in asked if signal.getsignal(number) is not signal.SIG_IGN]


def cancel_on_signals() -> None:
    """End the process as Ctrl-C does, with ``ExitCode.CANCELLED``, also on SIGTERM and SIGHUP; main thread only."""
    for number in stop_signals():
        signal.signal(number, _cancel)


def let_go(terminals: Iterable[int]) -> None:
    """Send what would go to a closed terminal nowhere: writing to it is an error."""
    for descriptor in terminals:
        with contextlib.suppress(OSError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)


def _cancel(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
