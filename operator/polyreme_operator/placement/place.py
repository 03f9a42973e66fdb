"""Places all workers of a gang on the nodes of a snapshot, or none.

Shape suffixes: N nodes, W workers, S places of the gang.
"""

from __future__ import annotations

import numpy as np

from polyreme_operator.placement.domains import CLUSTER, Domain, rooms_of
from polyreme_operator.placement.eligible import slots_N
from polyreme_operator.placement.rank_order import ordered
from polyreme_operator.placement.risk import fit
from polyreme_operator.placement.topology_request import TopologyRequest, topology_request_of
from polyreme_operator.placement.tree import Tree, tree_of
from polyreme_operator.placement.unschedulable import unschedulable_because
from polyreme_operator.types.inventory import (
    BoolArray,
    GangRequest,
    Inventory,
    Placed,
    RowArray,
    Unschedulable,
)


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
    rooms = rooms_of(tree, requested, open_N)
    found = fit(tree, requested, rooms, inventory.risk_N, workers=request.workers, near_W=near_W)
    if found is None:
        return unschedulable_because(inventory, requested, request, rooms, barred_N)
    slots_S = np.repeat(np.arange(len(found.need_N), dtype=np.int32), found.need_N)
    order = ordered(tree, requested, request, slots_S, work_units=work_units)
    level, name = _named(tree, found.domain)
    rows_W = slots_S[order.place_W]
    return Placed(rows_W=rows_W, level=level, domain=name, cost=order.cost, work_units=order.work_units)


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
