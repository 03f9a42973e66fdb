"""Two meshes over the same ranks, dense ``(pp, dp, cp, tp)`` and sparse ``(pp, edp, ep)``: arXiv:2504.14960.

Attention and the dense layers address a rank by its place in the dense mesh, the experts by its place in the sparse
one. Both number ranks row-major, so the ranks of one expert-parallel group are neighbours: those that exchange most are
closest. Expert-parallel ranks are also token shards: ``edp * ep = dp * cp * tp``, without tensor parallelism inside an
expert.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import cast

import torch.distributed as dist

from polyreme_api.errors import InvalidConfigError
from polyreme_api.rank_state import ExchangeKind
from polyreme_planner.layout import Layout, gives_each_packs, packs_of_rank
from polyreme_trainer.parallel.communicators import Communicators, Operation, Wanted

DENSE_AXES = ("pp", "dp", "cp", "tp")
SPARSE_AXES = ("pp", "edp", "ep")


def dense_sizes(layout: Layout) -> tuple[int, int, int, int]:
    """Sizes in the order of ``DENSE_AXES``."""
    return layout.pp, layout.dp, layout.cp, layout.tp


def sparse_sizes(layout: Layout) -> tuple[int, int, int]:
    """Sizes in the order of ``SPARSE_AXES``.

    Raises:
        InvalidConfigError: If ``ep`` does not divide the token shards.
    """
    shards = layout.dp * layout.cp * layout.tp
    if shards % layout.ep:
        raise InvalidConfigError(
            f"layout does not fit: ep={layout.ep} must divide dp*cp*tp={shards}", field="spec.parallelism.ep"
        )
    return layout.pp, layout.edp, layout.ep


def dense_place(layout: Layout, rank: int) -> dict[str, int]:
    """Coordinates of a rank in the dense mesh."""
    return dict(zip(DENSE_AXES, _place(rank, dense_sizes(layout)), strict=True))


def sparse_place(layout: Layout, rank: int) -> dict[str, int]:
    """Coordinates of a rank in the sparse mesh."""
    return dict(zip(SPARSE_AXES, _place(rank, sparse_sizes(layout)), strict=True))


def experts_of(layout: Layout, rank: int, experts: int) -> range:
    """Global numbers of the experts that a rank holds.

    Raises:
        InvalidConfigError: If ``ep`` does not divide the experts.
    """
    if experts % layout.ep:
        raise InvalidConfigError(
            f"layout does not fit: ep={layout.ep} must divide the {experts} experts", field="spec.parallelism.ep"
        )
    held = experts // layout.ep
    first = sparse_place(layout, rank)["ep"] * held
    return range(first, first + held)


def packs_of(layout: Layout, rank: int, packs: int) -> range:
    """Places of a step that a rank trains on: equal, contiguous parts in the order of dp.

    Places from ``packs`` on are null packs.

    Raises:
        InvalidConfigError: If a rank would have null packs alone.
    """
    if not gives_each_packs(packs, layout.dp):
        raise InvalidConfigError(
            f"layout does not fit: dp={layout.dp} leaves ranks without one of the {packs} packs of a step",
            field="spec.training.packsPerStep",
        )
    share = packs_of_rank(packs, layout.dp)
    first = dense_place(layout, rank)["dp"] * share
    return range(first, first + share)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Meshes:
    """This rank's groups. A group of a degree of 1 is this rank alone; groups of the same ranks are one group."""

    layout: Layout
    rank: int
    communicators: Communicators
    """Opens further groups."""
    control_group: dist.ProcessGroup
    """All ranks, for what the host exchanges: always gloo. While a checkpoint is being saved, the saving thread alone
    uses it: two threads would interleave their exchanges differently on each rank, and deadlock."""
    world_group: dist.ProcessGroup
    """All ranks."""
    stage_group: dist.ProcessGroup
    """dp x cp x tp, the ranks of one pipeline stage, over which gradients of whole dense parameters are summed. Tensor
    ranks are among them, since each sees the tokens of its own part of the sequence."""
    replica_group: dist.ProcessGroup
    """dp x cp, the ranks that hold the same tensor-parallel slices."""
    shard_group: dist.ProcessGroup
    """cp x tp, the ranks over which the packs of one dp rank are cut."""
    pp_group: dist.ProcessGroup
    ring_group: dist.ProcessGroup
    """Context ranks that pass keys and values around; cp = ring x ulysses, Ulysses ranks are neighbours."""
    ulysses_group: dist.ProcessGroup
    """Context ranks that exchange heads for tokens."""
    tp_group: dist.ProcessGroup
    edp_group: dist.ProcessGroup
    """Copies of this rank's experts."""
    ep_group: dist.ProcessGroup
    """Ranks that together hold all experts."""

    def place(self, axis: str) -> int:
        """Coordinate of this rank along an axis of either mesh."""
        return {**dense_place(self.layout, self.rank), **sparse_place(self.layout, self.rank)}[axis]


