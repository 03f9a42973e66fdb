"""Rate limiter for informational status updates: those on which no controller acts.

The status is computed when the job's turn comes, so it is always the newest one, and a job that is admitted, runs and
ends within a second gets no update in between. Updates are written one after another, so a slow API server gets fewer.
The state is not persistent: after a restart the operator reconciles every job and requests the updates again.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable


class StatusThrottle:
    """Jobs with a pending informational update, in the order of their turns.

    Running and waiting jobs alternate, so that a job that starts to train is not delayed by thousands that wait.

    Args:
        now_s: A steady clock.
        rest_s: Shortest time from a write of a job's status, or its first request, to an informational update.
        per_s: Rate of all jobs together.
        burst: Unused updates that are saved up.
    """

    def __init__(self, now_s: Callable[[], float], *, rest_s: float, per_s: float, burst: int) -> None:
        self._now_s, self._rest_s = now_s, rest_s
        self._every_s, self._saved_s = 1.0 / per_s, burst / per_s
        self._next_s = -self._saved_s
        """When the rate allows the next write."""
        self._rests_until_s: dict[str, float] = {}
        self._places: dict[str, int] = {}
        """By job, the number of its valid entry."""
        self._numbers = itertools.count()
        self._lanes: deque[list[tuple[float, int, str]]] = deque(([], []))
        """Heaps of (time at which an entry is ready, its number, its job); the first lane is served next."""
        self._waiting, self._running = self._lanes

    def wants(self, uid: str, *, runs: bool) -> None:
        """Request an update of a job; one that is requested already keeps its place."""
        if uid in self._places:
            return
        ready_s = self._rests_until_s.setdefault(uid, self._now_s() + self._rest_s)
        number = self._places[uid] = next(self._numbers)
        heapq.heappush(self._running if runs else self._waiting, (ready_s, number, uid))

    def wait_s(self) -> float | None:
        """Return the time until the next turn; None without a request."""
        ready_s = [lane[0][0] for lane in self._lanes if self._tidied(lane)]
        return max(0.0, max(min(ready_s), self._next_s) - self._now_s()) if ready_s else None

    def take(self) -> str | None:
        """Return the job whose turn it is, and drop its request; None if no job is ready."""
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
        """Charge one write to the rate."""
        self._next_s = max(self._next_s, self._now_s() - self._saved_s) + self._every_s

    def wrote(self, uid: str) -> None:
        """Note a write of a job's status, which includes its informational update."""
        self._places.pop(uid, None)
        self._rests_until_s[uid] = self._now_s() + self._rest_s

    def forget(self, uid: str) -> None:
        """Forget a job."""
        self._places.pop(uid, None)
        self._rests_until_s.pop(uid, None)

    def _tidied(self, lane: list[tuple[float, int, str]]) -> bool:
        """Drop outdated entries from the front; tell whether any is left."""
        while lane and self._places.get(lane[0][2]) != lane[0][1]:
            heapq.heappop(lane)
        return bool(lane)
