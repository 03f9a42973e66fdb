"""The nodes of a cluster as integer arrays, and placement requests; placement uses these, never node objects.

Shape suffixes: N nodes, R resources, L levels of the topology, C classes of nodes, W workers of a gang.
A node's *row* is its position in ``names``; rows are in the order of their domains, top level first, then of names, so
that nodes of one domain are neighbours in every array.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from polyreme_api.job.workers import Topology
from polyreme_operator.types.reasons import Reason
from polyreme_planner.layout import Layout
from polyreme_planner.traffic_volume import GroupVolume

IntArray: TypeAlias = NDArray[np.int64]
RowArray: TypeAlias = NDArray[np.int32]
BoolArray: TypeAlias = NDArray[np.bool_]
FloatArray: TypeAlias = NDArray[np.float32]

CPU = "cpu"
"""In thousandths of a core."""
MEMORY = "memory"
"""In bytes, like ephemeral storage."""
PODS = "pods"
HOST_LEVEL = "kubernetes.io/hostname"
"""The lowest level of every topology, where each node is a domain."""

Requests: TypeAlias = tuple[tuple[str, int], ...]
"""Pairs of resource and amount, by name: CPU in thousandths of a core, memory in bytes, devices as a count."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LevelView:
    """A level of the ClusterTopology."""

    name: str
    node_label: str
    distance: int | None = None
    """Cost of crossing it, relative to 1 between hosts; None: four times that of the level below."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SparesView:
    """Nodes that each domain of a level keeps for repairs."""

    level: str
    nodes: int = 0
    percent: int = 0
    """Share of a domain's nodes, rounded up, where ``nodes`` is 0."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Taint:
    """A taint of a node."""

    key: str
    value: str = ""
    effect: str = "NoSchedule"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeClass:
    """Labels, without the host's name, and taints: nodes of one class are equal for selectors and tolerations."""

    labels: Mapping[str, str]
    taints: tuple[Taint, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """Which nodes a pod template accepts, as JSON of ``core/v1``, canonical so that equal templates compare equal."""

    node_selector: tuple[tuple[str, str], ...] = ()
    required_affinity: str = ""
    """``affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution`` as canonical JSON; empty: none."""
    tolerations: str = "[]"
    """``tolerations`` as canonical JSON."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Inventory:
    """A snapshot of all nodes. ``used_NR`` and ``busy_N`` belong to the scheduling cycle that holds the snapshot."""

    names: tuple[str, ...]
    rows: Mapping[str, int]
    """Row by node name."""
    resources: tuple[str, ...]
    """Columns of ``capacity_NR`` and ``used_NR``."""
    capacity_NR: IntArray
    """Allocatable."""
    used_NR: IntArray
    """Used by places of workers and by foreign pods."""
    usable_N: BoolArray
    """Ready, schedulable, in service, and with every label of the topology."""
    risk_N: FloatArray
    """Failure probability of the node, from 0 to 1: of equal domains the one with the lower risk is chosen."""
    busy_N: RowArray
    """Places of workers of any job."""
    owned_N: BoolArray
    """Whether the node has the taint of the operator's own nodes, so that the gang binder may bind there."""
    class_N: RowArray
    classes: tuple[NodeClass, ...]
    levels: tuple[str, ...]
    """Names of the levels, top to bottom; the last is ``HOST_LEVEL``."""
    domain_LN: RowArray
    """Domain of each node at each level, counted from 0 in the order of rows. A node that lacks a label has -1 at every
    level but the last, and its row comes after all others."""
    domain_names: tuple[tuple[str, ...], ...]
    """Names of the domains of each level, by number."""
    level_labels: tuple[str, ...] = ()
    """Node labels of the levels, which name a level as well as its name does."""
    distance_L: IntArray | None = None
    """Distance of two nodes that part at a level, never rising downwards; None: 1 for hosts, times four a level."""
    spare_N: BoolArray | None = None
    """Nodes that are kept as spares in this scheduling cycle; None: they have not been chosen, or there are none."""
    memo: dict[Any, Any] = dataclasses.field(default_factory=dict)
    """Cached results that are valid, and shared by snapshots, until nodes, labels, taints or levels change."""

    def column(self, resource: str) -> int | None:
        """Return the column of a resource; None when no node has it."""
        return self.resources.index(resource) if resource in self.resources else None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GangRequest:
    """Placement request of a gang."""

    workers: int
    devices: int
    """Devices, and so ranks, of each worker."""
    requests: Requests
    """Of each worker, devices and one ``pods`` included."""
    constraints: Constraints = dataclasses.field(default_factory=Constraints)
    topology: Topology = dataclasses.field(default_factory=Topology)
    layout: Layout = dataclasses.field(default_factory=Layout)
    volumes: tuple[GroupVolume, ...] = ()
    """Traffic of the plan's groups, which determines the order of ranks."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A place for every worker."""

    rows_W: RowArray
    """Row of the node of each worker, by index."""
    level: str
    """Lowest level with one domain that holds the gang; empty if there is none."""
    domain: str
    cost: int
    """Bytes x distance of a step, over all groups."""
    work_units: int = 0
    """Work units spent on the search of the rank order."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Unschedulable:
    """Why a gang does not fit, and what would let it run."""

    reason: Reason
    message: str
    lacking: int = 0
    """Workers without a place in the domain that came nearest."""
