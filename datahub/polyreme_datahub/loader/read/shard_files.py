"""Ranges of sample shards: open files, read by place, so no page of them is mapped and threads share them.

At most ``OPEN_MAX`` files are open, the least recently used is closed first; a file that was deleted while it is open
can still be read. An open file keeps its local copy, so of copies only those stay open that the next steps read: a rank
that is idle would otherwise leave no room for others. Where there is no room for a copy, ranges are read in the bucket.
"""

from __future__ import annotations

import enum
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping

from polyreme_api.errors import EnvironmentFailedError
from polyreme_datahub.digests import blob_key
from polyreme_datahub.loader.read.blob_files import BlobFiles
from polyreme_datahub.loader.read.copy_folder import NoRoomError
from polyreme_datahub.loader.read.part_files import OpenFile

OPEN_MAX = 64
MIB = 2**20


class Tier(enum.StrEnum):
    """Where a sample's bytes were found."""

    MEMORY = "memory"
    """Decoded, kept from an earlier visit."""
    FILES = "local files"
    BUCKET = "the bucket"
    """It was waited for."""


class ReadCounts:
    """Samples by tier, and bytes that were fetched; threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.samples: Counter[Tier] = Counter()
        self.fetched_bytes = 0

    def add(self, tier: Tier) -> None:
        """Count a sample."""
        with self._lock:
            self.samples[tier] += 1

    def add_fetched(self, size_bytes: int) -> None:
        """Count what a request brought."""
        with self._lock:
            self.fetched_bytes += size_bytes

    def sentence(self) -> str:
        """Say which share of the samples came from where."""
        with self._lock:
            total = max(1, self.samples.total())
            shares = [f"{100.0 * self.samples[tier] / total:.1f} % from {tier}" for tier in Tier]
            fetched = f"{self.fetched_bytes / MIB:,.0f} MiB were fetched from it"
            return f"{self.samples.total():,} samples read: {', '.join(shares)} ({fetched})"


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
        self._held: frozenset[str] | None = None if blobs.parts is None else frozenset()
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
        if self._blobs.parts is not None:
            self._blobs.check_present(first)
            self._blobs.parts.admit(sizes)
        for digest in first:
            self._file(digest, make=False)

    def read(self, digest: str, *, start: int, size: int) -> bytes:
        """Return a range of a shard, unchecked.

        Raises:
            IndexDamagedError: If the shard is missing or cut.
            EnvironmentFailedError: If its file can't be read, or its store stays away.
        """
        file, waited, parts = self._file(digest, make=True), False, self._blobs.parts
        if parts is not None:
            try:
                waited = file is None or parts.fill(file, start=start, length=size, fetched=self.reads.add_fetched)
            except NoRoomError:
                file, waited = None, True
        self.reads.add(Tier.BUCKET if waited else Tier.FILES)
        if file is None:
            assert parts is not None
            self.reads.add_fetched(size)
            return parts.read_range(digest, start=start, length=size)
        try:
            # After a shard's bytes its local copy has marks.
            return os.pread(file.descriptor, max(0, min(size, file.size_bytes - start)), start)
        except OSError as error:
            raise EnvironmentFailedError(
                f"stored data can't be read: {blob_key(digest)}, {error.strerror}", field="the disk that holds it"
            ) from error

    def fetch_soon(self, digest: str, *, start: int, size: int) -> None:
        """Begin to fetch a range that will be read, unless it is here."""
        parts = self._blobs.parts
        if parts is not None and (file := self._file(digest, make=True)) is not None:
            parts.fill_soon(file, start=start, length=size, fetched=self.reads.add_fetched)

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
        if self._blobs.parts is None:
            return False
        self._blobs.parts.drop(digest, self._sizes[digest], start=start, length=size)
        return True

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
