"""Documents: samples as the trainer takes them, read by several threads, kept in memory, laid out as packs.

Threads read and decode the next samples of a request while its first ones are taken: decoders, resizing and digests
release the interpreter's lock. Results are taken in the order of the request, each with the error that its own read
raised; a read that is not taken leaves no trace. Everything is bounded: the threads, the reads ahead of the one
that is taken, and the bytes of what is kept.

A sample whose bytes no longer fit their digest stops the rank, or, with ``data.onDamage: Placeholder``, is replaced by
a placeholder of the same length: pad tokens, no target, no patches. Every rank then keeps the same order. Shape
suffixes as in ``polyreme_api.batch``.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from polyreme_api.batch import IGNORED_TARGET, PackedBatch, TokenIds
from polyreme_api.errors import RefusedError
from polyreme_api.store import ObjectStore
from polyreme_datahub.errors import SampleDamagedError
from polyreme_datahub.index.damage import note_damage
from polyreme_datahub.index.format import PREFERENCES
from polyreme_datahub.loader.order.slots import Slot
from polyreme_datahub.loader.read.shard_files import ReadCounts, Tier
from polyreme_datahub.loader.sample.augment import AugmentSettings, Visit
from polyreme_datahub.loader.sample.mapped_index import MappedIndex
from polyreme_datahub.loader.sample.pixels import CHANNELS
from polyreme_datahub.loader.sample.reader import ImageNote, StoredSample

AHEAD_PER_THREAD = 2
"""Samples that are read ahead of the one that is taken, for each thread."""
DECODE_BYTES_MIN = 16 * 2**10
"""A sample with fewer encoded bytes is read by the thread that takes it: passing it to another one costs too much."""
PATCH_CACHE_BYTES_MAX = 32 * 2**20
PLACEHOLDER = "placeholder:"
"""Begins the sample id of a placeholder; that of the damaged sample follows."""
REPORTS_MAX = 1000
"""Damaged samples that one rank reports."""
NULL_DOCUMENT_TOKENS = 128
"""A null pack is cut into documents so short that attention to them costs little: it must not be the dearest pack."""

Key = TypeVar("Key")
Result = TypeVar("Result")

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Document:
    """A sample as the trainer takes it."""

    tokens_T: npt.NDArray[np.int64]
    targets_T: npt.NDArray[np.int64]
    patches_PC: npt.NDArray[np.uint8]
    grids_I2: npt.NDArray[np.int32]
    sample_id: str
    unmasked: int
    """Targets that are not masked."""
    lost_images: int = 0
    """Images that the index has and that are not here."""
    notes: tuple[ImageNote, ...] = ()
    """One of each image, for people."""
    placeholder: bool = False
    """Whether it is padding in the place of a damaged sample."""
    branches: tuple[int, ...] = ()
    """First token of each branch; none: it is one text."""
    place: tuple[int, int] = (0, 0)
    """Number of its source, and of its sample there."""

    @property
    def size_bytes(self) -> int:
        """Bytes of its arrays."""
        return self.patches_PC.nbytes + self.tokens_T.nbytes + self.targets_T.nbytes + self.grids_I2.nbytes


@dataclasses.dataclass(frozen=True, slots=True)
class LaidPacks:
    """Packs whose patches still lie in their documents: moving them to their place copies them once."""

    batch: PackedBatch
    """All but the patches; it has none."""
    patches: Sequence[npt.NDArray[np.uint8]]
    """Of each document, in order; at least one array."""

    def joined(self) -> PackedBatch:
        """Return the packs with their patches."""
        return dataclasses.replace(self.batch, patches_PC=np.concatenate(self.patches))


def cut(index: MappedIndex, sample: int, stored: StoredSample, *, source: int) -> Document:
    """Make a document of a sample of a source: targets are the tokens that follow, where they are learned."""
    tokens_T = stored.tokens_T.astype(np.int64)
    targets_T = np.full(tokens_T.size, IGNORED_TARGET, dtype=np.int64)
    following = stored.learned_T[1:].astype(bool)
    targets_T[:-1][following] = tokens_T[1:][following]
    return Document(
        tokens_T,
        targets_T,
        stored.patches_P,
        stored.grids_I2,
        index.sample_id(sample),
        int(np.count_nonzero(following)),
        notes=stored.notes,
        branches=branches_of(stored.learned_T) if index.manifest.kind == PREFERENCES else (),
        place=(source, sample),
    )


def branches_of(learned_T: npt.NDArray[np.uint8]) -> tuple[int, ...]:
    """Return the first token of each branch: the repeated one, not learned, in front of each answer."""
    return tuple(np.flatnonzero(np.diff(learned_T.astype(np.int8)) == 1).tolist())


def positions_of(offsets: npt.NDArray[np.int32], branches_B4: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the position of each token in its document; every branch continues the prefix that they share."""
    positions_T = np.arange(int(offsets[-1])) - np.repeat(offsets[:-1], np.diff(offsets)).astype(np.int64)
    first: dict[int, int] = {}
    for document, begin in branches_B4[:, :2].tolist():
        shared = first.setdefault(document, begin)
        positions_T[begin : offsets[document + 1]] -= positions_T[begin] - positions_T[shared]
    return positions_T


