"""Places all workers of a gang on the nodes of a snapshot, or none.

Shape suffixes: N nodes, W workers, S places of the gang.
"""

from __future__ import annotations

import numpy as np

from polyreme_operator.placement.domains import (
    CLUSTER,
    Domain,
    Rooms,
    nearest_domain,
    rooms_of,
    smallest_domain,
    spread,
)
from polyreme_operator.placement.eligible import slots_N
from polyreme_operator.placement.rank_order import ordered
from polyreme_operator.placement.topology_request import TopologyRequest, topology_request_of
from polyreme_operator.placement.tree import Tree, tree_of
from polyreme_operator.placement.unschedulable import unschedulable_because
from polyreme_operator.types.inventory import (
    BoolArray,
    FloatArray,
    GangRequest,
    Inventory,
    Placed,
    RowArray,
    Unschedulable,
)

WORST_RISK = 0.5
"""A node with this risk or more is avoided by gangs of any size."""


def place(
    inventory: Inventory,
    request: GangRequest,
    *,
    blocked_N: BoolArray | None = None,
    near_W: RowArray | None = None,
    work_units: int | None = None,
) -> Placed | Unschedulable:
    """Return a place for every worker, or why there is none. Nothing is changed.

    Args:
        inventory: The nodes, and what is taken of them.
        request: What the gang needs.
        blocked_N: Nodes that this gang may not use: other jobs' exclusive domains, reservations.
        near_W: Nodes of workers of the same job that stay: the others go as near to them as they fit.
        work_units: Distances that the search of the order of ranks may look up; None: so many for each worker.
    """
    tree = tree_of(inventory)
    requested = topology_request_of(inventory, tree, request)
    if isinstance(requested, Unschedulable):
        return requested
    barred_N = _barred_N(inventory, tree, requested, blocked_N)
    open_N = slots_N(inventory, request, blocked_N=barred_N)
    rooms, domain = _calmest(tree, requested, open_N, inventory.risk_N, workers=request.workers, near_W=near_W)
    if domain is None:
        return unschedulable_because(inventory, requested, request, rooms, barred_N)
    need_N = spread(tree, requested, rooms, domain, request.workers)
    slots_S = np.repeat(np.arange(len(need_N), dtype=np.int32), need_N)
    order = ordered(tree, requested, request, slots_S, work_units=work_units)
    level, name = _named(tree, domain)
    return Placed(rows_W=order.rows_W, level=level, domain=name, cost=order.cost, work_units=order.work_units)


def _calmest(
    tree: Tree,
    requested: TopologyRequest,
    open_N: RowArray,
    risk_N: FloatArray,
    *,
    workers: int,
    near_W: RowArray | None,
) -> tuple[Rooms, Domain | None]:
    """Find the smallest domain for the gang, without risky nodes where that keeps the gang as near together."""
    rooms = rooms_of(tree, requested, open_N, risk_N)
    domain, is_near = _smallest(tree, requested, rooms, workers, near_W)
    if domain is None:
        return rooms, None
    for limit in avoided_risks(workers):
        calm_N = np.where(risk_N >= limit, 0, open_N).astype(open_N.dtype)
        if np.array_equal(calm_N, open_N):
            break
        calm_rooms = rooms_of(tree, requested, calm_N, risk_N)
        calm, calm_is_near = _smallest(tree, requested, calm_rooms, workers, near_W)
        if calm is not None and (calm.depth, calm_is_near) == (domain.depth, is_near):
            return calm_rooms, calm
    return rooms, domain


def _smallest(
    tree: Tree, requested: TopologyRequest, rooms: Rooms, workers: int, near_W: RowArray | None
) -> tuple[Domain | None, bool]:
    """Return the smallest domain with room, around remaining workers if possible, and whether it is around them."""
    near = None if near_W is None or not len(near_W) else nearest_domain(tree, requested, rooms, workers, near_W)
    return (near, True) if near is not None else (smallest_domain(tree, requested, rooms, workers), False)


def avoided_risks(workers: int) -> tuple[float, ...]:
    """Return the risks from which nodes are avoided, strictest first.

    Workers on so many nodes of the first would fail more likely than not, so a large gang avoids any risk and leaves
    the risky nodes to small ones; every gang avoids nodes that fail more likely than not by themselves.
    """
    of_gang = 1.0 - (1.0 - WORST_RISK) ** (1.0 / max(1, workers))
    return (WORST_RISK,) if workers < 2 else (of_gang, WORST_RISK)


def charge(inventory: Inventory, request: GangRequest, rows_W: RowArray, *, sign: int = 1) -> None:
    """Charge the workers of a gang to the nodes' usage.

    Args:
        inventory: Changed in place.
        request: What one worker needs.
        rows_W: Their nodes; -1 where the node is gone.
        sign: -1 to give it back.
    """
    rows_W = rows_W[rows_W >= 0]
    np.add.at(inventory.busy_N, rows_W, sign)
    for resource, amount in request.requests:
        column = inventory.column(resource)
        if column is not None:
            np.add.at(inventory.used_NR[:, column], rows_W, sign * amount)


def _barred_N(inventory: Inventory, tree: Tree, requested: TopologyRequest, blocked_N: BoolArray | None) -> BoolArray:
    """Return the nodes that the gang must not use: blocked ones, and for an exclusive gang all domains in use."""
    barred_N = np.zeros(len(inventory.names), dtype=np.bool_) if blocked_N is None else blocked_N.copy()
    if requested.exclusive is not None:
        level = tree.levels[requested.exclusive]
        barred_N |= level.rows_in(level.sums(inventory.busy_N > 0) > 0, len(barred_N))
    return barred_N


def _named(tree: Tree, domain: Domain) -> tuple[str, str]:
    if domain.depth == CLUSTER:
        return "", ""
    level = tree.levels[domain.depth]
    return level.name, level.names[domain.number]
