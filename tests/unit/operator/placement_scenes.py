"""Clusters and gangs for tests of placement."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from polyreme_api.job.workers import Topology
from polyreme_operator.placement.topology import Arrangement, arrange
from polyreme_operator.types.inventory import Constraints, GangRequest, Inventory, LevelView, NodeClass, Taint

GPU = "nvidia.com/gpu"
LEVELS = (LevelView(name="block", node_label="net/block"), LevelView(name="rack", node_label="net/rack"))
RESOURCES = (GPU, "cpu", "pods")
GIB = 2**30


def labels_of(path: str) -> dict[str, str]:
    """Labels of a node called ``block/rack/host``."""
    block, rack, _ = path.split("/")
    return {"net/block": block, "net/rack": f"{block}-{rack}"}


def cluster(
    free: Mapping[str, int],
    *,
    levels: Sequence[LevelView] = LEVELS,
    out: Sequence[str] = (),
    risk: Mapping[str, float] | None = None,
    busy: Sequence[str] = (),
    labels: Mapping[str, Mapping[str, str]] | None = None,
    taints: Mapping[str, tuple[Taint, ...]] | None = None,
    capacity: int = 8,
    arrangement: Arrangement | None = None,
) -> Inventory:
    """Nodes named ``block/rack/host`` with so many free devices of ``capacity``, unless an arrangement names others."""
    labels, taints, risk = labels or {}, taints or {}, risk or {}
    arrangement = arrangement or arrange({name: labels_of(name) for name in free}, levels)
    names = arrangement.names
    classes = [NodeClass(labels=labels.get(name, {}), taints=taints.get(name, ())) for name in names]
    capacity_NR = np.array([[max(capacity, free[name]), 64_000, 110] for name in names], dtype=np.int64).reshape(-1, 3)
    used_NR = np.zeros_like(capacity_NR)
    used_NR[:, 0] = [max(capacity, free[name]) - free[name] for name in names]
    return Inventory(
        names=names,
        rows={name: row for row, name in enumerate(names)},
        resources=RESOURCES,
        capacity_NR=capacity_NR,
        used_NR=used_NR,
        usable_N=np.array([name not in out and name not in arrangement.unlabelled for name in names], dtype=np.bool_),
        risk_N=np.array([risk.get(name, 0.0) for name in names], dtype=np.float32),
        busy_N=np.array([name in busy for name in names], dtype=np.int32),
        owned_N=np.zeros(len(names), dtype=np.bool_),
        class_N=np.arange(len(names), dtype=np.int32),
        classes=tuple(classes),
        levels=arrangement.levels,
        level_labels=arrangement.level_labels,
        domain_LN=arrangement.domain_LN,
        domain_names=arrangement.domain_names,
        distance_L=arrangement.distance_L,
    )


def gang(workers: int, *, devices: int = 8, cpu: int = 1000, constraints: Any = None, **topology: Any) -> GangRequest:
    """A gang; further arguments are fields of its topology."""
    return GangRequest(
        workers=workers,
        devices=devices,
        requests=((GPU, devices), ("cpu", cpu), ("pods", 1)),
        constraints=constraints or Constraints(),
        topology=Topology(**topology),
    )


def grid(blocks: int, racks: int, hosts: int, free: int = 8) -> dict[str, int]:
    """Names of a regular cluster's nodes."""
    return {
        f"b{block}/r{rack}/h{host:02d}": free
        for block in range(blocks)
        for rack in range(racks)
        for host in range(hosts)
    }
