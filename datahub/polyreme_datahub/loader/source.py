"""Packs for the trainer: the samples of each step, read and laid out, while the local copies of near steps are held.

Shape suffixes as in ``polyreme_api.batch``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from polyreme_api.batch import PackedBatch, PreferenceSet, TokenIds
from polyreme_api.errors import NotSealedError, RefusedError
from polyreme_datahub.index.format import EVEN
from polyreme_datahub.loader.order.outlook import SegmentOutlook, outlook_with_visits
from polyreme_datahub.loader.order.slots import Slot, Turn
from polyreme_datahub.loader.read.shard_files import ReadCounts
from polyreme_datahub.loader.sample.documents import Document, DocumentCache, LaidPacks, assemble
from polyreme_datahub.loader.sample.mapped_index import MappedIndex
from polyreme_datahub.loader.sample.reader import ImageNote
from polyreme_datahub.loader.steps import Packs, Steps

PLACES_PER_PACK_MAX = 2
"""Null packs are fewer than the packs of a step: each data-parallel rank has at least one that is not."""
STEPS_HELD = 3
"""Steps before and after the one that is read whose shards keep their local copies. Threads of a data engine read as
many steps ahead at once."""


class HeldCopies:
    """The hold on local copies: those of the sample shards that the steps around the one that is read need.

    Args:
        steps: The packs of each step.
        indexes: One per source.
    """

    def __init__(self, steps: Steps, indexes: Sequence[MappedIndex]) -> None:
        self._steps, self._indexes = steps, indexes
        self._held_step = 0
        self._shards: dict[int, Sequence[Sequence[str]]] = {}
        """Sample shards of the steps around the held one, by source."""
        self._lock = threading.Lock()

    def hold(self, step: int) -> None:
        """Keep the copies of what the steps around one read, its own and later steps first; its blocks are known.

        Of the steps before it only those that were read: after a resume their window would be planned for nothing.
        """
        with self._lock:
            if step == self._held_step or not any(index.has_copies for index in self._indexes):
                return
            before = [near for near in range(step - STEPS_HELD, step) if near in self._shards]
            self._shards_of(step)
            self._held_step = step
            steps = [*range(step, step + STEPS_HELD + 1), *before]
            shards: list[dict[str, None]] = [{} for _ in self._indexes]
            for near in steps:
                with contextlib.suppress(NotSealedError):
                    for source, found in enumerate(self._shards_of(near)):
                        shards[source].update(dict.fromkeys(found))
            self._shards = {near: self._shards[near] for near in steps if near in self._shards}
            for index, wanted in zip(self._indexes, shards, strict=True):
                index.hold(wanted)

    def forget(self, from_step: int) -> None:
        """Forget what the steps from one on read: it has changed."""
        with self._lock:
            self._shards = {step: shards for step, shards in self._shards.items() if step < from_step}

    def _shards_of(self, step: int) -> Sequence[Sequence[str]]:
        """Return the sample shards that a step reads of each source, as far as blocks are known."""
        if step not in self._shards:
            both = zip(self._indexes, self._steps.samples(step), strict=True)
            self._shards[step] = [index.shards_of(samples) for index, samples in both]
        return self._shards[step]


class PackedSource:
    """Training data as a pure function of (plan, step): ``polyreme_api.batch.BatchSource``; threads may share it.

    Args:
        steps: The packs of each step.
        indexes: One per source.
        documents: Reads and keeps their documents.
        preference_sets: See ``BatchSource``.
        pixels: Whether batches have patches.
    """

    def __init__(
        self,
        steps: Steps,
        indexes: Sequence[MappedIndex],
        documents: DocumentCache,
        *,
        preference_sets: Sequence[PreferenceSet | None],
        pixels: bool = True,
    ) -> None:
        self.preference_sets = preference_sets
        self._steps, self._indexes, self._documents, self._pixels = steps, indexes, documents, pixels
        self._copies = HeldCopies(steps, indexes)
        self.packs_in, self.pack_tokens_in = steps.packs_in, steps.pack_tokens_in
        self.state, self.check_state = steps.state, steps.check_state

    @property
    def token_ids(self) -> TokenIds:
        """Special tokens of the tokenizer that made this data."""
        return self._documents.token_ids

    @property
    def reads(self) -> ReadCounts:
        """Samples by where they were read."""
        return self._documents.reads

    def packs(self, step: int, *, first: int, count: int) -> PackedBatch:
        """Return packs ``first .. first + count`` of ``step`` (steps count from 1); beyond its last are null packs.

        Raises:
            NotSealedError: If samples of the step are still processed.
            SampleDamagedError: If stored bytes do not fit their digest, unless placeholders are wanted.
        """
        return self.laid(step, first=first, count=count).joined()

    def laid(self, step: int, *, first: int, count: int) -> LaidPacks:
        """Return packs as ``packs`` does, their patches still in their documents."""
        of_step = self._steps.packs_in(step)
        if count < 1 or first < 0 or first + count > of_step * PLACES_PER_PACK_MAX:
            raise RefusedError(
                f"no packs {first}..{first + count}: step {step} has {of_step}, and at most as many null packs"
            )
        packs = self._places(step, first, count)
        self._copies.hold(step)
        read = self._documents.read([slot for slots in packs for slot in slots or ()])
        documents = [list(itertools.islice(read, len(slots or ()))) for slots in packs]
        return assemble(
            documents,
            pack_tokens=self._steps.pack_tokens_in(step),
            pad=self.token_ids.pad,
            values=self._documents.patch_values,
            null=len(list(itertools.takewhile(lambda slots: slots is None, reversed(packs)))),
            # A job of an earlier release keeps what its experts see, as it keeps its order.
            marks_padding=self._steps.plan.version >= EVEN,
        )

    def outlook(self, steps: int) -> list[SegmentOutlook]:
        """Return what each source gives to a run of so many steps, between changes of the mixture, with its visits.

        Raises:
            RefusedError: If samples are still processed: their count is not known.
        """
        plan = self._steps.plan
        if any(plan.is_growing(source) for source in range(len(plan.names))):
            raise RefusedError("the data are still processed; shares and epochs are known when all samples are")
        return outlook_with_visits(plan, steps)

    def find(self, sample_id: str) -> dict[str, list[int]]:
        """Return the numbers of a sample, or of its pieces, in each source that has one of that name."""
        both = zip(self._steps.plan.names, self._indexes, strict=True)
        return {name: samples for name, index in both if (samples := index.find(sample_id))}

    def turns(self, samples: Mapping[str, Sequence[int]], step: int) -> list[Turn]:
        """Return the turns of some samples of each source in a step; no sample is read."""
        names = self._steps.plan.names
        return [
            Turn(step=step, pack=pack, source=names[slot.source], epoch=slot.epoch)
            for pack, slots in enumerate(self._steps.packs(step))
            for slot in slots or ()
            if slot.sample in samples.get(names[slot.source], ())
        ]

    def notes(self, step: int, *, pack: int) -> list[ImageNote]:
        """Return what there is to say to people about each image of a pack of ``step``, less those that are lost."""
        slots = self._steps.packs(step)[pack] or ()
        return [
            dataclasses.replace(note, sample=(self._indexes[slot.source].manifest.reference, document.sample_id))
            for slot, document in zip(slots, self._documents.read(slots), strict=True)
            for note in document.notes
        ]

    def grids(self, step: int, *, first: int, count: int) -> Sequence[npt.NDArray[np.int32]]:
        """Return the grids [I, 2] of the images of ``count`` packs of ``step``, as the indexes have them."""
        return self._steps.grids(self._places(step, first, count))

    def patches(self, step: int, *, pack: int, images: Sequence[int]) -> npt.NDArray[np.uint8]:
        """Return the patches [P, C] of some images of a pack of ``step``, by their numbers in ``grids``, rising."""
        if not self._pixels:
            raise RefusedError("no patches: this source was opened without pixels")
        found = [np.zeros((0, self._documents.patch_values), np.uint8)]
        wanted: list[tuple[Slot, npt.NDArray[np.int32], list[int]]] = []
        first = 0
        for slot in self._steps.packs(step)[pack] or ():
            grids_I2 = self._indexes[slot.source].grids(slot.sample)
            if mine := [image - first for image in images if first <= image < first + len(grids_I2)]:
                wanted.append((slot, grids_I2, mine))
            first += len(grids_I2)
        documents = self._documents.read([slot for slot, _, _ in wanted])
        for document, (_, grids_I2, mine) in zip(documents, wanted, strict=True):
            found += self._patches_of(document, grids_I2, mine)
        return np.concatenate(found)

    def pairs(self, step: int, *, first: int, count: int) -> npt.NDArray[np.int64]:
        """Return the pairs [N, 2] of ``count`` packs of ``step``: source and place of each sample, as planned."""
        slots = [slot for slots in self._places(step, first, count) for slot in slots or ()]
        pairs = [(of.source, of.sample) for of in slots if self.preference_sets[of.source] is not None]
        return np.array(pairs, np.int64).reshape(-1, 2)

    def refresh(self) -> None:
        """Take over changes of the mixture that were fixed since; they take effect at steps that no rank has read yet.

        Raises:
            StoreFailedError: If the store stays away.
        """
        if (from_step := self._steps.refresh()) is not None:
            self._copies.forget(from_step)

    def close(self) -> None:
        """Begin no more reads; requests that wait for them fail."""
        self._documents.close()

    def _places(self, step: int, first: int, count: int) -> Packs:
        """Return the packs at some places of a step; after its last are null packs."""
        packs = self._steps.packs(step)[first : first + count]
        return [*packs, *[None] * (count - len(packs))]

    def _patches_of(
        self, document: Document, grids_I2: npt.NDArray[np.int32], images: Sequence[int]
    ) -> Iterator[npt.NDArray[np.uint8]]:
        """Cut images out of a sample; those of a damaged one are zero."""
        edges = np.concatenate([[0], grids_I2.prod(axis=1, dtype=np.int64).cumsum()])
        lost = np.zeros((int(edges[-1]), self._documents.patch_values), np.uint8) if document.lost_images else None
        patches_PC = document.patches_PC if lost is None else lost
        return (patches_PC[edges[image] : edges[image + 1]] for image in images)
