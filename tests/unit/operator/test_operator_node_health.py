"""The operator carries out NodeFaultPolicies: taints, charges, releases, and what it leaves alone."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from polyreme_api.times import rfc3339
from polyreme_cluster.port import STATUS_SUBRESOURCE, ObjectRef
from polyreme_operator.health.node import HealthNode
from polyreme_operator.health.record import HEALTH, NodeState, Record
from polyreme_operator.types.observer import Observer, Observers
from tests.unit.operator.health_stage import FOREIGN, GPU, HealthStage


def test_a_fault_is_tainted_within_a_second_and_foreign_taints_stay() -> None:
    stage = HealthStage()
    stage.add_policy()

    async def story() -> None:
        await asyncio.sleep(5.0)
        stage.show("n0")
        await asyncio.sleep(1.0)
        assert stage.out() == ["n0"]
        assert stage.taints("n0") == [FOREIGN["key"], HEALTH]
        node, record = stage.node("n0"), stage.record("n0")
        assert node["spec"]["taints"][1]["value"] == "gpu-lost"
        assert record is not None
        assert (record.owner, record.reason, record.state) == ("policy/gpus", "Xid79", NodeState.REPAIRING)
        assert node["metadata"]["labels"][HEALTH] == "repairing"
        await asyncio.sleep(2.0)
        status = stage.policy()
        assert [charge["node"] for charge in status["breaker"]["charges"]] == ["n0"]
        assert (status["nodes"], status["outOfService"], status["conditions"][0]["reason"]) == (20, 1, "Enforcing")
        assert len(stage.events("NodeQuarantined")) == 1

    stage.run(story)
    assert stage.metric("polyreme_node_faults_total", action="Drain") == 1.0
    assert stage.metric("polyreme_detect_to_taint_seconds_count") == 1.0


class OutOfService(Observer):
    """Keeps which nodes are reported as out of service, and why."""

    def __init__(self) -> None:
        self.found: set[tuple[str, str]] = set()

    def on_node_states(self, states: Mapping[str, int], out: Sequence[tuple[HealthNode, Record]]) -> None:
        del states
        self.found |= {(node.name, record.reason) for node, record in out}


def test_a_node_out_of_service_is_reported_to_every_observer() -> None:
    first, second = OutOfService(), OutOfService()
    stage = HealthStage(observer=Observers(first, second))
    stage.add_policy()

    async def story() -> None:
        await asyncio.sleep(5.0)
        assert not first.found
        stage.show("n0")
        await asyncio.sleep(2.0)

    stage.run(story)
    assert first.found == second.found == {("n0", "Xid79")}


def test_observing_writes_to_no_node_and_counts() -> None:
    stage = HealthStage()
    stage.add_policy(mode="Observe")

    async def story() -> None:
        before = {each.name: each.version for each in stage.store.records("Node")}
        await asyncio.sleep(5.0)
        for node in ("n1", "n2", "n3", "n4"):
            stage.show(node)
            before.pop(node)
        await asyncio.sleep(5.0)
        assert stage.out() == []
        assert all(stage.record(name) is None for name in ("n1", "n2"))
        assert before.items() <= {each.name: each.version for each in stage.store.records("Node")}.items()
        status = stage.policy()
        assert status["wouldTakeOut"] == 4
        assert status["faults"] == [{"faultClass": "gpu-lost", "nodes": 4, "wouldTakeOut": 4}]
        assert not status["breaker"]["latched"]

    stage.run(story)
    assert stage.metric("polyreme_node_faults_total", action="ObserveDrain") == 4.0


def test_too_many_at_once_latch_the_breaker_and_nothing_is_taken_until_a_reset() -> None:
    stage = HealthStage()
    stage.add_policy()

    async def story() -> None:
        await asyncio.sleep(5.0)
        for at in range(3):
            stage.show(f"n{at}")
        await asyncio.sleep(3.0)
        assert stage.out() == []
        assert stage.policy()["breaker"]["latched"]
        assert stage.policy()["conditions"][0]["reason"] == "BreakerLatched"
        stage.show("n2", status="False")
        await asyncio.sleep(3.0)
        assert stage.out() == []
        stage.store.change(ObjectRef(kind="NodeFaultPolicy", name="gpus"), {"spec": {"breaker": {"reset": "ada"}}})
        await asyncio.sleep(3.0)
        assert stage.out() == ["n0", "n1"]
        assert not stage.policy()["breaker"]["latched"]

    stage.run(story)


def test_a_node_returns_by_examination_and_by_a_persons_hand() -> None:
    stage = HealthStage()
    stage.add_policy(examineSeconds=10)

    async def story() -> None:
        await asyncio.sleep(5.0)
        stage.show("n1", reason="GPUMissing")
        stage.show("n2", reason="GPUMissing")
        await asyncio.sleep(2.0)
        assert stage.out() == ["n1", "n2"]
        ref = ObjectRef(kind="Node", name="n2")
        stage.store.change(ref, {"spec": {"taints": []}})
        await asyncio.sleep(60.0)
        released = stage.record("n2")
        assert released is not None
        assert released.released is not None
        assert released.released.by == "person"
        assert len(stage.events("NodeReleased")) == 1
        assert stage.out() == ["n1"]
        stage.show("n1", status="False")
        await asyncio.sleep(700.0)
        record = stage.record("n1")
        assert stage.out() == []
        assert record is not None
        assert not record.state.is_out

    stage.run(story)


def test_two_policies_on_one_node_and_a_policy_on_none_say_so() -> None:
    stage = HealthStage(3)
    stage.add_policy("one")
    stage.add_policy("two")
    stage.add_policy("none", nodeSelector={"pool": "x"})

    async def story() -> None:
        await asyncio.sleep(5.0)
        stage.show("n1")
        await asyncio.sleep(5.0)
        assert stage.out() == []
        for name, other in (("one", "two"), ("two", "one")):
            ready = stage.policy(name)["conditions"][0]
            assert (ready["reason"], f"also selected by {other}" in ready["message"]) == ("Overlap", True)
        assert stage.policy("none")["conditions"][0]["reason"] == "SelectsNothing"

    stage.run(story)


def test_a_foreign_health_record_is_reported_and_never_trusted() -> None:
    stage = HealthStage()
    stage.add_policy()

    async def story() -> None:
        await asyncio.sleep(5.0)
        ref = ObjectRef(kind="Node", name="n3")
        stage.store.change(ref, {"metadata": {"annotations": {HEALTH: "[" * 10_000}}})
        await asyncio.sleep(2.0)
        assert len(stage.events("NodeHealthUnreadable")) == 1
        assert stage.out() == []

    stage.run(story)


def test_a_condition_of_a_megabyte_and_a_thousand_conditions_are_reported_once() -> None:
    stage = HealthStage()
    stage.add_policy()

    async def story() -> None:
        await asyncio.sleep(5.0)
        known = stage.node("n1")["status"]["conditions"]
        fault = {"type": GPU, "status": "True", "reason": "Xid79", "message": "x\n" * 500_000}
        many = [{"type": f"example.com/{at}", "status": "False"} for at in range(1_000)]
        for node, conditions in (("n1", [*known, fault]), ("n2", [*known, *many])):
            ref = ObjectRef(kind="Node", name=node)
            stage.store.change(ref, {"status": {"conditions": conditions}}, subresource=STATUS_SUBRESOURCE)
        await asyncio.sleep(10.0)
        assert stage.out() == ["n1"]
        said = sorted(event["message"] for event in stage.events("NodeHealthUnreadable"))
        assert said == [
            f"condition {GPU}: its message has more than 1024 characters, so no event of it is read",
            f"it has {1_000 + len(known)} conditions, of these the first 128 are read",
        ]

    stage.run(story)


def test_a_view_that_loses_a_third_of_the_nodes_fences_none_of_them() -> None:
    stage = HealthStage(10)
    stage.add_policy()
    uid = stage.add_job("job", workers={"replicas": 1})

    async def story() -> None:
        await asyncio.sleep(5.0)
        await stage.report("job", uid, attempt=1)
        for at in range(10):
            ref = ObjectRef(kind="Node", name=f"n{at}")
            gone = {"type": "Ready", "status": "Unknown", "lastTransitionTime": rfc3339(stage.clock.now_s())}
            stage.store.change(ref, {"status": {"conditions": [gone]}}, subresource=STATUS_SUBRESOURCE)
        for _ in range(10):
            await asyncio.sleep(10.0)
            await stage.report("job", uid, attempt=1)
        assert stage.condition("job", "Admitted")["status"] == "True"

    stage.run(story)