def assemble(
    packs: Sequence[Sequence[Document]],
    *,
    pack_tokens: int,
    pad: int,
    values: int,
    null: int = 0,
    marks_padding: bool = True,
) -> LaidPacks:
    """Lay documents out as packs, one after the other; what is left of a pack is a document of padding.

    Args:
        packs: Documents of each pack, which fit it; a pack may have none.
        pack_tokens: Tokens of a pack.
        pad: Token of the padding.
        values: Values of a patch.
        null: How many packs, the last ones, are null packs.
        marks_padding: Whether all padding is marked as such; else null packs alone, as for jobs of earlier releases.
    """
    total = len(packs) * pack_tokens
    tokens_T = np.full(total, pad, dtype=np.int64)
    targets_T = np.full(total, IGNORED_TARGET, dtype=np.int64)
    offsets, padding = [0], []
    branches: list[tuple[int, int, int, int]] = []
    real = len(packs) - null
    inside = int(marks_padding)
    for number, documents in enumerate(packs[:real]):
        at = number * pack_tokens
        for document in documents:
            stop = at + document.tokens_T.size
            tokens_T[at:stop] = document.tokens_T
            targets_T[at:stop] = document.targets_T
            branches += [(len(offsets) - 1, at + begin, *document.place) for begin in document.branches]
            padding += [len(offsets) - 1] * (inside * document.placeholder)
            offsets.append(stop)
            at = stop
        if at < (number + 1) * pack_tokens:
            padding += [len(offsets) - 1] * inside
            offsets.append((number + 1) * pack_tokens)
    for number in range(real, len(packs)):
        begin, end = number * pack_tokens, (number + 1) * pack_tokens
        cuts = [*range(begin + NULL_DOCUMENT_TOKENS, end, NULL_DOCUMENT_TOKENS), end]
        padding += range(len(offsets) - 1, len(offsets) - 1 + len(cuts))
        offsets += cuts
    bounds = np.array(offsets, dtype=np.int32)
    laid = [document for documents in packs for document in documents]
    branches_B4 = np.array(branches, np.int64).reshape(-1, 4)
    none_PC = np.zeros((0, values), np.uint8)
    batch = PackedBatch(
        tokens_T=tokens_T,
        targets_T=targets_T,
        positions_T=positions_of(bounds, branches_B4),
        document_offsets=bounds,
        patches_PC=none_PC,
        grids_I2=np.concatenate([np.zeros((0, 2), np.int32), *(d.grids_I2 for d in laid)]),
        sample_ids=[document.sample_id for document in laid],
        unmasked_tokens=sum(document.unmasked for document in laid),
        lost_images=_lost(laid),
        padding_documents=tuple(padding),
        branches_B4=branches_B4,
    )
    return LaidPacks(batch, [none_PC, *(document.patches_PC for document in laid)])


