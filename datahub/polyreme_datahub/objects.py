"""Object stores by URL: a directory, or an S3 bucket through obstore, as ``polyreme_api.store.ObjectStore``.

Create-if-absent in a bucket is ``If-None-Match: *``. obstore's runtime does not survive a fork, so a bucket is opened
once per process, at its first use; importing this module imports no client.

A bucket's server and credentials come from the environment, by AWS' own names (``AWS_ENDPOINT_URL``, ``AWS_REGION``,
``AWS_ACCESS_KEY_ID``, ``AWS_SECRET_ACCESS_KEY``, ``AWS_SESSION_TOKEN``, web identity), and never from a URL.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar
from urllib.parse import unquote, urlsplit

from polyreme_api.errors import InvalidConfigError
from polyreme_api.store import (
    Data,
    FolderStore,
    ObjectExistsError,
    ObjectInfo,
    ObjectNotFoundError,
    StoreFailedError,
)
from polyreme_api.urls import folder_path, is_bucket, masked
from polyreme_datahub.local_objects import LocalObjectStore
from polyreme_datahub.object_rules import TRIES_MAX, Sleep, checked_key, delay_s, parts_of

if TYPE_CHECKING:
    from obstore.store import S3Store

ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT")
"""Variables that name a bucket's server."""
REQUEST_TRIES_MAX = 3
"""Tries of one request to a bucket's server before a try of ours has failed."""
CONNECT_S_MAX = 10
JOINED_BYTES_MAX = 5 << 20
"""Parts of at most so many bytes together go to a bucket in one request: it takes more in pieces of this size."""
METADATA_HOST = "169.254.169.254"
"""Where a client asks for a machine's credentials when its environment has none."""
REASON_CHARACTERS_MAX = 300
_CODE = re.compile(r"<Code>(\w+)</Code>")
_UNTRUSTED = re.compile(r"InvalidCertificate\(\s*(\w+)")

_Result = TypeVar("_Result")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long a bucket's server is waited for."""

    request_s: float
    """Longest time of one request."""
    retries_s: float
    """Longest time after which the client begins it again."""
    tries_s: float
    """Longest time after which we begin another try."""
    tries_max: int = TRIES_MAX
    """Most tries of ours."""
    request_tries_max: int = REQUEST_TRIES_MAX
    """Most requests of the client in each of them."""
    tries_min: int = 1
    """Tries of ours that time does not end."""

    @property
    def worst_s(self) -> float:
        """Longest time until the caller has an answer or an error."""
        return self.tries_s + DELAY_S_MAX + self.retries_s + self.request_s


WHOLE_OBJECTS = Patience(request_s=300, retries_s=30, tries_s=math.inf)
"""For a range of 64 MiB over a slow line; the number of tries ends it."""
WORK = Patience(request_s=300, retries_s=30, tries_s=40, tries_max=64, tries_min=TRIES_MAX)
"""For processing, which has hours to lose: a server may restart in the middle."""
SAMPLES = Patience(request_s=15, retries_s=15, tries_s=25, tries_max=64)
"""For what a rank waits for: samples, and pieces of 8 MiB of their shards. Time ends it: a server that refuses for some
seconds costs them, and no attempt."""
PACED = dataclasses.replace(SAMPLES, request_tries_max=1)
"""For samples where each request counts: the client sends none that we don't know of."""
DELAY_S_MAX = 1.0
"""Longest wait between two tries of ours."""
PIECE_BYTES = 1 << 20
"""What is asked for at once of an object whose size is not known, where the bytes are limited."""
BUSY = ("SlowDown", "ServiceUnavailable", "503 Service", "429 Too Many")
"""How a server says that it has too many requests."""


class Gate(Protocol):
    """Where requests to a bucket wait until they may be sent."""

    def admitted(self, size_bytes: int) -> AbstractContextManager[int]:
        """Wait until a request may be sent; gives the bytes that it may ask for, at most those wanted."""
        ...

    def refused(self) -> None:
        """Note that the server has too many requests."""
        ...


