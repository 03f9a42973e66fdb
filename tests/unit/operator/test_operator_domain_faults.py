"""A rack whose nodes fail together is taken out whole, or not at all, and comes back when it is well."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from polyreme_api.times import rfc3339
from polyreme_cluster.port import STATUS_SUBRESOURCE, Manifest, ObjectRef, ServerError
from polyreme_operator.health.record import HEALTH, NodeState
from polyreme_operator.health.signs import DOMAIN_FAULT
from tests.unit.operator.health_stage import HealthStage

NETWORK = "polyreme.dev/Network"
RACK, BLOCK = "example.com/rack", "example.com/block"
SIZE = 8
READY_UNKNOWN = [{"type": "Ready", "status": "Unknown"}]
RULE: dict[str, Any] = {"name": "rack-switch", "level": "rack", "faultClasses": ["network-link"]}


class RackStage(HealthStage):
    """Two blocks of two racks of eight nodes; racks are numbered separately in each block."""

    def __init__(self, *, percent: int = 50, **rule: Any) -> None:
        super().__init__(4 * SIZE)
        for at in range(4 * SIZE):
            labels = {RACK: f"r{at // SIZE % 2}", BLOCK: f"b{at // SIZE // 2}"}
            self.store.change(ObjectRef(kind="Node", name=f"n{at}"), {"metadata": {"labels": labels}})
        levels = [{"name": "block", "nodeLabel": BLOCK}, {"name": "rack", "nodeLabel": RACK}]
        topology = {"metadata": {"name": "default"}, "spec": {"levels": levels}}
        self.store.create({"apiVersion": "polyreme.dev/v1alpha1", "kind": "ClusterTopology", **topology})
        self.rule = {**RULE, **rule}
        self.add_policy(
            classes=["network-link"],
            breaker={"nodesPercent": percent},
            evacuations=[self.rule],
            examineSeconds=10,
            probationSeconds=10,
        )

    def fail(self, *nodes: str, status: str = "True", before_s: float = 0.0) -> None:
        """Have nodes show that their link failed."""
        for node in nodes:
            others = [each for each in self.node(node)["status"]["conditions"] if each["type"] != NETWORK]
            since = rfc3339(self.clock.now_s() - before_s)
            mine = {"type": NETWORK, "status": status, "reason": "LinkDowned", "lastTransitionTime": since}
            changed = {"status": {"conditions": [*others, mine]}}
            self.store.change(ObjectRef(kind="Node", name=node), changed, subresource=STATUS_SUBRESOURCE)


def names(first: int, count: int) -> list[str]:
    return sorted(f"n{at}" for at in range(first, first + count))


def test_the_whole_rack_goes_and_only_that_one_and_is_back_when_fewer_nodes_are_faulty() -> None:
    stage = RackStage()

    async def story() -> None:
        await asyncio.sleep(5.0)
        stage.fail(*names(0, 3))
        await asyncio.sleep(3.0)
        assert stage.out() == names(0, 3), "three of eight are less than half"
        stage.fail("n3")
        await asyncio.sleep(2.0)
        assert stage.out() == names(0, 8)
        neighbour = stage.record("n7")
        assert neighbour is not None
        assert (neighbour.reason, neighbour.device, neighbour.action) == (DOMAIN_FAULT, "b0/r0", "")
        assert "4 of its 8 nodes show network-link" in neighbour.evidence
        assert stage.node("n7")["metadata"]["labels"][HEALTH] == "quarantined"
        assert len(stage.policy()["breaker"]["charges"]) == 8
        await asyncio.sleep(600.0)
        assert stage.out() == names(0, 8), "it is examined, and the rack is still faulty"
        stage.fail("n0", status="False")
        await asyncio.sleep(4_000.0)
        assert stage.out() == ["n1", "n2", "n3"]
        neighbour = stage.record("n7")
        assert neighbour is None or (neighbour.state, neighbour.repairs_s) == (NodeState.HEALTHY, ())

    stage.run(story)


def test_whole_rack_goes_though_its_charge_is_not_stored_at_first() -> None:
    stage = RackStage()
    patch, failures = stage.cluster.patch, iter(range(0))

    async def failing(ref: ObjectRef, body: Any, **options: Any) -> Manifest:
        if "breaker" in body.get("status", {}) and next(failures, None) is not None:
            raise ServerError("away")
        return await patch(ref, body, **options)

    stage.cluster.patch = failing  # type: ignore[method-assign,assignment]

    async def story() -> None:
        nonlocal failures
        await asyncio.sleep(5.0)
        stage.fail(*names(0, 4))
        failures = iter(range(3))
        await asyncio.sleep(5.0)
        assert stage.out() == names(0, 8)

    stage.run(story)


@pytest.mark.parametrize(
    ("rule", "faulty", "said"),
    [
        pytest.param({}, [("n0", 0), ("n1", 0), ("n2", 200), ("n3", 300)], "", id="not together"),
        pytest.param({}, [("n0", 0), ("n1", 0), ("n8", 0), ("n9", 0)], "", id="in two racks"),
        pytest.param({}, [("n0", 0), ("n1", 0), ("n16", 0), ("n17", 0)], "", id="in racks of one name"),
        pytest.param({"nodesPercent": 10}, [("n0", 0), ("n1", 0)], "", id="two nodes"),
        pytest.param(
            {"faultClasses": ["kernel"]},
            [(f"n{at}", 0) for at in range(4)],
            "evacuation rule rack-switch only observes until spec.classes has kernel too",
            id="another class",
        ),
        pytest.param(
            {"level": "row"},
            [(f"n{at}", 0) for at in range(4)],
            "evacuation rule rack-switch names level row, known levels are: block, rack",
            id="no such level",
        ),
    ],
)
def test_what_is_no_fault_of_one_rack_takes_no_neighbour(
    rule: dict[str, Any], faulty: list[tuple[str, int]], said: str
) -> None:
    stage = RackStage(**rule)

    async def story() -> None:
        await asyncio.sleep(400.0)
        for node, before_s in faulty:
            stage.fail(node, before_s=before_s)
        await asyncio.sleep(5.0)
        assert stage.out() == sorted(node for node, _ in faulty)
        ready = stage.policy()["conditions"][0]["message"]
        assert said in ready
        assert bool(said) == ("evacuation rule" in ready)

    stage.run(story)


def test_a_rack_that_the_breaker_does_not_allow_stays_and_is_reported_once_until_there_is_room() -> None:
    stage = RackStage(percent=20)

    async def story() -> None:
        await asyncio.sleep(5.0)
        stage.fail(*names(0, 4))
        await asyncio.sleep(120.0)
        assert stage.out() == names(0, 4), "nodes with a fault of their own go"
        assert not stage.policy()["breaker"]["latched"]
        (event,) = stage.events("DomainTooLarge")
        assert "domain b0/r0 is faulty by evacuation rule rack-switch, and 4 of its nodes stay in service" in str(event)
        assert "at most 6 may be" in str(event)
        change = {"spec": {"breaker": {"nodesPercent": 40}}}
        stage.store.change(ObjectRef(kind="NodeFaultPolicy", name="gpus"), change)
        await asyncio.sleep(5.0)
        assert stage.out() == names(0, 8)

    stage.run(story)


def test_a_neighbour_that_a_person_released_stays_and_a_rule_that_is_gone_keeps_none_out() -> None:
    stage = RackStage()

    async def story() -> None:
        await asyncio.sleep(5.0)
        stage.fail(*names(0, 4))
        await asyncio.sleep(3.0)
        stage.store.change(ObjectRef(kind="Node", name="n5"), {"spec": {"taints": []}})
        await asyncio.sleep(60.0)
        assert stage.out() == sorted({*names(0, 8)} - {"n5"})
        stage.fail("n5")
        await asyncio.sleep(3.0)
        assert stage.out() == names(0, 8), "a fault of its own is new"
        stage.store.change(ObjectRef(kind="NodeFaultPolicy", name="gpus"), {"spec": {"evacuations": []}})
        await asyncio.sleep(4_000.0)
        assert stage.out() == sorted({*names(0, 4), "n5"})

    stage.run(story)


def test_observe_mode_taints_no_node_and_counts_the_neighbours() -> None:
    stage = RackStage()
    stage.store.change(ObjectRef(kind="NodeFaultPolicy", name="gpus"), {"spec": {"mode": "Observe"}})

    async def story() -> None:
        await asyncio.sleep(5.0)
        stage.fail(*names(0, 4))
        await asyncio.sleep(5.0)
        assert stage.out() == []
        assert stage.policy()["wouldTakeOut"] == 8

    stage.run(story)


def test_a_neighbour_with_a_fault_of_its_own_is_out_for_that_one() -> None:
    stage = RackStage()

    async def story() -> None:
        await asyncio.sleep(5.0)
        stage.fail(*names(0, 4))
        await asyncio.sleep(3.0)
        stage.fail("n6")
        await asyncio.sleep(3.0)
        own = stage.record("n6")
        assert own is not None
        assert (own.reason, own.action, own.condition) == ("LinkDowned", "Replace", NETWORK)
        stage.fail(*names(0, 4), status="False")
        await asyncio.sleep(4_000.0)
        assert stage.out() == ["n6"]

    stage.run(story)


def test_nodes_that_are_lost_together_are_a_domains_fault_by_a_rule_for_their_condition() -> None:
    stage = RackStage(faultClasses=["node-lost"])
    lost = {"name": "lost", "action": "Taint", "faultClass": "node-lost", "onNodeConditions": READY_UNKNOWN}
    stage.store.change(
        ObjectRef(kind="NodeFaultPolicy", name="gpus"), {"spec": {"classes": ["node-lost"], "rules": [lost]}}
    )

    async def story() -> None:
        await asyncio.sleep(5.0)
        for node in names(8, 4):
            gone = {"type": "Ready", "status": "Unknown", "lastTransitionTime": rfc3339(stage.clock.now_s())}
            stage.store.change(
                ObjectRef(kind="Node", name=node), {"status": {"conditions": [gone]}}, subresource=STATUS_SUBRESOURCE
            )
        await asyncio.sleep(3.0)
        assert stage.out() == names(8, 8)

    stage.run(story)
