"""Blobs as files that a rank can map or read: a directory store's own, or local copies of what lies in a bucket.

Copies lie in one folder of the machine, which the ranks of all runs share (see ``copy_folder``). What is mapped is
copied whole, under its digest, and checked against it. Nothing is synced: a copy that a crash tore does not pass the
checks of its reader, who has it fetched again. Shards of samples are copied part by part, as they are read (see
``part_files``).
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, TypeAlias

from polyreme_api.environment import CACHE_BYTES, CACHE_DIRECTORY
from polyreme_api.errors import EnvironmentFailedError, InvalidConfigError
from polyreme_api.store import ObjectNotFoundError, ObjectStore, StoreFailedError
from polyreme_api.urls import is_bucket
from polyreme_datahub.digests import blob_key
from polyreme_datahub.errors import IndexDamagedError
from polyreme_datahub.loader.read.copy_folder import CopyFolder, LockWaits
from polyreme_datahub.loader.read.part_files import OpenFile, PartFiles
from polyreme_datahub.objects import PACED, SAMPLES, Gate, open_store, store_folder

BYTES_MAX = 64 * 2**30
"""Size of the folder of copies, unless the environment says otherwise."""
PIECE_BYTES = 8 * 2**20
"""Bytes that one request of a fetch asks for; also the memory that a fetch takes."""
LOCK_TRIES_MAX = 1000
"""Times that a file may be replaced under a process that waits for its lock."""
FETCHES_MAX = 4
"""Blobs that one process fetches at once."""


class FolderBlobs:
    """Blobs of a directory store: its own files."""

    parts = None

    def __init__(self, root: Path) -> None:
        self._root = root

    def read(self, digest: str) -> bytes:
        """Return the bytes of a small blob, checked."""
        try:
            return _checked(digest, (self._root / blob_key(digest)).read_bytes())
        except OSError as error:
            raise _unreadable(digest, str(error.strerror)) from error

    def open(self, digest: str, size_bytes: int) -> BinaryIO:
        """Open the file."""
        del size_bytes
        try:
            return (self._root / blob_key(digest)).open("rb")
        except OSError as error:
            raise _unreadable(digest, str(error.strerror)) from error

    def local(self, digest: str, size_bytes: int, *, make: bool) -> OpenFile:
        """Open the file of a shard."""
        del make
        with self.open(digest, size_bytes) as file:
            if (found := os.fstat(file.fileno()).st_size) != size_bytes:
                raise IndexDamagedError(
                    f"stored data is damaged: {blob_key(digest)} has {found} bytes, its index expects {size_bytes}"
                )
            return OpenFile(file, digest, size_bytes)

    def prepare(self, sizes: Mapping[str, int]) -> None:
        """Fetch nothing: the files are the blobs."""

    def fetch_again(self, digest: str) -> bool:
        """Return False: the file is the blob."""
        del digest
        return False


class CopiedBlobs:
    """Blobs of any store, through copies in a folder of this machine.

    Args:
        store: Where the blobs lie.
        folder: Holds the copies.
        bytes_max: Most bytes of all copies together.
        waits: How the locks of other processes are waited for; its clock also says when room is looked for again.
    """

    def __init__(self, store: ObjectStore, folder: Path, *, bytes_max: int, waits: LockWaits | None = None) -> None:
        self._store, self._folder = store, folder
        self._copies = CopyFolder(folder, bytes_max=bytes_max, waits=waits or LockWaits())
        self.parts = PartFiles(store, self._copies)
        """Copies of shards of samples."""
        self.local = self.parts.open

    def read(self, digest: str) -> bytes:
        """Return the bytes of a small blob, checked; a copy that was changed is fetched again."""
        with self.open(digest, -1) as file:
            data = file.read()
        if hashlib.sha256(data).hexdigest() == digest:
            return data
        self.fetch_again(digest)
        with self.open(digest, -1) as file:
            return _checked(digest, file.read())

    def open(self, digest: str, size_bytes: int) -> BinaryIO:
        """Open a copy, under a lock that keeps it; one that is missing or cut is fetched first.

        Raises:
            IndexDamagedError: If the store has no such blob, or another one under its digest.
            EnvironmentFailedError: If the store stays away.
            NoRoomError: If the copies in use leave no room, or the folder can't be written.
        """
        for _ in range(LOCK_TRIES_MAX):
            file = self._copies.locked(digest)
            if file is None:
                try:
                    self._fetch(digest, size_bytes)
                except OSError as error:
                    raise self._copies.not_written(error) from error
            elif size_bytes in {-1, os.fstat(file.fileno()).st_size}:
                return file
            else:
                file.close()
                self.fetch_again(digest)
        raise EnvironmentFailedError(
            f"local copy of {blob_key(digest)} was removed {LOCK_TRIES_MAX} times while opened"
        )

    def prepare(self, sizes: Mapping[str, int]) -> None:
        """Fetch what is missing, ``FETCHES_MAX`` at once."""
        missing = [(digest, size) for digest, size in sizes.items() if not (self._folder / digest).exists()]
        if missing:
            with ThreadPoolExecutor(FETCHES_MAX) as threads:
                for file in threads.map(lambda blob: self.open(*blob), missing):
                    file.close()

    def fetch_again(self, digest: str) -> bool:
        """Remove the copy; the next one who opens it fetches it."""
        (self._folder / digest).unlink(missing_ok=True)
        return True

    def check_present(self, sizes: Mapping[str, int]) -> None:
        """Ask the store for what is no local copy yet, ``FETCHES_MAX`` at once; nothing is fetched."""
        missing = [digest for digest in sizes if not self.parts.has(digest)]
        if missing:
            with ThreadPoolExecutor(FETCHES_MAX) as threads:
                found = list(threads.map(lambda digest: self._store.exists(blob_key(digest)), missing))
            for digest, is_there in zip(missing, found, strict=True):
                if not is_there:
                    raise _unreadable(digest, "no such object")

    def _fetch(self, digest: str, size_bytes: int) -> None:
        """Fetch a blob, unless another process does so first."""
        with self._copies.making(digest) as path:
            if path is None:
                return
            data = None
            if size_bytes < 0:
                data = self._whole(digest)
                size_bytes = len(data)
            pieces = self._pieces(digest, size_bytes) if data is None else iter([data])
            with path.open("wb") as partial:
                try:
                    self._copies.make_room(partial, size_bytes)
                    seen = _write(partial, pieces)
                    if seen != digest:
                        raise IndexDamagedError(f"stored data is damaged: {blob_key(digest)} has digest {seen}")
                    path.replace(self._folder / digest)
                except BaseException:
                    path.unlink(missing_ok=True)
                    raise

    def _whole(self, digest: str) -> bytes:
        try:
            return self._store.get(blob_key(digest))
        except ObjectNotFoundError as error:
            raise _unreadable(digest, "no such object") from error

    def _pieces(self, digest: str, size_bytes: int) -> Iterator[bytes]:
        for start in range(0, size_bytes, PIECE_BYTES):
            try:
                yield self._store.get_range(blob_key(digest), start=start, length=min(PIECE_BYTES, size_bytes - start))
            except ObjectNotFoundError as error:
                raise _unreadable(digest, "no such object") from error


BlobFiles: TypeAlias = FolderBlobs | CopiedBlobs


def blob_files(url: str, environment: Mapping[str, str] | None = None, *, gate: Gate | None = None) -> BlobFiles:
    """Return the blobs of the store at ``url`` as files.

    Args:
        url: ``file:///absolute/folder`` or ``s3://bucket/prefix``.
        environment: Names the folder of the copies and its limit; None: this process's own.
        gate: Where requests to a bucket wait.

    Raises:
        InvalidConfigError: If the URL is of another kind, or the limit is no number.
    """
    if not is_bucket(url):
        return FolderBlobs(store_folder(url))
    given = os.environ if environment is None else environment
    folder = Path(given.get(CACHE_DIRECTORY) or Path(tempfile.gettempdir()) / f"polyreme-cache-{os.getuid()}")
    limit = given.get(CACHE_BYTES) or str(BYTES_MAX)
    if not limit.isascii() or not limit.isdigit():
        raise InvalidConfigError(
            f"{CACHE_BYTES} is {limit!r}, expected a whole number of bytes", field=f"the variable {CACHE_BYTES}"
        )
    return CopiedBlobs(samples_store(url, gate), folder, bytes_max=int(limit))


def samples_store(url: str, gate: Gate | None) -> ObjectStore:
    """Return the store at ``url`` for what a rank waits for, through a gate or not."""
    return open_store(url, patience=SAMPLES if gate is None else PACED, gate=gate)


def read_blob(store: ObjectStore, digest: str) -> bytes:
    """Read a small blob from its store, checked against its digest.

    Raises:
        IndexDamagedError: If it is missing, can't be read, or its bytes have another digest.
    """
    try:
        return _checked(digest, store.get(blob_key(digest)))
    except ObjectNotFoundError as error:
        raise _unreadable(digest, "no such object") from error
    except StoreFailedError as error:
        raise _unreadable(digest, error.message) from error


def _checked(digest: str, data: bytes) -> bytes:
    seen = hashlib.sha256(data).hexdigest()
    if seen != digest:
        raise IndexDamagedError(f"stored data is damaged: {blob_key(digest)} has digest {seen}")
    return data


def _write(partial: BinaryIO, pieces: Iterator[bytes]) -> str:
    """Write the pieces of a blob; return the digest of what came."""
    seen = hashlib.sha256()
    for piece in pieces:
        seen.update(piece)
        partial.write(piece)
        partial.flush()
    partial.truncate()
    return seen.hexdigest()


def _unreadable(digest: str, why: str) -> IndexDamagedError:
    return IndexDamagedError(f"stored data can't be read: {blob_key(digest)}, {why}")
