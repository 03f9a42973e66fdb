"""Retries of jobs in quarantine: later each time, and so often at most. What quarantine means is in ``core``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

RETRY_FIRST_S = 1.0
RETRY_LONGEST_S = 600.0
RETRIES_MAX = 20
"""About two hours; then a job stays in quarantine until its spec changes or the operator restarts."""
FORGIVEN_AFTER_S = 3_600.0
"""A job that raised no error for so long has all its retries again."""


@dataclasses.dataclass(slots=True)
class _Entry:
    generation: int
    failures: int
    failed_at_s: float


class Quarantine:
    """When each job in quarantine is to be retried.

    Args:
        now_s: A steady clock.
    """

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._entries: dict[str, _Entry] = {}

    def add(self, uid: str, *, generation: int) -> float | None:
        """Note an error; return the delay until the next retry, None for no more of them."""
        now_s = self._now_s()
        entry = self._entries.get(uid)
        if entry is None or entry.generation != generation or now_s - entry.failed_at_s > FORGIVEN_AFTER_S:
            entry = self._entries[uid] = _Entry(generation=generation, failures=0, failed_at_s=now_s)
        entry.failures += 1
        entry.failed_at_s = now_s
        return self.wait_s(uid)

    def wait_s(self, uid: str) -> float | None:
        """Return how long it is until the next retry; None for a job that is not to be retried."""
        entry = self._entries.get(uid)
        if entry is None or entry.failures > RETRIES_MAX:
            return None
        delay_s = min(RETRY_LONGEST_S, RETRY_FIRST_S * 2.0 ** (entry.failures - 1))
        return max(0.0, entry.failed_at_s + delay_s - self._now_s())

    def forget(self, uid: str) -> None:
        """Forget a job."""
        self._entries.pop(uid, None)
