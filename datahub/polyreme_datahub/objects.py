"""Object stores by URL, on obstore: a local directory or an S3 bucket behind ``polyreme_api.store.ObjectStore``.

In a directory a put is durable and atomic: the bytes go to a temporary name, are synced, then renamed (or hard-linked,
for create-if-absent), and the folder is synced, with those that were made for it. In a bucket the server does all that;
create-if-absent is ``If-None-Match: *``. obstore's runtime does not survive a fork, so a store opens itself once per
process.

A bucket's server and credentials come from the environment, by AWS' own names (``AWS_ENDPOINT_URL``, ``AWS_REGION``,
``AWS_ACCESS_KEY_ID``, ``AWS_SECRET_ACCESS_KEY``, ``AWS_SESSION_TOKEN``, web identity), and stand in no URL.
"""

from __future__ import annotations

import abc
import contextlib
import datetime
import errno
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar
from urllib.parse import unquote, urlsplit

from polyreme_api.errors import InvalidConfigError
from polyreme_api.store import (
    Data,
    ObjectExistsError,
    ObjectInfo,
    ObjectNotFoundError,
    ObjectStore,
    StoreFailedError,
)
from polyreme_datahub.locations import local_root

if TYPE_CHECKING:
    from obstore.store import LocalStore, S3Store

ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT")
"""Variables that name a bucket's server."""
TRIES_MAX = 4
RETRY_DELAY_S = 0.05
TEMPORARY = ".tmp"
TEMPORARY_AGE_S = 24 * 3600.0
"""No put takes so long: what is older belongs to a writer that was killed."""
SWEEP_MAX = 1000
REQUEST_TRIES_MAX = 3
"""Tries of one request to a bucket's server before a try of ours has failed."""
REQUEST_RETRIES_S = 30
"""Longest time over which one request is tried again."""
REQUEST_S_MAX = 300
"""Longest time of one request: a range of 64 MiB over a slow line."""
CONNECT_S_MAX = 10
JOINED_BYTES_MAX = 5 << 20
"""Parts of at most so many bytes together go to a bucket in one request: it takes more in pieces of this size."""

_Result = TypeVar("_Result")
_Store = TypeVar("_Store", "LocalStore", "S3Store")
Sleep = Callable[[float], None]


def open_store(url: str, *, sleep: Sleep = time.sleep) -> ObjectStore:  # noqa: TID251 - the shell's default
    """Open the store at ``url``: ``file:///absolute/folder`` or ``s3://bucket/prefix``.

    Raises:
        InvalidConfigError: If no store of this release has that scheme, or the URL holds credentials.
        StoreFailedError: If the directory can't be made.
    """
    if urlsplit(url).scheme == "s3":
        _check_endpoints(os.environ)
        return BucketStore(*bucket_of(url), sleep=sleep)
    return LocalObjectStore(local_root(url), sleep=sleep)


def _check_endpoints(environment: Mapping[str, str]) -> None:
    """Refuse a server's URL that holds credentials: it stands in every message about the server.

    Raises:
        InvalidConfigError: Naming the variable, and nothing of its value.
    """
    for name in ENDPOINT_VARIABLES:
        if "@" in urlsplit(environment.get(name, "")).netloc:
            raise InvalidConfigError(
                f"the URL in {name} has credentials; remove them and set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
                field=name,
            )


def bucket_of(url: str) -> tuple[str, str]:
    """Return bucket and prefix of an ``s3://`` URL.

    Raises:
        InvalidConfigError: If it names no bucket, or holds more than bucket and prefix.
    """
    parts = urlsplit(url)
    if "@" in parts.netloc:
        raise InvalidConfigError(
            "an s3:// URL has credentials; remove them and set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
            field="the URL",
        )
    prefix = unquote(parts.path).strip("/")
    if not parts.netloc or ":" in parts.netloc or parts.query or parts.fragment:
        raise InvalidConfigError(f"not a bucket: {url!r}, expected s3://bucket/prefix", field="the URL")
    return parts.netloc, _checked(prefix) if prefix else ""


class _Objects(abc.ABC, Generic[_Store]):
    """What directories and buckets have in common."""

    def __init__(self, *, where: str, sleep: Sleep) -> None:
        self._where = where
        self._sleep = sleep
        self._opened: tuple[int, _Store] | None = None
        self._lock = threading.Lock()

    def __eq__(self, other: object) -> bool:
        """Two stores of one place are the same."""
        return isinstance(other, _Objects) and type(self) is type(other) and self._where == other._where

    def __hash__(self) -> int:
        return hash((type(self), self._where))

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
        with contextlib.suppress(ObjectNotFoundError):
            self._try(key, lambda: self._remove(_checked(key)))

    def _remove(self, key: str) -> None:
        import obstore

        obstore.delete(self._store(), key)

    def _store(self) -> _Store:
        with self._lock:
            if self._opened is None or self._opened[0] != os.getpid():
                self._opened = (os.getpid(), self._open())
            return self._opened[1]

    @abc.abstractmethod
    def _open(self) -> _Store:
        """Open the store in this process."""

    def _try(self, key: str, call: Callable[[], _Result]) -> _Result:
        from obstore import exceptions

        for tried in range(1, TRIES_MAX + 1):
            try:
                return call()
            except (FileNotFoundError, exceptions.NotFoundError) as error:
                raise ObjectNotFoundError(f"no object at {key} under {self._where}") from error
            except exceptions.AlreadyExistsError as error:
                raise ObjectExistsError(f"object already exists: {key}, and the first writer wins") from error
            except (OSError, exceptions.BaseError) as error:
                if tried == TRIES_MAX or isinstance(error, exceptions.PermissionDeniedError):
                    reason = str(error).partition("\n")[0]
                    raise StoreFailedError(
                        f"object store {self._where} failed at {key} after {tried} tries: {reason}"
                    ) from error
                self._sleep(RETRY_DELAY_S * 2 ** (tried - 1))
        raise AssertionError("the last try returns or raises")