def _lost(documents: Sequence[Document]) -> list[int]:
    """Number the images that are not there among those that the index has."""
    counts = [len(document.grids_I2) + document.lost_images for document in documents]
    firsts = itertools.accumulate(counts, initial=0)
    return [
        number
        for document, first in zip(documents, firsts, strict=False)
        for number in range(first, first + document.lost_images)
    ]


class ReadsAhead(Generic[Key, Result]):
    """The reads of one request, started in order, a bounded number ahead of the one that is taken.

    Args:
        start: Starts a read.
        reads: By key, in the order in which they are taken.
        ahead: Reads that are started and not taken yet.
    """

    def __init__(
        self,
        start: Callable[[Callable[[], Result]], Future[Result]],
        reads: Mapping[Key, Callable[[], Result]],
        *,
        ahead: int,
    ) -> None:
        self._start, self._ahead = start, ahead
        self._waiting = deque(reads.items())
        self._started: dict[Key, Future[Result]] = {}
        self._fill()

    def take(self, key: Key) -> Future[Result] | None:
        """Return the read of a key, once, and start later ones; None where it is none of the request's."""
        taken = self._started.pop(key, None)
        self._fill()
        return taken

    def cancel(self) -> None:
        """Start no more reads; those that run end by themselves, and their results are dropped."""
        self._waiting.clear()
        for read in self._started.values():
            read.cancel()
        self._started.clear()

    def _fill(self) -> None:
        while self._waiting and len(self._started) < self._ahead:
            key, read = self._waiting.popleft()
            self._started[key] = self._start(read)


