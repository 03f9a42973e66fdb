"""Objects as files under one directory.

A put is durable and atomic: the bytes go to a temporary name, are synced, then renamed (or hard-linked, for
create-if-absent), and the folder is synced, with those folders above it that this process has not synced yet.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TypeVar

from polyreme_api.store import Data, ObjectExistsError, ObjectInfo, ObjectNotFoundError, StoreFailedError
from polyreme_datahub.object_rules import TRIES_MAX, Sleep, checked_key, delay_s, parts_of

TEMPORARY = ".tmp"
TEMPORARY_AGE_S = 24 * 3600.0
"""No put takes so long: what is older belongs to a writer that was killed."""
SWEEP_MAX = 1000
FOLDERS_MAX = 1 << 17
"""Folders that one store remembers as durable: more than the blobs of a lakehouse lie in."""

_Result = TypeVar("_Result")


class LocalObjectStore:
    """Objects as files under one directory."""

    def __init__(self, root: Path, *, sleep: Sleep) -> None:
        self._root = root
        self._sleep = sleep
        self._swept_by = 0
        self._durable: set[Path] = set()
        """Folders whose entry in the folder above was synced by this store."""

    def __eq__(self, other: object) -> bool:
        """Two stores of one place are the same."""
        return isinstance(other, LocalObjectStore) and self._root == other._root

    def __hash__(self) -> int:
        return hash(self._root)

    def get(self, key: str) -> bytes:
        """Return the whole object."""
        return self._try(key, (self._root / checked_key(key)).read_bytes)

    def get_range(self, key: str, *, start: int, length: int) -> bytes:
        """Return ``length`` bytes from ``start``, fewer only at the object's end."""

        def read() -> bytes:
            with (self._root / checked_key(key)).open("rb", buffering=0) as file:
                return os.pread(file.fileno(), length, start)

        return self._try(key, read)

    def exists(self, key: str) -> bool:
        """Tell whether an object lies at the key."""
        return self._try(key, (self._root / checked_key(key)).is_file)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield the objects whose key begins with ``prefix``, in the order of their keys."""
        yield from sorted(self._try(prefix, lambda: [*self._walk(prefix)]), key=lambda info: info.key)

    def children(self, folder: str) -> tuple[Sequence[str], Sequence[ObjectInfo]]:
        """Return what lies directly in a folder: names of folders, then objects."""
        try:
            return self._try(folder, lambda: self._entries(f"{checked_key(folder)}/" if folder else ""))
        except ObjectNotFoundError:
            return [], []

    def put(self, key: str, data: Data) -> None:
        """Write or replace the object, atomically and durably."""
        self._try(key, lambda: self._write(self._root / checked_key(key), data, overwrite=True))

    def put_if_absent(self, key: str, data: bytes) -> None:
        """Write the object unless one exists; one that exists is durable when this returns."""
        path = self._root / checked_key(key)
        try:
            self._try(key, lambda: self._write(path, data, overwrite=False))
        except FileExistsError as error:
            # Its writer may not have synced the folder yet, and a caller that finds the object relies on it.
            self._try(key, lambda: self._sync_folders(path))
            raise ObjectExistsError(f"object already exists: {key}, and the first writer wins") from error

    def delete(self, key: str) -> None:
        """Remove the object, durably: others are deleted because this one is gone. Its folder goes with the last."""
        with contextlib.suppress(ObjectNotFoundError):
            self._try(key, lambda: self._remove(self._root / checked_key(key)))

    def _remove(self, path: Path) -> None:
        path.unlink()
        folder = path.parent
        _sync(folder)
        if folder != self._root:
            with contextlib.suppress(OSError):
                folder.rmdir()
                self._durable.discard(folder)

    def _walk(self, prefix: str) -> Iterator[ObjectInfo]:
        for folder, folders, files in os.walk(self._root / prefix.rpartition("/")[0]):
            if Path(folder) == self._root and TEMPORARY in folders:
                folders.remove(TEMPORARY)
            for name in files:
                path = Path(folder, name)
                key = path.relative_to(self._root).as_posix()
                if key.startswith(prefix):
                    with contextlib.suppress(FileNotFoundError):
                        yield ObjectInfo(key=key, size_bytes=path.stat().st_size)

    def _entries(self, prefix: str) -> tuple[Sequence[str], Sequence[ObjectInfo]]:
        folders, objects = list[str](), list[ObjectInfo]()
        with os.scandir(self._root / prefix) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                if entry.is_dir():
                    folders += [entry.name] if prefix or entry.name != TEMPORARY else []
                    continue
                with contextlib.suppress(FileNotFoundError):
                    objects.append(ObjectInfo(key=prefix + entry.name, size_bytes=entry.stat().st_size))
        return folders, objects

    def _write(self, path: Path, data: Data, *, overwrite: bool) -> None:
        if not overwrite and path.exists():
            raise FileExistsError(path)
        self._sweep()
        temporary = self._root / TEMPORARY / f"{os.getpid()}-{secrets.token_hex(8)}"
        try:
            _write_file(temporary, data)
            path.parent.mkdir(parents=True, exist_ok=True)
            if overwrite:
                temporary.replace(path)
            else:
                path.hardlink_to(temporary)
                temporary.unlink()
            self._sync_folders(path)
        except BaseException as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            if isinstance(error, FileNotFoundError):
                # The folder went with its last object meanwhile: the next try recreates it.
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path)) from error
            raise

    def _sync_folders(self, path: Path) -> None:
        """Make an entry durable, and those of the folders above it that this store has not made durable yet."""
        _sync(path.parent)
        folder = path.parent
        while folder != self._root and folder not in self._durable:
            _sync(folder.parent)
            if len(self._durable) >= FOLDERS_MAX:
                self._durable.clear()
            self._durable.add(folder)
            folder = folder.parent

    def _sweep(self) -> None:
        """Remove what killed writers left under temporary names; the file system's own clock tells its age."""
        if self._swept_by == os.getpid():
            return
        (self._root / TEMPORARY).mkdir(parents=True, exist_ok=True)
        self._swept_by = os.getpid()
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
        for tried in range(1, TRIES_MAX + 1):
            try:
                return call()
            except FileExistsError:
                raise
            except (FileNotFoundError, IsADirectoryError) as error:
                raise ObjectNotFoundError(f"no object at {key} under {self._root}") from error
            except OSError as error:
                if tried == TRIES_MAX or isinstance(error, PermissionError):
                    raise StoreFailedError(
                        f"object store {self._root} failed at {key} after {tried} tries: {error}"
                    ) from error
                self._sleep(delay_s(tried))
        raise AssertionError("the last try returns or raises")


def _write_file(path: Path, data: Data) -> None:
    """Write a new file and sync it, without a copy of what is written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb", buffering=0) as file:
        for part in parts_of(data):
            view = memoryview(part).cast("B")
            while len(view):
                view = view[file.write(view) :]
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