class LocalObjectStore(_Objects["LocalStore"]):
    """Objects as files under one directory."""

    def __init__(self, root: Path, *, sleep: Sleep) -> None:
        super().__init__(where=str(root), sleep=sleep)
        self._root = root

    def get_range(self, key: str, *, start: int, length: int) -> bytes:
        """Return ``length`` bytes from ``start``, fewer only at the object's end; read once, copied nowhere."""

        def read() -> bytes:
            with (self._root / _checked(key)).open("rb") as file:
                file.seek(start)
                return file.read(length)

        return self._try(key, read)

    def put(self, key: str, data: Data) -> None:
        """Write or replace the object, atomically and durably."""
        self._try(key, lambda: self._write(_checked(key), data, overwrite=True))

    def put_if_absent(self, key: str, data: bytes) -> None:
        """Write the object unless one exists."""
        self._try(key, lambda: self._write(_checked(key), data, overwrite=False))

    def _open(self) -> LocalStore:
        from obstore.store import LocalStore

        store = LocalStore(self._root, mkdir=True)
        self._sweep()
        return store

    def _remove(self, key: str) -> None:
        """Durably, since others are deleted on the word that this one is gone; a folder goes with its last object."""
        super()._remove(key)
        folder = (self._root / key).parent
        _sync(folder)
        if folder != self._root:
            with contextlib.suppress(OSError):
                folder.rmdir()

    def _write(self, key: str, data: Data, *, overwrite: bool) -> None:
        import obstore
        from obstore import exceptions

        store = self._store()
        path = self._root / key
        if not overwrite and path.exists():
            raise ObjectExistsError(f"object already exists: {key}, and the first writer wins")
        fresh = [folder for folder in path.parents if folder.is_relative_to(self._root) and not folder.exists()]
        temporary = f"{TEMPORARY}/{os.getpid()}-{secrets.token_hex(8)}"
        try:
            _write_file(self._root / temporary, data)
            obstore.rename(store, temporary, key, overwrite=overwrite)
            for folder in (path.parent, *(made.parent for made in fresh)):
                _sync(folder)
        except BaseException as error:
            (self._root / temporary).unlink(missing_ok=True)
            if isinstance(error, (FileNotFoundError, exceptions.NotFoundError)):
                # The folder went with its last object meanwhile: the next try makes it anew.
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path)) from error
            raise

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


class BucketStore(_Objects["S3Store"]):
    """Objects in an S3 bucket, under a prefix."""

    def __init__(self, bucket: str, prefix: str, *, sleep: Sleep) -> None:
        super().__init__(where=f"s3://{bucket}/{prefix}", sleep=sleep)
        self._bucket, self._prefix = bucket, prefix

    def put(self, key: str, data: Data) -> None:
        """Write or replace the object; large ones in parts, which show only when all are there."""
        import obstore

        parts = _parts(data)
        whole = b"".join(parts) if sum(len(part) for part in parts) <= JOINED_BYTES_MAX else None
        self._try(key, lambda: obstore.put(self._store(), _checked(key), parts if whole is None else whole))

    def put_if_absent(self, key: str, data: bytes) -> None:
        """Write the object unless one exists."""
        import obstore

        try:
            self._try(key, lambda: obstore.put(self._store(), _checked(key), data, mode="create", use_multipart=False))
        except ObjectExistsError:
            # A write whose answer was lost is tried again, and then meets itself.
            if not data or self.get(key) != data:
                raise

    def _open(self) -> S3Store:
        from obstore.store import S3Store

        return S3Store(
            self._bucket,
            prefix=self._prefix or None,
            client_options={
                "allow_http": True,  # only where AWS_ENDPOINT_URL says http
                "timeout": datetime.timedelta(seconds=REQUEST_S_MAX),
                "connect_timeout": datetime.timedelta(seconds=CONNECT_S_MAX),
            },
            retry_config={
                "max_retries": REQUEST_TRIES_MAX - 1,
                "retry_timeout": datetime.timedelta(seconds=REQUEST_RETRIES_S),
            },
        )


def _parts(data: Data) -> Sequence[bytes | memoryview]:
    return [data] if isinstance(data, bytes) else data


def _write_file(path: Path, data: Data) -> None:
    """Write a new file and sync it, without a copy of what is written."""
    path.parent.mkdir(exist_ok=True)
    with path.open("xb", buffering=0) as file:
        for part in _parts(data):
            view = memoryview(part).cast("B")
            while len(view):
                view = view[file.write(view) :]
        os.fsync(file.fileno())


def _checked(key: str) -> str:
    if not key or any(part in {"", ".", ".."} for part in key.split("/")):
        raise InvalidConfigError(f"not an object key: {key!r}, keys are relative paths without empty, . or .. parts")
    return key


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
