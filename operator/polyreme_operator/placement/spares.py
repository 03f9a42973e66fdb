"""Warm spares: nodes of each domain of a level that only repairs of running gangs may take.

They are chosen again in each scheduling cycle, idle nodes first: a spare that a repair took is replaced by another idle
node, and a domain without one keeps the next node whose worker leaves. A node is no spare while it is out of service,
in probation, or without devices.

Shape suffixes: N nodes, K candidates, D domains.
"""

from __future__ import annotations

import numpy as np

from polyreme_operator.health.record import PROBATION
from polyreme_operator.placement.eligible import REPELLING
from polyreme_operator.types.inventory import BoolArray, Inventory, SparesView


def spares_N(inventory: Inventory, spares: SparesView, *, reserved_N: BoolArray | None = None) -> BoolArray:
    """Return the nodes that are kept as spares.

    Args:
        inventory: The nodes, and what is taken of them.
        spares: The level, and how many nodes each of its domains keeps.
        reserved_N: Nodes that are reserved for a preemptor; they become spares only after all others.
    """
    found_N = np.zeros(len(inventory.names), dtype=np.bool_)
    if spares.level not in inventory.levels:
        return found_N
    domain_N = inventory.domain_LN[inventory.levels.index(spares.level)]
    row_K = np.flatnonzero(_candidates_N(inventory) & (domain_N >= 0))
    domain_K = domain_N[row_K]
    reserved_K = np.zeros(len(row_K), dtype=np.bool_) if reserved_N is None else reserved_N[row_K]
    # The last of equal nodes, since gangs fill a domain from its first.
    order_K = np.lexsort((-row_K, inventory.busy_N[row_K] > 0, reserved_K, domain_K))
    sorted_K = domain_K[order_K]
    place_K = np.arange(len(sorted_K)) - np.searchsorted(sorted_K, sorted_K)
    # A share is one of all nodes of the domain, whatever state they are in: it does not shrink while nodes fail.
    size_D = np.bincount(domain_N[domain_N >= 0], minlength=1)
    kept_D = np.maximum(spares.nodes, -(-size_D * spares.percent // 100))
    found_N[row_K[order_K[place_K < kept_D[sorted_K]]]] = True
    return found_N


def _candidates_N(inventory: Inventory) -> BoolArray:
    """Return the nodes in full service, of these only those with devices if any has."""
    proven = [
        not any(taint.key == PROBATION and taint.effect in REPELLING for taint in each.taints)
        for each in inventory.classes
    ]
    good_N: BoolArray = inventory.usable_N & np.array(proven, dtype=np.bool_)[inventory.class_N]
    devices = [at for at, resource in enumerate(inventory.resources) if "/" in resource]
    equipped_N = (inventory.capacity_NR[:, devices] > 0).any(axis=1)
    return good_N & equipped_N if equipped_N.any() else good_N
