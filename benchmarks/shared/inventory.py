"""Clusters of calm nodes for benchmarks of placement."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from polyreme_operator.placement.topology import arrange
from polyreme_operator.types.inventory import IntArray, Inventory, LevelView, NodeClass


def inventory_of(
    labels: Mapping[str, Mapping[str, str]],
    levels: tuple[LevelView, ...],
    resources: tuple[str, ...],
    capacity_NR: IntArray,
    used_NR: IntArray,
) -> Inventory:
    """Build a cluster of calm nodes with these labels, in the order of their domains."""
    arrangement = arrange(labels, levels)
    names, nodes = arrangement.names, len(labels)
    return Inventory(
        names=names,
        rows={name: row for row, name in enumerate(names)},
        resources=resources,
        capacity_NR=capacity_NR,
        used_NR=used_NR,
        usable_N=np.ones(nodes, dtype=np.bool_),
        risk_N=np.zeros(nodes, dtype=np.float32),
        busy_N=np.zeros(nodes, dtype=np.int32),
        owned_N=np.zeros(nodes, dtype=np.bool_),
        class_N=np.zeros(nodes, dtype=np.int32),
        classes=(NodeClass(labels={}),),
        levels=arrangement.levels,
        level_labels=arrangement.level_labels,
        domain_LN=arrangement.domain_LN,
        domain_names=arrangement.domain_names,
        distance_L=arrangement.distance_L,
    )
