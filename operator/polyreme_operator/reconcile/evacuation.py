"""Workers that leave a node that was taken out of service, and when: by the job's policy, or at once."""

from __future__ import annotations

from enum import StrEnum

from polyreme_api.job import TrainingJobSpec
from polyreme_operator.health.record import Leave
from polyreme_operator.types.snapshot import JobSnapshot
from polyreme_operator.types.views import NodeView

NAMED_MAX = 3


class Departure(StrEnum):
    """How the workers of one job leave one node."""

    STAY = "Stay"
    CHECKPOINT = "Checkpoint"
    """After a checkpoint of the whole gang."""
    NOW = "Now"


def departure_of(node: NodeView, spec: TrainingJobSpec, now_s: float) -> Departure:
    """Return how the workers of a job leave a node now."""
    if node.leave is Leave.STAY:
        return Departure.STAY
    asked = spec.failure_policy.on_node_fault
    if node.leave is Leave.EVICT or asked.action == "Now":
        return Departure.NOW
    due_s = finish_deadline_s(node, spec)
    if asked.action == "Finish" and (due_s is None or now_s < due_s):
        return Departure.STAY
    return Departure.CHECKPOINT


def finish_deadline_s(node: NodeView, spec: TrainingJobSpec) -> float | None:
    """Return until when a job that finishes may stay on a node; None: until it ends, or it does not stay at all."""
    asked = spec.failure_policy.on_node_fault
    if node.leave is not Leave.DRAIN or asked.action != "Finish" or asked.deadline_seconds is None:
        return None
    return node.leave_since_s + asked.deadline_seconds


def leaving(snapshot: JobSnapshot, spec: TrainingJobSpec, now_s: float) -> dict[int, NodeView]:
    """Return the workers that leave their nodes now, by index, with the node."""
    attempt = snapshot.job.attempt
    if attempt is None:
        return {}
    found = {}
    for index, name in enumerate(attempt.placement.node_by_index()):
        node = snapshot.nodes.get(name)
        if node is not None and departure_of(node, spec, now_s) is not Departure.STAY:
            found[index] = node
    return found


def message_of(left: dict[int, NodeView]) -> str:
    """Return the sentence that names the nodes and their faults."""
    nodes = {node.name: node.fault for node in left.values()}
    named = ", ".join(f"{name} ({fault})" for name, fault in sorted(nodes.items())[:NAMED_MAX])
    more = f" and {len(nodes) - NAMED_MAX} more" if len(nodes) > NAMED_MAX else ""
    return f"node {named}{more} was taken out of service"
