"""Threads that read and decode the next samples of a request while its first ones are taken.

Decoders, resizing and digests release the interpreter's lock. Results are taken in the order of the request, each with
the error that its own read raised; a read that is not taken leaves nothing behind. Everything is bounded: the threads,
the reads ahead of the one that is taken, and the bytes of images that are decoded at once.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Generic, TypeVar

from polyreme_api.environment import DATA_THREADS
from polyreme_api.errors import InvalidConfigError, RefusedError

THREADS_MAX = 8
"""Threads of a process unless the environment asks for more."""
THREADS_LIMIT = 64
"""Most threads that the environment may ask for."""
AHEAD_PER_THREAD = 2
"""Samples that are read ahead of the one that is taken, for each thread."""
DECODED_BYTES_MAX = 512 * 2**20
"""Most bytes of images that are decoded at once; a larger image is decoded alone."""

Key = TypeVar("Key")
Result = TypeVar("Result")


class DecodeRoom:
    """Memory for images while they are decoded: who asks for more than is left waits.

    Args:
        bytes_max: Most bytes at once; what is larger waits until it is alone.
    """

    def __init__(self, bytes_max: int = DECODED_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._held = 0
        self._changed = threading.Condition()

    @contextmanager
    def hold(self, size_bytes: int) -> Iterator[None]:
        """Hold some bytes."""
        with self._changed:
            self._changed.wait_for(lambda: not self._held or self._held + size_bytes <= self._bytes_max)
            self._held += size_bytes
        try:
            yield
        finally:
            with self._changed:
                self._held -= size_bytes
                self._changed.notify_all()


class ReadsAhead(Generic[Key, Result]):
    """The reads of one request, started in order, a bounded number ahead of the one that is taken.

    Args:
        start: Starts a read.
        reads: By key, in the order in which they are taken.
        ahead: Reads that are started and not taken yet.
    """

    def __init__(
        self,
        start: Callable[[Callable[[], Result]], Future[Result]],
        reads: Mapping[Key, Callable[[], Result]],
        *,
        ahead: int,
    ) -> None:
        self._start, self._ahead = start, ahead
        self._waiting = deque(reads.items())
        self._started: dict[Key, Future[Result]] = {}
        self._fill()

    def take(self, key: Key) -> Future[Result] | None:
        """Return the read of a key, once, and start later ones; None where it is none of the request's."""
        taken = self._started.pop(key, None)
        self._fill()
        return taken

    def cancel(self) -> None:
        """Start no more reads; those that run end by themselves, and their results are dropped."""
        self._waiting.clear()
        for read in self._started.values():
            read.cancel()
        self._started.clear()

    def _fill(self) -> None:
        while self._waiting and len(self._started) < self._ahead:
            key, read = self._waiting.popleft()
            self._started[key] = self._start(read)


class DecodePool:
    """The threads of one process; they start with the first request, and end when the pool is dropped.

    Args:
        threads: How many; with one, the thread that asks reads by itself.
    """

    def __init__(self, threads: int) -> None:
        self._count = threads
        self._lock = threading.Lock()
        self._threads: tuple[int, ThreadPoolExecutor] | None = None
        self._closed = False

    @contextmanager
    def reading(self, reads: Mapping[Key, Callable[[], Result]]) -> Iterator[ReadsAhead[Key, Result]]:
        """Read in parallel as far as there is more than one thread; what was not taken is dropped at the end."""
        if self._count < 2 or len(reads) < 2:
            reads = {}
        begun = ReadsAhead(self._start, reads, ahead=self._count * AHEAD_PER_THREAD)
        try:
            yield begun
        finally:
            begun.cancel()

    def close(self) -> None:
        """Begin no more reads: those that wait for a thread are cancelled, later ones are refused."""
        with self._lock:
            self._closed = True
            if self._threads is not None and self._threads[0] == os.getpid():
                self._threads[1].shutdown(wait=False, cancel_futures=True)

    def check_open(self) -> None:
        """Refuse to go on once the threads are closed.

        Raises:
            RefusedError: If they are.
        """
        if self._closed:
            raise RefusedError("nothing is read any more: the source was closed")

    def _start(self, read: Callable[[], Result]) -> Future[Result]:
        with self._lock:
            self.check_open()
            # A forked process has none of its parent's threads.
            if self._threads is None or self._threads[0] != os.getpid():
                self._threads = (os.getpid(), ThreadPoolExecutor(self._count, thread_name_prefix="decode"))
            return self._threads[1].submit(read)


def decode_threads(environment: Mapping[str, str], *, processes: int) -> int:
    """Return how many threads of this process decode.

    Args:
        environment: May name the number.
        processes: Processes that decode on the same processors; without a number each takes its share of them.

    Raises:
        InvalidConfigError: If the number is none, or too large.
    """
    value = environment.get(DATA_THREADS, "")
    if not value:
        return max(1, min(THREADS_MAX, len(os.sched_getaffinity(0)) // processes))
    if not (value.isascii() and value.isdigit() and 1 <= int(value) <= THREADS_LIMIT):
        raise InvalidConfigError(
            f"environment variable is no number from 1 to {THREADS_LIMIT}: {DATA_THREADS}={value!r}",
            field=DATA_THREADS,
        )
    return int(value)
