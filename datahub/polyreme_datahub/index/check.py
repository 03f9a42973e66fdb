"""Checks of a stored index: whether it can be opened, and whether every byte of it is what was written."""

from __future__ import annotations

import numpy as np

from polyreme_api.store import ObjectNotFoundError, ObjectStore
from polyreme_datahub.digests import blob_key
from polyreme_datahub.errors import IndexDamagedError
from polyreme_datahub.index.format import ARRAYS, CONTENT, Manifest, Shard, structure_of
from polyreme_datahub.lakehouse import Lakehouse


def can_open(store: ObjectStore, digest: str) -> bool:
    """Tell whether loaders could open an index.

    Raises:
        StoreFailedError: If the store stays away.
    """
    try:
        manifest = Manifest.from_bytes(Lakehouse(store).get_blob(digest))
        return all(_is_sound(store, shard) for shard in manifest.shards)
    except (ObjectNotFoundError, IndexDamagedError):
        return False


def is_whole(store: ObjectStore, digest: str) -> bool:
    """Tell whether manifest and shards have the digests that name them; reads all of it.

    Raises:
        StoreFailedError: If the store stays away.
    """
    lakehouse = Lakehouse(store)
    try:
        for shard in Manifest.from_bytes(lakehouse.get_blob(digest)).shards:
            lakehouse.get_blob(shard.digest)
    except (ObjectNotFoundError, IndexDamagedError):
        return False
    return True


def _is_sound(store: ObjectStore, shard: Shard) -> bool:
    key = blob_key(shard.digest)
    if len(store.get_range(key, start=shard.size_bytes - 1, length=2)) != 1:
        return False
    arrays = {}
    for place in shard.arrays:
        if place.name in CONTENT:
            continue
        kind = np.dtype(ARRAYS[place.name])
        length = int(np.prod(place.shape, dtype=np.int64)) * kind.itemsize
        arrays[place.name] = np.frombuffer(store.get_range(key, start=place.start, length=length), dtype=kind)
    return structure_of(arrays) == shard.structure
