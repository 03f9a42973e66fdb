"""Whose status is written next of those who only tell: what says nothing that anybody acts on waits for its turn.

A job that is admitted, runs and ends within a second is never told that it waited and that it ran. What is written is
decided when the turn comes, so it is always the newest. Turns are taken one after another: an API server that is slow
to answer is asked for less. Nothing here outlives the process: its successor looks at every job and tells what is not
told.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable


class StatusThrottle:
    """Jobs that have something to tell, in the order of their turns.

    Those that run and those that wait take turns with each other: a job that begins to train is not behind thousands
    that wait.

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
        self._places: dict[str, int] = {}
        """By job, the number of its entry; an entry of another number counts no more."""
        self._numbers = itertools.count()
        self._lanes: deque[list[tuple[float, int, str]]] = deque(([], []))
        """Heaps of when an entry is ready, its number, its job: first the lane that is asked first."""
        self._waiting, self._running = self._lanes

    def wants(self, uid: str, *, runs: bool) -> None:
        """Note that a job has something to tell; one that is here already keeps its place."""
        if uid in self._places:
            return
        ready_s = self._rests_until_s.setdefault(uid, self._now_s() + self._rest_s)
        number = self._places[uid] = next(self._numbers)
        heapq.heappush(self._running if runs else self._waiting, (ready_s, number, uid))

    def wait_s(self) -> float | None:
        """Return how long it is until the next turn; None while nobody wants one."""
        ready_s = [lane[0][0] for lane in self._lanes if self._tidied(lane)]
        return max(0.0, max(min(ready_s), self._next_s) - self._now_s()) if ready_s else None

    def take(self) -> str | None:
        """Return the job whose turn it is, and it has none then; None when it is nobody's."""
        now_s = self._now_s()
        lane = next((lane for lane in self._lanes if self._tidied(lane) and lane[0][0] <= now_s), None)
        if lane is None:
            return None
        self._lanes.remove(lane)
        self._lanes.append(lane)
        uid = heapq.heappop(lane)[2]
        del self._places[uid]
        return uid

    def spend(self) -> None:
        """Take a write from the budget."""
        self._next_s = max(self._next_s, self._now_s() - self._saved_s) + self._every_s

    def wrote(self, uid: str) -> None:
        """Note that a job's status is being written, with everything that there was to tell."""
        self._places.pop(uid, None)
        self._rests_until_s[uid] = self._now_s() + self._rest_s

    def forget(self, uid: str) -> None:
        """Forget a job."""
        self._places.pop(uid, None)
        self._rests_until_s.pop(uid, None)

    def _tidied(self, lane: list[tuple[float, int, str]]) -> bool:
        """Drop entries that count no more from the front; tell whether any is left."""
        while lane and self._places.get(lane[0][2]) != lane[0][1]:
            heapq.heappop(lane)
        return bool(lane)
