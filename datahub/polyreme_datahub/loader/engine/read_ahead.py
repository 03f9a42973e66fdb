"""Packs that threads of the data engine prepare before ranks ask for them.

A request for packs of a step has the same packs of the next steps prepared. Ranks that train on the same packs ask for
the same ones and get the same memory. The order of samples is the source's: a slow sample delays its own packs, while
other threads prepare later ones.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self

import numpy as np

from polyreme_api.batch import BatchSource
from polyreme_datahub.loader.engine.client import ALIGNMENT, BATCH_ARRAYS, Values
from polyreme_datahub.loader.read.shard_files import ReadCounts
from polyreme_datahub.loader.sample.documents import LaidPacks

STEPS_AHEAD = 3
"""Steps that are prepared after the newest one that was asked for."""
STEPS_KEPT = 2
"""Steps that are kept before it, for ranks that ask later; an older one is read again."""
BYTES_MAX = 256 * 2**20
"""Most bytes of prepared packs; packs that a rank waits for are read even if they alone are larger."""
ENTRIES_MAX = 1024
"""Most packs that are prepared or wait to be."""
READ_THREADS_MAX = 4

Key = tuple[int, int, int]
"""Step, first pack, count of packs."""


class LaidSource(BatchSource, Protocol):
    """Training data that can be had before their patches are joined."""

    @property
    def reads(self) -> ReadCounts:
        """Samples by where they were read."""
        ...

    def laid(self, step: int, *, first: int, count: int) -> LaidPacks:
        """Return packs as ``packs`` does, their patches still in their documents."""
        ...

    def close(self) -> None:
        """Begin no more reads; requests that wait for them fail."""
        ...


class SharedArrays:
    """Arrays in a sealed memory file, which is closed with the last reference.

    Args:
        arrays: Each as its parts along the first axis, at least one.
        facts: Go with the arrays.
    """

    def __init__(self, arrays: Sequence[Sequence[Values]], facts: Mapping[str, Any]) -> None:
        self.facts = dict(facts)
        self.layout, self.size = layout_of(arrays)
        self.descriptor = os.memfd_create("polyreme-packs", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, self.size)
            for parts, (_, _, start) in zip(arrays, self.layout, strict=True):
                end = start
                for part in parts:
                    end = _write(self.descriptor, np.ascontiguousarray(part), end)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, seals)
        except BaseException:
            os.close(self.descriptor)
            raise

    def __del__(self) -> None:
        """Close the file; clients keep what they have mapped."""
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)

    @property
    def message(self) -> dict[str, Any]:
        """The reply that goes with the descriptor."""
        return {**self.facts, "layout": self.layout}


def layout_of(arrays: Sequence[Sequence[Values]]) -> tuple[list[tuple[str, list[int], int]], int]:
    """Return the place of each array, given as its parts, in a memory file, and the bytes of the file."""
    layout, end = [], 0
    for parts in arrays:
        layout.append((parts[0].dtype.str, [sum(map(len, parts)), *parts[0].shape[1:]], end))
        end += -(-sum(part.nbytes for part in parts) // ALIGNMENT) * ALIGNMENT
    return layout, max(end, ALIGNMENT)


def share_packs(laid: LaidPacks) -> SharedArrays:
    """Put packs into a memory file, each document's patches by one copy."""
    batch = laid.batch
    arrays = [[np.asarray(getattr(batch, name))] for name in BATCH_ARRAYS[:-1]]
    names = np.frombuffer(json.dumps(list(batch.sample_ids)).encode(), np.uint8)
    return SharedArrays(
        [[names], *arrays, laid.patches],
        {
            "unmasked": int(batch.unmasked_tokens),
            "lost": [int(at) for at in batch.lost_images],
            "padding": [int(at) for at in batch.padding_documents],
        },
    )


def _write(descriptor: int, array: Values, start: int) -> int:
    """Write an array; return where it ends."""
    data = memoryview(array.reshape(-1).view(np.uint8).data)
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], start + done)
    return start + done


@dataclasses.dataclass(slots=True)
class _Entry:
    waiting: int = 0
    """Requests that wait for it."""
    reading: bool = False
    packs: SharedArrays | None = None
    error: Exception | None = None

    @property
    def is_done(self) -> bool:
        return self.packs is not None or self.error is not None


