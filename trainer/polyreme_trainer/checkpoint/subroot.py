"""A folder of a checkpoint root as a root of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from polyreme_api.store import Data, ObjectInfo, ObjectStore


class SubRoot:
    """Objects whose keys begin with a folder's name.

    Args:
        store: The store of the whole root.
        folder: The folder, without a slash at its end.
    """

    def __init__(self, store: ObjectStore, folder: str) -> None:
        self._store, self._prefix = store, f"{folder}/"

    def get(self, key: str) -> bytes:
        """Return the whole object."""
        return self._store.get(self._prefix + key)

    def get_range(self, key: str, *, start: int, length: int) -> bytes:
        """Return a part of the object."""
        return self._store.get_range(self._prefix + key, start=start, length=length)

    def put(self, key: str, data: Data) -> None:
        """Write or replace the object."""
        self._store.put(self._prefix + key, data)

    def put_if_absent(self, key: str, data: bytes) -> None:
        """Write the object unless one exists."""
        self._store.put_if_absent(self._prefix + key, data)

    def exists(self, key: str) -> bool:
        """Tell whether an object lies at the key."""
        return self._store.exists(self._prefix + key)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield the folder's objects, by their keys in it."""
        for info in self._store.list(self._prefix + prefix):
            yield dataclasses.replace(info, key=info.key.removeprefix(self._prefix))

    def delete(self, key: str) -> None:
        """Remove the object."""
        self._store.delete(self._prefix + key)