def open_store(
    url: str,
    *,
    sleep: Sleep = time.sleep,  # noqa: TID251 - the shell's default
    steady_s: Callable[[], float] = time.monotonic,  # noqa: TID251 - the shell's default
    patience: Patience = WHOLE_OBJECTS,
    gate: Gate | None = None,
) -> FolderStore:
    """Open the store at ``url``: ``file:///absolute/folder`` or ``s3://bucket/prefix``.

    Args:
        url: The URL.
        sleep: Waits between two tries.
        steady_s: A clock that never jumps [s].
        patience: How long a bucket's server is waited for.
        gate: Where requests to a bucket wait; then ``get`` and ``get_range`` may take several.

    Raises:
        InvalidConfigError: If no store of this release has that scheme, or the URL holds credentials.
        StoreFailedError: If the directory can't be made.
    """
    if is_bucket(url):
        check_endpoints(os.environ)
        return BucketStore(*bucket_of(url), sleep=sleep, steady_s=steady_s, patience=patience, gate=gate)
    return LocalObjectStore(store_folder(url), sleep=sleep)


def store_folder(url: str) -> Path:
    """Return the folder of a local object store.

    Raises:
        InvalidConfigError: If the URL is neither a folder's nor a bucket's.
    """
    return Path(folder_path(url, field="the objects URL", expected="file:///absolute/directory or s3://bucket/prefix"))


def check_access(url: str) -> None:
    """Refuse a store that can't be reached: one request to a bucket's server, none for a directory.

    Raises:
        InvalidConfigError: As ``open_store``.
        StoreFailedError: Naming what is wrong.
    """
    store = open_store(url)
    if isinstance(store, BucketStore):
        store.check()


def check_endpoints(environment: Mapping[str, str]) -> None:
    """Refuse a server's URL that holds credentials: it is part of every message about the server.

    Raises:
        InvalidConfigError: Naming the variable, and nothing of its value.
    """
    for name in ENDPOINT_VARIABLES:
        if "@" in urlsplit(environment.get(name, "")).netloc:
            raise InvalidConfigError(
                f"the URL in {name} has credentials; remove them; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
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
            "an s3:// URL has credentials; remove them; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
            field="the URL",
        )
    prefix = unquote(parts.path).strip("/")
    if not parts.netloc or ":" in parts.netloc or parts.query or parts.fragment:
        raise InvalidConfigError(f"not a bucket: {masked(url)!r}, expected s3://bucket/prefix", field="the URL")
    return parts.netloc, checked_key(prefix) if prefix else ""


