"""A page of memory with what a rank does, written by the rank and read by its launcher.

A write is a few stores to shared memory, so that it costs less than a microsecond and needs no help of the reader: the
page can be read while the rank hangs, spins, or is stopped. Each number is written whole; two of them may be from
different moments, which the next look corrects.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Sequence

PAGE_BYTES = 4096


def open_page() -> int:
    """Make an empty page in memory; return its descriptor, which a rank inherits.

    Raises:
        OSError: If the system has no memory files.
    """
    descriptor = os.memfd_create("rank-page", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, PAGE_BYTES)
    return descriptor


def read_page(page: mmap.mmap, fields: int) -> Sequence[int]:
    """Return the first numbers of a page."""
    with memoryview(page) as bytes_of_page, bytes_of_page.cast("q") as numbers:
        return tuple(numbers[:fields])


def write_number(page: mmap.mmap, place: int, number: int) -> None:
    """Write one number of a page that another process reads."""
    with memoryview(page) as bytes_of_page, bytes_of_page.cast("q") as numbers:
        numbers[place] = number


class PageWriter:
    """Writes numbers to the page of this process, for all its threads but those that are excluded.

    Args:
        moves: Place of the number that rises with each write.
        moved_ns: Place of the time of the last write, on the steady clock.
    """

    def __init__(self, *, moves: int, moved_ns: int) -> None:
        self._moves, self._moved_ns = moves, moved_ns
        self._attached = False
        self._excluded: set[int] = set()
        self.numbers = memoryview(bytearray(PAGE_BYTES)).cast("q")
        """Of a page without a reader, until one is attached."""

    def attach(self, descriptor: int) -> None:
        """Write to a page that another process reads."""
        self.numbers = memoryview(mmap.mmap(descriptor, PAGE_BYTES)).cast("q")
        os.close(descriptor)
        self._attached = True

    def exclude_thread(self) -> None:
        """Drop what this thread writes from now on: it does something beside what the page describes."""
        self._excluded.add(threading.get_ident())

    def is_ours(self) -> bool:
        """Whether there is a page, and this thread may write on it."""
        return self._attached and (not self._excluded or threading.get_ident() not in self._excluded)

    def moved(self) -> int:
        """Record that the rank advances; return the time [ns]."""
        numbers = self.numbers
        numbers[self._moves] += 1
        now_ns = numbers[self._moved_ns] = time.monotonic_ns()
        return now_ns
