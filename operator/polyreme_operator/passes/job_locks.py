"""Locks of jobs: a job has one pass at a time, and the scheduler's writes come first."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator


class JobLocks:
    """One lock per job."""

    def __init__(self) -> None:
        self._locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._wanting: dict[str, int] = defaultdict(int)
        """By job, the number of the scheduler's writes that wait for its lock."""

    def of(self, uid: str) -> asyncio.Lock:
        """Return the lock of a job."""
        return self._locks[uid]

    def is_wanted(self, uid: str) -> bool:
        """Tell whether the scheduler waits for the lock. A pass that is creating thousands of pods then stops early."""
        return uid in self._wanting

    @contextlib.asynccontextmanager
    async def wanted(self, uid: str) -> AsyncIterator[None]:
        """Hold a job's lock for a write of the scheduler."""
        self._wanting[uid] += 1
        try:
            lock = self._locks[uid]
            await lock.acquire()
        finally:
            self._wanting[uid] -= 1
            if not self._wanting[uid]:
                del self._wanting[uid]
        try:
            yield
        finally:
            lock.release()

    def forget(self, uid: str) -> None:
        """Forget a job."""
        self._locks.pop(uid, None)
