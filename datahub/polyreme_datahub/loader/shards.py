"""Reads an index by memory map: one open file per shard, arrays as views of it.

Nothing that a rank trains on is used unchecked. Offsets, grids, names and checksums are copied out of the map when it
is opened, then checked; a sample's tokens and patches are copied at each read, then checked. So bytes that change on
disk while a run trains are found where they are read. A local copy that changed is fetched again, and read once more.
"""

from __future__ import annotations

import dataclasses
import json
import mmap
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from polyreme_datahub.digests import blob_key
from polyreme_datahub.errors import IndexDamagedError
from polyreme_datahub.index.format import ARRAYS, CONTENT, Manifest, Shard, checksum, structure_of
from polyreme_datahub.loader.blob_files import BlobFiles

Arrays = Mapping[str, npt.NDArray[Any]]
_MAPPED = CONTENT | {"details"}
"""Arrays that stay in the map: too large to copy. Details are read once, right after the shard was checked."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredSample:
    """The bytes of one sample, checked."""

    tokens_T: npt.NDArray[np.uint32]
    learned_T: npt.NDArray[np.uint8]
    patches_P: npt.NDArray[np.uint8]
    """[P, channels * side * side]."""
    grids_I2: npt.NDArray[np.int32]


class SampleDamagedError(IndexDamagedError):
    """The stored bytes of one sample do not fit their checksum."""


class MappedIndex:
    """The samples of one index, by their place in it."""

    def __init__(self, blobs: BlobFiles, digest: str) -> None:
        self.digest = digest
        self._blobs = blobs
        self.manifest = Manifest.from_bytes(blobs.read(digest))
        blobs.prepare({shard.digest: shard.size_bytes for shard in self.manifest.shards})
        self._shards = [_mapped(blobs, shard) for shard in self.manifest.shards]
        counts = [shard.count for shard in self.manifest.shards]
        self._firsts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        self.lengths: npt.NDArray[np.int64] = (
            np.concatenate([np.diff(arrays["token_offsets"]) for arrays in self._shards])
            if self._shards
            else np.zeros(0, dtype=np.int64)
        )

    def __len__(self) -> int:
        """Count of samples."""
        return self.manifest.samples

    def sample_id(self, sample: int) -> str:
        """Name a sample."""
        arrays, at = self._place(sample)
        return bytes(_cut(arrays, "ids", "id_offsets", at)).decode()

    def details(self, sample: int) -> dict[str, Any]:
        """Return question, expected answer, pages and boxes."""
        arrays, at = self._place(sample)
        value: dict[str, Any] = json.loads(bytes(_cut(arrays, "details", "detail_offsets", at)))
        return value

    def read(self, sample: int) -> StoredSample:
        """Copy a sample out of the map.

        Raises:
            SampleDamagedError: If its bytes do not fit their checksum.
        """
        stored, seen = self._copy(sample)
        if seen is not None and self._fetch_again(sample):
            stored, seen = self._copy(sample)
        if seen is not None:
            arrays, at = self._place(sample)
            shard = self.manifest.shards[self._shard_of(sample)]
            raise SampleDamagedError(
                f"stored data is damaged: sample {self.sample_id(sample)} of {self.manifest.name}@"
                f"{self.manifest.number} in {blob_key(shard.digest)} has checksum {seen:08x}, "
                f"its index expects {int(arrays['checksums'][at]):08x}"
            )
        return stored

    def _copy(self, sample: int) -> tuple[StoredSample, int | None]:
        """Copy a sample out of the map; give its checksum too, where it is another than the index has."""
        arrays, at = self._place(sample)
        tokens = _cut(arrays, "tokens_T", "token_offsets", at).copy()
        learned = _cut(arrays, "learned_T", "token_offsets", at).copy()
        patches = _cut(arrays, "patches_P", "patch_offsets", at).copy()
        seen = checksum(tokens, learned, patches)
        stored = StoredSample(tokens_T=tokens, learned_T=learned, patches_P=patches, grids_I2=self.grids(sample))
        return stored, None if seen == int(arrays["checksums"][at]) else seen

    def _fetch_again(self, sample: int) -> bool:
        """Map a fresh copy of the shard that holds a sample; return False where the file is no copy."""
        shard = self._shard_of(sample)
        if not self._blobs.fetch_again(self.manifest.shards[shard].digest):
            return False
        self._shards[shard] = _mapped(self._blobs, self.manifest.shards[shard])
        return True

    def prompt_tokens(self, sample: int) -> int:
        """Count the tokens before the last answer."""
        arrays, at = self._place(sample)
        return int(arrays["prompt_tokens"][at])

    def grids(self, sample: int) -> npt.NDArray[np.int32]:
        """Return the grids [I, 2] of a sample's images; their patches are not read."""
        arrays, at = self._place(sample)
        return _cut(arrays, "grids_I2", "image_offsets", at)

    def grids_of(self, sample_N: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        """Return how many images each of some samples has, and the grids [I, 2] of all of them, in order."""
        shard_N = np.searchsorted(self._firsts, sample_N, side="right") - 1
        begin_N, count_N = np.zeros_like(sample_N), np.zeros_like(sample_N)
        for shard in np.unique(shard_N):
            mine = shard_N == shard
            offsets, at = self._shards[shard]["image_offsets"], sample_N[mine] - self._firsts[shard]
            begin_N[mine], count_N[mine] = offsets[at], offsets[at + 1] - offsets[at]
        grids_I2 = np.zeros((int(count_N.sum()), 2), np.int32)
        shard_I, place_I = np.repeat(shard_N, count_N), runs(begin_N, count_N)
        for shard in np.unique(shard_I):
            mine = shard_I == shard
            grids_I2[mine] = self._shards[shard]["grids_I2"][place_I[mine]]
        return count_N, grids_I2

    def _place(self, sample: int) -> tuple[Arrays, int]:
        shard = self._shard_of(sample)
        return self._shards[shard], sample - int(self._firsts[shard])

    def _shard_of(self, sample: int) -> int:
        return int(np.searchsorted(self._firsts, sample, side="right")) - 1


def runs(begin_N: npt.NDArray[np.int64], count_N: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Join runs of numbers, each with its first one and its length."""
    before_N = np.cumsum(count_N) - count_N
    return np.repeat(begin_N - before_N, count_N) + np.arange(int(count_N.sum()))


def _mapped(blobs: BlobFiles, shard: Shard) -> Arrays:
    """Map a shard; a local copy that does not pass the checks is fetched again, once."""
    try:
        return _map(blobs, shard)
    except IndexDamagedError:
        if not blobs.fetch_again(shard.digest):
            raise
        return _map(blobs, shard)


def _map(blobs: BlobFiles, shard: Shard) -> Arrays:
    try:
        # The map holds a duplicate of the descriptor, and with it the lock that keeps a local copy.
        with blobs.open(shard.digest, shard.size_bytes) as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise IndexDamagedError(f"stored data can't be read: {blob_key(shard.digest)}, {why}") from error
    if len(mapped) != shard.size_bytes:
        raise IndexDamagedError(
            f"stored data is damaged: {blob_key(shard.digest)} has {len(mapped)} bytes, "
            f"its index expects {shard.size_bytes}"
        )
    arrays = {}
    for place in shard.arrays:
        count = int(np.prod(place.shape, dtype=np.int64))
        flat = np.frombuffer(mapped, dtype=ARRAYS[place.name], count=count, offset=place.start)
        array = flat.reshape(place.shape)
        arrays[place.name] = array if place.name in _MAPPED else array.copy()
    if structure_of(arrays) != shard.structure:
        raise IndexDamagedError(
            f"stored data is damaged: {blob_key(shard.digest)}: its offsets, names or grids are not valid"
        )
    return arrays


def _cut(arrays: Arrays, name: str, offsets: str, at: int) -> npt.NDArray[Any]:
    bounds = arrays[offsets]
    return arrays[name][int(bounds[at]) : int(bounds[at + 1])]
