"""The bounded watch history of one kind: append, resume after a version, wait for more."""

from __future__ import annotations

import asyncio
import bisect
from collections.abc import Sequence

from polyreme_cluster.port import GoneError
from polyreme_local.api_server.record import Change


class WatchHistory:
    """Changes of one kind in the order of their versions, the newest ``limit`` at least, twice that at most."""

    def __init__(self, *, kind: str, limit: int) -> None:
        self._kind = kind
        self._limit = limit
        self._changes: list[Change] = []
        self._versions: list[int] = []
        """Of the changes."""
        self._forgotten = 0
        self._waiting: list[asyncio.Future[None]] = []

    @property
    def forgotten(self) -> int:
        """Newest version whose change is no longer kept; a watch resumes from it or a later one."""
        return self._forgotten

    def append(self, change: Change) -> None:
        """Add the newest change and wake who waits."""
        self._changes.append(change)
        self._versions.append(change.version)
        if len(self._changes) > 2 * self._limit:
            cut = len(self._changes) - self._limit
            self._forgotten = self._versions[cut - 1]
            del self._changes[:cut], self._versions[:cut]
        self.wake()

    def forget(self, version: int) -> None:
        """Drop what is not newer than ``version``, as compaction of etcd does."""
        cut = bisect.bisect_right(self._versions, version)
        del self._changes[:cut], self._versions[:cut]
        self._forgotten = max(self._forgotten, version)
        self.wake()

    def after(self, version: int, *, limit: int) -> Sequence[Change]:
        """Return the next changes after ``version``.

        Raises:
            GoneError: If some of them are no longer kept.
        """
        if version < self._forgotten:
            raise GoneError(
                f"watch history of {self._kind} is gone: resource version {version}, kept after {self._forgotten}"
            )
        start = bisect.bisect_right(self._versions, version)
        return self._changes[start : start + limit]

    def wake(self) -> None:
        """Let every waiting watch look again."""
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    async def wait(self) -> None:
        """Wait for the next ``wake``."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        try:
            await future
        finally:
            if future in self._waiting:
                self._waiting.remove(future)
