"""Blobs as files that a rank can map: a directory store's own, or local copies of what lies in a bucket.

Copies lie in one folder of the machine, which the ranks of all runs share. A copy is written under the name
``DIGEST.partial``, checked against its digest, then renamed; one process fetches, under the lock ``DIGEST.lock``, while
the others wait for it. One that holds the lock and makes no progress (it is stopped, or its disk hangs) is not waited
for longer than ``STUCK_S``: the next one fetches to a file of its own. Nothing is synced: a copy that a crash tore does
not pass the checks of its reader, who has it fetched again. Whoever maps a copy holds a shared lock on its file, which
the kernel drops with the last map; so the copies that no process maps can be removed, the least recently used first,
once the folder reaches its limit.

A reader of single samples does not wait for copies: it reads ranges from the store while one thread of its process
fetches the blob in the background.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import tempfile
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol
from urllib.parse import urlsplit

from polyreme_api.environment import CACHE_BYTES, CACHE_DIRECTORY
from polyreme_api.errors import EnvironmentFailedError, InvalidConfigError
from polyreme_api.store import ObjectNotFoundError, ObjectStore, StoreFailedError
from polyreme_datahub.digests import blob_key
from polyreme_datahub.errors import IndexDamagedError
from polyreme_datahub.loader.background_fetches import (
    BackgroundFetches,
    CopyNotWrittenError,
    NoRoomError,
    process_lives,
)
from polyreme_datahub.loader.file_locks import STUCK_S, LockWaits
from polyreme_datahub.locations import local_root
from polyreme_datahub.objects import SAMPLES, open_store

BYTES_MAX = 64 * 2**30
"""Size of the folder of copies, unless the environment says otherwise."""
PIECE_BYTES = 8 * 2**20
"""Bytes that one request of a fetch asks for; also the memory that a fetch takes."""
LOCK_TRIES_MAX = 1000
"""Times that a file may be replaced under a process that waits for its lock."""
FETCHES_MAX = 4
"""Blobs that one process fetches at once."""
PARTIAL = ".partial"
LOCK = ".lock"

_log = logging.getLogger(__name__)


class BlobFiles(Protocol):
    """Blobs as files."""

    @property
    def are_copies(self) -> bool:
        """Whether an open file keeps a local copy, which others may want removed."""
        ...

    def read(self, digest: str) -> bytes:
        """Return the bytes of a small blob, checked against its digest.

        Raises:
            IndexDamagedError: If the blob is missing, or its bytes have another digest.
        """
        ...

    def open(self, digest: str, size_bytes: int) -> BinaryIO:
        """Open a blob to map it.

        Raises:
            IndexDamagedError: If the blob is missing, or can't be read.
        """
        ...

    def prepare(self, sizes: Mapping[str, int]) -> None:
        """Fetch what is no local file yet of some blobs, given by digest and size; several at once.

        Raises:
            IndexDamagedError: If one is missing or damaged.
        """
        ...

    def fetch_again(self, digest: str) -> bool:
        """Drop a local copy that turned out to be damaged; return False where the file is no copy."""
        ...

    def check_present(self, sizes: Mapping[str, int]) -> None:
        """Find out, without fetching them, that some blobs are there.

        Raises:
            IndexDamagedError: If one is missing.
        """
        ...

    def local(self, digest: str, size_bytes: int) -> BinaryIO | None:
        """Open a blob that is a local file; None: it has to be fetched.

        Raises:
            IndexDamagedError: If the blob is missing, or can't be read.
        """
        ...

    def read_range(self, digest: str, size_bytes: int, *, start: int, length: int) -> bytes:
        """Read a range of a blob where it is stored, unchecked, and begin to fetch the blob in the background.

        Raises:
            IndexDamagedError: If the blob is missing.
        """
        ...


class FolderBlobs:
    """Blobs of a directory store: its own files."""

    are_copies = False

    def __init__(self, root: Path) -> None:
        self._root = root

    def read(self, digest: str) -> bytes:
        """Return the bytes of a small blob, checked."""
        try:
            data = (self._root / blob_key(digest)).read_bytes()
        except OSError as error:
            raise _unreadable(digest, str(error.strerror)) from error
        return _checked(digest, data)

    def open(self, digest: str, size_bytes: int) -> BinaryIO:
        """Open the file."""
        del size_bytes
        try:
            return (self._root / blob_key(digest)).open("rb")
        except OSError as error:
            raise _unreadable(digest, str(error.strerror)) from error

    def prepare(self, sizes: Mapping[str, int]) -> None:
        """Fetch nothing: the files are the blobs."""

    def fetch_again(self, digest: str) -> bool:
        """Return False: the file is the blob."""
        del digest
        return False

    def check_present(self, sizes: Mapping[str, int]) -> None:
        """Check nothing: who opens a file finds out."""

    def local(self, digest: str, size_bytes: int) -> BinaryIO:
        """Open the file."""
        return self.open(digest, size_bytes)

    def read_range(self, digest: str, size_bytes: int, *, start: int, length: int) -> bytes:
        """Read a range of the file."""
        with self.open(digest, size_bytes) as file:
            file.seek(start)
            return file.read(length)


class CopiedBlobs:
    """Blobs of any store, through copies in a folder of this machine.

    Args:
        store: Where the blobs lie.
        folder: Holds the copies.
        bytes_max: Most bytes of all copies together.
        waits: How the locks of other processes are waited for; its clock also says when room is looked for again.
    """

    are_copies = True

    def __init__(self, store: ObjectStore, folder: Path, *, bytes_max: int, waits: LockWaits | None = None) -> None:
        self._store, self._folder, self._bytes_max = store, folder, bytes_max
        self._waits = waits or LockWaits()
        self._fetches = BackgroundFetches(
            lambda digest, size_bytes: self.open(digest, size_bytes).close(), steady_s=self._waits.steady_s
        )

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
            file = self._locked(digest)
            if file is None:
                try:
                    self._fetch(digest, size_bytes)
                except OSError as error:
                    raise NoRoomError(
                        f"local copies of stored data can't be written to {self._folder}: {error.strerror}",
                        field=CACHE_DIRECTORY,
                    ) from error
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
        missing = [digest for digest in sizes if not (self._folder / digest).exists()]
        if missing:
            with ThreadPoolExecutor(FETCHES_MAX) as threads:
                found = list(threads.map(lambda digest: self._store.exists(blob_key(digest)), missing))
            for digest, is_there in zip(missing, found, strict=True):
                if not is_there:
                    raise _unreadable(digest, "no such object")

    def local(self, digest: str, size_bytes: int) -> BinaryIO | None:
        """Open a copy, under a lock that keeps it; one that was cut is removed."""
        file = self._locked(digest)
        if file is not None and os.fstat(file.fileno()).st_size != size_bytes:
            file.close()
            self.fetch_again(digest)
            return None
        return file

    def read_range(self, digest: str, size_bytes: int, *, start: int, length: int) -> bytes:
        """Read a range with one request; the copy is made in the background."""
        self._fetches.want(digest, size_bytes)
        try:
            return self._store.get_range(blob_key(digest), start=start, length=length)
        except ObjectNotFoundError as error:
            raise _unreadable(digest, "no such object") from error

    def wait_fetched(self) -> None:
        """Wait until no copy is being made in the background."""
        self._fetches.wait()

    def _locked(self, digest: str) -> BinaryIO | None:
        """Open a copy and lock it, unless there is none, or a stuck process holds it."""
        path = self._folder / digest
        try:
            file = path.open("rb")
        except (FileNotFoundError, NotADirectoryError):
            return None
        if not self._waits.take(file, fcntl.LOCK_SH) or os.fstat(file.fileno()).st_nlink == 0:
            file.close()
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return file

    def _fetch(self, digest: str, size_bytes: int) -> None:
        """Fetch a blob, unless another process does so first."""
        with self._alone(digest) as path:
            if path is None:
                return
            data = None
            if size_bytes < 0:
                data = self._whole(digest)
                size_bytes = len(data)
            pieces = self._pieces(digest, size_bytes) if data is None else iter([data])
            with path.open("wb") as partial:
                self._take(partial)
                try:
                    self._make_room(partial, size_bytes)
                    seen = self._write(partial, pieces)
                    if seen != digest:
                        raise IndexDamagedError(f"stored data is damaged: {blob_key(digest)} has digest {seen}")
                    path.replace(self._folder / digest)
                except BaseException:
                    path.unlink(missing_ok=True)
                    raise

    def _write(self, partial: BinaryIO, pieces: Iterator[bytes]) -> str:
        """Write the pieces of a blob; return the digest of what came."""
        seen = hashlib.sha256()
        for piece in pieces:
            seen.update(piece)
            try:
                partial.write(piece)
                partial.flush()
            except OSError as error:
                raise CopyNotWrittenError(
                    f"local copies of stored data can't be written to {self._folder}: {error.strerror}",
                    field=CACHE_DIRECTORY,
                ) from error
        partial.truncate()
        return seen.hexdigest()

    def _whole(self, digest: str) -> bytes:
        try:
            return self._store.get(blob_key(digest))
        except ObjectNotFoundError as error:
            raise _unreadable(digest, "no such object") from error

    def _pieces(self, digest: str, size_bytes: int) -> Iterator[bytes]:
        for start in range(0, size_bytes, PIECE_BYTES):
            if not process_lives():
                raise EnvironmentFailedError(f"fetch of {blob_key(digest)} was given up: the process ends")
            try:
                yield self._store.get_range(blob_key(digest), start=start, length=min(PIECE_BYTES, size_bytes - start))
            except ObjectNotFoundError as error:
                raise _unreadable(digest, "no such object") from error

    @contextmanager
    def _alone(self, digest: str) -> Iterator[Path | None]:
        """Hold the lock of a blob's fetch; give the file to write, None where another process has just ended a fetch.

        Where another process holds the lock and is stuck, the file is one of this thread's own.
        """
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path, shared = self._folder / f"{digest}{LOCK}", self._folder / f"{digest}{PARTIAL}"
        with path.open("ab") as lock:
            if not self._waits.take(lock, fcntl.LOCK_EX, lambda: _changed_ns(shared)):
                _log.warning("%s is held by a process without progress for %g s; fetched without it", path, STUCK_S)
                yield self._folder / f"{digest}.{os.getpid()}-{threading.get_ident()}{PARTIAL}"
                return
            if os.fstat(lock.fileno()).st_nlink == 0:
                yield None
                return
            try:
                yield None if (self._folder / digest).exists() else shared
            finally:
                path.unlink(missing_ok=True)

    def _make_room(self, partial: BinaryIO, size_bytes: int) -> None:
        """Reserve the bytes of a blob, and remove copies that no process maps until they fit.

        Raises:
            NoRoomError: If the copies in use leave no room, or a stuck process holds the folder's lock.
        """
        with (self._folder / f"folder{LOCK}").open("ab") as lock:
            self._take(lock)
            mine = os.fstat(partial.fileno()).st_ino
            files = sorted(self._files(), key=lambda found: found[1].st_mtime_ns)
            taken = sum(seen.st_size for _, seen in files) + size_bytes
            for path, seen in files:
                if taken <= self._bytes_max:
                    break
                if seen.st_ino != mine and _remove_unused(path):
                    taken -= seen.st_size
            if taken > self._bytes_max:
                raise NoRoomError(
                    f"local copies of stored data don't fit: {taken} bytes with those in use, {self._folder} may hold "
                    f"{self._bytes_max}",
                    field=f"{CACHE_BYTES}, or {CACHE_DIRECTORY} to a larger disk",
                )
            # The length that a partial file has is what its fetch will take.
            if size_bytes:
                os.posix_fallocate(partial.fileno(), 0, size_bytes)

    def _take(self, file: BinaryIO) -> None:
        """Lock a file that others hold for moments only."""
        if not self._waits.take(file, fcntl.LOCK_EX):
            raise NoRoomError(
                f"local copies of stored data can't be made: another process has held {file.name} for {STUCK_S:g} s",
                field=CACHE_DIRECTORY,
            )

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        for entry in os.scandir(self._folder):
            if not entry.name.endswith(LOCK):
                with contextlib.suppress(FileNotFoundError):
                    yield Path(entry.path), entry.stat()


def blob_files(url: str, environment: Mapping[str, str] | None = None) -> BlobFiles:
    """Return the blobs of the store at ``url`` as files.

    Args:
        url: ``file:///absolute/folder`` or ``s3://bucket/prefix``.
        environment: Names the folder of the copies and its limit; None: this process's own.

    Raises:
        InvalidConfigError: If the URL is of another kind, or the limit is no number.
    """
    if urlsplit(url).scheme != "s3":
        return FolderBlobs(local_root(url))
    given = os.environ if environment is None else environment
    folder = Path(given.get(CACHE_DIRECTORY) or Path(tempfile.gettempdir()) / f"polyreme-cache-{os.getuid()}")
    limit = given.get(CACHE_BYTES) or str(BYTES_MAX)
    if not limit.isascii() or not limit.isdigit():
        raise InvalidConfigError(
            f"{CACHE_BYTES} is {limit!r}, expected a whole number of bytes", field=f"the variable {CACHE_BYTES}"
        )
    return CopiedBlobs(open_store(url, patience=SAMPLES), folder, bytes_max=int(limit))


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


def _changed_ns(path: Path) -> int:
    """Return when a file was last written; 0: there is none."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _unreadable(digest: str, why: str) -> IndexDamagedError:
    return IndexDamagedError(f"stored data can't be read: {blob_key(digest)}, {why}")


def _remove_unused(path: Path) -> bool:
    """Remove a copy that no process maps, or what a killed fetch left."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
