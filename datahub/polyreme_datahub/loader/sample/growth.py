"""Indexes whose blocks are sealed while ranks read them: appends each block once it is published.

Blocks are only ever appended, so samples keep their numbers. Nothing here waits: a caller that needs a block that
is not there asks again.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence

from polyreme_api.errors import NotSealedError, RefusedError
from polyreme_datahub.errors import IndexDamagedError
from polyreme_datahub.index.blocks import Journal, Sizes, shards_of
from polyreme_datahub.loader.order.plan import BlockEnds
from polyreme_datahub.loader.read.blob_files import BlobFiles
from polyreme_datahub.loader.sample.mapped_index import MappedIndex

LOOK_EVERY_S = 0.2
BUCKET_LOOK_EVERY_S = 2.0
"""Time between looks for new blocks, where each look is a request."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Journaled:
    """Where blocks that are sealed later come from: the journal of a job that is still processed."""

    journal: Journal
    indexes: Sequence[MappedIndex]
    """Of each source, without samples."""
    places: Sequence[int]
    """Of each source, the place of its dataset in the journal."""
    blobs: BlobFiles
    """Gives the objects that list shards."""
    steady_s: Callable[[], float] = time.monotonic  # noqa: TID251 - the shell's default
    """A clock that never jumps [s]."""


class Growth:
    """The blocks of the sources of one job.

    Args:
        sizes: Of each source, the blocks that its index has.
        coming: Gives later ones; None: there are none.
    """

    def __init__(self, sizes: Sequence[Sizes], coming: Journaled | None = None) -> None:
        self.sizes = list(sizes)
        self._coming, self._due_s = coming, float("-inf")

    @property
    def ends(self) -> tuple[BlockEnds, ...]:
        """Return the blocks of each source for its order."""
        return tuple(BlockEnds(tuple(itertools.accumulate(of.samples)), of.total) for of in self.sizes)

    def look(self) -> bool:
        """Append what was sealed since; return whether there was anything.

        Raises:
            IndexDamagedError: If a sealed block can't be read.
            StoreFailedError: If the store stays away.
        """
        coming = self._coming
        if coming is None or all(of.complete for of in self.sizes) or coming.steady_s() < self._due_s:
            return False
        found = [self._append(coming, source) for source in range(len(self.sizes))]
        self._due_s = coming.steady_s() + (LOOK_EVERY_S if coming.blobs.parts is None else BUCKET_LOOK_EVERY_S)
        return any(found)

    def describe(self, counts: Sequence[int]) -> list[list[int | str]]:
        """Describe the first blocks of each source for a loader's state."""
        return [[count, sizes.digest(count)] for count, sizes in zip(counts, self.sizes, strict=True)]

    def check(self, described: Sequence[tuple[int, str]], names: Sequence[str]) -> None:
        """Refuse a state that has read other blocks.

        Raises:
            NotSealedError: If they are not sealed (yet).
            RefusedError: If they are others.
        """
        for (count, digest), sizes, name in zip(described, self.sizes, names, strict=True):
            if count > len(sizes.samples):
                raise NotSealedError(
                    f"loader state has read {count} blocks of source {name}, and {len(sizes.samples)} are sealed"
                )
            if sizes.digest(count) != digest:
                raise RefusedError(
                    f"loader state belongs to other data: the first {count} blocks of source {name} had other samples",
                    field="spec.data",
                )

    def _append(self, coming: Journaled, source: int) -> bool:
        sizes, index = self.sizes[source], coming.indexes[source]
        first = len(sizes.samples)
        for number in range(first, sizes.total):
            block = coming.journal.block(coming.places[source], number)
            if block is None:
                break
            index.extend(shards_of(coming.blobs.read(block.group)))
            if len(index) != sum(sizes.samples) + block.samples:
                raise IndexDamagedError(
                    f"stored data is damaged: block {number} of {index.manifest.reference} has "
                    f"{len(index) - sum(sizes.samples)} samples, its journal says {block.samples}"
                )
            sizes = Sizes((*sizes.samples, block.samples), (*sizes.tokens, block.tokens), sizes.total)
            self.sizes[source] = sizes
        return len(sizes.samples) > first
