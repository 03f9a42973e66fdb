"""Object stores around others, for tests: they pass everything on, and subclasses spoil some of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from polyreme_api.store import Data, ObjectInfo, ObjectStore


class PassingStore:
    """Passes every call on."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def get(self, key: str) -> bytes:
        return self._store.get(key)

    def get_range(self, key: str, *, start: int, length: int) -> bytes:
        return self._store.get_range(key, start=start, length=length)

    def put(self, key: str, data: Data) -> None:
        self._store.put(key, data)

    def put_if_absent(self, key: str, data: bytes) -> None:
        self._store.put_if_absent(key, data)

    def exists(self, key: str) -> bool:
        return self._store.exists(key)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return self._store.list(prefix)

    def delete(self, key: str) -> None:
        self._store.delete(key)


class CountingStore(PassingStore):
    """Counts what is read, and how many reads there are at once."""

    def __init__(self, store: ObjectStore) -> None:
        super().__init__(store)
        self.requests = self.bytes = self.together_max = 0
        self._together = 0
        self._lock = threading.Lock()

    def get(self, key: str) -> bytes:
        return self._count(lambda: super(CountingStore, self).get(key))

    def get_range(self, key: str, *, start: int, length: int) -> bytes:
        return self._count(lambda: super(CountingStore, self).get_range(key, start=start, length=length))

    def _count(self, read: Callable[[], bytes]) -> bytes:
        with self._lock:
            self._together += 1
            self.together_max = max(self.together_max, self._together)
        data = read()
        with self._lock:
            self._together -= 1
            self.requests += 1
            self.bytes += len(data)
        return data


class StepClock:
    """A clock that only waits move, and what happens at each wait."""

    def __init__(self, at_wait: Callable[[float], None] = lambda _: None) -> None:
        self.now_s, self.at_wait = 0.0, at_wait

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, delay_s: float) -> None:
        self.now_s += delay_s
        self.at_wait(self.now_s)
