"""A job's topology request with levels resolved to depths, or what is wrong with it."""

from __future__ import annotations

import dataclasses

from polyreme_operator.placement.tree import Tree
from polyreme_operator.types.inventory import HOST_LEVEL, GangRequest, Inventory, Unschedulable
from polyreme_operator.types.reasons import Reason


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TopologyRequest:
    """Depths count levels from 0 at the top; None if not requested."""

    required: int | None
    preferred: int | None
    slice_depth: int
    """The hosts' level without slices."""
    slice_workers: int
    """Workers of a slice; 1 without slices."""
    exclusive: int | None


def topology_request_of(inventory: Inventory, tree: Tree, request: GangRequest) -> TopologyRequest | Unschedulable:
    """Resolve the levels of a request."""
    asked = request.topology
    depths: dict[str, int | None] = {}
    for field, level in (
        ("required", asked.required),
        ("preferred", asked.preferred),
        ("sliceLevel", asked.slice_level),
        ("exclusive", asked.exclusive),
    ):
        depths[field] = None if level is None else tree.depth_of(level, inventory.level_labels)
        if level is not None and depths[field] is None:
            return _misconfigured(f"topology.{field} names level {level!r}; there are {_level_names(tree)}")
    slice_depth, slice_workers = depths["sliceLevel"], asked.slice_size or 1
    if slice_depth is None:
        slice_depth = len(tree.levels) - 1
    if request.workers % slice_workers:
        return _misconfigured(
            f"topology.sliceSize {slice_workers} does not divide {request.workers} workers; change one of them"
        )
    upper = depths["required"] if depths["required"] is not None else depths["preferred"]
    if upper is not None and slice_depth < upper:
        words = "required" if depths["required"] is not None else "preferred"
        return _misconfigured(
            f"topology.sliceLevel {level_name(tree, slice_depth)} lies above topology.{words} "
            f"{level_name(tree, upper)}; a slice must fit into the domain of the gang"
        )
    return TopologyRequest(
        required=depths["required"],
        preferred=depths["preferred"],
        slice_depth=slice_depth,
        slice_workers=slice_workers,
        exclusive=depths["exclusive"],
    )


def level_name(tree: Tree, depth: int) -> str:
    """Name a level for people."""
    name = tree.levels[depth].name
    return "host" if name == HOST_LEVEL else name


def _level_names(tree: Tree) -> str:
    return ", ".join(level_name(tree, depth) for depth in range(len(tree.levels)))


def _misconfigured(message: str) -> Unschedulable:
    return Unschedulable(reason=Reason.MISCONFIGURED, message=message)