class BucketStore:
    """Objects in an S3 bucket, under a prefix."""

    def __init__(
        self,
        bucket: str,
        prefix: str,
        *,
        sleep: Sleep,
        steady_s: Callable[[], float],
        patience: Patience = WHOLE_OBJECTS,
        gate: Gate | None = None,
    ) -> None:
        self._where = f"s3://{bucket}/{prefix}"
        self._bucket, self._prefix = bucket, prefix
        self._sleep, self._steady_s, self._patience, self._gate = sleep, steady_s, patience, gate
        self._opened: tuple[int, S3Store] | None = None
        self._lock = threading.Lock()

    def __eq__(self, other: object) -> bool:
        """Two stores of one place are the same."""
        return isinstance(other, BucketStore) and self._where == other._where

    def __hash__(self) -> int:
        return hash(self._where)

    def get(self, key: str) -> bytes:
        """Return the whole object."""
        import obstore

        if self._gate is not None:
            return b"".join(self._pieces(key, 0, None))
        return self._try(key, lambda _: obstore.get(self._store(), checked_key(key)).bytes().to_bytes())

    def get_range(self, key: str, *, start: int, length: int) -> bytes:
        """Return ``length`` bytes from ``start``, fewer only at the object's end; one request, or more at a gate."""
        if length == 0:
            return b""
        return b"".join(self._pieces(key, start, length))

    def _pieces(self, key: str, start: int, length: int | None) -> Iterator[bytes]:
        """Yield a range in the pieces that may be asked for; no length: all that follows."""
        import obstore

        at, end = start, None if length is None else start + length
        while end is None or at < end:
            wanted = PIECE_BYTES if end is None else end - at

            def read(may: int, at: int = at) -> tuple[bytes, int]:
                found = obstore.get(self._store(), checked_key(key), options={"range": (at, at + may)})
                return found.bytes().to_bytes(), found.meta["size"]

            try:
                piece, size = self._try(key, read, size_bytes=wanted)
            except _PastTheEndError:
                return
            yield piece
            if not piece:
                return
            at += len(piece)
            end = size if end is None else min(end, size)

    def exists(self, key: str) -> bool:
        """Tell whether an object lies at the key."""
        import obstore

        try:
            self._try(key, lambda _: obstore.head(self._store(), checked_key(key)))
        except ObjectNotFoundError:
            return False
        return True

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield the objects whose key begins with ``prefix``, in the order of their keys."""
        import obstore

        folder = prefix.rpartition("/")[0]

        def read(_: int) -> list[ObjectInfo]:
            return [
                ObjectInfo(key=meta["path"], size_bytes=meta["size"])
                for page in obstore.list(self._store(), folder or None)
                for meta in page
                if meta["path"].startswith(prefix)
            ]

        yield from sorted(self._try(prefix, read), key=lambda info: info.key)

    def children(self, folder: str) -> tuple[Sequence[str], Sequence[ObjectInfo]]:
        """Return what lies directly in a folder, names of folders first; one request for each 1,000 of both."""
        import obstore

        prefix = checked_key(folder) if folder else None
        found = self._try(folder, lambda _: obstore.list_with_delimiter(self._store(), prefix))
        objects = [ObjectInfo(key=meta["path"], size_bytes=meta["size"]) for meta in found["objects"]]
        folders = [path.rstrip("/").rpartition("/")[2] for path in found["common_prefixes"]]
        return sorted(folders), sorted(objects, key=lambda info: info.key)

    def delete(self, key: str) -> None:
        """Remove the object; no error when there is none."""
        import obstore

        with contextlib.suppress(ObjectNotFoundError):
            self._try(key, lambda _: obstore.delete(self._store(), checked_key(key)))

    def put(self, key: str, data: Data) -> None:
        """Write or replace the object; large ones in parts, which show only when all are there."""
        import obstore

        parts = parts_of(data)
        whole = b"".join(parts) if sum(len(part) for part in parts) <= JOINED_BYTES_MAX else None
        self._try(key, lambda _: obstore.put(self._store(), checked_key(key), parts if whole is None else whole))

    def put_if_absent(self, key: str, data: bytes) -> None:
        """Write the object unless one exists."""
        import obstore

        try:
            self._try(
                key, lambda _: obstore.put(self._store(), checked_key(key), data, mode="create", use_multipart=False)
            )
        except ObjectExistsError:
            # A write whose answer was lost is tried again, and then meets itself.
            if not data or self.get(key) != data:
                raise

    def check(self) -> None:
        """Ask the server for the first page of a listing: that needs the server, the credentials and the bucket.

        Raises:
            StoreFailedError: Naming what is wrong.
        """
        import obstore

        self._try("", lambda _: next(iter(obstore.list(self._store(), chunk_size=1)), None))

    def request(self, key: str, call: Callable[[S3Store], _Result]) -> _Result:
        """Make a request of the caller's own, tried again and failing like all others.

        Args:
            key: What it is about, for messages.
            call: Makes the request, perhaps several times; what it raises beside a client's errors passes through.

        Raises:
            ObjectNotFoundError: If there is no such object.
            StoreFailedError: If the server can't be reached or refuses.
        """
        return self._try(key, lambda _: call(self._store()))

    def _store(self) -> S3Store:
        with self._lock:
            if self._opened is None or self._opened[0] != os.getpid():
                self._opened = (os.getpid(), self._open())
            return self._opened[1]

    def _open(self) -> S3Store:
        from obstore.store import S3Store

        return S3Store(
            self._bucket,
            prefix=self._prefix or None,
            client_options={
                "allow_http": True,  # only where AWS_ENDPOINT_URL says http
                "timeout": datetime.timedelta(seconds=self._patience.request_s),
                "connect_timeout": datetime.timedelta(seconds=min(CONNECT_S_MAX, self._patience.request_s)),
            },
            retry_config={
                "max_retries": self._patience.request_tries_max - 1,
                "retry_timeout": datetime.timedelta(seconds=self._patience.retries_s),
            },
        )

    def _try(self, key: str, call: Callable[[int], _Result], *, size_bytes: int = 0) -> _Result:
        from obstore import exceptions

        began_s = self._steady_s()
        for tried in range(1, self._patience.tries_max + 1):
            asked_s = self._steady_s()
            try:
                with self._admitted(size_bytes) as may:
                    # Waiting for a request's turn is no fault of the server.
                    began_s += self._steady_s() - asked_s
                    return call(may)
            except exceptions.AlreadyExistsError as error:
                raise ObjectExistsError(f"object already exists: {key}, and the first writer wins") from error
            except (OSError, exceptions.BaseError) as error:
                failure = failure_of(error)
                if failure.code == "InvalidRange":
                    raise _PastTheEndError from error
                if isinstance(error, FileNotFoundError | exceptions.NotFoundError) and not failure.final:
                    raise ObjectNotFoundError(f"no object at {key} under {self._where}") from error
                if self._gate is not None and failure.busy:
                    self._gate.refused()
                spent_s = self._steady_s() - began_s
                late = spent_s >= self._patience.tries_s and tried >= self._patience.tries_min
                if failure.final or tried == self._patience.tries_max or late:
                    tries = "" if failure.final else f" after {tried} tries in {spent_s:.0f} s"
                    raise StoreFailedError(
                        f"object store {self._where} failed at {key or 'its listing'}{tries}: {failure.reason}",
                        field=failure.field,
                    ) from error
                self._sleep(min(DELAY_S_MAX, delay_s(tried)))
        raise AssertionError("the last try returns or raises")

    def _admitted(self, size_bytes: int) -> AbstractContextManager[int]:
        return contextlib.nullcontext(size_bytes) if self._gate is None else self._gate.admitted(size_bytes)


class _PastTheEndError(Exception):
    """A range begins at or after the object's end."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a request to a bucket's server failed."""

    code: str
    """The server's own word for it, or nothing."""
    reason: str
    """For the person who reads it."""
    final: bool
    """Whether another try would fail in the same way."""
    busy: bool = False
    """Whether the server has too many requests."""
    field: str | None = None
    """What to change."""


def failure_of(error: Exception) -> Failure:
    """Read a client's error, which is a page of nested causes."""
    text = str(error)
    code = found.group(1) if (found := _CODE.search(text)) else ""
    credentials = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    if code == "NoSuchBucket":
        return Failure(code=code, reason="the server has no such bucket", final=True, field="the bucket in the URL")
    if METADATA_HOST in text:
        return Failure(code=code, reason="the environment holds no credentials", final=True, field=credentials)
    if "403 Forbidden" in text or "401 Unauthorized" in text:
        reason = f"the server refuses the credentials or the access ({code or 'forbidden'})"
        return Failure(code=code, reason=reason, final=True, field=credentials)
    if untrusted := _UNTRUSTED.search(text):
        reason = f"the server's certificate is not accepted ({untrusted[1]})"
        return Failure(code=code, reason=reason, final=True, field="SSL_CERT_FILE, which names the authorities")
    busy = any(word in text for word in BUSY)
    return Failure(code=code, reason=text.partition("\n")[0][:REASON_CHARACTERS_MAX], final=False, busy=busy)
