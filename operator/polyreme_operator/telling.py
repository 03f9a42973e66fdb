"""When a status that only tells may be written: what says nothing that anybody acts on waits for something newer.

A job that is admitted, runs and ends within a second is never told that it waited and that it ran. A write that is put
off is decided anew when its time comes, so what is written is always the newest. Nothing here outlives the process:
its successor looks at every job and tells what is not told.
"""

from __future__ import annotations

from collections.abc import Callable


class Telling:
    """Times of writes that only tell.

    Args:
        now_s: A steady clock.
        rest_s: Least time from a write of a job's status, or from the first sight of it, to one that only tells.
        per_s: Budget of all jobs together.
        burst: Writes that the budget saves up.
    """

    def __init__(self, now_s: Callable[[], float], *, rest_s: float, per_s: float, burst: int) -> None:
        self._now_s, self._rest_s = now_s, rest_s
        self._every_s, self._saved_s = 1.0 / per_s, burst / per_s
        self._next_s = -self._saved_s
        """When the budget has its next write to give."""
        self._rests_until_s: dict[str, float] = {}
        self._turns_s: dict[str, float] = {}
        """Writes of the budget that are given already, to jobs whose turn is still to come."""

    def wait_s(self, uid: str) -> float:
        """Return how long a job has still to wait; 0: its write is taken from the budget, and to be made now."""
        now_s = self._now_s()
        rests_until_s = self._rests_until_s.setdefault(uid, now_s + self._rest_s)
        if now_s < rests_until_s:
            return rests_until_s - now_s
        turn_s = self._turns_s.get(uid)
        if turn_s is None:
            turn_s = max(self._next_s, now_s - self._saved_s)
            self._next_s = turn_s + self._every_s
        if turn_s > now_s:
            self._turns_s[uid] = turn_s
            return turn_s - now_s
        self.wrote(uid)
        return 0.0

    def wrote(self, uid: str) -> None:
        """Note that a job's status is being written, with everything that there was to tell."""
        self._turns_s.pop(uid, None)
        self._rests_until_s[uid] = self._now_s() + self._rest_s

    def forget(self, uid: str) -> None:
        """Forget a job."""
        self._turns_s.pop(uid, None)
        self._rests_until_s.pop(uid, None)
