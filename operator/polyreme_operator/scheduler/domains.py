"""Rows of nodes and of topology domains that a gang occupies."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from polyreme_operator.placement.tree import tree_of
from polyreme_operator.types.inventory import BoolArray, Inventory, RowArray
from polyreme_operator.types.views import JobView


def domain_rows(inventory: Inventory, level: str | None, rows_W: RowArray) -> BoolArray | None:
    """Return the nodes of the domains that these workers occupy; None without a level or workers."""
    kept_W = rows_W[rows_W >= 0]
    depth = None if level is None else tree_of(inventory).depth_of(level, inventory.level_labels)
    if depth is None or not len(kept_W):
        return None
    domain_N = inventory.domain_LN[depth]
    return np.isin(domain_N, domain_N[kept_W])


def is_torn(inventory: Inventory, level: str | None, rows_W: RowArray) -> bool:
    """Tell whether workers that must share a domain of a level no longer do, since labels or levels have changed.

    It is also true if all of their nodes are gone: their domain is unknown, so no other worker can be placed in it.
    """
    if level is None or not len(rows_W):
        return False
    kept_W = rows_W[rows_W >= 0]
    if not len(kept_W):
        return True
    depth = tree_of(inventory).depth_of(level, inventory.level_labels)
    if depth is None:
        return True
    domain_W = inventory.domain_LN[depth][kept_W]
    return bool(domain_W[0] < 0 or (domain_W != domain_W[0]).any())


def exclusive_domains(inventory: Inventory, jobs: Mapping[str, JobView], uids: Collection[str]) -> dict[str, BoolArray]:
    """Return the nodes of the exclusive domains of running jobs, by job."""
    taken: dict[str, BoolArray] = {}
    for uid in sorted(uids):
        job = jobs[uid]
        if job.spec is None or job.attempt is None:
            continue
        rows_W = rows_of(inventory, job.attempt.placement.node_by_index())
        own_N = domain_rows(inventory, job.spec.topology.exclusive, rows_W)
        if own_N is not None:
            taken[uid] = own_N
    return taken


def rows_of(inventory: Inventory, nodes: Collection[str]) -> RowArray:
    """Return the rows of nodes; -1 for nodes that don't exist."""
    known = inventory.rows
    return np.fromiter((known.get(node, -1) for node in nodes), dtype=np.int32, count=len(nodes))