GROUP_AXES = {
    "world_group": DENSE_AXES,
    "stage_group": ("dp", "cp", "tp"),
    "replica_group": ("dp", "cp"),
    "shard_group": ("cp", "tp"),
    "pp_group": ("pp",),
    "ring_group": ("ring",),
    "ulysses_group": ("ulysses",),
    "tp_group": ("tp",),
    "edp_group": ("edp",),
    "ep_group": ("ep",),
}
"""Axes along which the ranks of a group differ, all of one mesh; cp may be split into ring and ulysses."""
_SUM, _ROWS, _NEIGHBOURS = Operation.SUM, Operation.ROWS, Operation.NEIGHBOURS
GROUP_OPERATIONS = {
    "world_group": {_SUM},
    "stage_group": {_SUM},
    "replica_group": {_SUM, _ROWS},
    "shard_group": {_ROWS},
    "pp_group": {_NEIGHBOURS},
    "ring_group": {_NEIGHBOURS},
    "ulysses_group": {_ROWS},
    "tp_group": {_SUM, Operation.SHARES},
    "edp_group": {_SUM},
    "ep_group": {_ROWS},
}
"""Kinds of exchange of a training step in each group."""
_KINDS = {
    "shard_group": ExchangeKind.CONTEXT,
    "ring_group": ExchangeKind.CONTEXT,
    "ulysses_group": ExchangeKind.CONTEXT,
    "tp_group": ExchangeKind.TENSOR,
    "ep_group": ExchangeKind.EXPERTS,
}


def group_ranks(layout: Layout, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
    """Ranks that differ from ``rank`` along the given axes of one mesh only, in order, including itself."""
    names: tuple[str, ...] = ("pp", "dp", "ring", "ulysses", "tp")
    sizes: tuple[int, ...] = (layout.pp, layout.dp, layout.ring, layout.ulysses, layout.tp)
    if set(axes) <= set(SPARSE_AXES) - {"pp"}:
        names, sizes = SPARSE_AXES, sparse_sizes(layout)
    free = {*axes, *(("ring", "ulysses") if "cp" in axes else ())}
    own = _place(rank, sizes)
    choices = [range(size) if name in free else (place,) for name, size, place in zip(names, sizes, own, strict=True)]
    return tuple(_rank(place, sizes) for place in itertools.product(*choices))


def open_meshes(layout: Layout, communicators: Communicators) -> Meshes:
    """Open this rank's groups and warm them; every rank calls it. The default group becomes the control group.

    Args:
        layout: Degrees of the axes.
        communicators: Opens this rank's groups.

    Raises:
        InvalidConfigError: If the degrees do not multiply to the world, or ``ep`` does not divide the token shards.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    if layout.world != world:
        raise InvalidConfigError(
            f"layout does not fit: pp*dp*cp*tp={layout.world}, the job has {world} ranks", field="spec.parallelism"
        )
    return Meshes(
        layout=layout,
        rank=rank,
        communicators=communicators,
        control_group=cast("dist.ProcessGroup", dist.group.WORLD),
        **communicators.open(mesh_groups(layout, rank)),
    )


def mesh_groups(layout: Layout, rank: int) -> list[Wanted]:
    """Return the groups of both meshes that a rank is in, in the order in which all ranks open theirs."""
    return [
        Wanted(
            name=name,
            ranks=group_ranks(layout, rank, axes),
            operations=frozenset(GROUP_OPERATIONS[name]),
            kind=_KINDS.get(name, ExchangeKind.STAGE),
        )
        for name, axes in GROUP_AXES.items()
    ]


def share_groups(layout: Layout, rank: int, axes: Mapping[str, Sequence[str]]) -> list[Wanted]:
    """Return the groups of more than one rank, by name, that sum and gather shares along axes."""
    wanted = [
        Wanted(name=name, ranks=group_ranks(layout, rank, along), operations=frozenset({Operation.SHARES}))
        for name, along in axes.items()
    ]
    return [each for each in wanted if len(each.ranks) > 1]


def _place(rank: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    if not 0 <= rank < math.prod(sizes):
        raise InvalidConfigError(f"rank outside the mesh: {rank}, the mesh has {math.prod(sizes)} ranks", field="RANK")
    place: list[int] = []
    for size in reversed(sizes):
        rank, coordinate = divmod(rank, size)
        place.append(coordinate)
    return tuple(reversed(place))


def _rank(place: Sequence[int], sizes: Sequence[int]) -> int:
    rank = 0
    for coordinate, size in zip(place, sizes, strict=True):
        rank = rank * size + coordinate
    return rank
