"""Ranges of sample shards: open files, read by place, so no page of them is mapped and threads share them.

At most ``OPEN_MAX`` files are open, the least recently used is closed first; a file that was deleted while it is open
can still be read. An open file keeps its local copy, so of copies only those stay open that the next steps read: a rank
that is idle would otherwise leave no room for others. A shard of a bucket that has no local copy is read by ranges,
while its copy is made in the background.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import BinaryIO

from polyreme_api.errors import EnvironmentFailedError
from polyreme_datahub.digests import blob_key
from polyreme_datahub.errors import IndexDamagedError
from polyreme_datahub.loader.blob_files import BlobFiles
from polyreme_datahub.loader.read_counts import ReadCounts, Tier

OPEN_MAX = 64


class _OpenFile:
    """A descriptor, closed when its last reader is done."""

    def __init__(self, file: BinaryIO) -> None:
        # A duplicate shares the lock that keeps a local copy.
        self.descriptor = os.dup(file.fileno())

    def __del__(self) -> None:
        os.close(self.descriptor)


class ShardFiles:
    """The sample shards of one index.

    Args:
        blobs: Gives files.
        sizes: Digests and sizes of the shards.

    Raises:
        IndexDamagedError: If one of the first ``OPEN_MAX`` is missing, or a file that is cut.
    """

    def __init__(self, blobs: BlobFiles, sizes: Mapping[str, int]) -> None:
        self._blobs, self._sizes = blobs, sizes
        self.reads = ReadCounts()
        """A source puts its own in this place."""
        self._held: frozenset[str] | None = frozenset() if blobs.are_copies else None
        """Shards whose files stay open; None: of all."""
        self._open: OrderedDict[str, _OpenFile] = OrderedDict()
        self._lock = threading.Lock()
        first = dict(list(sizes.items())[:OPEN_MAX])
        blobs.check_present(first)
        for digest in first:
            self._file(digest)

    def read(self, digest: str, *, start: int, size: int) -> bytes:
        """Return a range of a shard, unchecked.

        Raises:
            IndexDamagedError: If the shard is missing or cut.
            EnvironmentFailedError: If its file can't be read.
        """
        file = self._file(digest)
        self.reads.add(Tier.BUCKET if file is None else Tier.FILES, size)
        if file is None:
            return self._blobs.read_range(digest, self._sizes[digest], start=start, length=size)
        try:
            return os.pread(file.descriptor, size, start)
        except OSError as error:
            raise EnvironmentFailedError(
                f"stored data can't be read: {blob_key(digest)}, {error.strerror}", field="the disk that holds it"
            ) from error

    def hold(self, digests: Iterable[str]) -> None:
        """Keep the local copies of these shards, and of no others; files that are no copies stay as they are.

        Args:
            digests: The one that is read first comes first: of more than ``OPEN_MAX`` the others are not kept.
        """
        if self._held is None:
            return
        wanted = list(dict.fromkeys(digests))[:OPEN_MAX]
        with self._lock:
            self._held = frozenset(wanted)
            for digest in self._open.keys() - self._held:
                del self._open[digest]
        for digest in wanted:
            self._file(digest)

    def fetch_again(self, digest: str) -> bool:
        """Drop a local copy that turned out to be damaged; return False where the file is no copy."""
        if not self._blobs.fetch_again(digest):
            return False
        with self._lock:
            self._open.pop(digest, None)
        return True

    def _file(self, digest: str) -> _OpenFile | None:
        """Return the file of a shard; None: it has no local copy yet."""
        with self._lock:
            file = self._open.get(digest) or self._opened(digest)
            if file is None:
                return None
            if self._held is not None and digest not in self._held:
                return file
            self._open[digest] = file
            self._open.move_to_end(digest)
            while len(self._open) > OPEN_MAX:
                # A thread that still reads it holds it; it is closed after that.
                self._open.popitem(last=False)
            return file

    def _opened(self, digest: str) -> _OpenFile | None:
        size_bytes = self._sizes[digest]
        opened = self._blobs.local(digest, size_bytes)
        if opened is None:
            return None
        with opened as file:
            if (found := os.fstat(file.fileno()).st_size) != size_bytes:
                raise IndexDamagedError(
                    f"stored data is damaged: {blob_key(digest)} has {found} bytes, its index expects {size_bytes}"
                )
            return _OpenFile(file)
