"""Reads a plan index by memory map, and samples by ranges of their shards.

Nothing that a rank trains on is used unchecked. The arrays of the index are copied out of the map when it is opened,
then checked; a sample's encoded bytes are checked against their digest at each read. So bytes that change on disk while
a run trains are found where they are read. A local copy that changed is fetched again, and read once more. Whether a
sample is damaged is decided by bytes that were read: a failure to read them is an error of the environment.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import mmap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from polyreme_datahub.digests import blob_key
from polyreme_datahub.errors import BadRecordError, IndexDamagedError, SampleDamagedError
from polyreme_datahub.index.format import ARRAYS, Manifest, Shard, structure_of
from polyreme_datahub.loader.read.blob_files import BlobFiles
from polyreme_datahub.loader.read.shard_files import ReadCounts, ShardFiles
from polyreme_datahub.loader.sample.augment import Visit
from polyreme_datahub.loader.sample.page_references import sample_reference
from polyreme_datahub.loader.sample.reader import DecodeRoom, SampleReader, StoredSample, decoded_bytes
from polyreme_datahub.operations.values import Blob

Arrays = Mapping[str, npt.NDArray[Any]]
_MAPPED = frozenset({"details"})
"""Stays in the map: too large to copy. Details are read once, right after the shard was checked."""


class MappedIndex:
    """The samples of one index, by their place in it.

    Args:
        blobs: Gives the files of the index and of its sample shards.
        digest: Of its manifest.
        tokenizer: Of the plan.
        pixel_version: How images become pixels, as the plan says.
        room: Memory for decoded images, which the indexes of a process share; None: its own.

    Raises:
        IndexDamagedError: If bytes are missing or damaged, or the index was made with another tokenizer.
    """

    def __init__(
        self, blobs: BlobFiles, digest: str, *, tokenizer: Blob, pixel_version: int, room: DecodeRoom | None = None
    ) -> None:
        self.digest = digest
        self._room = room or DecodeRoom()
        self._blobs = blobs
        self.manifest = Manifest.from_bytes(blobs.read(digest))
        if tokenizer.digest != self.manifest.tokenizer:
            raise IndexDamagedError(
                f"index {digest} was made with tokenizer {self.manifest.tokenizer}, its plan names {tokenizer.digest}"
            )
        blobs.prepare({shard.digest: shard.size_bytes for shard in self.manifest.shards})
        self._shards = [_mapped(blobs, shard) for shard in self.manifest.shards]
        counts = [shard.count for shard in self.manifest.shards]
        self._firsts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        counted = [np.zeros(0, dtype=np.int64), *(arrays["token_counts"] for arrays in self._shards)]
        self.lengths: npt.NDArray[np.int64] = np.concatenate(counted).astype(np.int64)
        self._files = ShardFiles(blobs, self.manifest.sample_shards)
        self._reader = SampleReader(
            patch_px=self.manifest.patch_px, merge=self.manifest.merge, tokenizer=tokenizer, pixel_version=pixel_version
        )

    def __len__(self) -> int:
        """Count of samples."""
        return self.manifest.samples

    def extend(self, shards: Sequence[Shard]) -> None:
        """Append the samples of shards that were sealed since; other threads may read the earlier ones meanwhile.

        Raises:
            IndexDamagedError: If bytes are missing or damaged.
        """
        self._blobs.prepare({shard.digest: shard.size_bytes for shard in shards})
        mapped = [_mapped(self._blobs, shard) for shard in shards]
        self._files.add({of.digest: of.size_bytes for shard in shards for of in shard.samples})
        counted = [arrays["token_counts"].astype(np.int64) for arrays in mapped]
        lengths = np.concatenate([self.lengths, *counted])
        counts = [shard.count for shard in self.manifest.shards] + [shard.count for shard in shards]
        self._shards = [*self._shards, *mapped]
        self.manifest = dataclasses.replace(
            self.manifest,
            shards=(*self.manifest.shards, *shards),
            samples=len(lengths),
            tokens=int(lengths.sum()),
        )
        # Last: a sample is looked up by these.
        self.lengths = lengths
        self._firsts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])

    def sample_id(self, sample: int) -> str:
        """Name a sample."""
        arrays, at = self._place(sample)
        return bytes(_cut(arrays, "ids", "id_offsets", at)).decode()

    def find(self, sample_id: str) -> list[int]:
        """Return the numbers of the samples of a name: several of one that was cut, none if it is not here."""
        wanted, found = sample_id.encode(), []
        for shard, arrays in enumerate(self._shards):
            names, offsets = bytes(arrays["ids"]), arrays["id_offsets"]
            begin = names.find(wanted)
            while begin >= 0:
                at = int(np.searchsorted(offsets, begin))
                if at + 1 < len(offsets) and (offsets[at], offsets[at + 1]) == (begin, begin + len(wanted)):
                    found.append(int(self._firsts[shard]) + at)
                begin = names.find(wanted, begin + 1)
        return found

    def details(self, sample: int) -> dict[str, Any]:
        """Return question, expected answer and boxes."""
        arrays, at = self._place(sample)
        value: dict[str, Any] = json.loads(bytes(_cut(arrays, "details", "detail_offsets", at)))
        return value

    def read(self, sample: int, visit: Visit | None = None, *, pixels: bool = True) -> StoredSample:
        """Make a sample of its encoded bytes; several threads may.

        Args:
            sample: Its place.
            visit: At which visit, where it is augmented.
            pixels: Whether patches are made.

        Raises:
            SampleDamagedError: If its bytes do not fit their digest, or can't be decoded.
            IndexDamagedError: If its shard is missing, or its text is encoded to other tokens than in processing.
            EnvironmentFailedError: If its bytes can't be read.
        """
        data = self.encoded(sample)
        arrays, at = self._place(sample)
        start, tokens = int(arrays["token_starts"][at]) if "token_starts" in arrays else 0, int(self.lengths[sample])
        try:
            with self._room.hold(decoded_bytes(data)):
                stored = self._reader.read(data, self.grids(sample), visit, start=start, tokens=tokens, pixels=pixels)
        except BadRecordError as error:
            raise SampleDamagedError(f"stored data can't be decoded: {self._name(sample)}: {error.message}") from error
        encoded = (stored.check, len(stored.tokens_T))
        if encoded != (int(arrays["token_checks"][at]), int(arrays["token_counts"][at])):
            raise IndexDamagedError(
                f"{self._name(sample)} is encoded to other tokens than when it was processed: this release's tokenizer "
                "differs; process the job's data again"
            )
        return stored

    def encoded(self, sample: int) -> bytes:
        """Return a sample's encoded bytes, checked.

        Raises:
            SampleDamagedError: If they do not fit their digest.
            IndexDamagedError: If its shard is missing.
            EnvironmentFailedError: If they can't be read.
        """
        shard, start, size, wanted = self._range(sample)
        data = self._files.read(shard, start=start, size=size)
        seen = hashlib.sha256(data).hexdigest()
        if seen != wanted and self._files.drop(shard, start=start, size=size):
            data = self._files.read(shard, start=start, size=size)
            seen = hashlib.sha256(data).hexdigest()
        if seen != wanted:
            raise SampleDamagedError(
                f"stored data is damaged: {self._name(sample)} has digest {seen[:16]}, its index expects {wanted[:16]}"
            )
        return data

    def shards_of(self, sample_N: npt.NDArray[np.int64]) -> list[str]:
        """Return the sample shards of some samples, each once, in the order of its first sample."""
        shard_N = np.searchsorted(self._firsts, sample_N, side="right") - 1
        place_N = np.zeros_like(sample_N)
        for shard in np.unique(shard_N):
            mine = shard_N == shard
            place_N[mine] = self._shards[shard]["places"][sample_N[mine] - self._firsts[shard]]
        pairs = dict.fromkeys(zip(shard_N.tolist(), place_N.tolist(), strict=True))
        return [self.manifest.shards[shard].samples[place].digest for shard, place in pairs]

    @property
    def has_copies(self) -> bool:
        """Whether its files are local copies."""
        return self._blobs.parts is not None

    def count_reads(self, reads: ReadCounts) -> None:
        """Have the reads of samples counted here."""
        self._files.reads = reads

    def fetch_soon(self, samples: Iterable[int]) -> None:
        """Begin to fetch the bytes of some samples that will be read, unless they are on this machine."""
        if self._blobs.parts is not None:
            for sample in samples:
                shard, start, size, _ = self._range(sample)
                self._files.fetch_soon(shard, start=start, size=size)

    def hold(self, shards: Iterable[str]) -> None:
        """Keep the local copies of these sample shards, and of no others."""
        self._files.hold(shards)

    def size_of(self, sample: int) -> int:
        """Return the count of a sample's encoded bytes."""
        arrays, at = self._place(sample)
        return int(arrays["sizes"][at])

    def image_reference(self, sample: int) -> str:
        """Name the first image of a sample, as it is trained on; empty where there is none."""
        grids_I2 = self.grids(sample)
        if not len(grids_I2):
            return ""
        height, width = (int(side) * self.manifest.patch_px for side in grids_I2[0])
        return sample_reference(*self._range(sample), image=0, height=height, width=width)

    def _range(self, sample: int) -> tuple[str, int, int, str]:
        """Return the sample shard, the start, the size and the digest of a sample's bytes."""
        arrays, at = self._place(sample)
        shard = self.manifest.shards[self._shard_of(sample)].samples[int(arrays["places"][at])]
        return shard.digest, int(arrays["starts"][at]), int(arrays["sizes"][at]), arrays["digests"][at].tobytes().hex()

    def _name(self, sample: int) -> str:
        shard = self._range(sample)[0]
        manifest = self.manifest
        return f"sample {self.sample_id(sample)} of {manifest.name}@{manifest.number} in {blob_key(shard)}"

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