class ReadAhead:
    """Prepared packs of one source.

    Args:
        source: The packs; called from several threads at once.
        last_step: Nothing is prepared after it.
        threads: Threads that read.
        bytes_max: Most bytes of prepared packs.
        steps_ahead: Steps that are prepared after the newest one that was asked for.
    """

    def __init__(
        self,
        source: LaidSource,
        *,
        last_step: int,
        threads: int,
        bytes_max: int = BYTES_MAX,
        steps_ahead: int = STEPS_AHEAD,
    ) -> None:
        self._source, self.last_step = source, last_step
        self._bytes_max, self._steps_ahead = bytes_max, steps_ahead
        self._entries: dict[Key, _Entry] = {}
        self._held_bytes = 0
        self._largest = 0
        self._changed = threading.Condition()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"packs-{number}", daemon=True) for number in range(threads)
        ]

    def __enter__(self) -> Self:
        """Start the threads."""
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Close the source and end the threads; prepared packs are dropped."""
        with self._changed:
            self._closed = True
            self._entries.clear()
            self._held_bytes = 0
            self._changed.notify_all()
        # Its pending reads would delay the first packs of the next source.
        self._source.close()

    @property
    def held_bytes(self) -> int:
        """Bytes of prepared packs."""
        return self._held_bytes

    def get(self, step: int, *, first: int, count: int) -> SharedArrays:
        """Return packs of a step as soon as they are prepared, and have those of the next steps prepared.

        Raises:
            PolyremeError: What reading them raised.
        """
        key = (step, first, count)
        ahead = self._steps_like(step)
        with self._changed:
            self._forget_before(step - STEPS_KEPT)
            entry = self._entries.setdefault(key, _Entry())
            entry.waiting += 1
            self._plan(ahead, first, count)
            self._changed.notify_all()
            try:
                self._changed.wait_for(lambda: entry.is_done or self._closed)
            finally:
                entry.waiting -= 1
            self._plan(ahead, first, count)
            self._changed.notify_all()
            if entry.error is not None:
                raise entry.error
            if entry.packs is None:
                raise ConnectionResetError("the source was closed")
            return entry.packs

    def _steps_like(self, step: int) -> list[int]:
        """Return the next steps that have as many packs, each as long."""
        source, until = self._source, min(step + self._steps_ahead, self.last_step)
        like = (source.packs_in(step), source.pack_tokens_in(step))
        steps = range(step + 1, until + 1)
        return [after for after in steps if (source.packs_in(after), source.pack_tokens_in(after)) == like]

    def _plan(self, steps: list[int], first: int, count: int) -> None:
        """Have packs prepared, nearest step first, as far as memory allows."""
        for step in steps:
            planned = sum(not entry.is_done for entry in self._entries.values())
            room = self._held_bytes + (planned + 1) * self._largest <= self._bytes_max
            if not self._largest or not room or len(self._entries) >= ENTRIES_MAX:
                return
            self._entries.setdefault((step, first, count), _Entry())

    def _forget_before(self, step: int) -> None:
        for key in [key for key, entry in self._entries.items() if key[0] < step and not entry.waiting]:
            self._drop(key)

    def _drop(self, key: Key) -> None:
        entry = self._entries.pop(key)
        self._held_bytes -= entry.packs.size if entry.packs is not None else 0

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._next() is not None)
                key = self._next()
                if self._closed or key is None:
                    return
                entry = self._entries[key]
                entry.reading = True
            self._read(key, entry)

    def _next(self) -> Key | None:
        """Return what to read next: what is waited for, then the nearest step."""
        waits = [key for key, entry in self._entries.items() if not entry.reading and not entry.is_done]
        return min(waits, key=lambda key: (not self._entries[key].waiting, key), default=None)

    def _read(self, key: Key, entry: _Entry) -> None:
        step, first, count = key
        packs, error = None, None
        try:
            packs = share_packs(self._source.laid(step, first=first, count=count))
        except Exception as raised:  # noqa: BLE001 - every error belongs to the rank that asks, and none may end the thread
            error = raised
        with self._changed:
            entry.reading = False
            if self._entries.get(key) is entry:
                self._keep(key, entry, packs, error)
            else:
                # Passed or closed meanwhile.
                entry.packs, entry.error = packs, error
            self._changed.notify_all()

    def _keep(self, key: Key, entry: _Entry, packs: SharedArrays | None, error: Exception | None) -> None:
        if packs is None:
            if entry.waiting:
                entry.error = error
            # The next request reads it again: a store that was away may be back.
            del self._entries[key]
            return
        self._largest = max(self._largest, packs.size)
        self._make_room(packs.size, step=key[0], passed_only=not entry.waiting)
        if self._held_bytes + packs.size > self._bytes_max and not entry.waiting:
            del self._entries[key]
            return
        entry.packs = packs
        self._held_bytes += packs.size

    def _make_room(self, size: int, *, step: int, passed_only: bool) -> None:
        """Drop packs of earlier steps, oldest first, then of later ones, furthest first, until ``size`` bytes fit."""
        held = [key for key, entry in self._entries.items() if entry.packs is not None and not entry.waiting]
        passed = sorted(key for key in held if key[0] < step)
        later = [] if passed_only else sorted((key for key in held if key[0] >= step), reverse=True)
        for key in [*passed, *later]:
            if self._held_bytes + size <= self._bytes_max:
                return
            self._drop(key)
