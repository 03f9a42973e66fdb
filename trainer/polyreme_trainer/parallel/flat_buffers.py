"""Parameters and gradients in flat buffers: one all-reduce, one optimizer call, one copy for a checkpoint.

On CPU an optimizer step over 650 k parameters takes 0.5 ms flat against some ms tensor by tensor, and a gloo all-reduce
costs nearly the same for one float as for a MiB.

Ranks that hold the same parameters may shard their update (ZeRO-1, arXiv:1910.02054). A buffer is then a sequence of
buckets, each split into equal shares, one per rank: a bucket's gradient is reduce-scattered into the shares, its values
are gathered from them. Matrices that an optimizer must see whole lie inside one share; everything else is cut at any
scalar.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

FUSED_BYTES_MAX = 4 << 20
"""Gradients of all slices up to this size are fused into the dense all-reduce: another all-reduce costs 5 ms, one more
MiB 1 ms."""
BUCKET_SCALARS = 40_000_000
"""Scalars that are exchanged at a time under ZeRO-1: fewer would not fill a link, more would leave nothing to overlap
with."""
_ALIGNMENT = 16
"""Elements to which every parameter is aligned: grouped matrix products on CUDA need 16 bytes. The gaps stay zero."""
_SLOTS_A_SHARE = 4
"""Least number of whole matrices in a bucket per share: assigned largest first, they make shares nearly even."""

Outline = tuple[str, tuple[int, ...]]
"""Name and shape of a parameter."""
Named = tuple[str, nn.Parameter]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Where one parameter lies in its flat buffer."""

    name: str
    start: int
    shape: tuple[int, ...]

    @property
    def length(self) -> int:
        """Scalars of the parameter."""
        return int(torch.Size(self.shape).numel())

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
class _Plan:
    slots: tuple[Slot, ...]
    buckets: tuple[Bucket, ...]
    whole_end: int
    matrices_end: int
    length: int


