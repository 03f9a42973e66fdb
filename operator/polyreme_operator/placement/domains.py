"""Chooses the nodes of a gang: the smallest domain that holds it, and inside it as few sub-domains as possible.

Shape suffixes: N nodes, D domains of one level, P domains of the level above.

Room is counted in workers. With slices, a domain at or above the slices' level has room for whole slices only: the sum
over the slices' domains below it of ``slots // sliceSize * sliceSize``.

The search goes up from the hosts to the first level at which one domain has room for the gang. Of the domains of that
level the one with the least room is chosen (best fit keeps large ones whole), then the first by name; ``risk.py`` may
choose another. A required level ends the search; a preferred one does not, and the last choice is the whole cluster.

Inside, from level to level downwards: a domain that must hold ``n`` fills its largest children until the rest fits into
one, and takes for that the smallest that holds it. No choice of children is smaller. All domains of a level are done at
once, so a gang of any size costs a few sorts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from polyreme_operator.placement.topology_request import TopologyRequest
from polyreme_operator.placement.tree import Tree
from polyreme_operator.types.inventory import IntArray, RowArray

CLUSTER = -1
"""The depth above the top level, where all nodes are one domain."""


@dataclasses.dataclass(frozen=True, slots=True)
class Domain:
    """A domain: its level's depth and its number there."""

    depth: int
    number: int


@dataclasses.dataclass(frozen=True, slots=True)
class Rooms:
    """Room of every domain, in workers."""

    slots_N: RowArray
    by_depth: tuple[IntArray, ...]
    cluster: int
    """Room of the whole cluster."""

    def of_level(self, depth: int) -> IntArray:
        """Return the room of each domain of a level, or of the whole cluster."""
        return self.by_depth[depth] if depth != CLUSTER else np.array([self.cluster], dtype=np.int64)


def rooms_of(tree: Tree, requested: TopologyRequest, slots_N: RowArray) -> Rooms:
    """Sum the room of every domain."""
    whole_N: Any = slots_N
    if requested.slice_workers > 1:
        level = tree.levels[requested.slice_depth]
        whole_N = np.zeros(len(slots_N), dtype=np.int64)
        whole_N[level.start_D] = level.sums(slots_N) // requested.slice_workers * requested.slice_workers
    last = len(tree.levels) - 1
    by_depth = tuple(
        slots_N.astype(np.int64)[: len(level.start_D)]
        if depth == last and requested.slice_workers == 1
        else level.sums(whole_N if depth <= requested.slice_depth else slots_N)
        for depth, level in enumerate(tree.levels)
    )
    return Rooms(slots_N=slots_N, by_depth=by_depth, cluster=int(by_depth[0].sum()))


def smallest_domain(tree: Tree, requested: TopologyRequest, rooms: Rooms, workers: int) -> Domain | None:
    """Find the smallest domain with room for the gang; None if no domain of the required level has."""
    top = CLUSTER if requested.required is None else requested.required
    for depth in range(len(tree.levels) - 1, top - 1, -1):
        holding = np.flatnonzero(rooms.of_level(depth) >= workers)
        if len(holding):
            return Domain(depth, int(best_fit(tree, requested, rooms, depth, holding)[0]))
    return None


def nearest_domain(
    tree: Tree, requested: TopologyRequest, rooms: Rooms, workers: int, near_W: RowArray
) -> Domain | None:
    """Find the smallest domain around the remaining workers with room for the others; None if there is none.

    Without one the others go wherever they fit, as a gang of their own.
    """
    top = CLUSTER + 1 if requested.required is None else requested.required
    for depth in range(len(tree.levels) - 1, top - 1, -1):
        around, room_D = np.unique(tree.domain_LN[depth, near_W]), rooms.by_depth[depth]
        # A host without the topology's labels has a number, but is no domain.
        if len(around) == 1 and 0 <= around[0] < len(room_D) and room_D[around[0]] >= workers:
            return Domain(depth, int(around[0]))
    return None


def best_fit(tree: Tree, requested: TopologyRequest, rooms: Rooms, depth: int, holding: Any) -> Any:
    """Return those of some domains of one level with the least room, by name."""
    if requested.exclusive is not None and requested.exclusive < depth:
        taken = tree.domain_LN[requested.exclusive, tree.levels[depth].start_D[holding]]
        holding = least(holding, rooms.by_depth[requested.exclusive][taken])
    return least(holding, rooms.of_level(depth)[holding])


def least(candidates: Any, value: Any) -> Any:
    """Return the candidates with the lowest value."""
    return candidates[value == value.min()]


def spread(
    tree: Tree,
    requested: TopologyRequest,
    rooms: Rooms,
    depth: int,
    need_D: IntArray,
    *,
    risk_by_depth: tuple[IntArray, ...] | None = None,
) -> Iterator[IntArray]:
    """Yield how many workers each domain gets, level by level downwards, the hosts last.

    Args:
        tree: Of domains.
        requested: Workers of a slice stay together.
        rooms: Room of every domain.
        depth: Level of the domains whose workers are distributed.
        need_D: Workers of each of them, never more than its room; each is distributed by itself.
        risk_by_depth: Of equal children the calmer is filled first; None: the first by name.
    """
    for below in range(depth + 1, len(tree.levels)):
        # Room of children is counted in whole slices down to the slices' level, and in workers below it.
        step = requested.slice_workers if below <= requested.slice_depth else 1
        risk_D = None if risk_by_depth is None else risk_by_depth[below]
        need_D = _fill(tree.levels[below].parent_D, rooms.by_depth[below], need_D, risk_D, step)
        yield need_D


def _fill(parent_D: IntArray, room_D: IntArray, need_P: IntArray, risk_D: IntArray | None, step: int) -> IntArray:
    """Distribute each parent's workers to as few of its children as possible.

    Args:
        parent_D: Parent of each child.
        room_D: Room of each child.
        need_P: What each parent must hold; never more than its children's room.
        risk_D: Of equal children the calmer is filled first; None: the first by name.
        step: A child is given multiples of this.
    """
    total_P = np.bincount(parent_D, weights=room_D, minlength=len(need_P)).astype(np.int64)
    given_D = np.where((need_P == total_P)[parent_D], room_D, 0)
    partly_P = (need_P > 0) & (need_P < total_P)
    child = np.flatnonzero(partly_P[parent_D] & (room_D > 0))
    if not len(child):
        return given_D
    # Within each parent: largest first, then lowest risk, then by name.
    keys = () if risk_D is None else (risk_D[child],)
    child = child[np.lexsort((*keys, -room_D[child], parent_D[child]))]
    group_C, room_C = parent_D[child], room_D[child]
    before_C = np.cumsum(room_C) - room_C
    first_C = np.diff(group_C, prepend=-1) != 0
    before_C -= np.maximum.accumulate(np.where(first_C, before_C, 0))
    rest_C = need_P[group_C] - before_C
    # Children are full until one holds all that is left, once in each parent. Rooms fall from there on: the tightest
    # that still holds the rest is the last that does, and of its equals the first.
    last = np.flatnonzero((rest_C > 0) & (room_C >= rest_C))
    full = (rest_C > 0) & (room_C < rest_C)
    given_D[child[full]] = room_C[full]
    widest = int(room_C.max()) + 1
    key_C = group_C * widest - room_C
    stop = np.searchsorted(key_C, group_C[last] * widest - rest_C[last], side="right")
    chosen = np.maximum(np.searchsorted(key_C, key_C[stop - 1], side="left"), last)
    given_D[child[chosen]] = rest_C[last]
    assert not (given_D % step).any()
    return given_D
