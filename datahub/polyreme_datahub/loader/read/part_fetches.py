"""Fetches parts of shards in a few threads of this process, each part once however many wait for it.

The threads live while something is wanted. Whoever waits for a part gets the error of its fetch; the next one who wants
it has it fetched again.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from polyreme_api.errors import EnvironmentFailedError

FETCH_THREADS = 8
"""Parts that one process fetches at once; a part takes its bytes of memory while it is fetched."""
WAITING_MAX = 1024
"""Parts that wait to be fetched before anybody waits for them; one that is wanted beyond that is not queued."""

Part = tuple[str, int]
"""Digest of the shard, number of the part."""


class PartFetches:
    """A queue of parts, and threads that live while it is not empty."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Part, Callable[[], None]]] = deque()
        self._fetching: dict[Part, Future[None]] = {}
        self._threads = 0

    def want(self, part: Part, fetch: Callable[[], None], *, now: bool) -> Future[None] | None:
        """Return a part's fetch, which is begun unless it runs or waits already.

        Args:
            part: The part.
            fetch: Fetches it.
            now: Whether somebody waits for it; if not, None is returned where too many wait before it.
        """
        with self._lock:
            found = self._fetching.get(part)
            if found is not None:
                return found
            if not now and len(self._waiting) >= WAITING_MAX:
                return None
            result = self._fetching[part] = Future[None]()
            self._waiting.append((part, fetch))
            if self._threads < FETCH_THREADS:
                self._threads += 1
                # No daemon: one that the interpreter's end interrupts inside the S3 client would abort the process.
                threading.Thread(target=self._work, name=f"part-fetch-{self._threads}").start()
            return result

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._threads -= 1
                    return
                part, fetch = self._waiting.popleft()
            error = _try(part, fetch)
            with self._lock:
                result = self._fetching.pop(part)
            if error is None:
                result.set_result(None)
            else:
                result.set_exception(error)


def _try(part: Part, fetch: Callable[[], None]) -> BaseException | None:
    if not threading.main_thread().is_alive():
        # The interpreter waits for this thread.
        return EnvironmentFailedError(f"fetch of part {part[1]} of {part[0]} was given up: the process ends")
    try:
        fetch()
    except BaseException as error:  # noqa: BLE001 - every error belongs to those who wait, and none may end the thread
        return error
    return None
