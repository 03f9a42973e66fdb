"""Ranges of sample shards: open files, read by place, so no page of them is mapped and threads share them.

At most ``OPEN_MAX`` files are open, the least recently used is closed first; a file that was deleted while it is open
can still be read. An open file keeps its local copy, so of copies only those stay open that the next steps read: a rank
that is idle would otherwise leave no room for others. Where there is no room for a copy, ranges are read in the bucket.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping

from polyreme_api.errors import EnvironmentFailedError
from polyreme_datahub.digests import blob_key
from polyreme_datahub.loader.read.blob_files import BlobFiles
from polyreme_datahub.loader.read.copy_folder import NoRoomError
from polyreme_datahub.loader.read.part_files import OpenFile
from polyreme_datahub.loader.read.read_counts import ReadCounts, Tier

OPEN_MAX = 64


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
        self._open: OrderedDict[str, OpenFile] = OrderedDict()
        self._lock = threading.Lock()
        self._prepare(sizes)

    def add(self, sizes: Mapping[str, int]) -> None:
        """Take shards that were written since; errors as when it was made."""
        self._sizes = {**self._sizes, **sizes}
        self._prepare(sizes)

    def _prepare(self, sizes: Mapping[str, int]) -> None:
        first = dict(list(sizes.items())[:OPEN_MAX])
        self._blobs.check_present(first)
        self._blobs.admit(sizes)
        for digest in first:
            self._file(digest, make=False)

    def read(self, digest: str, *, start: int, size: int) -> bytes:
        """Return a range of a shard, unchecked.

        Raises:
            IndexDamagedError: If the shard is missing or cut.
            EnvironmentFailedError: If its file can't be read, or its store stays away.
        """
        file, waited = self._file(digest, make=True), True
        if file is not None:
            try:
                waited = self._blobs.fill(file, start=start, length=size, fetched=self.reads.add_fetched)
            except NoRoomError:
                file = None
        self.reads.add(Tier.BUCKET if waited else Tier.FILES)
        if file is None:
            self.reads.add_fetched(size)
            return self._blobs.read_range(digest, start=start, length=size)
        try:
            # Behind a shard's bytes its local copy has marks.
            return os.pread(file.descriptor, max(0, min(size, file.size_bytes - start)), start)
        except OSError as error:
            raise EnvironmentFailedError(
                f"stored data can't be read: {blob_key(digest)}, {error.strerror}", field="the disk that holds it"
            ) from error

    def fetch_soon(self, digest: str, *, start: int, size: int) -> None:
        """Begin to fetch a range that will be read, unless it is here."""
        file = self._file(digest, make=True)
        if file is not None:
            self._blobs.fill_soon(file, start=start, length=size, fetched=self.reads.add_fetched)

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
            self._file(digest, make=False)

    def drop(self, digest: str, *, start: int, size: int) -> bool:
        """Drop a range of a local copy that turned out to be damaged; return False where the file is no copy."""
        return self._blobs.drop_range(digest, self._sizes[digest], start=start, length=size)

    def _file(self, digest: str, *, make: bool) -> OpenFile | None:
        """Return the file of a shard; None: it has no local copy."""
        with self._lock:
            file = self._open.get(digest) or self._blobs.local(digest, self._sizes[digest], make=make)
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
