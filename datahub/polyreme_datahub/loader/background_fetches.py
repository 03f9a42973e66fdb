"""Fetches blobs to local copies in one background thread, in the order in which they were first wanted.

Nothing waits for it: until a copy is here, its readers read ranges from the store. So a fetch that fails costs no
step. One process fetches a blob at most ``FETCH_TRIES_MAX`` times: where the folder of copies is too small for the
data, copies that are removed and wanted again would otherwise be fetched for every few samples. Where the folder has no
room, this process stores no copies for ``ROOM_RETRY_S``, then looks again: other jobs' copies may have gone.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable

from polyreme_api.errors import EnvironmentFailedError
from polyreme_datahub.errors import IndexDamagedError

FETCH_TRIES_MAX = 3
"""Times that one process fetches a blob in the background."""
ROOM_RETRY_S = 30.0
"""Time until a folder that had no room is tried again; a look costs a listing of the folder, and no request."""
WAITING_MAX = 1024
"""Blobs that wait to be fetched; one that is wanted beyond that is queued when it is wanted again."""

_log = logging.getLogger(__name__)


class NoRoomError(EnvironmentFailedError):
    """The folder of local copies has no room for another one, or can't be written."""


class CopyNotWrittenError(NoRoomError):
    """The folder refused bytes that the store had already given."""


class BackgroundFetches:
    """A queue of blobs, and a thread that lives while it is not empty.

    Args:
        fetch: Makes the local copy of a blob, given its digest and size.
        steady_s: A clock that never jumps [s].
    """

    def __init__(
        self,
        fetch: Callable[[str, int], None],
        *,
        steady_s: Callable[[], float] = time.monotonic,  # noqa: TID251 - the shell's default
    ) -> None:
        self._fetch, self._steady_s = fetch, steady_s
        self._lock = threading.Lock()
        self._waiting: OrderedDict[str, int] = OrderedDict()
        self._tries: Counter[str] = Counter()
        self._thread: threading.Thread | None = None
        self._full_until_s: float | None = None
        self._full_logged = False

    def want(self, digest: str, size_bytes: int) -> None:
        """Queue a blob, unless it waits already, was tried too often, or there is no room; returns at once."""
        with self._lock:
            tried = self._tries[digest] >= FETCH_TRIES_MAX
            if self._is_full() or tried or digest in self._waiting or len(self._waiting) >= WAITING_MAX:
                return
            self._waiting[digest] = size_bytes
            if self._thread is None:
                # No daemon: one that the interpreter's end interrupts inside the S3 client would abort the process.
                self._thread = threading.Thread(target=self._work, name="shard-fetch")
                self._thread.start()

    def wait(self) -> None:
        """Wait until nothing is queued."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join()

    def _work(self) -> None:
        while (blob := self._next()) is not None:
            try:
                self._try(*blob)
            except BaseException:
                with self._lock:
                    self._waiting.clear()
                    self._thread = None
                raise
            with self._lock:
                self._waiting.pop(blob[0], None)

    def _next(self) -> tuple[str, int] | None:
        with self._lock:
            if not self._waiting or self._is_full() or not process_lives():
                self._waiting.clear()
                self._thread = None
                return None
            digest, size_bytes = next(iter(self._waiting.items()))
            self._tries[digest] += 1
            return digest, size_bytes

    def _try(self, digest: str, size_bytes: int) -> None:
        try:
            self._fetch(digest, size_bytes)
        except NoRoomError as error:
            self._note_full(digest, error)
        except (EnvironmentFailedError, IndexDamagedError) as error:
            if isinstance(error, IndexDamagedError):
                self._tries[digest] = FETCH_TRIES_MAX
            if process_lives() and self._tries[digest] >= FETCH_TRIES_MAX:
                _log.warning("%s; its samples are read from the store, without a local copy", error.message)
        else:
            self._full_logged = False

    def _is_full(self) -> bool:
        return self._full_until_s is not None and self._steady_s() < self._full_until_s

    def _note_full(self, digest: str, error: NoRoomError) -> None:
        """Store nothing for a while; it is no try of the blob unless some of it was asked for."""
        with self._lock:
            if not isinstance(error, CopyNotWrittenError):
                self._tries[digest] -= 1
            self._full_until_s = self._steady_s() + ROOM_RETRY_S
        if not self._full_logged:
            self._full_logged = True
            _log.warning("%s; samples are read from the store, without local copies", error.message)


def process_lives() -> bool:
    """Return False once the interpreter waits for its other threads, which then end soon."""
    return threading.main_thread().is_alive()
