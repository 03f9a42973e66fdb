"""The layout of parameters in a flat buffer: a place for each, and buckets whose shares ranks update.

Ranks that hold the same parameters may shard their update (ZeRO-1, arXiv:1910.02054). A buffer is then a sequence of
buckets, each split into equal shares, one per rank. Matrices that an optimizer must see whole lie inside one share;
everything else is cut at any scalar.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

from torch import Tensor

BUCKET_SCALARS = 40_000_000
"""Scalars that are exchanged at a time under ZeRO-1: fewer would not fill a link, more would leave nothing to overlap
with."""
_ALIGNMENT = 16
"""Elements to which every parameter is aligned: grouped matrix products on CUDA need 16 bytes. The gaps stay zero."""
_SLOTS_A_SHARE = 4
"""Least number of whole matrices in a bucket per share: assigned largest first, they make shares nearly even."""

Outline = tuple[str, tuple[int, ...]]
"""Name and shape of a parameter."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Where one parameter lies in its flat buffer."""

    name: str
    start: int
    shape: tuple[int, ...]

    @property
    def length(self) -> int:
        """Scalars of the parameter."""
        return math.prod(self.shape)

    def row_start(self, row: int) -> int:
        """First scalar of a row."""
        return self.start + (row * (self.length // self.shape[0]) if row else 0)

    def view(self, buffer: Tensor) -> Tensor:
        """The parameter's part of a buffer of this layout."""
        return buffer[self.start : self.start + self.length].view(self.shape)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """The ranks that shard the update of a buffer."""

    count: int = 1
    place: int = 0
    """Which share is this rank's."""
    bucket_scalars: int = BUCKET_SCALARS


UNSHARED = Shares()
"""Every rank updates all that it holds."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """A part of a buffer that is exchanged at once."""

    start: int
    length: int
    """A multiple of the number of shares."""
    whole: bool = False
    """Whether each of its matrices lies inside one share."""

    @property
    def end(self) -> int:
        """First scalar after it."""
        return self.start + self.length

    def of(self, buffer: Tensor) -> Tensor:
        """The bucket's part of a buffer."""
        return buffer[self.start : self.end]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The part of a bucket that this rank updates."""

    bucket: Bucket
    start: int
    """First scalar in the buffer."""
    length: int
    own: int
    """First scalar in a buffer that only holds what this rank updates."""

    def of(self, buffer: Tensor) -> Tensor:
        """The piece's part of a whole buffer."""
        return buffer[self.start : self.start + self.length]

    def of_own(self, buffer: Tensor, *, begin: int = 0) -> Tensor:
        """The piece's part of a buffer that holds what this rank updates, starting at its scalar ``begin``."""
        return buffer[self.own - begin : self.own - begin + self.length]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FlatLayout:
    """Places of all parameters of a buffer."""

    slots: tuple[Slot, ...]
    buckets: tuple[Bucket, ...]
    whole_end: int
    matrices_end: int
    length: int


def lay_out(named: Sequence[Outline], whole: frozenset[str], shares: Shares) -> FlatLayout:
    """Place whole matrices first, then the other matrices, then vectors; each in the order of the model."""
    unit = _ALIGNMENT * shares.count
    slots, buckets = _lay_out_whole([of for of in named if of[0] in whole], shares)
    whole_end = buckets[-1].end if buckets else 0
    matrices = [of for of in named if of[0] not in whole and len(of[1]) > 1]
    vectors = [of for of in named if of[0] not in whole and len(of[1]) < 2]
    small = shares.count == 1 or _room(matrices) + _room(vectors) <= shares.bucket_scalars
    matrices_end = whole_end + _room(matrices)
    edges = [whole_end] if small else [whole_end, whole_end + _rounded(_room(matrices), unit)]
    vectors_begin = matrices_end if small else edges[-1]
    edges.append(edges[-1] + _rounded(vectors_begin + _room(vectors) - edges[-1], unit))
    size = max(unit, shares.bucket_scalars // unit * unit) if shares.count > 1 else max(1, edges[-1])
    for start, stop in itertools.pairwise(edges):
        buckets += [Bucket(start=at, length=min(size, stop - at)) for at in range(start, stop, size)]
    return FlatLayout(
        slots=(*slots, *_row(matrices, whole_end), *_row(vectors, vectors_begin)),
        buckets=tuple(buckets),
        whole_end=whole_end,
        matrices_end=matrices_end,
        length=edges[-1],
    )


def _lay_out_whole(first: Sequence[Outline], shares: Shares) -> tuple[list[Slot], list[Bucket]]:
    slots: list[Slot] = []
    buckets: list[Bucket] = []
    for group in _groups(first, shares):
        begin = buckets[-1].end if buckets else 0
        assigned = _assign(group, shares.count)
        share = max(map(_room, assigned))
        for place, hand in enumerate(assigned):
            slots += _row(hand, begin + place * share)
        buckets.append(Bucket(start=begin, length=share * shares.count, whole=True))
    return slots, buckets


def _row(group: Sequence[Outline], begin: int) -> list[Slot]:
    starts = itertools.accumulate((_aligned(math.prod(shape)) for _, shape in group), initial=begin)
    return [Slot(name=name, start=start, shape=shape) for (name, shape), start in zip(group, starts, strict=False)]


def _room(group: Sequence[Outline]) -> int:
    return sum(_aligned(math.prod(shape)) for _, shape in group)


def _groups(first: Sequence[Outline], shares: Shares) -> list[Sequence[Outline]]:
    """Cut whole matrices, in the order of the model, into what one bucket exchanges."""
    if not first:
        return []
    scalars = sum(math.prod(shape) for _, shape in first)
    wanted = -(-scalars // shares.bucket_scalars)
    count = max(1, min(wanted, len(first) // (_SLOTS_A_SHARE * shares.count))) if shares.count > 1 else 1
    size = -(-len(first) // count)
    return [first[begin : begin + size] for begin in range(0, len(first), size)]


def _assign(group: Sequence[Outline], count: int) -> list[list[Outline]]:
    """Assign matrices to shares, the largest first, each to the share that has least; the same on all ranks."""
    assigned: list[list[Outline]] = [[] for _ in range(count)]
    if count == 1:
        return [list(group)]
    for of in sorted(group, key=lambda of: -math.prod(of[1])):
        min(assigned, key=_room).append(of)
    return assigned


def pieces_of(buckets: Sequence[Bucket], shares: Shares) -> tuple[Piece, ...]:
    """Return what this rank updates of each bucket."""
    pieces: list[Piece] = []
    own = 0
    for bucket in buckets:
        length = bucket.length // shares.count
        pieces.append(Piece(bucket=bucket, start=bucket.start + shares.place * length, length=length, own=own))
        own += length
    return tuple(pieces)


def _aligned(length: int) -> int:
    return _rounded(length, _ALIGNMENT)


def _rounded(length: int, unit: int) -> int:
    return -(-length // unit) * unit
