"""The object store as every plane sees it: whole objects, ranges, create-if-absent.

A key is a relative path of ``/``-separated names without ``.`` or ``..``. A put is atomic: a reader sees the old
object, the new one, or none, never a part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Protocol

from polyreme_api.errors import EnvironmentFailedError, NotFoundError, RefusedError

Data = bytes | Sequence[bytes | memoryview]
"""What is put: the bytes of an object, or its parts in order, which the caller need not join."""


class ObjectNotFoundError(NotFoundError):
    """No object lies at the key."""


class ObjectExistsError(RefusedError):
    """Create-if-absent found an object at the key; the first writer won."""


class StoreFailedError(EnvironmentFailedError):
    """The store did not take or give the bytes within its bounded retries (disk full, away, forbidden)."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """What a listing tells of one object."""

    key: str
    size_bytes: int


class ObjectStore(Protocol):
    """Objects under one root, addressed by key."""

    def get(self, key: str) -> bytes:
        """Return the whole object.

        Raises:
            ObjectNotFoundError: If there is none.
            StoreFailedError: If the store stays away.
        """
        ...

    def get_range(self, key: str, *, start: int, length: int) -> bytes:
        """Return ``length`` bytes from ``start``, fewer only at the object's end."""
        ...

    def put(self, key: str, data: Data) -> None:
        """Write or replace the object, atomically and durably."""
        ...

    def put_if_absent(self, key: str, data: bytes) -> None:
        """Write the object unless one exists.

        Raises:
            ObjectExistsError: If one exists; nothing was changed.
        """
        ...

    def exists(self, key: str) -> bool:
        """Tell whether an object lies at the key."""
        ...

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield the objects whose key begins with ``prefix``, in the order of their keys."""
        ...

    def delete(self, key: str) -> None:
        """Remove the object; no error when there is none."""
        ...


class FolderStore(ObjectStore, Protocol):
    """A store that can be looked into folder by folder, without listing what is further below."""

    def children(self, folder: str) -> tuple[Sequence[str], Sequence[ObjectInfo]]:
        """Return what lies directly in a folder: names of folders, then objects; nothing if it does not exist.

        Args:
            folder: Its key, without a slash at the end; empty: the root.
        """
        ...
