"""The cluster's topology: its levels, and the nodes that it keeps as spares."""

from __future__ import annotations

from polyreme_cluster.port import Manifest, ObjectRef
from polyreme_operator.cache.health import HealthIndex
from polyreme_operator.cache.kinds import Kind
from polyreme_operator.cache.nodes import NodeTable
from polyreme_operator.types.changes import Changes
from polyreme_operator.types.inventory import LevelView, SparesView
from polyreme_operator.types.parse_settings import parse_topology
from polyreme_operator.types.views import TopologyView


class TopologyIndex(Kind):
    """The one ClusterTopology that counts; nodes are arranged by its levels."""

    def __init__(self, nodes: NodeTable, health: HealthIndex) -> None:
        self.view: TopologyView | None = None
        self._nodes, self._health = nodes, health

    @property
    def levels(self) -> tuple[LevelView, ...]:
        """Its levels, from the widest to the narrowest."""
        return () if self.view is None else self.view.levels

    @property
    def spares(self) -> SparesView | None:
        """Which nodes are kept for repairs; None if none are."""
        return None if self.view is None else self.view.spares

    def put(self, ref: ObjectRef, manifest: Manifest, now_s: float) -> Changes:
        """Use a topology, if it is the one that counts."""
        del ref, now_s
        topology = parse_topology(manifest)
        return Changes() if topology is None else self._use(topology)

    def remove(self, ref: ObjectRef) -> Changes:
        """Remove a topology."""
        return self._use(None) if self.view is not None and self.view.name == ref.name else Changes()

    def _use(self, topology: TopologyView | None) -> Changes:
        before, self.view = self.view, topology
        self._nodes.set_levels(self.levels)
        known = None if before is None else (before.levels, before.spares)
        moved = (known is None or known[0] != self.levels) and self._health.touch_all()
        return Changes(capacity=topology is None or known != (self.levels, self.spares), health=moved)
