"""Object stores by URL: a local directory behind ``polyreme_api.store.ObjectStore``, on obstore.

A put is durable and atomic: the bytes go to a temporary name, are synced, then renamed (or hard-linked, for
create-if-absent), and the folder is synced, with those that were made for it. obstore's runtime does not survive a
fork, so the store opens itself once per process.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from polyreme_api.errors import InvalidConfigError
from polyreme_api.store import ObjectExistsError, ObjectInfo, ObjectNotFoundError, ObjectStore, StoreFailedError
from polyreme_datahub.locations import local_root

if TYPE_CHECKING:
    from obstore.store import LocalStore

TRIES_MAX = 4
RETRY_DELAY_S = 0.05
TEMPORARY = ".tmp"
TEMPORARY_AGE_S = 24 * 3600.0
"""No put takes so long: what is older belongs to a writer that was killed."""
SWEEP_MAX = 1000

_Result = TypeVar("_Result")
Sleep = Callable[[float], None]


def open_store(url: str, *, sleep: Sleep = time.sleep) -> ObjectStore:  # noqa: TID251 - the shell's default
    """Open the store at ``url``.

    Raises:
        InvalidConfigError: If no store of this release has that scheme.
        StoreFailedError: If the directory can't be made.
    """
    return LocalObjectStore(local_root(url), sleep=sleep)


class LocalObjectStore:
    """Objects as files under one directory."""

    def __init__(self, root: Path, *, sleep: Sleep) -> None:
        self._root = root
        self._sleep = sleep
        self._opened: tuple[int, LocalStore] | None = None
        self._lock = threading.Lock()

    def get(self, key: str) -> bytes:
        """Return the whole object."""
        import obstore

        return self._try(key, lambda: obstore.get(self._store(), _checked(key)).bytes().to_bytes())

    def get_range(self, key: str, *, start: int, length: int) -> bytes:
        """Return ``length`` bytes from ``start``, fewer only at the object's end."""
        import obstore

        def read() -> bytes:
            size_bytes = obstore.head(self._store(), _checked(key))["size"]
            if start >= size_bytes or length == 0:
                return b""
            stop = min(start + length, size_bytes)
            return obstore.get_range(self._store(), key, start=start, length=stop - start).to_bytes()

        return self._try(key, read)

    def put(self, key: str, data: bytes) -> None:
        """Write or replace the object, atomically and durably."""
        self._try(key, lambda: self._write(_checked(key), data, overwrite=True))

    def put_if_absent(self, key: str, data: bytes) -> None:
        """Write the object unless one exists."""
        self._try(key, lambda: self._write(_checked(key), data, overwrite=False))

    def exists(self, key: str) -> bool:
        """Tell whether an object lies at the key."""
        import obstore

        try:
            self._try(key, lambda: obstore.head(self._store(), _checked(key)))
        except ObjectNotFoundError:
            return False
        return True

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield the objects whose key begins with ``prefix``, in the order of their keys."""
        import obstore

        folder = prefix.rpartition("/")[0]

        def read() -> list[ObjectInfo]:
            pages = obstore.list(self._store(), folder or None)
            return [
                ObjectInfo(key=meta["path"], size_bytes=meta["size"])
                for page in pages
                for meta in page
                if meta["path"].startswith(prefix) and not meta["path"].startswith(TEMPORARY + "/")
            ]

        yield from sorted(self._try(prefix, read), key=lambda info: info.key)

    def delete(self, key: str) -> None:
        """Remove the object; no error when there is none."""
        import obstore

        with contextlib.suppress(ObjectNotFoundError):
            self._try(key, lambda: obstore.delete(self._store(), _checked(key)))

    def _store(self) -> LocalStore:
        from obstore.store import LocalStore

        with self._lock:
            if self._opened is None or self._opened[0] != os.getpid():
                self._opened = (os.getpid(), LocalStore(self._root, mkdir=True))
                self._sweep()
            return self._opened[1]

    def _write(self, key: str, data: bytes, *, overwrite: bool) -> None:
        import obstore

        store = self._store()
        path = self._root / key
        if not overwrite and path.exists():
            raise ObjectExistsError(f"object exists: {key}, and the first writer wins")
        fresh = [folder for folder in path.parents if folder.is_relative_to(self._root) and not folder.exists()]
        temporary = f"{TEMPORARY}/{os.getpid()}-{secrets.token_hex(8)}"
        try:
            obstore.put(store, temporary, data)
            _sync(self._root / temporary)
            obstore.rename(store, temporary, key, overwrite=overwrite)
        except BaseException:
            (self._root / temporary).unlink(missing_ok=True)
            raise
        for folder in (path.parent, *(made.parent for made in fresh)):
            _sync(folder)

    def _sweep(self) -> None:
        """Remove what killed writers left under temporary names; the file system's own clock tells its age."""
        left = sorted(islice((self._root / TEMPORARY).glob("*"), SWEEP_MAX))
        if not left:
            return
        mark = self._root / TEMPORARY / f"{os.getpid()}-{secrets.token_hex(8)}"
        with contextlib.suppress(OSError):
            mark.touch()
            now_s = mark.stat().st_mtime
            for path in (*left, mark):
                if path == mark or now_s - path.stat().st_mtime > TEMPORARY_AGE_S:
                    path.unlink(missing_ok=True)

    def _try(self, key: str, call: Callable[[], _Result]) -> _Result:
        from obstore import exceptions

        for tried in range(1, TRIES_MAX + 1):
            try:
                return call()
            except (FileNotFoundError, exceptions.NotFoundError) as error:
                raise ObjectNotFoundError(f"no object at {key} under {self._root}") from error
            except exceptions.AlreadyExistsError as error:
                raise ObjectExistsError(f"object exists: {key}, and the first writer wins") from error
            except (OSError, exceptions.BaseError) as error:
                if tried == TRIES_MAX or isinstance(error, exceptions.PermissionDeniedError):
                    reason = str(error).partition("\n")[0]
                    raise StoreFailedError(
                        f"object store {self._root} failed at {key} after {tried} tries: {reason}"
                    ) from error
                self._sleep(RETRY_DELAY_S * 2 ** (tried - 1))
        raise AssertionError("the last try returns or raises")


def _checked(key: str) -> str:
    if not key or any(part in {"", ".", ".."} for part in key.split("/")):
        raise InvalidConfigError(f"no object key: {key!r}, keys are relative paths without empty, . or .. parts")
    return key


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
