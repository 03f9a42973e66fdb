"""Work queue of keys: deduplicating, delayed and rate-limited, as client-go's; pure, driven by the caller's clock."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence

_STALE_MAX = 64
"""Superseded timers that are kept beyond the number of keys with a delay."""


class WorkQueue:
    """Keys to process.

    A key is queued once, however often it is added. A key that is added while it is being processed keeps its place and
    is handed out after ``done``. Of several delays of a key the shortest one counts.

    Args:
        now_s: The clock.
        first: Keys that are handed out before all others, in this order, and don't count towards ``processing_max``.
        processing_max: Number of other keys processed at a time.
        backoff_s: Delay of a retry, by the number of failures in a row.
    """

    def __init__(
        self,
        now_s: Callable[[], float],
        *,
        first: Sequence[str] = (),
        processing_max: int,
        backoff_s: Callable[[int], float],
    ) -> None:
        self._now_s, self._backoff_s = now_s, backoff_s
        self._first, self._processing_max = tuple(first), processing_max
        self._queued: dict[str, None] = {}
        """In the order in which they were added."""
        self._processing: set[str] = set()
        self._due_s: dict[str, float] = {}
        self._timers: list[tuple[float, str]] = []
        """Heap of due times; an entry counts only while ``_due_s`` says the same."""
        self._resting_s: dict[str, float] = {}
        self._failures: dict[str, int] = {}

    def __len__(self) -> int:
        """Return how many keys are queued."""
        return len(self._queued)

    def add(self, *keys: str) -> None:
        """Queue keys."""
        self._queued.update(dict.fromkeys(keys))

    def add_at(self, key: str, at_s: float) -> None:
        """Start a delay: ``due`` yields the key at this time, or earlier if it has a shorter delay already."""
        if self._due_s.get(key, at_s + 1.0) <= at_s:
            return
        self._due_s[key] = at_s
        heapq.heappush(self._timers, (at_s, key))
        if len(self._timers) > 2 * len(self._due_s) + _STALE_MAX:
            self._timers = [(due_s, key) for key, due_s in self._due_s.items()]
            heapq.heapify(self._timers)

    def rest_until(self, key: str, at_s: float) -> None:
        """Hand out a key no earlier than this, whenever it is added."""
        self._resting_s[key] = at_s

    def due(self) -> Iterator[str]:
        """Yield the keys whose delay is over; the caller adds them, or others in their place."""
        while (at_s := self.next_due_s()) is not None and at_s <= self._now_s():
            key = heapq.heappop(self._timers)[1]
            del self._due_s[key]
            yield key

    def next_due_s(self) -> float | None:
        """Return the time at which the next delay is over; None if there is none."""
        while self._timers and self._due_s.get(self._timers[0][1]) != self._timers[0][0]:
            heapq.heappop(self._timers)
        return self._timers[0][0] if self._timers else None

    def get(self) -> str | None:
        """Return the next key, which counts as being processed until ``done``; None if there is none to process."""
        while (key := self._next()) is not None:
            del self._queued[key]
            at_s = self._resting_s.pop(key, None)
            if at_s is None or at_s <= self._now_s():
                self._processing.add(key)
                return key
            self._resting_s[key] = at_s
            self.add_at(key, at_s)
        return None

    def done(self, key: str) -> None:
        """Note that a key is no longer being processed."""
        self._processing.discard(key)

    def retry_delay_s(self, key: str) -> float:
        """Count one more failure of a key, and return how long to wait before it is retried."""
        self._failures[key] = self._failures.get(key, 0) + 1
        return self._backoff_s(self._failures[key])

    def forget(self, key: str) -> None:
        """Reset the failures of a key."""
        self._failures.pop(key, None)

    def remove(self, key: str) -> None:
        """Drop the failures, the delay and the rest of a key that no longer exists."""
        self._failures.pop(key, None)
        self._due_s.pop(key, None)
        self._resting_s.pop(key, None)

    def _next(self) -> str | None:
        for key in self._first:
            if key in self._queued and key not in self._processing:
                return key
        if len(self._processing.difference(self._first)) >= self._processing_max:
            return None
        return next((key for key in self._queued if key not in self._processing and key not in self._first), None)
