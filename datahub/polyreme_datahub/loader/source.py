"""Packs for the trainer: makes documents of encoded samples, shifts targets within each document.

A sample whose bytes no longer fit their digest stops the rank, or, with ``data.onDamage: Placeholder``, is replaced
by a placeholder of the same length: pad tokens, no target, no patches. Every rank then keeps the same order. Shape
suffixes as in ``polyreme_api.batch``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import numpy.typing as npt

from polyreme_api.batch import IGNORED_TARGET, PackedBatch, TokenIds
from polyreme_api.errors import NotSealedError, RefusedError
from polyreme_api.store import ObjectStore
from polyreme_datahub.index.damage import note_damage
from polyreme_datahub.index.format import EVEN
from polyreme_datahub.loader.order.amendments import Amendments
from polyreme_datahub.loader.order.balance import StepSplit, assign_packs
from polyreme_datahub.loader.order.growth import Growth
from polyreme_datahub.loader.order.identity import Identity
from polyreme_datahub.loader.order.order import Order
from polyreme_datahub.loader.order.outlook import SegmentOutlook
from polyreme_datahub.loader.order.plan import OrderPlan
from polyreme_datahub.loader.order.slots import Slot, Turn
from polyreme_datahub.loader.order.visits import outlook_with_visits
from polyreme_datahub.loader.read.read_counts import ReadCounts, Tier
from polyreme_datahub.loader.sample.augment import AugmentSettings, Visit
from polyreme_datahub.loader.sample.decode_pool import DecodePool
from polyreme_datahub.loader.sample.documents import CHANNELS, Document, LaidPacks, assemble, cut
from polyreme_datahub.loader.sample.mapped_index import MappedIndex, SampleDamagedError
from polyreme_datahub.loader.sample.reader import ImageNote
from polyreme_planner.flops import uneven_flops
from polyreme_planner.shapes import ModelShape

PATCH_CACHE_BYTES_MAX = 32 * 2**20
DECODE_BYTES_MIN = 16 * 2**10
"""A sample with fewer encoded bytes is read by the thread that takes it: passing it to another one costs too much."""
PLACES_PER_PACK_MAX = 2
"""Null packs are fewer than the packs of a step: each data-parallel rank has at least one that is not."""
STEPS_HELD = 3
"""Steps before and after the one that is read whose shards keep their local copies. Threads of a data engine read as
many steps ahead at once."""
ASSIGNED_STEPS_MAX = 16
"""Steps whose assignment of packs is kept; others are computed again."""
REPORTS_MAX = 1000
"""Damaged samples that one rank reports."""

_log = logging.getLogger(__name__)
_Key = tuple[int, int, int]
"""Source, sample, visit."""


@dataclasses.dataclass(frozen=True, slots=True)
class Balance:
    """Balance of the packs of each step by their cost."""

    shape: ModelShape
    """Of the model, which says what a pack costs."""
    split: StepSplit


class PackedSource:
    """Training data as a pure function of (plan, step): ``polyreme_api.batch.BatchSource``; threads may share it.

    Args:
        plan: Order of the samples.
        indexes: One per source.
        identity: What the data and its order are; a checkpoint's loader state must have what holds at its step.
        store: Object store; notes about damage are left there.
        placeholders: Whether a placeholder takes the place of a damaged sample; otherwise reading it raises.
        augment: How the samples of each source change at each visit; none: not at all.
        threads: Threads that read and decode samples.
        balance: Assigns the packs of a step to ranks by cost; None: they are numbered as in the order.
        pixels: Whether batches have patches.
        growth: Blocks of the sources, where training may start before all are sealed.
        amendments: Changes of the mixture that are fixed later; None: there are none.
    """

    def __init__(
        self,
        plan: OrderPlan,
        indexes: Sequence[MappedIndex],
        *,
        identity: Identity,
        store: ObjectStore,
        placeholders: bool,
        augment: Sequence[AugmentSettings | None] = (),
        threads: int = 1,
        balance: Balance | None = None,
        pixels: bool = True,
        growth: Growth | None = None,
        amendments: Amendments | None = None,
    ) -> None:
        self._plan, self._growth, self._amendments = plan, growth, amendments
        self._order = Order(plan)
        self._indexes = indexes
        self._identity = identity
        self._store = store
        self._placeholders = placeholders
        self._augment = tuple(augment) or (None,) * len(indexes)
        self._pool = DecodePool(threads)
        self._balance, self._pixels = balance, pixels
        self._assigned: OrderedDict[int, list[int]] = OrderedDict()
        """Number in the order of each pack, by step."""
        manifest = indexes[0].manifest
        self._ids = TokenIds(**manifest.token_ids)
        self._patch_values = CHANNELS * manifest.patch_px**2
        self._cache: OrderedDict[_Key, Document] = OrderedDict()
        self._cached_bytes = 0
        self._reported = 0
        self.reads = ReadCounts()
        for index in indexes:
            index.count_reads(self.reads)
        self._held_step = 0
        self._shards: dict[int, Sequence[Sequence[str]]] = {}
        """Sample shards of the steps around the held one, by source."""
        self._order_lock, self._cache_lock, self._hold_lock = threading.Lock(), threading.Lock(), threading.Lock()
        self._growth_lock = threading.Lock()
        """Held while the journal is read; taken before the order's."""

    def packs_in(self, step: int) -> int:
        """Packs that all ranks together train on in a step."""
        return self._plan.packs_in(self._plan.segment_of(step))

    def pack_tokens_in(self, step: int) -> int:
        """Tokens of one pack of a step."""
        return self._plan.tokens_in(self._plan.segment_of(step))

    @property
    def token_ids(self) -> TokenIds:
        """Special tokens of the tokenizer that made this data."""
        return self._ids

    def packs(self, step: int, *, first: int, count: int) -> PackedBatch:
        """Return packs ``first .. first + count`` of ``step`` (steps count from 1); beyond its last are null packs.

        Raises:
            NotSealedError: If samples of the step are still processed.
            SampleDamagedError: If stored bytes do not fit their digest, unless placeholders are wanted.
        """
        return self.laid(step, first=first, count=count).joined()

    def laid(self, step: int, *, first: int, count: int) -> LaidPacks:
        """Return packs as ``packs`` does, their patches still in their documents."""
        of_step = self.packs_in(step)
        if count < 1 or first < 0 or first + count > of_step * PLACES_PER_PACK_MAX:
            raise RefusedError(
                f"no packs {first}..{first + count}: step {step} has {of_step}, and at most as many null packs"
            )
        self._hold(step)
        packs, null = self._places(step, first, count)
        read = self._documents([slot for slots in packs for slot in slots])
        documents = [list(itertools.islice(read, len(slots))) for slots in packs]
        return assemble(
            documents,
            pack_tokens=self.pack_tokens_in(step),
            pad=self._ids.pad,
            values=self._patch_values,
            null=null,
            # A job of an earlier release keeps what its experts see, as it keeps its order.
            marks_padding=self._plan.version >= EVEN,
        )

    def outlook(self, steps: int) -> list[SegmentOutlook]:
        """Return what each source gives to a run of so many steps, between changes of the mixture, with its visits.

        Raises:
            RefusedError: If samples are still processed: their count is not known.
        """
        if any(self._plan.is_growing(source) for source in range(len(self._plan.names))):
            raise RefusedError("the data are still processed; shares and epochs are known when all samples are")
        return outlook_with_visits(self._plan, steps)

    def find(self, sample_id: str) -> dict[str, list[int]]:
        """Return the numbers of a sample, or of its pieces, in each source that has one of that name."""
        found = {name: index.find(sample_id) for name, index in zip(self._plan.names, self._indexes, strict=True)}
        return {name: samples for name, samples in found.items() if samples}

    def turns(self, samples: Mapping[str, Sequence[int]], step: int) -> list[Turn]:
        """Return the turns of some samples of each source in a step; no sample is read."""
        return [
            Turn(step=step, pack=pack, source=self._plan.names[slot.source], epoch=slot.epoch)
            for pack, slots in enumerate(self._packs(step))
            for slot in slots
            if slot.sample in samples.get(self._plan.names[slot.source], ())
        ]

    def notes(self, step: int, *, pack: int) -> list[ImageNote]:
        """Return what there is to say to people about each image of a pack of ``step``, less those that are lost."""
        slots = self._packs(step)[pack]
        return [
            dataclasses.replace(note, sample=(self._indexes[slot.source].manifest.reference, document.sample_id))
            for slot, document in zip(slots, self._documents(slots), strict=True)
            for note in document.notes
        ]

    def grids(self, step: int, *, first: int, count: int) -> Sequence[npt.NDArray[np.int32]]:
        """Return the grids [I, 2] of the images of ``count`` packs of ``step``, as the indexes have them.

        Ranks look the packs of their neighbours up at every step, so all at once: it costs a microsecond an image.
        """
        return self._grids(self._places(step, first, count)[0])

    def _grids(self, packs: Sequence[Sequence[Slot]]) -> Sequence[npt.NDArray[np.int32]]:
        slots = [slot for slots in packs for slot in slots]
        source_N, sample_N = (np.array(of, np.int64) for of in ([s.source for s in slots], [s.sample for s in slots]))
        looked_up = {source: self._indexes[source].grids_of(sample_N[source_N == source]) for source in set(source_N)}
        count_N = np.zeros(len(slots), np.int64)
        for source, (counts, _) in looked_up.items():
            count_N[source_N == source] = counts
        source_I = np.repeat(source_N, count_N)
        grids_I2 = np.zeros((len(source_I), 2), np.int32)
        for source, (_, found_I2) in looked_up.items():
            grids_I2[source_I == source] = found_I2
        ends = np.cumsum([0, *count_N])[np.cumsum([len(slots) for slots in packs])]
        return np.split(grids_I2, ends[:-1])

    def patches(self, step: int, *, pack: int, images: Sequence[int]) -> npt.NDArray[np.uint8]:
        """Return the patches [P, C] of some images of a pack of ``step``, by their numbers in ``grids``, rising."""
        if not self._pixels:
            raise RefusedError("no patches: this source was opened without pixels")
        found = [np.zeros((0, self._patch_values), np.uint8)]
        wanted: list[tuple[Slot, npt.NDArray[np.int32], list[int]]] = []
        first = 0
        for slot in self._packs(step)[pack]:
            grids_I2 = self._indexes[slot.source].grids(slot.sample)
            if mine := [image - first for image in images if first <= image < first + len(grids_I2)]:
                wanted.append((slot, grids_I2, mine))
            first += len(grids_I2)
        documents = self._documents([slot for slot, _, _ in wanted])
        for document, (_, grids_I2, mine) in zip(documents, wanted, strict=True):
            found += self._patches_of(document, grids_I2, mine)
        return np.concatenate(found)

    def _patches_of(
        self, document: Document, grids_I2: npt.NDArray[np.int32], images: Sequence[int]
    ) -> Iterator[npt.NDArray[np.uint8]]:
        """Cut images out of a sample; those of a damaged one are zero."""
        edges = np.concatenate([[0], grids_I2.prod(axis=1, dtype=np.int64).cumsum()])
        lost = np.zeros((int(edges[-1]), self._patch_values), np.uint8) if document.lost_images else None
        patches_PC = document.patches_PC if lost is None else lost
        return (patches_PC[edges[image] : edges[image + 1]] for image in images)

    def state(self, step: int) -> Mapping[str, Any]:
        """Describe where a loader stands after ``step``."""
        mixture = self._identity.mixture
        appended = {} if mixture is None else {"mixture": mixture.summary()}
        with self._order_lock:
            state = {"data": self._identity.at(step), "step": step, "window": self._order.place(step + 1), **appended}
            if self._growth is not None:
                state["blocks"] = self._growth.describe(self._order.blocks_before(step + 1))
            return state

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse to go on from a state that another dataset or order made; go on from a good one without a walk.

        Raises:
            NotSealedError: If blocks that the state has seen are not there (yet).
            RefusedError: If the data's identity differs.
        """
        step = state.get("step")
        identity = self._identity.at(step if type(step) is int and step > 0 else 0)
        if state.get("data") != identity:
            raise RefusedError(
                f"loader state belongs to other data: {state.get('data')!r} of step {step}, this job has {identity!r}",
                field="spec.data",
            )
        self._grow(self._plan)
        with self._order_lock:
            if self._growth is not None:
                self._growth.check(state["blocks"], self._plan.names)
            self._order.jump(state.get("window", {}))

    def refresh(self) -> None:
        """Take over changes of the mixture that were fixed since; they take effect at steps that no rank has read yet.

        Raises:
            StoreFailedError: If the store stays away.
        """
        if self._amendments is None:
            return
        newest = self._amendments.read()
        with self._hold_lock, self._order_lock:
            amended = self._amendments.next(self._plan, newest)
            if amended is None:
                return
            self._plan, self._identity = amended.plan, amended.identity
            self._order.amend(amended.plan, from_step=amended.from_step)
            for kept in (self._assigned, self._shards):
                for step in [step for step in kept if step >= amended.from_step]:
                    del kept[step]

    def close(self) -> None:
        """Begin no more reads; requests that wait for them fail."""
        self._pool.close()

    def _grow(self, known: OrderPlan) -> bool:
        """Take over blocks that were sealed since; return whether the plan is another than the known one.

        The journal is read without the order's lock: threads that need sealed steps alone do not wait for a bucket.
        """
        if self._growth is None:
            return False
        with self._growth_lock:
            if self._plan is known:
                self._growth.look()
            with self._order_lock:
                if self._growth.ends != self._plan.blocks:
                    lengths = tuple(index.lengths for index in self._indexes)
                    self._plan = dataclasses.replace(self._plan, lengths=lengths, blocks=self._growth.ends)
                    self._order.extend(self._plan)
                return self._plan is not known

    def _ordered(self, step: int) -> list[list[Slot]]:
        """Return the packs of a step in the order.

        Raises:
            NotSealedError: If the step needs a block that is not sealed; the caller asks again.
        """
        while True:
            with self._order_lock:
                known = self._plan
                try:
                    return self._order.packs(step)
                except NotSealedError as error:
                    unsealed = error
            if not self._grow(known):
                raise unsealed

    def _hold(self, step: int) -> None:
        """Keep the local copies of what the steps around this one read, its own and later steps first.

        Of the steps before it only those that were read: after a resume their window would be planned for nothing.
        """
        if self._growth is not None:
            # The journal is read here, if at all: others may hold copies for their steps meanwhile.
            self._ordered(step)
        with self._hold_lock:
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

    def _shards_of(self, step: int) -> Sequence[Sequence[str]]:
        """Return the sample shards that a step reads of each source, as far as blocks are known."""
        if step not in self._shards:
            with self._order_lock:
                slots = [slot for slots in self._order.packs(step) for slot in slots]
            samples = [[slot.sample for slot in slots if slot.source == at] for at in range(len(self._indexes))]
            self._shards[step] = [
                index.shards_of(np.array(of, np.int64)) for index, of in zip(self._indexes, samples, strict=True)
            ]
        return self._shards[step]

    def _places(self, step: int, first: int, count: int) -> tuple[Sequence[Sequence[Slot]], int]:
        """Return the samples of some places of a step, and how many of them, the last ones, are null packs."""
        packs, numbers = self._numbered(step)
        mine = [*numbers[first : first + count]]
        mine += [len(packs)] * (count - len(mine))
        null = len(list(itertools.takewhile(lambda number: number >= len(packs), reversed(mine))))
        return [packs[number] if number < len(packs) else () for number in mine], null

    def _packs(self, step: int) -> Sequence[Sequence[Slot]]:
        """Return the samples of each pack of a step, in the trainer's numbering of the packs; a null pack has none."""
        packs, numbers = self._numbered(step)
        return [packs[number] if number < len(packs) else () for number in numbers]

    def _numbered(self, step: int) -> tuple[Sequence[Sequence[Slot]], Sequence[int]]:
        """Return the samples of each pack of a step in the order, and the trainer's numbering of the packs.

        Where packs are balanced, numbers from their count on are among them: null packs.
        """
        packs = self._ordered(step)
        with self._order_lock:
            assigned = self._assigned.get(step)
        if self._balance is None:
            return packs, range(len(packs))
        if assigned is None:
            costs = self._costs(packs, self.pack_tokens_in(step), self._balance.shape)
            assigned = assign_packs(costs, self._balance.split)
            with self._order_lock:
                self._assigned[step] = assigned
                while len(self._assigned) > ASSIGNED_STEPS_MAX:
                    self._assigned.popitem(last=False)
        return packs, assigned

    def _costs(self, packs: Sequence[Sequence[Slot]], tokens: int, shape: ModelShape) -> list[int]:
        """Count what differs between packs, as the index has them: a damaged sample costs what it would have."""
        costs: list[int] = []
        for slots, grids_I2 in zip(packs, self._grids(packs), strict=True):
            documents = [int(self._indexes[slot.source].lengths[slot.sample]) for slot in slots]
            images: list[int] = grids_I2.prod(axis=1, dtype=np.int64).tolist()
            costs.append(uneven_flops(shape, [*documents, tokens - sum(documents)], images))
        return costs

    def _documents(self, slots: Sequence[Slot]) -> Iterator[Document]:
        """Read samples, several at once; they come, and are reported as damaged, in the order of the slots."""
        with self._cache_lock:
            missing = [slot for slot in slots if self._key(slot) not in self._cache]
        for source, index in enumerate(self._indexes):
            index.fetch_soon(slot.sample for slot in missing if slot.source == source)
        large = [slot for slot in missing if self._indexes[slot.source].size_of(slot.sample) >= DECODE_BYTES_MIN]
        reads = {self._key(slot): functools.partial(self._read, slot) for slot in large}
        with self._pool.reading(reads) as reading:
            for slot in slots:
                self._pool.check_open()
                yield self._document(slot, reading.take(self._key(slot)))

    def _key(self, slot: Slot) -> _Key:
        """Name what a slot reads: where nothing is augmented, the same at each visit."""
        return slot.source, slot.sample, 0 if self._augment[slot.source] is None else slot.epoch

    def _read(self, slot: Slot) -> Document:
        index, settings = self._indexes[slot.source], self._augment[slot.source]
        if settings is None:
            return cut(index, slot.sample, index.read(slot.sample, pixels=self._pixels))
        visit = Visit(
            settings=settings,
            seed=self._plan.seed,
            source=self._plan.names[slot.source],
            sample_id=index.sample_id(slot.sample),
            number=slot.epoch,
        )
        return cut(index, slot.sample, index.read(slot.sample, visit, pixels=self._pixels))

    def _document(self, slot: Slot, read: Future[Document] | None) -> Document:
        """Return a document from the cache, or from its read, which is done here unless another thread does it."""
        key = self._key(slot)
        with self._cache_lock:
            found = self._cache.get(key)
            if found is not None:
                self._cache.move_to_end(key)
                self.reads.add(Tier.MEMORY)
                return found
        index = self._indexes[slot.source]
        try:
            document = self._read(slot) if read is None else read.result()
        except SampleDamagedError as error:
            self._report(index, slot.sample, error)
            if not self._placeholders:
                raise
            document = self._placeholder(index, slot.sample)
        with self._cache_lock:
            # Another thread may have read the same sample meanwhile.
            self._cached_bytes += document.size_bytes if key not in self._cache else 0
            self._cache.setdefault(key, document)
            while self._cached_bytes > PATCH_CACHE_BYTES_MAX and len(self._cache) > 1:
                self._cached_bytes -= self._cache.popitem(last=False)[1].size_bytes
        return document

    def _placeholder(self, index: MappedIndex, sample: int) -> Document:
        length = int(index.lengths[sample])
        return Document(
            np.full(length, self._ids.pad, dtype=np.int64),
            np.full(length, IGNORED_TARGET, dtype=np.int64),
            np.zeros((0, self._patch_values), np.uint8),
            np.zeros((0, 2), np.int32),
            f"hole:{index.sample_id(sample)}",
            0,
            lost_images=len(index.grids(sample)),
            placeholder=True,
        )

    def _report(self, index: MappedIndex, sample: int, error: SampleDamagedError) -> None:
        """Log the damage, and leave a note for the run, its report and the next processing."""
        self._reported += 1
        if self._reported > REPORTS_MAX:
            return
        note_damage(self._store, index.digest, error.message, ordinal=sample, sample_id=index.sample_id(sample))
        if self._placeholders:
            _log.warning("%s; a placeholder takes its place (data.onDamage: Placeholder)", error.message)
