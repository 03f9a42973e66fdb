"""The lakehouse: every intermediate under the digest of its bytes.

A blob lies at ``blobs/sha256/ab/cd/<digest>``. Thousands of small results are written as few bundles: one blob of
bytes end to end, whose parts are artifacts (digest -> blob, offset, length) in the registry. So a chunk of pages
costs one sync, and each page is still found by the digest of its own bytes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import mmap
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, islice
from typing import BinaryIO

from polyreme_api.store import ObjectExistsError, ObjectNotFoundError, ObjectStore
from polyreme_datahub.digests import blob_key, digest_bytes
from polyreme_datahub.errors import IndexDamagedError

BUNDLE_BYTES_MAX = 32 * 2**20
READ_BYTES_MAX = 8 * 2**20
"""Most bytes of one request for several parts."""
GAP_BYTES_MAX = 4 * 2**10
"""Bytes between two parts that are read along, since a request of their own would cost more."""
FILE_BLOCK_BYTES = 8 * 2**20
"""Bytes of a file that are digested, or put, at once."""
READS_MAX = 8
"""Requests in flight."""
INLINE_READS_MAX = 2
"""So few requests are made without threads."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """Where bytes of a digest lie."""

    digest: str
    blob: str
    """Digest of the blob that holds them."""
    start: int
    length: int


class Lakehouse:
    """Content-addressed bytes over an object store."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    @property
    def store(self) -> ObjectStore:
        """The object store."""
        return self._store

    def put_blob(self, data: bytes) -> str:
        """Store bytes under their digest; writing what is there already changes nothing.

        Raises:
            StoreFailedError: If the store stays away or full.
        """
        digest = digest_bytes(data)
        try:
            self._store.put_if_absent(blob_key(digest), data)
        except ObjectExistsError:
            if digest_bytes(self._store.get(blob_key(digest))) != digest:
                self._store.put(blob_key(digest), data)
        return digest

    def put_file(self, file: BinaryIO, *, before: Callable[[str, int], None]) -> tuple[str, int]:
        """Store a file under the digest of its bytes, without reading it into memory; return digest and size.

        Args:
            file: A real file, not empty.
            before: Called with digest and size before anything is put.

        Raises:
            StoreFailedError: If the store stays away or full.
        """
        digest, size = hashlib.sha256(), 0
        file.seek(0)
        while block := file.read(FILE_BLOCK_BYTES):
            digest.update(block)
            size += len(block)
        name = digest.hexdigest()
        before(name, size)
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as view:
            parts = [view[start : start + FILE_BLOCK_BYTES] for start in range(0, size, FILE_BLOCK_BYTES)]
            try:
                self._store.put(blob_key(name), parts)
            finally:
                for part in parts:
                    part.release()
        return name, size

    def get_range(self, digest: str, *, start: int, length: int) -> bytes:
        """Return some bytes of a blob, unchecked: for formats with checksums of their own.

        Raises:
            IndexDamagedError: If there is no such blob.
        """
        try:
            return self._store.get_range(blob_key(digest), start=start, length=length)
        except ObjectNotFoundError as error:
            raise IndexDamagedError(f"stored data is missing: {blob_key(digest)}") from error

    def get_blob(self, digest: str) -> bytes:
        """Return a blob's bytes, checked against their digest.

        Raises:
            IndexDamagedError: If the stored bytes have another digest.
            ObjectNotFoundError: If there is no such blob.
        """
        data = self._store.get(blob_key(digest))
        seen = digest_bytes(data)
        if seen != digest:
            raise IndexDamagedError(f"stored data is damaged: {blob_key(digest)} has digest {seen}")
        return data

    def put_parts(self, parts: Iterable[bytes]) -> list[Artifact]:
        """Store many small results in bundles, in order; equal bytes are stored once."""
        return self.put_digested({digest_bytes(part): part for part in parts})

    def put_digested(self, parts: Mapping[str, bytes]) -> list[Artifact]:
        """Store parts as ``put_parts`` does, by digests that the caller has computed or checked."""
        waiting: dict[str, bytes] = {}
        size_bytes = 0
        artifacts: list[Artifact] = []
        for digest, part in parts.items():
            waiting[digest] = part
            size_bytes += len(part)
            if size_bytes >= BUNDLE_BYTES_MAX:
                artifacts += self._put_bundle(waiting)
                waiting, size_bytes = {}, 0
        return artifacts + self._put_bundle(waiting)

    def get_parts(self, artifacts: Mapping[str, Artifact]) -> dict[str, bytes]:
        """Return the bytes of each digest; as ``read_parts``."""
        return dict(self.read_parts(artifacts.values()))

    def read_parts(self, artifacts: Iterable[Artifact]) -> Iterator[tuple[str, bytes]]:
        """Yield the digest and the bytes of each part, by blob and place in it.

        Parts that lie close together are one request, at most ``READS_MAX`` requests are in flight, and each part is
        checked against its digest. So memory is bounded by the reads in flight, and nothing is read twice.

        Raises:
            IndexDamagedError: If stored bytes have another digest.
            ObjectNotFoundError: If there is no such blob.
        """
        ranges = iter(joined_ranges(artifacts))
        first = list(islice(ranges, INLINE_READS_MAX + 1))
        if len(first) <= INLINE_READS_MAX:
            for found in first:
                yield from self._read(found)
            return
        with ThreadPoolExecutor(READS_MAX) as threads:
            ahead: deque[Future[list[tuple[str, bytes]]]] = deque()
            try:
                for found in chain(first, ranges):
                    ahead.append(threads.submit(self._read, found))
                    if len(ahead) == READS_MAX:
                        yield from ahead.popleft().result()
                while ahead:
                    yield from ahead.popleft().result()
            finally:
                for waiting in ahead:
                    waiting.cancel()

    def _read(self, parts: list[Artifact]) -> list[tuple[str, bytes]]:
        """Read parts of one blob by one request."""
        blob, start = parts[0].blob, parts[0].start
        length = max(part.start + part.length for part in parts) - start
        data = memoryview(self._store.get_range(blob_key(blob), start=start, length=length))
        return [(part.digest, _checked(part, data[part.start - start :][: part.length])) for part in parts]

    def _put_bundle(self, parts: Mapping[str, bytes]) -> list[Artifact]:
        if not parts:
            return []
        blob = self.put_blob(b"".join(parts.values()))
        artifacts, start = [], 0
        for digest, part in parts.items():
            artifacts.append(Artifact(digest=digest, blob=blob, start=start, length=len(part)))
            start += len(part)
        return artifacts


def joined_ranges(artifacts: Iterable[Artifact]) -> Iterator[list[Artifact]]:
    """Group parts by the request that reads them: those of one blob, in order, with small gaps, up to a length."""
    group: list[Artifact] = []
    end = 0
    for part in sorted(artifacts, key=lambda part: (part.blob, part.start, part.length)):
        near = bool(group) and part.blob == group[0].blob and part.start - end <= GAP_BYTES_MAX
        if group and not (near and part.start + part.length - group[0].start <= READ_BYTES_MAX):
            yield group
            group, end = [], 0
        group.append(part)
        end = max(end, part.start + part.length)
    if group:
        yield group


def _checked(part: Artifact, view: memoryview) -> bytes:
    """Copy a part out of what was read, so that it keeps nothing else in memory."""
    data = bytes(view)
    seen = digest_bytes(data)
    if seen != part.digest:
        raise IndexDamagedError(
            f"stored data is damaged: bytes {part.start} to {part.start + part.length} of {blob_key(part.blob)} have "
            f"digest {seen}, expected {part.digest}"
        )
    return data
