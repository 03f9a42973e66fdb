"""Requests of the launcher to running ranks: SIGTERM to save and stop, SIGUSR1 to save and continue.

A rank only notes the request; the next step's all-reduce passes it to all ranks, so all of them stop after the same
step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
from collections.abc import Iterator
from types import FrameType


@dataclasses.dataclass(slots=True)
class Requests:
    """Requests that this rank has received and not yet passed on."""

    stop: bool = False
    save: bool = False


@contextlib.contextmanager
def listen() -> Iterator[Requests]:
    """Note signals while the block runs, then restore the old handlers; main thread only."""
    requests = Requests()

    def stop(_number: int, _frame: FrameType | None) -> None:
        requests.stop = True

    def save(_number: int, _frame: FrameType | None) -> None:
        requests.save = True

    old = {signal.SIGTERM: signal.signal(signal.SIGTERM, stop), signal.SIGUSR1: signal.signal(signal.SIGUSR1, save)}
    try:
        yield requests
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
