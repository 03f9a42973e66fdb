"""Object stores around others, for tests: they pass everything on, and subclasses spoil some of it."""

from __future__ import annotations

from collections.abc import Iterator

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
