"""Metrics of the health of nodes, by NodeFaultPolicies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from polyreme_cluster.metric_registry import MetricRegistry
from polyreme_operator.health.node import HealthNode
from polyreme_operator.health.record import Record
from polyreme_operator.publishing.cycle_metrics import DECISION_S
from polyreme_operator.types.observer import Observer


class NodeMetrics(Observer):
    """Faults, taints, repairs and incidents of nodes."""

    def __init__(self, registry: MetricRegistry) -> None:
        self.node_faults_total = registry.counter(
            "node_faults_total",
            "Faults of nodes, by class and by what was done (Observe...: only counted).",
            "class",
            "action",
        )
        self.node_repairs_total = registry.counter(
            "node_repairs_total",
            "Hooks that repair nodes, by action and by result: Started, Succeeded, Failed.",
            "action",
            "result",
        )
        self.detect_to_taint_seconds = registry.histogram(
            "detect_to_taint_seconds",
            "Time from the first sight of a node's condition to its stored taint.",
            DECISION_S,
        )
        self.node_health = registry.gauge("node_health", "Nodes by state of their health.", "state")
        self.node_incident_lost_device_seconds_total = registry.counter(
            "node_incident_lost_device_seconds_total",
            "Device-seconds that jobs lost to nodes that left service, by class of the fault.",
            "class",
        )
        self.node_incidents_dropped_total = registry.counter(
            "node_incidents_dropped_total",
            "Sights of nodes that were not added to the history: the queue or the history was full, or it was refused.",
        )

    def on_node_fault(self, fault_class: str, action: str) -> None:
        """Count a fault of a node."""
        self.node_faults_total.labels(fault_class, action).inc()

    def on_node_repair(self, action: str, result: str) -> None:
        """Count a step of a repair."""
        self.node_repairs_total.labels(action, result).inc()

    def on_node_tainted(self, after_s: float) -> None:
        """Time a taint."""
        self.detect_to_taint_seconds.observe(after_s)

    def on_node_states(self, states: Mapping[str, int], out: Sequence[tuple[HealthNode, Record]]) -> None:
        """Replace the number of nodes by state."""
        del out
        self.node_health.clear()
        for state, nodes in states.items():
            self.node_health.labels(state).set(nodes)

    def on_incident_dropped(self) -> None:
        """Count what the history lacks."""
        self.node_incidents_dropped_total.inc()

    def on_incident_cost(self, fault_class: str, device_s: float) -> None:
        """Add the cost of an incident."""
        self.node_incident_lost_device_seconds_total.labels(fault_class).inc(device_s)
