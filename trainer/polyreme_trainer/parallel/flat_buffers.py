"""Parameters and gradients in flat buffers: one all-reduce, one optimizer call, one copy for a checkpoint.

On CPU an optimizer step over 650 k parameters takes 0.5 ms flat against some ms tensor by tensor, and a gloo all-reduce
costs nearly the same for one float as for a MiB.

Ranks that hold the same parameters may shard their update (ZeRO-1): a bucket's gradient is reduce-scattered into shares
(``flat_layout.py``), its values are gathered from them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from polyreme_trainer.parallel.flat_layout import BUCKET_SCALARS, UNSHARED, Piece, Shares, Slot, lay_out, pieces_of
from polyreme_trainer.parallel.host_memory import pinned_zeros

FUSED_BYTES_MAX = 4 << 20
"""Gradients of all slices up to this size are fused into the dense all-reduce: another all-reduce costs 5 ms, one more
MiB 1 ms."""

Named = tuple[str, nn.Parameter]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """Type and place of the numbers of a buffer."""

    dtype: torch.dtype = torch.float32
    """Type of the values. If narrower than float32, float32 originals of what a rank updates are kept."""
    device: torch.device | str = "cpu"
    state_on_host: bool = False
    """Whether originals and the optimizer's state live in pinned host memory."""

    def state(self, length: int) -> Tensor:
        """Allocate zeros for originals or moments where they stay, so that no copy of them is ever on the device."""
        if self.state_on_host and torch.device(self.device).type != "cpu":
            return pinned_zeros(length)
        return torch.zeros(length, device=self.device)


FLOAT32 = Storage()


class FlatParameters:
    """Parameters moved into one buffer, matrices first; their gradients, and whatever is summed with them, in another.

    After construction every parameter is a view of ``values`` and its ``grad`` a view of ``gradients``: backward
    accumulates in place, in float32 whatever the type of the values. A parameter on the device ``meta`` has no values
    yet and can't become a view: another one takes its place in ``parameters``, for the caller to put into the model,
    and ``put`` sets its values. So no second copy of the model ever exists.
    """

    def __init__(
        self,
        named: Iterable[Named],
        *,
        piggybacked: int = 0,
        fused_gradients: int = 0,
        whole: Collection[str] = (),
        shares: Shares = UNSHARED,
        storage: Storage = FLOAT32,
    ) -> None:
        """Move the parameters.

        Args:
            named: Parameters by their global names, float32.
            piggybacked: Scalars that are summed in the gradients' all-reduce too.
            fused_gradients: Scalars of gradients of other parameters in the same all-reduce.
            whole: Matrices that one rank must update whole; they come first.
            shares: Ranks that shard the update.
            storage: Type and place of the values.
        """
        parameters = dict(named)
        plan = lay_out([(name, tuple(p.shape)) for name, p in parameters.items()], frozenset(whole), shares)
        self.slots, self.buckets, self.length = plan.slots, plan.buckets, plan.length
        self.shares = shares
        self.whole_end = plan.whole_end
        """Scalars before this one belong to matrices that one rank updates whole."""
        self.matrices_end = plan.matrices_end
        """Scalars before this one belong to matrices; only those have weight decay."""
        self.pieces = pieces_of(plan.buckets, shares)
        self.own_length = sum(piece.length for piece in self.pieces)
        self.own_whole_length = sum(piece.length for piece in self.pieces if piece.bucket.whole)
        self._parameters = [parameters[slot.name] for slot in self.slots]
        device = storage.device
        self._piggybacked_end = self.length + piggybacked
        self._reduced = torch.zeros(self._piggybacked_end + fused_gradients, device=device)
        self._own_gradients = torch.zeros(self.own_length, device=device) if shares.count > 1 else None
        self.values = torch.zeros(self.length, dtype=storage.dtype, device=device)
        """All parameters, in the type in which the model computes."""
        self.masters = None if storage.dtype == torch.float32 else storage.state(self.own_length)
        """float32 originals of what this rank updates; None where the values are float32 themselves."""
        for index, slot in enumerate(self.slots):
            parameter = self._parameters[index]
            if parameter.is_meta:
                # ``data`` counts versions apart from the buffer: parts of it arrive while others are in a graph.
                parameter = self._parameters[index] = nn.Parameter(slot.view(self.values).data)
            else:
                self.put(slot, 0, parameter.detach())
                parameter.data = slot.view(self.values)
            # A narrow gradient is added as it comes, without a float32 copy. Two of one backward would be added before
            # that, narrow as they are: no parameter gets two.
            parameter.grad_dtype = None
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

    def memory(self) -> list[Tensor]:
        """Return all memory of the values with which the model computes, flat."""
        return [self.values]

    def own_values(self, piece: Piece) -> Tensor:
        """Return what the optimizer changes, in float32; ``publish`` then copies it into the values.

        Originals may have moved to host memory.
        """
        return piece.of(self.values) if self.masters is None else piece.of_own(self.masters)

    def put(self, slot: Slot, first: int, rows: Tensor) -> None:
        """Set rows of a parameter, starting at row ``first``; they are float32."""
        # They are rounded where they are: on the device, a float32 copy of the largest tensor would be needed.
        begin, flat = slot.row_start(first), rows.reshape(-1)
        self.values[begin : begin + flat.shape[0]].copy_(flat.to(self.values.dtype))
        if self.masters is not None:
            self.put_own(begin, flat)

    def put_own(self, begin: int, flat: Tensor) -> None:
        """Set those of some scalars, starting at ``begin``, that this rank updates, in float32."""
        for piece in self.pieces:
            start, stop = max(begin, piece.start), min(begin + flat.shape[0], piece.start + piece.length)
            if start < stop:
                own = self.own_values(piece).view(-1)
                own[start - piece.start : stop - piece.start].copy_(flat[start - begin : stop - begin])

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
    """Storage and sharding of the parameters for the optimizer."""

    storage: Storage = FLOAT32
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
    stage: Shares = UNSHARED,
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
        update: Storage and sharding for the optimizer.
    """

    def shares(count: int, place: int) -> Shares:
        given = dataclasses.replace(stage, count=count, place=place, bucket_scalars=update.bucket_scalars)
        return given if update.zero1 else UNSHARED

    cut = tensor.names | experts.names
    exact_names = update.exact - cut if update.storage.dtype != torch.float32 else frozenset()
    parts = [
        FlatParameters(
            ((name, p) for name, p in named.items() if name in slices.names),
            whole=update.whole,
            shares=shares(slices.copies, slices.copy),
            storage=update.storage,
        )
        for slices in (tensor, experts)
    ]
    exact = FlatParameters(
        ((name, p) for name, p in named.items() if name in exact_names),
        shares=shares(stage.count, stage.place),
        storage=dataclasses.replace(update.storage, dtype=torch.float32),
    )
    fused_sizes = [0 if update.zero1 else _fused_size(*both) for both in zip(parts, (tensor, experts), strict=True)]
    exact_size = 0 if update.zero1 else exact.length
    dense = FlatParameters(
        ((name, p) for name, p in named.items() if name not in cut | exact_names),
        piggybacked=piggybacked,
        fused_gradients=sum(fused_sizes) + exact_size,
        whole=update.whole,
        shares=shares(stage.count, stage.place),
        storage=update.storage,
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
