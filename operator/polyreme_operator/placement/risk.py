"""Chooses the nodes of a gang, and keeps it off risky ones where that spreads it no wider.

Shape suffixes: N nodes, D domains of one level, P domains of the level above.

The choice without regard to risk (``domains.py``) says how near together the gang can be: the level of its domain, and
how many domains it uses at each level below, hosts included. Then, in this order, and only if the gang uses no more
domains at any of these levels: without the nodes that a gang of its size avoids, without those that every gang avoids,
and with all nodes, where of equal domains the calmest is taken.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from polyreme_operator.placement.domains import (
    CLUSTER,
    Domain,
    Rooms,
    best_fit,
    least,
    nearest_domain,
    rooms_of,
    smallest_domain,
    spread,
)
from polyreme_operator.placement.topology_request import TopologyRequest
from polyreme_operator.placement.tree import Tree
from polyreme_operator.types.inventory import FloatArray, IntArray, RowArray

WORST_RISK = 0.5
"""A node with this risk or more is avoided by gangs of any size."""


@dataclasses.dataclass(frozen=True, slots=True)
class Fit:
    """The domain of a gang, and how many workers each node gets."""

    domain: Domain
    need_N: IntArray


def avoided_risks(workers: int) -> tuple[float, ...]:
    """Return the risks from which nodes are avoided, strictest first.

    Workers on so many nodes of the first would fail more likely than not, so a large gang avoids any risk and leaves
    the risky nodes to small ones; every gang avoids nodes that fail more likely than not by themselves.
    """
    of_gang = 1.0 - (1.0 - WORST_RISK) ** (1.0 / max(1, workers))
    return (WORST_RISK,) if workers < 2 else (of_gang, WORST_RISK)


def fit(
    tree: Tree,
    requested: TopologyRequest,
    rooms: Rooms,
    risk_N: FloatArray,
    *,
    workers: int,
    near_W: RowArray | None,
) -> Fit | None:
    """Choose the nodes of a gang; None if no domain holds it.

    Args:
        tree: Of domains.
        requested: What the gang asks of the topology.
        rooms: The room there is.
        risk_N: Of each node.
        workers: Of the gang.
        near_W: Nodes of workers of the same job that stay: the others go as near to them as they fit.
    """
    near = None if near_W is None or not len(near_W) else nearest_domain(tree, requested, rooms, workers, near_W)
    domain = near or smallest_domain(tree, requested, rooms, workers)
    if domain is None:
        return None
    depth = domain.depth
    need_P = np.zeros(len(rooms.of_level(depth)), dtype=np.int64)
    need_P[domain.number] = workers
    below = tuple(spread(tree, requested, rooms, depth, need_P))
    plain = Fit(domain, below[-1] if below else need_P)
    if not risk_N.any():
        return plain
    most = tuple(int(np.count_nonzero(need_D)) for need_D in below)
    among = np.array([domain.number]) if near is not None else np.arange(len(need_P))
    for limit in avoided_risks(workers):
        calm_N = np.where(risk_N >= limit, 0, rooms.slots_N).astype(rooms.slots_N.dtype)
        if np.array_equal(calm_N, rooms.slots_N):
            break
        if int(calm_N.sum()) >= workers:
            calm = rooms_of(tree, requested, calm_N)
            found = _calmest(tree, requested, calm, risk_N, depth=depth, among=among, workers=workers, most=most)
            if found is not None:
                return found
    if near is None:
        among = best_fit(tree, requested, rooms, depth, np.flatnonzero(rooms.of_level(depth) >= workers))
    return _calmest(tree, requested, rooms, risk_N, depth=depth, among=among, workers=workers, most=most) or plain


def _calmest(
    tree: Tree,
    requested: TopologyRequest,
    rooms: Rooms,
    risk_N: FloatArray,
    *,
    depth: int,
    among: Any,
    workers: int,
    most: tuple[int, ...],
) -> Fit | None:
    """Choose the best fit, then the calmest, of the domains in which a gang is spread no wider than ``most``.

    Args:
        tree: Of domains.
        requested: What the gang asks of the topology.
        rooms: The room there is.
        risk_N: Of each node.
        depth: Level of the domains.
        among: Numbers of those that may be chosen.
        workers: Of the gang.
        most: Domains that it may use of each level below, top to bottom.
    """
    room_P = rooms.of_level(depth)
    holding = among[room_P[among] >= workers]
    risk_by_depth = _risk_by_depth(tree, rooms, risk_N)
    need_P = np.zeros(len(room_P), dtype=np.int64)
    need_P[holding] = workers
    need_D, home_D = need_P, np.arange(len(room_P))
    levels = spread(tree, requested, rooms, depth, need_P, risk_by_depth=risk_by_depth)
    for below, (need_D, width) in enumerate(zip(levels, most, strict=True), depth + 1):
        home_D = home_D[tree.levels[below].parent_D]
        used_P = np.bincount(home_D[need_D > 0], minlength=len(room_P))
        holding = holding[used_P[holding] <= width]
    if not len(holding):
        return None
    best = best_fit(tree, requested, rooms, depth, holding)
    number = int(best[0] if depth == CLUSTER else least(best, risk_by_depth[depth][best])[0])
    return Fit(Domain(depth, number), np.where(home_D == number, need_D, 0))


def _risk_by_depth(tree: Tree, rooms: Rooms, risk_N: FloatArray) -> tuple[IntArray, ...]:
    """Return the mean risk of each domain's free slots, in steps of 1/1000, so that rounding decides nothing."""
    milli_N = np.rint(risk_N.astype(np.float64) * 1000).astype(np.int64) * rooms.slots_N
    return tuple(level.sums(milli_N) // np.maximum(level.sums(rooms.slots_N), 1) for level in tree.levels)