class DecodePool:
    """The threads of one process; they start with the first request, and end when the pool is dropped.

    Args:
        threads: How many; with one, the thread that asks reads by itself.
    """

    def __init__(self, threads: int) -> None:
        self._count = threads
        self._lock = threading.Lock()
        self._threads: tuple[int, ThreadPoolExecutor] | None = None
        self._closed = False

    @contextmanager
    def reading(self, reads: Mapping[Key, Callable[[], Result]]) -> Iterator[ReadsAhead[Key, Result]]:
        """Read in parallel as far as there is more than one thread; what was not taken is dropped at the end."""
        if self._count < 2 or len(reads) < 2:
            reads = {}
        begun = ReadsAhead(self._start, reads, ahead=self._count * AHEAD_PER_THREAD)
        try:
            yield begun
        finally:
            begun.cancel()

    def close(self) -> None:
        """Begin no more reads: those that wait for a thread are cancelled, later ones are refused."""
        with self._lock:
            self._closed = True
            if self._threads is not None and self._threads[0] == os.getpid():
                self._threads[1].shutdown(wait=False, cancel_futures=True)

    def check_open(self) -> None:
        """Refuse further reads once the threads are closed.

        Raises:
            RefusedError: If they are.
        """
        if self._closed:
            raise RefusedError("nothing is read any more: the source was closed")

    def _start(self, read: Callable[[], Result]) -> Future[Result]:
        with self._lock:
            self.check_open()
            # A forked process has none of its parent's threads.
            if self._threads is None or self._threads[0] != os.getpid():
                self._threads = (os.getpid(), ThreadPoolExecutor(self._count, thread_name_prefix="decode"))
            return self._threads[1].submit(read)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How the samples of a job are read."""

    seed: int
    names: tuple[str, ...]
    """Of the sources."""
    augment: tuple[AugmentSettings | None, ...]
    """How the samples of each source change at each visit; None: not at all."""
    placeholders: bool = False
    """Whether a placeholder takes the place of a damaged sample; otherwise reading it raises."""
    pixels: bool = True
    """Whether documents have patches."""
    threads: int = 1


class DocumentCache:
    """Cache of the newest documents of slots; threads may share it.

    Args:
        indexes: One per source.
        store: Object store; notes about damage are left there.
        how: How samples are read.
    """

    def __init__(self, indexes: Sequence[MappedIndex], store: ObjectStore, how: Reading) -> None:
        self._indexes, self._store, self._how = indexes, store, how
        self._pool = DecodePool(how.threads)
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[int, int, int], Document] = OrderedDict()
        """By source, sample and visit."""
        self._kept_bytes = self._reported = 0
        self.token_ids = TokenIds(**indexes[0].manifest.token_ids)
        self.patch_values = CHANNELS * indexes[0].manifest.patch_px ** 2
        self.reads = ReadCounts()
        for index in indexes:
            index.count_reads(self.reads)

    def read(self, slots: Sequence[Slot]) -> Iterator[Document]:
        """Read samples, several at once; they come, and are reported as damaged, in the order of the slots.

        Raises:
            SampleDamagedError: If stored bytes do not fit their digest, unless placeholders are wanted.
        """
        with self._lock:
            missing = [slot for slot in slots if self._key(slot) not in self._kept]
        for source, index in enumerate(self._indexes):
            index.fetch_soon(slot.sample for slot in missing if slot.source == source)
        large = [slot for slot in missing if self._indexes[slot.source].size_of(slot.sample) >= DECODE_BYTES_MIN]
        reads = {self._key(slot): functools.partial(self._read, slot) for slot in large}
        with self._pool.reading(reads) as reading:
            for slot in slots:
                self._pool.check_open()
                yield self._document(slot, reading.take(self._key(slot)))

    def close(self) -> None:
        """Begin no more reads; requests that wait for them fail."""
        self._pool.close()

    def _key(self, slot: Slot) -> tuple[int, int, int]:
        """Name what a slot reads: where nothing is augmented, the same at each visit."""
        return slot.source, slot.sample, 0 if self._how.augment[slot.source] is None else slot.epoch

    def _read(self, slot: Slot) -> Document:
        index, settings = self._indexes[slot.source], self._how.augment[slot.source]
        visit = None
        if settings is not None:
            visit = Visit(
                settings=settings,
                seed=self._how.seed,
                source=self._how.names[slot.source],
                sample_id=index.sample_id(slot.sample),
                number=slot.epoch,
            )
        stored = index.read(slot.sample, visit, pixels=self._how.pixels)
        return cut(index, slot.sample, stored, source=slot.source)

    def _document(self, slot: Slot, read: Future[Document] | None) -> Document:
        """Return a document that is kept, or that of its read, which is done here unless another thread does it."""
        key = self._key(slot)
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
                self.reads.add(Tier.MEMORY)
                return found
        try:
            document = self._read(slot) if read is None else read.result()
        except SampleDamagedError as error:
            self._report(slot, error)
            if not self._how.placeholders:
                raise
            document = self._placeholder(slot)
        with self._lock:
            # Another thread may have read the same sample meanwhile.
            self._kept_bytes += document.size_bytes if key not in self._kept else 0
            self._kept.setdefault(key, document)
            while self._kept_bytes > PATCH_CACHE_BYTES_MAX and len(self._kept) > 1:
                self._kept_bytes -= self._kept.popitem(last=False)[1].size_bytes
        return document

    def _placeholder(self, slot: Slot) -> Document:
        index = self._indexes[slot.source]
        length = int(index.lengths[slot.sample])
        return Document(
            np.full(length, self.token_ids.pad, dtype=np.int64),
            np.full(length, IGNORED_TARGET, dtype=np.int64),
            np.zeros((0, self.patch_values), np.uint8),
            np.zeros((0, 2), np.int32),
            f"{PLACEHOLDER}{index.sample_id(slot.sample)}",
            0,
            lost_images=len(index.grids(slot.sample)),
            placeholder=True,
        )

    def _report(self, slot: Slot, error: SampleDamagedError) -> None:
        """Log the damage, and leave a note for the run, its report and the next processing."""
        self._reported += 1
        if self._reported > REPORTS_MAX:
            return
        index = self._indexes[slot.source]
        name = index.sample_id(slot.sample)
        note_damage(self._store, index.digest, error.message, ordinal=slot.sample, sample_id=name)
        if self._how.placeholders:
            _log.warning("%s; a placeholder takes its place (data.onDamage: Placeholder)", error.message)
