"""File locks that are waited for with a limit: a process that holds one may be stopped or stuck."""

from __future__ import annotations

import dataclasses
import fcntl
import time
from collections.abc import Callable
from typing import BinaryIO

from polyreme_datahub.object_rules import Sleep

POLL_S = 0.01
STUCK_S = 20.0
"""A process that holds a lock and shows no progress for so long is stuck. It is longer than any one request."""


def _no_progress() -> int:
    return 0


@dataclasses.dataclass(frozen=True, slots=True)
class LockWaits:
    """How locks are waited for: a clock that never jumps, and a wait."""

    steady_s: Callable[[], float] = time.monotonic  # noqa: TID251 - the shell's default
    sleep: Sleep = time.sleep  # noqa: TID251 - the shell's default

    def take(self, file: BinaryIO, how: int, progress: Callable[[], int] = _no_progress) -> bool:
        """Lock a file; return False if its holder shows no progress for ``STUCK_S``.

        Args:
            file: Open file.
            how: ``fcntl.LOCK_SH`` or ``fcntl.LOCK_EX``.
            progress: A number that changes while the holder works.
        """
        seen, seen_s = progress(), self.steady_s()
        while True:
            try:
                fcntl.flock(file, how | fcntl.LOCK_NB)
            except BlockingIOError:
                now_s = self.steady_s()
                if (current := progress()) != seen:
                    seen, seen_s = current, now_s
                elif now_s - seen_s >= STUCK_S:
                    return False
                self.sleep(POLL_S)
            else:
                return True
