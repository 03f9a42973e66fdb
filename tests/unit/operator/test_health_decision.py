"""One decision about the health of all nodes: it follows from its snapshot, and a taint waits for its charge."""

from __future__ import annotations

import dataclasses
from typing import Any

from polyreme_operator.health.facts import NodeFacts
from polyreme_operator.health.node import HealthNode
from polyreme_operator.health.record import NodeState, Record, render
from polyreme_operator.health.signs import ConditionView
from polyreme_operator.health_decision.decide import decide
from polyreme_operator.health_decision.snapshot import Limits, Memory, NodeView, Said, Snapshot
from tests.unit.operator.node_health_scenes import GPU, POLICY

NOW_S = 1_000.0
LIMITS = Limits(repairs=False, namespace="", of_node=50, of_all=5_000)


def view(name: str, *, faulty: bool = False, record: Record | None = None, tainted: bool = False) -> NodeView:
    """Return a node that shows a fault or none."""
    condition = ConditionView(type=GPU, status="True" if faulty else "False", reason="Xid79")
    taints = ({"key": "polyreme.dev/health", "value": "gpu-lost", "effect": "NoSchedule"},) if tainted else ()
    annotation = "" if record is None else render(record)
    node = HealthNode(name=name, uid=name, conditions=(condition,), taints=taints, annotation=annotation)
    facts = NodeFacts(name=name, record=record, tainted=tainted)
    return NodeView(node=node, facts=facts, silent=False, jobs=(), others=(), refused=0, evicted_s=0.0)


def snapshot(*views: NodeView, **fields: Any) -> Snapshot:
    """Return a cluster with one policy, whose breaker allows half of the nodes."""
    nodes = {each.node.name: each for each in views}
    given: dict[str, Any] = {
        "now_s": NOW_S,
        "limits": LIMITS,
        "due": tuple(nodes),
        "view": nodes.get,
        "present": nodes.keys(),
        "tainted": {name for name, each in nodes.items() if each.node.tainted},
        "not_ready_since_s": (),
        "policies": {POLICY.name: dataclasses.replace(POLICY, nodes_percent=50)},
        "levels": (),
        "said": {},
        "jobs": {},
        "costs": {},
        "incidents": {},
        "writable": True,
        "kept": {},
        "refused": (),
        "memory": Memory(),
    }
    return Snapshot(**{**given, **fields})


def test_decision_follows_from_its_snapshot_alone() -> None:
    seen = snapshot(view("n1", faulty=True), view("n2"), view("n3"), view("n4"))
    assert decide(seen) == decide(seen)


def test_taint_waits_for_the_charge_of_its_policy() -> None:
    batch = decide(snapshot(view("n1", faulty=True), view("n2"), view("n3"), view("n4")))
    (charge,) = batch.policies
    assert [each["node"] for each in charge.patch["breaker"]["charges"]] == ["n1"]
    (write,) = batch.nodes
    assert (write.node.name, write.charge) == ("n1", POLICY.name)


def test_demand_beyond_the_breaker_writes_no_node() -> None:
    batch = decide(snapshot(*(view(f"n{at}", faulty=True) for at in range(3)), view("n3")))
    assert [write.patch["breaker"]["latched"] for write in batch.policies] == [True]
    assert not [write for write in batch.nodes if write.takes_out]


def test_outage_that_is_over_before_the_next_decision_has_an_incident() -> None:
    out = Record(state=NodeState.QUARANTINED, owner="policy/gpus", fault_class="gpu-lost", since_s=900.0)
    first = decide(snapshot(view("n1"), said={"n1": Said(record=out)}, writable=False))
    later = decide(snapshot(view("n1"), now_s=NOW_S + 2.0, memory=first.memory))
    (write,) = later.incidents
    assert (write.incident.spec.owner, write.incident.is_open) == ("policy/gpus", False)


def test_node_that_is_deleted_ends_its_incident() -> None:
    out = Record(state=NodeState.QUARANTINED, owner="policy/gpus", fault_class="gpu-lost", since_s=900.0)
    first = decide(snapshot(view("n1", record=out, tainted=True)))
    gone = {"due": ("n1",), "view": lambda _: None, "present": ()}
    later = decide(snapshot(now_s=NOW_S + 2.0, memory=first.memory, **gone))
    assert [write.incident.status.ended for write in later.incidents] == ["NodeDeleted"]