class FlatParameters:
    """Parameters moved into one buffer, matrices first; their gradients, and whatever is summed with them, in another.

    After construction every parameter is a view of ``values`` and its ``grad`` a view of ``gradients``: backward
    accumulates in place, in float32 whatever the type of the values.
    """

    def __init__(
        self,
        named: Iterable[Named],
        *,
        piggybacked: int = 0,
        fused_gradients: int = 0,
        whole: Collection[str] = (),
        shares: Shares = Shares(),
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Move the parameters.

        Args:
            named: Parameters by their global names, float32.
            piggybacked: Scalars that are summed in the gradients' all-reduce too.
            fused_gradients: Scalars of gradients of other parameters in the same all-reduce.
            whole: Matrices that one rank must update whole; they come first.
            shares: Ranks that shard the update.
            dtype: Type of the values. If narrower than float32, float32 originals of what this rank updates are kept.
        """
        parameters = dict(named)
        plan = _lay_out([(name, tuple(p.shape)) for name, p in parameters.items()], frozenset(whole), shares)
        self.slots, self.buckets, self.length = plan.slots, plan.buckets, plan.length
        self.shares = shares
        self.whole_end = plan.whole_end
        """Scalars before this one belong to matrices that one rank updates whole."""
        self.matrices_end = plan.matrices_end
        """Scalars before this one belong to matrices; only those have weight decay."""
        self.pieces = _pieces(plan.buckets, shares)
        self.own_length = sum(piece.length for piece in self.pieces)
        self.own_whole_length = sum(piece.length for piece in self.pieces if piece.bucket.whole)
        self._parameters = [parameters[slot.name] for slot in self.slots]
        device = self._parameters[0].device if self._parameters else torch.device("cpu")
        self._piggybacked_end = self.length + piggybacked
        self._reduced = torch.zeros(self._piggybacked_end + fused_gradients, device=device)
        self._own_gradients = torch.zeros(self.own_length, device=device) if shares.count > 1 else None
        originals = torch.zeros(self.length, device=device)
        for slot, parameter in zip(self.slots, self._parameters, strict=True):
            slot.view(originals).copy_(parameter.detach())
        self.values = originals.to(dtype)
        """All parameters, in the type in which the model computes."""
        own = [originals[:0], *(piece.of(originals) for piece in self.pieces)]
        self.masters = None if dtype == torch.float32 else torch.cat(own)
        """float32 originals of what this rank updates; None where the values are float32 themselves."""
        for slot, parameter in zip(self.slots, self._parameters, strict=True):
            parameter.data = slot.view(self.values)
            parameter.grad_dtype = torch.float32
            parameter.grad = slot.view(self._reduced)

    @property
    def gradients(self) -> Tensor:
        """Gradients of all parameters."""
        return self._reduced[: self.length]

    @property
    def piggybacked(self) -> Tensor:
        """Scalars that are summed in the gradients' all-reduce too."""
        return self._reduced[self.length : self._piggybacked_end]

    @property
    def fused_gradients(self) -> Tensor:
        """Gradients of other parameters in the same all-reduce."""
        return self._reduced[self._piggybacked_end :]

    @property
    def reduced(self) -> Tensor:
        """Gradients, piggybacked scalars and fused gradients: the buffer of one all-reduce."""
        return self._reduced

    @property
    def own_gradients(self) -> Tensor:
        """Summed gradients of what this rank updates, one piece after another."""
        return self.gradients if self._own_gradients is None else self._own_gradients

    def own_values(self, piece: Piece) -> Tensor:
        """Return what the optimizer changes, in float32; ``publish`` then copies it into the values.

        Originals may have moved to host memory.
        """
        return piece.of(self.values) if self.masters is None else piece.of_own(self.masters)

    def publish(self, piece: Piece, updated: Tensor | None = None) -> None:
        """Round what the optimizer changed, or a copy of it on the device, to the type in which the model computes."""
        if self.masters is not None:
            piece.of(self.values).copy_(piece.of_own(self.masters) if updated is None else updated)

    def adopt(self) -> None:
        """Take the values, which were set from outside, as the originals."""
        for piece in self.pieces if self.masters is not None else ():
            self.own_values(piece).copy_(piece.of(self.values))

    def clear_gradients(self) -> None:
        """Set gradients, piggybacked scalars and fused gradients to zero, before a backward pass."""
        self._reduced.zero_()

    def keep_gradients_in(self, buffer: Tensor) -> None:
        """Accumulate into the caller's buffer, of ``length`` scalars, from now on."""
        self._reduced = buffer
        for slot, parameter in zip(self.slots, self._parameters, strict=True):
            parameter.grad = slot.view(buffer)

    def views(self, buffer: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield each parameter's name and its part of a buffer of this layout."""
        for slot in self.slots:
            yield slot.name, slot.view(buffer)

    def parameters(self) -> Iterator[tuple[Slot, nn.Parameter]]:
        """Yield each parameter with its place."""
        return zip(self.slots, self._parameters, strict=True)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Slices:
    """Names of the parameters that are cut, and which slices of them this rank holds."""

    names: frozenset[str] = frozenset()
    place: int = 0
    """Which slice this rank holds."""
    count: int = 1
    """Slices of a whole parameter."""
    copies: int = 1
    """Ranks of a stage that hold the same slice."""
    copy: int = 0
    """Which of these copies this rank has."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SlicedParameters:
    """This rank's slices in one buffer."""

    flat: FlatParameters
    slices: Slices
    fused: bool
    """Whether the gradients are fused into the dense all-reduce, each slice at its own place."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FlatModel:
    """All trained parameters of this rank, grouped by the ranks that hold the same ones."""

    dense: FlatParameters
    """Whole parameters, the same on all ranks of the stage."""
    exact: FlatParameters
    """Those of them that stay float32 although the model computes in another type; else empty."""
    tensor: SlicedParameters
    """Slices of the tensor-parallel group, the same on the ranks of dp x cp."""
    experts: SlicedParameters
    """Experts of this rank, the same on the ranks of edp."""
    sharded: tuple[FlatParameters, ...] = ()
    """This rank's rows of parameters that are sharded by rows (``fsdp.py``); the other groups hold the rest."""

    @property
    def parts(self) -> tuple[FlatParameters, ...]:
        """All buffers: dense, exact, tensor slices, experts, sharded parameters."""
        return self.dense, self.exact, self.tensor.flat, self.experts.flat, *self.sharded

    def clear_gradients(self) -> None:
        """Set all gradients, and what is summed with them, to zero, before a step's first backward pass."""
        for part in self.parts:
            part.clear_gradients()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """Precision and sharding of the parameters for the optimizer."""

    dtype: torch.dtype = torch.float32
    """Type in which the model computes."""
    exact: frozenset[str] = frozenset()
    """Parameters that stay float32 nevertheless."""
    whole: frozenset[str] = frozenset()
    """Matrices that one rank must update whole."""
    zero1: bool = False
    """Whether ranks that hold the same parameters shard the update."""
    bucket_scalars: int = BUCKET_SCALARS


PLAIN = Update()
"""float32, and every rank updates all that it holds."""


def flatten(
    named: Mapping[str, nn.Parameter],
    *,
    piggybacked: int,
    stage: Shares = Shares(),
    tensor: Slices = Slices(),
    experts: Slices = Slices(),
    update: Update = PLAIN,
) -> FlatModel:
    """Move a model's parameters into flat buffers, which replace their storage.

    Slices with copies need a sum over those copies: an all-reduce of their own. When all slices together are small,
    they are fused into the dense one instead: every rank adds its slice at the slice's own place, zeros elsewhere.
    Under ZeRO-1, every part is reduced by itself.

    Args:
        named: All trained parameters of this rank by their global names.
        piggybacked: Scalars that are summed in the dense all-reduce too.
        stage: The ranks that hold the same whole parameters.
        tensor: Parameters cut by tensor parallelism; this rank holds a slice.
        experts: Stacked experts; this rank holds some of them.
        update: Precision and sharding for the optimizer.
    """

    def shares(count: int, place: int) -> Shares:
        given = dataclasses.replace(stage, count=count, place=place, bucket_scalars=update.bucket_scalars)
        return given if update.zero1 else Shares()

    cut = tensor.names | experts.names
    exact_names = update.exact - cut if update.dtype != torch.float32 else frozenset()
    parts = [
        FlatParameters(
            ((name, p) for name, p in named.items() if name in slices.names),
            whole=update.whole,
            shares=shares(slices.copies, slices.copy),
            dtype=update.dtype,
        )
        for slices in (tensor, experts)
    ]
    exact = FlatParameters(
        ((name, p) for name, p in named.items() if name in exact_names), shares=shares(stage.count, stage.place)
    )
    fused_sizes = [0 if update.zero1 else _fused_size(*both) for both in zip(parts, (tensor, experts), strict=True)]
    exact_size = 0 if update.zero1 else exact.length
    dense = FlatParameters(
        ((name, p) for name, p in named.items() if name not in cut | exact_names),
        piggybacked=piggybacked,
        fused_gradients=sum(fused_sizes) + exact_size,
        whole=update.whole,
        shares=shares(stage.count, stage.place),
        dtype=update.dtype,
    )
    if exact_size:
        exact.keep_gradients_in(dense.fused_gradients[:exact_size])
    sliced: list[SlicedParameters] = []
    begin = exact_size
    for part, slices, size in zip(parts, (tensor, experts), fused_sizes, strict=True):
        if size:
            own = begin + slices.place * part.length
            part.keep_gradients_in(dense.fused_gradients[own : own + part.length])
        sliced.append(SlicedParameters(flat=part, slices=slices, fused=size > 0))
        begin += size
    return FlatModel(dense=dense, exact=exact, tensor=sliced[0], experts=sliced[1])


def _fused_size(part: FlatParameters, slices: Slices) -> int:
    """Scalars that the slices take in the dense all-reduce: none if they have no copies, or are too large."""
    fits = slices.copies > 1 and slices.count * part.gradients.nbytes <= FUSED_BYTES_MAX
    return slices.count * part.length if fits else 0


def _lay_out(named: Sequence[Outline], whole: frozenset[str], shares: Shares) -> _Plan:
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
    return _Plan(
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


def _pieces(buckets: Sequence[Bucket], shares: Shares) -> tuple[Piece, ...]:
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
