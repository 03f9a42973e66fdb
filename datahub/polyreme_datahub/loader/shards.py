"""Reads an index by memory map: one open file a shard, arrays as views of it."""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from polyreme_datahub.errors import IndexDamagedError
from polyreme_datahub.index.format import ARRAYS, Manifest, Shard, checksum, structure_of

Arrays = Mapping[str, npt.NDArray[Any]]


def blob_path(root: Path, digest: str) -> Path:
    """Where a blob lies under a local object store (``lakehouse.blob_key``)."""
    return root / "blobs" / "sha256" / digest[:2] / digest[2:4] / digest


class MappedIndex:
    """The samples of one index, by their place in it."""

    def __init__(self, root: Path, digest: str) -> None:
        self.digest = digest
        self.manifest = Manifest.from_bytes(read_blob(root, digest))
        self._shards = [_map(root, shard) for shard in self.manifest.shards]
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

    def tokens(self, sample: int) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint8]]:
        """Return token ids, and which of them are learned."""
        arrays, at = self._place(sample)
        return _cut(arrays, "tokens_T", "token_offsets", at), _cut(arrays, "learned_T", "token_offsets", at)

    def prompt_tokens(self, sample: int) -> int:
        """Count the tokens before the last answer."""
        arrays, at = self._place(sample)
        return int(arrays["prompt_tokens"][at])

    def images(self, sample: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]]:
        """Return patches [P, channels * side * side] and grids [I, 2]."""
        arrays, at = self._place(sample)
        return _cut(arrays, "patches_P", "patch_offsets", at), _cut(arrays, "grids_I2", "image_offsets", at)

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

    def is_whole(self, sample: int) -> bool:
        """Tell whether a sample's stored bytes fit their checksum."""
        arrays, at = self._place(sample)
        tokens, learned = self.tokens(sample)
        patches, _ = self.images(sample)
        return checksum(tokens, learned, np.ascontiguousarray(patches)) == int(arrays["checksums"][at])

    def _place(self, sample: int) -> tuple[Arrays, int]:
        shard = int(np.searchsorted(self._firsts, sample, side="right")) - 1
        return self._shards[shard], sample - int(self._firsts[shard])


def runs(begin_N: npt.NDArray[np.int64], count_N: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Join runs of numbers, each with its first one and its length."""
    before_N = np.cumsum(count_N) - count_N
    return np.repeat(begin_N - before_N, count_N) + np.arange(int(count_N.sum()))


def read_blob(root: Path, digest: str) -> bytes:
    """Read a small blob, checked against its digest.

    Raises:
        IndexDamagedError: If it is missing or its bytes have another digest.
    """
    import hashlib

    try:
        data = blob_path(root, digest).read_bytes()
    except OSError as error:
        raise IndexDamagedError(f"blob can't be read: {digest}, {error.strerror}; process the data again") from error
    if hashlib.sha256(data).hexdigest() != digest:
        raise IndexDamagedError(f"blob is damaged: {digest}, its bytes have another digest; process the data again")
    return data


def _map(root: Path, shard: Shard) -> Arrays:
    path = blob_path(root, shard.digest)
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise IndexDamagedError(f"shard can't be read: {shard.digest}, {error}; process the data again") from error
    if len(mapped) != shard.size_bytes:
        raise IndexDamagedError(
            f"shard is damaged: {shard.digest} has {len(mapped)} bytes, its manifest says {shard.size_bytes}"
        )
    arrays = {}
    for place in shard.arrays:
        count = int(np.prod(place.shape, dtype=np.int64))
        flat = np.frombuffer(mapped, dtype=ARRAYS[place.name], count=count, offset=place.start)
        arrays[place.name] = flat.reshape(place.shape)
    if structure_of(arrays) != shard.structure:
        raise IndexDamagedError(f"shard is damaged: {shard.digest}, its offsets or names; process the data again")
    return arrays


def _cut(arrays: Arrays, name: str, offsets: str, at: int) -> npt.NDArray[Any]:
    bounds = arrays[offsets]
    return arrays[name][int(bounds[at]) : int(bounds[at + 1])]
