"""Exchanges of a sharded update (ZeRO-1, arXiv:1910.02054): gradients to their owners, parameters back.

A bucket's gradient is reduce-scattered as soon as the backward pass has made all of it, while the passes of earlier
layers still run. Buckets go in one fixed order, the last layers' first, whatever order gradients come in: ranks may
have images or not, and experts tokens or not, but a group needs the same exchanges in the same order on each of its
ranks. Buckets that are not complete when the backward ends go then: schedules that compute gradients of weights apart
from those of inputs (zero-bubble) do not signal when they are made.

Parameters are gathered bucket by bucket after the optimizer, and waited for when they are first read.

These exchanges have separate groups. They begin at different moments on each rank, and no order between them and the
exchanges of the backward pass is common to all ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from polyreme_trainer.parallel import collectives
from polyreme_trainer.parallel.flat_buffers import FlatModel, FlatParameters
from polyreme_trainer.parallel.flat_layout import Piece
from polyreme_trainer.parallel.mesh import Meshes, group_ranks, open_group

_STAGE_AXES, _REPLICA_AXES, _EDP_AXES = ("dp", "cp", "tp"), ("dp", "cp"), ("edp",)


@dataclasses.dataclass(slots=True)
class _Turn:
    """One bucket of one part, in the order of its group."""

    part: FlatParameters
    piece: Piece
    parameters: list[nn.Parameter]
    """Parameters that lie in it, at least partly."""
    left: int = 0
    """Gradients of microbatches that are still missing."""


class Replicas:
    """Buffers that all ranks of a group hold copies of, and whose update they shard."""

    def __init__(self, parts: Iterable[FlatParameters], group: dist.ProcessGroup) -> None:
        """Watch the parameters: from now on their gradients may be sent while a backward pass runs.

        Args:
            parts: Buffers, each cut into one share per rank of the group.
            group: A group for these exchanges alone.
        """
        self.group = group
        self._turns = [turn for part in parts for turn in _turns(part)]
        self._next = len(self._turns)
        self._reducing: list[dist.Work] = []
        self._gathering: list[dist.Work] = []
        for index, turn in enumerate(self._turns):
            for slot, parameter in turn.part.parameters():
                if slot.start < turn.piece.bucket.end and turn.piece.bucket.start < slot.start + slot.length:
                    parameter.register_post_accumulate_grad_hook(self._hook(index))
                    turn.parameters.append(parameter)

    def begin(self, passes: int) -> None:
        """Start a step of so many backward passes."""
        self._next = 0
        for turn in self._turns:
            # Frozen parameters get no gradient, so none is waited for.
            turn.left = passes * sum(parameter.requires_grad for parameter in turn.parameters)

    def finish(self) -> None:
        """Reduce the remaining buckets, and wait for all: the owners' shares are then summed."""
        while self._next < len(self._turns):
            self._reduce_next()
        for work in self._reducing:
            work.wait()
        self._reducing.clear()

    def gather(self, part: FlatParameters, piece: Piece) -> None:
        """Begin to send an updated piece to the other ranks, and to receive theirs."""
        whole = piece.bucket.of(part.values)
        self._gathering.append(collectives.begin_gather(whole, piece.of(part.values), self.group))

    def settle(self) -> None:
        """Wait until all parameters are here."""
        for work in self._gathering:
            work.wait()
        self._gathering.clear()

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        def made(_: torch.Tensor) -> None:
            turn = self._turns[index]
            if index < self._next:
                raise RuntimeError(f"a gradient was made after its bucket was reduced: bucket {index}")
            turn.left -= 1
            while self._next < len(self._turns) and self._turns[self._next].left == 0:
                self._reduce_next()

        return made

    def _reduce_next(self) -> None:
        turn = self._turns[self._next]
        own = turn.piece.of_own(turn.part.own_gradients)
        whole = turn.piece.bucket.of(turn.part.gradients)
        self._reducing.append(collectives.begin_reduce_scatter(own, whole, self.group))
        self._next += 1


class Zero1Update:
    """All exchanges of a rank's sharded update."""

    def __init__(self, replicas: Sequence[Replicas], owner_of: dict[int, Replicas]) -> None:
        self._replicas = replicas
        self._replicas_of = owner_of

    def begin(self, passes: int) -> None:
        """Start a step of so many backward passes."""
        for replicas in self._replicas:
            replicas.begin(passes)

    def finish(self) -> None:
        """Wait until the gradients of what this rank updates are summed."""
        for replicas in self._replicas:
            replicas.finish()

    def gather(self, part: FlatParameters, piece: Piece) -> None:
        """Begin to send an updated piece to the other ranks, and to receive theirs; skip parts without copies."""
        if (replicas := self.replicas_of(part)) is not None:
            replicas.gather(part, piece)

    def replicas_of(self, part: FlatParameters) -> Replicas | None:
        """Return the exchanges of a part with the ranks that hold copies of it; None if there are none."""
        return self._replicas_of.get(id(part))

    def settle(self) -> None:
        """Wait until all parameters are here."""
        for replicas in self._replicas:
            replicas.settle()


def open_zero1(flat: FlatModel, meshes: Meshes, *, timeout_s: float) -> Zero1Update:
    """Open the groups of a sharded update; every rank calls it.

    Args:
        flat: Buffers that were laid out for it.
        meshes: This rank's place.
        timeout_s: Longest wait inside one exchange.
    """
    replicas: list[Replicas] = []
    replicas_of: dict[int, Replicas] = {}
    for axes, parts in (
        (_STAGE_AXES, (flat.dense, flat.exact)),
        (_REPLICA_AXES, (flat.tensor.flat,)),
        (_EDP_AXES, (flat.experts.flat,)),
    ):
        shared = [part for part in parts if part.shares.count > 1]
        if not any(part.length for part in shared):
            continue
        group = open_group(group_ranks(meshes.layout, meshes.rank, axes), timeout_s=timeout_s)
        replicas.append(Replicas(shared, group))
        replicas_of |= {id(part): replicas[-1] for part in shared}
    return Zero1Update(replicas, replicas_of)


def _turns(part: FlatParameters) -> list[_Turn]:
    """Order a part's buckets as the backward pass makes them: the last matrices first, vectors (of all layers) last."""
    matrices = [piece for piece in part.pieces if piece.bucket.start < part.matrices_end]
    vectors = [piece for piece in part.pieces if piece.bucket.start >= part.matrices_end]
    return [_Turn(part=part, piece=piece, parameters=[]) for piece in (*reversed(matrices), *reversed(vectors))]
