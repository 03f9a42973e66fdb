"""Local copies of shards that are read by ranges: a file of a shard's full length, filled part by part.

A part is fetched with one request when something in it is first read, by one process of the machine. After the shard's
bytes the file has one byte for each part, which says whether the part is here; it is written after the part. Nothing is
synced, and parts have no digests: each sample's own digest is checked by its reader, who drops parts that do not fit. A
file takes its full length from the start, so no part can meet a full disk.

Samples are read in a random order. So where the folder is smaller than the data, files are made of as many shards as
fit, always the same ones: of files that come and go, each would be filled for few samples. Other jobs' files may leave
less room: a process makes the file of a shard at most ``MAKE_TRIES_MAX`` times, and where there is no room it makes no
files for ``ROOM_RETRY_S``.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import BinaryIO

from polyreme_api.environment import CACHE_BYTES
from polyreme_api.errors import EnvironmentFailedError
from polyreme_api.store import ObjectNotFoundError, ObjectStore
from polyreme_datahub.digests import blob_key
from polyreme_datahub.errors import IndexDamagedError
from polyreme_datahub.loader.read.copy_folder import CopyFolder, NoRoomError

PART_BYTES = 4 * 2**20
"""Bytes that one request asks for: few requests for a shard, and not too many bytes for the first sample of it."""
ROOM_RETRY_S = 30.0
"""Time until a folder that had no room is tried again; a look costs a listing of the folder, and no request."""
MAKE_TRIES_MAX = 3
"""Times that one process makes the file of a shard."""
PARTS = ".parts"
_HERE = b"\x01"
FETCH_THREADS = 8
"""Parts that one process fetches at once; a part takes its bytes of memory while it is fetched."""
WAITING_MAX = 1024
"""Parts that wait to be fetched before anybody waits for them; one that is wanted beyond that is not queued."""

Part = tuple[str, int]
"""Digest of the shard, number of the part."""
Fetched = Callable[[int], None]

_log = logging.getLogger(__name__)


class OpenFile:
    """A shard's descriptor, closed when its last user is done.

    Args:
        file: The open file.
        digest: Of the shard.
        size_bytes: Of the shard.
    """

    def __init__(self, file: BinaryIO, digest: str, size_bytes: int) -> None:
        self.digest, self.size_bytes = digest, size_bytes
        # A duplicate shares the lock that keeps a local copy.
        self.descriptor = os.dup(file.fileno())

    def __del__(self) -> None:
        os.close(self.descriptor)


class PartFiles:
    """The files of shards in a folder of copies; threads may share it.

    Args:
        store: Where the shards lie.
        folder: Holds the files; the clock of its waits says when room is looked for again.
    """

    def __init__(self, store: ObjectStore, folder: CopyFolder) -> None:
        self._store, self._folder, self._steady_s = store, folder, folder.waits.steady_s
        self._fetches = PartFetches()
        self._lock = threading.Lock()
        self._admitted: set[str] = set()
        self._admitted_bytes = 0
        self._made: Counter[str] = Counter()
        self._full_until_s: float | None = None
        self._full_logged = False

    def has(self, digest: str) -> bool:
        """Tell whether a shard has a file."""
        return (self._folder.path / f"{digest}{PARTS}").exists()

    def admit(self, sizes: Mapping[str, int]) -> None:
        """Take note of shards that will be read: files are made of as many as the folder may hold.

        Args:
            sizes: By digest; in the order of the digests, so that all processes choose the same ones.
        """
        with self._lock:
            left = {digest: size for digest, size in sorted(sizes.items()) if digest not in self._admitted}
            for digest, size_bytes in left.items():
                length = size_bytes + _parts_in(size_bytes)
                if self._admitted_bytes + length <= self._folder.bytes_max:
                    self._admitted.add(digest)
                    self._admitted_bytes += length
            out = left.keys() - self._admitted
        if out:
            _log.warning(
                "local copies of %d of %d shards of samples don't fit into the %d bytes of %s; their samples are read "
                "from the store, without local copies",
                len(out),
                len(sizes),
                self._folder.bytes_max,
                CACHE_BYTES,
            )

    def open(self, digest: str, size_bytes: int, *, make: bool) -> OpenFile | None:
        """Open a shard's file, under a lock that keeps it; None: there is none, nor room for one.

        Args:
            digest: Of the shard.
            size_bytes: Of the shard.
            make: Whether one that is missing is made.
        """
        name, length = f"{digest}{PARTS}", size_bytes + _parts_in(size_bytes)
        for _ in range(2):
            file = self._folder.locked(name, writable=True)
            if file is not None:
                with file:
                    if os.fstat(file.fileno()).st_size == length:
                        return OpenFile(file, digest, size_bytes)
                # It was cut, or belongs to another release.
                (self._folder.path / name).unlink(missing_ok=True)
            if not make or not self._may_make(digest):
                return None
            try:
                self._make(name, length)
            except NoRoomError as error:
                self._note_full(error)
                return None
            except OSError as error:
                self._note_full(self._folder.not_written(error))
                return None
        return None

    def fill(self, file: OpenFile, *, start: int, length: int, fetched: Fetched) -> bool:
        """Wait until a range is in a shard's file; return whether it had to be waited for.

        Args:
            file: Of the shard.
            start: First byte.
            length: Count of bytes.
            fetched: Called with the number of bytes of each part that is fetched.

        Raises:
            IndexDamagedError: If the shard is missing.
            EnvironmentFailedError: If the store stays away.
            NoRoomError: If the file can't be written.
        """
        waits = self._want(file, _parts_of(start, length), fetched, now=True)
        try:
            for wait in waits:
                wait.result()
        except NoRoomError as error:
            self._note_full(error)
            raise
        return bool(waits)

    def fill_soon(self, file: OpenFile, *, start: int, length: int, fetched: Fetched) -> None:
        """Begin to fetch what is missing of a range; errors are those of who waits for it."""
        self._want(file, _parts_of(start, length), fetched, now=False)

    def _want(self, file: OpenFile, parts: range, fetched: Fetched, *, now: bool) -> list[Future[None]]:
        waits = []
        for part in _missing(file, parts):
            fetch = functools.partial(self._fetch, file, part, fetched)
            waits.append(self._fetches.want((file.digest, part), fetch, now=now))
        return [wait for wait in waits if wait is not None]

    def drop(self, digest: str, size_bytes: int, *, start: int, length: int) -> None:
        """Have the parts of a range fetched again when they are next read."""
        file = self.open(digest, size_bytes, make=False)
        if file is not None:
            parts = _parts_of(start, length)
            os.pwrite(file.descriptor, bytes(len(parts)), size_bytes + parts.start)

    def read_range(self, digest: str, *, start: int, length: int) -> bytes:
        """Read a range from the store, with one request.

        Raises:
            IndexDamagedError: If the shard is missing.
        """
        try:
            return self._store.get_range(blob_key(digest), start=start, length=length)
        except ObjectNotFoundError as error:
            raise IndexDamagedError(f"stored data can't be read: {blob_key(digest)}, no such object") from error

    def _note_full(self, error: NoRoomError) -> None:
        """Make no files for a while, and log one line."""
        with self._lock:
            self._full_until_s = self._steady_s() + ROOM_RETRY_S
            logged, self._full_logged = self._full_logged, True
        if not logged:
            _log.warning("%s; samples are read from the store, without local copies", error.message)

    def _may_make(self, digest: str) -> bool:
        with self._lock:
            full = self._full_until_s is not None and self._steady_s() < self._full_until_s
            return not full and digest in self._admitted and self._made[digest] < MAKE_TRIES_MAX

    def _make(self, name: str, length: int) -> None:
        """Make an empty file of full length, unless another process does so first."""
        with self._folder.making(name) as path:
            if path is None:
                return
            with path.open("wb") as partial:
                try:
                    self._folder.make_room(partial, length)
                    path.replace(self._folder.path / name)
                except BaseException:
                    path.unlink(missing_ok=True)
                    raise
        with self._lock:
            self._made[name.removesuffix(PARTS)] += 1
            self._full_logged = False

    def _fetch(self, file: OpenFile, part: int, fetched: Fetched) -> None:
        """Fetch a part, unless another process has just done so; one that is stuck in it is not waited for."""
        digest, size_bytes, start = file.digest, file.size_bytes, part * PART_BYTES
        length = min(PART_BYTES, size_bytes - start)
        try:
            with self._folder.alone(f"{digest}.{part}", watched=f"{digest}{PARTS}"):
                if not _missing(file, range(part, part + 1)):
                    return
                data = self.read_range(digest, start=start, length=length)
                fetched(len(data))
                # One that is cut in the store stays unmarked, and the digests of its samples decide about them.
                if os.pwrite(file.descriptor, data, start) == length:
                    os.pwrite(file.descriptor, _HERE, size_bytes + part)
        except OSError as error:
            raise self._folder.not_written(error) from error


class PartFetches:
    """Fetches parts in a few threads of this process, each part once however many wait for it.

    The threads live while something is wanted. Callers that wait for a part get the error of its fetch; the next one
    that wants it has it fetched again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Part, Callable[[], None]]] = deque()
        self._fetching: dict[Part, Future[None]] = {}
        self._threads = 0

    def want(self, part: Part, fetch: Callable[[], None], *, now: bool) -> Future[None] | None:
        """Return a part's fetch, which is begun unless it runs or waits already.

        Args:
            part: The part.
            fetch: Fetches it.
            now: Whether a caller waits for it; if not, None is returned where too many wait before it.
        """
        with self._lock:
            found = self._fetching.get(part)
            if found is not None:
                return found
            if not now and len(self._waiting) >= WAITING_MAX:
                return None
            result = self._fetching[part] = Future[None]()
            self._waiting.append((part, fetch))
            if self._threads < FETCH_THREADS:
                self._threads += 1
                # No daemon: one that the interpreter's end interrupts inside the S3 client would abort the process.
                threading.Thread(target=self._work, name=f"part-fetch-{self._threads}").start()
            return result

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._threads -= 1
                    return
                part, fetch = self._waiting.popleft()
            error = _try(part, fetch)
            with self._lock:
                result = self._fetching.pop(part)
            if error is None:
                result.set_result(None)
            else:
                result.set_exception(error)


def _try(part: Part, fetch: Callable[[], None]) -> BaseException | None:
    if not threading.main_thread().is_alive():
        # The interpreter waits for this thread.
        return EnvironmentFailedError(f"fetch of part {part[1]} of {part[0]} was given up: the process ends")
    try:
        fetch()
    except BaseException as error:  # noqa: BLE001 - every error belongs to those who wait, and none may end the thread
        return error
    return None


def _parts_in(size_bytes: int) -> int:
    """Count the parts of a shard."""
    return -(-size_bytes // PART_BYTES)


def _parts_of(start: int, length: int) -> range:
    """Number the parts of a range of bytes."""
    return range(start // PART_BYTES, _parts_in(start + max(1, length)))


def _missing(file: OpenFile, parts: range) -> list[int]:
    """Return which parts are not in a file."""
    flags = os.pread(file.descriptor, len(parts), file.size_bytes + parts.start)
    return [part for part, flag in zip(parts, flags, strict=False) if flag != _HERE[0]]
