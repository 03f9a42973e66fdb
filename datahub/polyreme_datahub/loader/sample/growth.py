"""Indexes whose blocks are sealed while ranks read them: appends each block once it is published.

Blocks are only ever appended, so samples keep their numbers. Nothing here waits: whoever needs a block that is not
there asks again.
"""

from __future__ import annotations

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


class Growth:
    """The blocks of the sources of one job.

    Args:
        sizes: Of each source, the blocks that its index has.
    """

    def __init__(self, sizes: Sequence[Sizes]) -> None:
        self.sizes = list(sizes)

    @property
    def ends(self) -> tuple[BlockEnds, ...]:
        """Return the blocks of each source for its order."""
        return tuple(BlockEnds(tuple(itertools.accumulate(of.samples)), of.total) for of in self.sizes)

    def look(self) -> bool:
        """Append what was sealed since; return whether there was anything."""
        return False

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


class JournalGrowth(Growth):
    """Blocks that are read from the journal of a job that is still processed.

    Args:
        journal: The journal.
        indexes: Of each source, without samples.
        places: Of each source, the place of its dataset in the journal.
        totals: Of each source, the count of its blocks in the end.
        blobs: Gives the objects that list shards.
        steady_s: A clock that never jumps [s].
    """

    def __init__(
        self,
        journal: Journal,
        indexes: Sequence[MappedIndex],
        places: Sequence[int],
        totals: Sequence[int],
        *,
        blobs: BlobFiles,
        steady_s: Callable[[], float] = time.monotonic,  # noqa: TID251 - the shell's default
    ) -> None:
        super().__init__([Sizes((), (), total) for total in totals])
        self._journal, self._indexes, self._places, self._blobs = journal, indexes, places, blobs
        self._steady_s, self._due_s = steady_s, float("-inf")
        self._every_s = LOOK_EVERY_S if blobs.parts is None else BUCKET_LOOK_EVERY_S

    def look(self) -> bool:
        """Append what was sealed since; return whether there was anything.

        Raises:
            IndexDamagedError: If a sealed block can't be read.
            StoreFailedError: If the store stays away.
        """
        if all(of.complete for of in self.sizes) or self._steady_s() < self._due_s:
            return False
        found = [self._append(source) for source in range(len(self.sizes))]
        self._due_s = self._steady_s() + self._every_s
        return any(found)

    def _append(self, source: int) -> bool:
        sizes, index = self.sizes[source], self._indexes[source]
        first = len(sizes.samples)
        for number in range(first, sizes.total):
            block = self._journal.block(self._places[source], number)
            if block is None:
                break
            index.extend(shards_of(self._blobs.read(block.group)))
            if len(index) != sum(sizes.samples) + block.samples:
                raise IndexDamagedError(
                    f"stored data is damaged: block {number} of {index.manifest.reference} has "
                    f"{len(index) - sum(sizes.samples)} samples, its journal says {block.samples}"
                )
            sizes = Sizes((*sizes.samples, block.samples), (*sizes.tokens, block.tokens), sizes.total)
            self.sizes[source] = sizes
        return len(sizes.samples) > first
