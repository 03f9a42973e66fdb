"""Checks of a stored index: whether it can be opened, and whether every byte of it is what was written."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from polyreme_api.store import ObjectNotFoundError, ObjectStore
from polyreme_datahub.digests import blob_key
from polyreme_datahub.errors import IndexDamagedError
from polyreme_datahub.index.format import ARRAYS, Manifest, Shard, structure_of
from polyreme_datahub.lakehouse import Lakehouse


def can_open(store: ObjectStore, digest: str) -> bool:
    """Tell whether loaders could open an index.

    Raises:
        StoreFailedError: If the store stays away.
    """
    try:
        manifest = Manifest.from_bytes(Lakehouse(store).get_blob(digest))
        samples = manifest.sample_shards.items()
        return all(_is_sound(store, shard) for shard in manifest.shards) and all(
            _has_size(store, digest, size_bytes) for digest, size_bytes in samples
        )
    except (ObjectNotFoundError, IndexDamagedError):
        return False


def is_whole(store: ObjectStore, digest: str) -> bool:
    """Tell whether manifest, shards and sample shards have the digests that name them; reads all of it.

    Raises:
        StoreFailedError: If the store stays away.
    """
    try:
        manifest = Manifest.from_bytes(Lakehouse(store).get_blob(digest))
    except (ObjectNotFoundError, IndexDamagedError):
        return False
    return has_shards(store, manifest.shards, every_byte=True)


def has_shards(store: ObjectStore, shards: Iterable[Shard], *, every_byte: bool) -> bool:
    """Tell whether shards and their sample shards are there in their sizes, or with the digests that name them.

    Raises:
        StoreFailedError: If the store stays away.
    """
    lakehouse = Lakehouse(store)
    try:
        for shard in shards:
            sizes = {shard.digest: shard.size_bytes} | {of.digest: of.size_bytes for of in shard.samples}
            for digest, size_bytes in sizes.items():
                if every_byte:
                    lakehouse.get_blob(digest)
                elif not _has_size(store, digest, size_bytes):
                    return False
    except (ObjectNotFoundError, IndexDamagedError):
        return False
    return True


def _is_sound(store: ObjectStore, shard: Shard) -> bool:
    key = blob_key(shard.digest)
    if not _has_size(store, shard.digest, shard.size_bytes):
        return False
    arrays = {}
    for place in shard.arrays:
        kind = np.dtype(ARRAYS[place.name])
        length = int(np.prod(place.shape, dtype=np.int64)) * kind.itemsize
        arrays[place.name] = np.frombuffer(store.get_range(key, start=place.start, length=length), dtype=kind)
    return structure_of(arrays) == shard.structure


def _has_size(store: ObjectStore, digest: str, size_bytes: int) -> bool:
    return len(store.get_range(blob_key(digest), start=size_bytes - 1, length=2)) == 1
