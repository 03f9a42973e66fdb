"""Reads several files at once and yields what they hold in their order, with a bounded part of it in memory."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

Item = TypeVar("Item")
Part = TypeVar("Part")

BATCH = 64
"""Parts that are passed on at once."""
BATCHES_AHEAD = 8
"""Batches of one file that wait for their turn."""
WAIT_S = 0.2
"""How long a thread waits for room before it looks whether its parts are still wanted [s]."""


def in_order(items: Iterable[Item], read: Callable[[Item], Iterator[Part]], *, threads: int) -> Generator[Part]:
    """Yield the parts of each item, in the order of items; an error of ``read`` is raised at its place.

    Args:
        items: What is read, such as the names of files.
        read: Yields the parts of one item; it runs in a thread.
        threads: Items that are read at once.
    """
    remaining = iter(items)
    stop = threading.Event()
    with ThreadPoolExecutor(threads) as pool:
        lines: deque[tuple[_Line, Future[None]]] = deque()
        try:
            while True:
                for item in itertools.islice(remaining, threads - len(lines)):
                    line = _Line(stop)
                    lines.append((line, pool.submit(line.fill, read, item)))
                if not lines:
                    return
                line, filled = lines.popleft()
                yield from line.parts()
                filled.result()
        finally:
            stop.set()


class _StoppedError(Exception):
    """The parts are no longer wanted."""


class _Line:
    """The parts of one item that wait for their turn.

    Args:
        stop: Set when they are no longer wanted.
    """

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop
        self._batches: queue.Queue[list[Any]] = queue.Queue(BATCHES_AHEAD)
        """An empty batch is the end."""

    def fill(self, read: Callable[[Item], Iterator[Part]], item: Item) -> None:
        """Put the parts of an item, and the end after them or after an error."""
        with contextlib.suppress(_StoppedError):
            try:
                parts = read(item)
                while some := list(itertools.islice(parts, BATCH)):
                    self._put(some)
            finally:
                self._put([])

    def parts(self) -> Iterator[Any]:
        """Yield the parts until the end."""
        while some := self._batches.get():
            yield from some

    def _put(self, some: list[Any]) -> None:
        while not self._stop.is_set():
            try:
                self._batches.put(some, timeout=WAIT_S)
            except queue.Full:
                continue
            return
        raise _StoppedError
