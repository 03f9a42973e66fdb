"""Two meshes over the same ranks, dense ``(pp, dp, cp, tp)`` and sparse ``(pp, edp, ep)``: arXiv:2504.14960.

Attention and the dense layers see a rank by its place in the dense mesh, the experts by its place in the sparse one.
Both number ranks row-major, so the ranks of one expert-parallel group are neighbours: those that talk most sit closest.
Expert-parallel ranks are also token shards: ``edp * ep = dp * cp * tp``, without tensor parallelism inside an expert.
"""

from __future__ import annotations

import dataclasses
import datetime
import math

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from polyreme_api.errors import InvalidConfigError
from polyreme_api.plan.layout import Layout

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
    """Packs of a step that a rank trains on: equal, contiguous parts in the order of dp.

    Raises:
        InvalidConfigError: If ``dp`` does not divide the packs.
    """
    if packs % layout.dp:
        raise InvalidConfigError(
            f"layout does not fit: dp={layout.dp} must divide the {packs} packs of a step",
            field="spec.training.packsPerStep",
        )
    share = packs // layout.dp
    first = dense_place(layout, rank)["dp"] * share
    return range(first, first + share)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Meshes:
    """The open meshes of this rank and the groups that the step uses."""

    layout: Layout
    rank: int
    dense: DeviceMesh
    sparse: DeviceMesh
    world_group: dist.ProcessGroup
    """All ranks: while only dp is above 1 in the dense mesh, dense gradients are summed over it."""
    edp_group: dist.ProcessGroup
    """Copies of this rank's experts."""
    ep_group: dist.ProcessGroup
    """Ranks that together hold all experts."""


def open_meshes(layout: Layout, *, device_type: str, timeout_s: float) -> Meshes:
    """Unflatten both meshes from the default process group; every rank calls it.

    Args:
        layout: Degrees of the axes.
        device_type: ``cpu`` or ``cuda``.
        timeout_s: Longest wait inside one collective of the groups; they don't inherit the default group's.

    Raises:
        InvalidConfigError: If the degrees do not multiply to the world, or use an axis that is not implemented.
    """
    world = dist.get_world_size()
    if layout.world != world:
        raise InvalidConfigError(
            f"layout does not fit: pp*dp*cp*tp={layout.world}, the job has {world} ranks", field="spec.parallelism"
        )
    for axis in ("pp", "cp", "tp"):
        if getattr(layout, axis) > 1:
            raise InvalidConfigError(
                f"axis not supported: {axis}={getattr(layout, axis)}, it must be 1", field=f"spec.parallelism.{axis}"
            )
    flat = init_device_mesh(device_type, (world,), mesh_dim_names=("world",))
    dense = flat._unflatten(0, dense_sizes(layout), DENSE_AXES)  # noqa: SLF001 - torch 2.13 has no public name for it
    sparse = flat._unflatten(0, sparse_sizes(layout), SPARSE_AXES)  # noqa: SLF001
    world_group, edp_group, ep_group = flat.get_group(), sparse.get_group("edp"), sparse.get_group("ep")
    for group in (world_group, edp_group, ep_group):
        _set_pg_timeout(datetime.timedelta(seconds=timeout_s), group)
    return Meshes(
        layout=layout,
        rank=dist.get_rank(),
        dense=dense,
        sparse=sparse,
        world_group=world_group,
        edp_group=edp_group,
        ep_group=ep_group,
    )


def _place(rank: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    if not 0 <= rank < math.prod(sizes):
        raise InvalidConfigError(f"rank outside the mesh: {rank}, the mesh has {math.prod(sizes)} ranks", field="RANK")
    place: list[int] = []
    for size in reversed(sizes):
        rank, coordinate = divmod(rank, size)
        place.append(coordinate)
    return tuple(reversed(place))
