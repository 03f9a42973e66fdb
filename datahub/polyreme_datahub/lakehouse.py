"""The lakehouse: every intermediate under the digest of its bytes.

A blob lies at ``blobs/sha256/ab/cd/<digest>``. Thousands of small results are written as few bundles: one blob of
bytes end to end, whose parts are artifacts (digest -> blob, offset, length) in the registry. So a chunk of pages
costs one sync, and each page is still found by the digest of its own bytes.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping

from polyreme_api.store import ObjectExistsError, ObjectStore
from polyreme_datahub.digests import blob_key, digest_bytes
from polyreme_datahub.errors import IndexDamagedError

BUNDLE_BYTES_MAX = 32 * 2**20
CACHE_BYTES_MAX = 64 * 2**20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """Where bytes of a digest lie."""

    digest: str
    blob: str
    """Digest of the blob that holds them."""
    start: int
    length: int


class Lakehouse:
    """Content-addressed bytes over an object store, with a small cache of whole bundles."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._cache: OrderedDict[str, bytes] = OrderedDict()
        self._lock = threading.Lock()

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
        waiting: list[bytes] = []
        size_bytes = 0
        artifacts: list[Artifact] = []
        seen: set[str] = set()
        for part in parts:
            digest = digest_bytes(part)
            if digest in seen:
                continue
            seen.add(digest)
            waiting.append(part)
            size_bytes += len(part)
            if size_bytes >= BUNDLE_BYTES_MAX:
                artifacts += self._put_bundle(waiting)
                waiting, size_bytes = [], 0
        return artifacts + self._put_bundle(waiting)

    def get_parts(self, artifacts: Mapping[str, Artifact]) -> dict[str, bytes]:
        """Return the bytes of each digest."""
        parts = {}
        for digest, artifact in artifacts.items():
            bundle = self._bundle(artifact.blob)
            parts[digest] = bundle[artifact.start : artifact.start + artifact.length]
        return parts

    def _put_bundle(self, parts: list[bytes]) -> list[Artifact]:
        if not parts:
            return []
        bundle = b"".join(parts)
        blob = self.put_blob(bundle)
        self._remember(blob, bundle)
        artifacts, start = [], 0
        for part in parts:
            artifacts.append(Artifact(digest=digest_bytes(part), blob=blob, start=start, length=len(part)))
            start += len(part)
        return artifacts

    def _bundle(self, digest: str) -> bytes:
        with self._lock:
            if digest in self._cache:
                self._cache.move_to_end(digest)
                return self._cache[digest]
        data = self.get_blob(digest)
        self._remember(digest, data)
        return data

    def _remember(self, digest: str, data: bytes) -> None:
        with self._lock:
            self._cache[digest] = data
            while sum(map(len, self._cache.values())) > CACHE_BYTES_MAX and len(self._cache) > 1:
                self._cache.popitem(last=False)
