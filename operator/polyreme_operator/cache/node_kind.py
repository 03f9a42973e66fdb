"""Nodes: how they enter and leave the cache, and which of them are absent."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from polyreme_cluster.port import Manifest, ObjectRef
from polyreme_operator.cache.absent_nodes import AbsentNodes
from polyreme_operator.cache.health import HealthIndex
from polyreme_operator.cache.kinds import Kind
from polyreme_operator.cache.nodes import NodeTable
from polyreme_operator.cache.usage import UsageLedger
from polyreme_operator.types.changes import Changes
from polyreme_operator.types.parse import parse_node
from polyreme_operator.types.parse_node import parse_health_node
from polyreme_operator.types.views import NodeView


class NodeKind(Kind):
    """Nodes, as placement and as the health of nodes see them.

    Args:
        nodes: Capacity and usage.
        ledger: Jobs on nodes.
        health: Health of nodes; None if it is not decided about.
    """

    def __init__(self, nodes: NodeTable, ledger: UsageLedger, health: HealthIndex | None) -> None:
        self.fences_held = False
        """Whether no node counts as lost, since too many are not ready at once."""
        self._nodes, self._ledger, self._health = nodes, ledger, health
        self._absent = AbsentNodes(lambda node: bool(ledger.jobs_on(node)))

    def put(self, ref: ObjectRef, manifest: Manifest, now_s: float) -> Changes:
        """Add or replace a node."""
        del ref
        changes = self._put(self._absent.seen(parse_node(manifest), now_s))
        if self._health is not None:
            changes.health = self._health.put_node(parse_health_node(manifest), now_s)
        return changes

    def put_unreadable(self, ref: ObjectRef, manifest: Manifest, why: str) -> Changes | None:
        """Keep a node as it was, without new pods."""
        del manifest, why
        node = self._nodes.views.get(ref.name)
        return None if node is None else self._put(dataclasses.replace(node, unschedulable=True))

    def remove(self, ref: ObjectRef) -> Changes:
        """Remove a node."""
        jobs, gone = set(self._ledger.jobs_on(ref.name)), self._nodes.remove(ref.name) is not None
        decide = self._health is not None and self._health.remove_node(ref.name)
        return Changes(jobs=jobs, capacity=gone, health=decide)

    def hold_fences(self, held: bool) -> Changes:
        """Count no node as lost, or count them again."""
        self.fences_held, changes = held, Changes()
        for node in [view for view in self._nodes.views.values() if not view.ready]:
            changes |= self._put(node)
        return changes

    def absent(self, names: Iterable[str], now_s: float) -> dict[str, NodeView]:
        """Return views of those of these nodes that have no Node object."""
        # Not as a difference of sets: that would walk all nodes.
        return self._absent.absent([name for name in names if name not in self._nodes.views], now_s)

    def _put(self, node: NodeView) -> Changes:
        if node.held != (self.fences_held and not node.ready):
            node = dataclasses.replace(node, held=not node.held)
        before = self._nodes.put(node)
        if before == node:
            return Changes()
        health_changed = before is None or before.health != node.health
        return Changes(jobs=set(self._ledger.jobs_on(node.name)) if health_changed else set(), capacity=True)
