"""The last lines of an attempt that did not succeed, stored in the job's checkpoint root: they outlive pods.

A thread does this beside the next attempt: it begins when that has had time to start, gives up where the store is away,
and no restart waits for it. Each launcher stores the lines of its own ranks; the first worker's removes old attempts.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from polyreme_api.errors import PolyremeError
from polyreme_api.rank_logs import (
    STORED_BYTES_MAX,
    STORED_LINES_MAX,
    STORED_PREFIX,
    RankAttempt,
    expired_attempts,
    of_stored_key,
)
from polyreme_api.store import ObjectStore
from polyreme_launcher.log_files import read_end
from polyreme_launcher.log_lines import lines_of

DELAY_S = 2.0
"""How long storing waits for the next attempt's ranks to start, which takes less than a second."""
PENDING_MAX = 4
"""Attempts that may wait to be stored; the oldest are given up beyond that."""


class StoredLogs:
    """One launcher's thread for it.

    Args:
        folder: The pod's folder, with the files of its ranks.
        url: The checkpoint root, for messages.
        open_store: Opens it.
        removes: Whether this launcher removes logs of old attempts.
        say: Takes a sentence for the pod's log.
    """

    def __init__(
        self,
        *,
        folder: Path,
        url: str,
        open_store: Callable[[], ObjectStore],
        removes: bool,
        say: Callable[[str], None],
    ) -> None:
        self._folder, self._url, self._open_store = folder, url.rstrip("/"), open_store
        self._removes, self._say = removes, say
        self._pending: deque[tuple[int, Sequence[int]]] = deque(maxlen=PENDING_MAX)
        self._changed = threading.Semaphore(0)
        self._hurry = threading.Event()
        self._thread: threading.Thread | None = None

    def store(self, attempt: int, ranks: Sequence[int]) -> None:
        """Have the last lines of these ranks stored, soon."""
        self._pending.append((attempt, ranks))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="stored-logs", daemon=True)
            self._thread.start()
        self._changed.release()

    def close(self, wait_s: float) -> None:
        """Store what waits now, but wait for no more than some seconds."""
        self._hurry.set()
        self._changed.release()
        if self._thread is not None:
            self._thread.join(wait_s)

    def _run(self) -> None:
        while True:
            self._changed.acquire()
            self._hurry.wait(DELAY_S)
            try:
                attempt, ranks = self._pending.popleft()
            except IndexError:
                if self._hurry.is_set():
                    return
                continue
            try:
                self._store(attempt, ranks)
            except (PolyremeError, OSError) as error:
                self._say(f"last lines of attempt {attempt} are not stored, they are in {self._folder}: {error}")

    def _store(self, attempt: int, ranks: Sequence[int]) -> None:
        store = self._open_store()
        stored = 0
        for rank in ranks:
            log = RankAttempt(attempt, rank)
            if data := last_lines(self._folder / log.file_name):
                store.put(log.stored_key, data)
                stored += 1
            if stacks := _read_stacks(self._folder / log.stacks_name):
                store.put(log.stored_stacks_key, stacks)
        if stored:
            self._say(f"last lines of {stored} ranks of attempt {attempt} are in {self._url}/{STORED_PREFIX}")
        if self._removes:
            logs = [found for info in store.list(STORED_PREFIX) if (found := of_stored_key(info.key)) is not None]
            old = expired_attempts(found.attempt for found in logs)
            for found in logs:
                if found.attempt in old:
                    store.delete(found.stored_key)
                    store.delete(found.stored_stacks_key)


def _read_stacks(path: Path) -> bytes:
    """Return the stacks of a rank's threads; empty if they were not asked for."""
    try:
        return read_end(path, bytes_max=STORED_BYTES_MAX)
    except FileNotFoundError:
        return b""


def last_lines(path: Path) -> bytes:
    """Return the last lines of a rank's file as they are stored; empty if it wrote none.

    Raises:
        OSError: If the file can't be read.
    """
    chosen: list[bytes] = []
    room = STORED_BYTES_MAX
    for line in reversed(lines_of(read_end(path, bytes_max=STORED_BYTES_MAX))[-STORED_LINES_MAX:]):
        data = f"{line}\n".encode()
        room -= len(data)
        if room < 0:
            break
        chosen.append(data)
    return b"".join(reversed(chosen))
