"""`kubectl polyreme nodes`, `quarantine` and `release`, on the embedded cluster."""

from __future__ import annotations

from typing import Any

import pytest

from polyreme.plugin import domain_change, nodes
from polyreme.plugin.reading import list_all
from polyreme_api.errors import InvalidConfigError, NotFoundError, RefusedError
from polyreme_cluster.port import ObjectRef
from polyreme_local.api_server.cluster import EmbeddedCluster
from polyreme_local.api_server.store import Store
from polyreme_operator.health.owners import REPAIR_OWNER
from polyreme_operator.health.record import (
    HEALTH,
    NodeState,
    Record,
    Repair,
    RepairAction,
    RepairPhase,
    parse,
    render,
)
from polyreme_operator.health.signs import DOMAIN_FAULT

NOW_S = 1_800_000_000.0
READY = {"type": "Ready", "status": "True", "reason": "KubeletReady"}
FOREIGN = {"key": "example.com/keep", "effect": "NoSchedule"}


def _cluster() -> EmbeddedCluster:
    numbers = iter(range(1000))
    store = Store(new_uid=lambda: f"{next(numbers):08x}", now_s=lambda: NOW_S)
    faulty = [{"type": "polyreme.dev/GPU", "status": "True", "reason": "Xid79", "message": "fell off the bus"}]
    for name, conditions in (("a", [READY]), ("b", [READY, *faulty])):
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}, "spec": {"taints": [FOREIGN]}}
        store.create({**node, "status": {"conditions": conditions}})
    return EmbeddedCluster(store)


async def test_a_quarantine_is_shown_with_its_reason_and_a_release_ends_it() -> None:
    cluster = _cluster()
    await nodes.quarantine(cluster, "b", who="ada", reason="new cable", for_s=0.0, evict=False, now_s=NOW_S)
    row = nodes.rows_of(await list_all(cluster, "Node"), everything=False)[0]
    assert (row.name, row.state, row.owner) == ("b", "quarantined", "person/ada")
    assert "new cable" in row.why
    assert row.back == "person/ada returns it: kubectl polyreme release b"
    with pytest.raises(RefusedError, match="out of service already"):
        await nodes.quarantine(cluster, "b", who="eve", reason="again", for_s=0.0, evict=False, now_s=NOW_S)
    await nodes.release(cluster, "b", who="ada", reason="replaced", now_s=NOW_S + 60.0)
    node = await cluster.get(ObjectRef(kind="Node", name="b"))
    assert node["spec"]["taints"] == [FOREIGN]
    assert "Xid79" in node["metadata"]["annotations"][HEALTH]
    assert nodes.rows_of(await list_all(cluster, "Node"), everything=False) == []
    assert len(nodes.rows_of(await list_all(cluster, "Node"), everything=True)) == 2


async def test_a_repair_and_another_tool_that_repairs_are_shown() -> None:
    cluster = _cluster()
    repair = Repair(action=RepairAction.RESET, attempt=2, phase=RepairPhase.CHECK, job="node-repair-1")
    record = Record(state=NodeState.REPAIRING, owner="policy/gpus", action="Reset", repair=repair, since_s=NOW_S)
    for name, notes in (
        ("a", {HEALTH: render(record)}),
        ("b", {HEALTH: render(record), REPAIR_OWNER: "nvsentinel"}),
    ):
        taint = {"key": HEALTH, "value": "gpu-hang", "effect": "NoSchedule"}
        ref = ObjectRef(kind="Node", name=name)
        await cluster.patch(ref, {"metadata": {"annotations": notes}, "spec": {"taints": [taint]}})
    first, second = nodes.rows_of(await list_all(cluster, "Node"), everything=False)
    assert first.back.startswith("repair: Reset, attempt 2, Check, Job node-repair-1; then an examination")
    assert second.repair_owner == "nvsentinel"


async def test_a_node_that_is_out_with_its_rack_says_what_brings_it_back_and_is_released_for_good() -> None:
    cluster, ref = _cluster(), ObjectRef(kind="Node", name="a")
    record = Record(
        state=NodeState.QUARANTINED,
        owner="policy/gpus",
        reason=DOMAIN_FAULT,
        device="r1",
        condition=f"{DOMAIN_FAULT}/switch",
        since_s=NOW_S,
    )
    taint = {"key": HEALTH, "value": "network-link", "effect": "NoSchedule"}
    notes = {"metadata": {"annotations": {HEALTH: render(record)}}, "spec": {"taints": [taint]}}
    await cluster.patch(ref, notes)
    (row,) = nodes.rows_of(await list_all(cluster, "Node"), everything=False)
    assert "an examination returns it that finds that fewer nodes of r1 show a fault" in row.back
    await nodes.release(cluster, "a", who="ada", reason="its link is fine", now_s=NOW_S)
    after, _ = parse((await cluster.get(ref))["metadata"]["annotations"][HEALTH])
    assert after is not None
    assert f"{DOMAIN_FAULT}/r1" in after.seen, "the operator does not take it out again for this fault of its rack"


async def test_wrong_changes_are_refused_in_one_sentence() -> None:
    cluster = _cluster()
    with pytest.raises(NotFoundError, match="there is no node 'z'"):
        await nodes.release(cluster, "z", who="", reason="r", now_s=NOW_S)
    with pytest.raises(RefusedError, match="is not out of service"):
        await nodes.release(cluster, "a", who="", reason="r", now_s=NOW_S)
    with pytest.raises(InvalidConfigError, match="needs a reason"):
        await nodes.quarantine(cluster, "a", who="", reason=" ", for_s=0.0, evict=False, now_s=NOW_S)


async def test_a_whole_domain_is_taken_out_and_returned_but_for_what_a_policy_took_out() -> None:
    cluster, said = _cluster(), list[str]()
    for kind, name, spec in (
        ("ClusterTopology", "default", {"levels": [{"name": "rack", "nodeLabel": "example.com/rack"}]}),
        ("NodeFaultPolicy", "gpus", {"mode": "Enforce", "nodeSelector": {"example.com/rack": "r1"}}),
    ):
        api = {"apiVersion": "polyreme.dev/v1alpha1", "kind": kind}
        await cluster.create({**api, "metadata": {"name": name}, "spec": spec})
    for at in range(12):
        labels = {"example.com/rack": "r1" if at < 11 else "r2"}
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": f"n{at}", "labels": labels}}
        await cluster.create({**node, "status": {"conditions": [READY]}})
    faulty = Record(state=NodeState.QUARANTINED, owner="policy/gpus", since_s=NOW_S)
    taint = {"key": HEALTH, "value": "gpu-hang", "effect": "NoSchedule"}
    body = {"metadata": {"annotations": {HEALTH: render(faulty)}}, "spec": {"taints": [taint]}}
    await cluster.patch(ObjectRef(kind="Node", name="n3"), body)
    change: dict[str, Any] = {"who": "ada", "reason": "switch", "now_s": NOW_S, "tell": said.append}
    for text, words in (
        ("rack", "a domain is LEVEL=NAME"),
        ("rak=r1", "no level 'rak'.*rack"),
        ("rack=r3", "no node has the label example.com/rack=r3"),
    ):
        with pytest.raises((InvalidConfigError, NotFoundError), match=words):
            await domain_change.release_domain(cluster, text, **change)
    for count in (10, 0):
        taken = await domain_change.quarantine_domain(cluster, "rack=r1", for_s=0.0, evict=False, **change)
        assert taken == count
    assert said[0] == "1 of its nodes were out of service already"
    assert said[1] == "policy gpus takes no further node out: 11 of its nodes are, its breaker allows 1"
    assert await domain_change.release_domain(cluster, "example.com/rack=r1", **change) == 10
    assert said[-1] == "1 of its nodes stay out, since no person took them out; release them by name"
    assert [node.name for node in await nodes.read_nodes(cluster) if node.tainted] == ["n3"]


async def test_spares_are_shown_as_the_topology_names_them() -> None:
    cluster = _cluster()
    api = {"apiVersion": "polyreme.dev/v1alpha1", "kind": "ClusterTopology", "metadata": {"name": "default"}}
    spec = {"levels": [{"name": "rack", "nodeLabel": "example.com/rack"}]}
    await cluster.create({**api, "spec": spec})
    status = {"status": {"spares": 1, "spareNodes": ["a"]}}
    await cluster.patch(ObjectRef(kind="ClusterTopology", name="default"), status, subresource="status")
    spares = nodes.spares_of(await list_all(cluster, "ClusterTopology"))
    (row,) = nodes.rows_of(await list_all(cluster, "Node"), everything=False, spares=spares)
    assert (row.name, row.state) == ("a", "spare")


SILENT = {
    "type": "Ready",
    "status": "Unknown",
    "reason": "NodeStatusUnknown",
    "message": "Kubelet stopped posting node status.",
    "lastTransitionTime": "2027-01-15T07:30:00Z",
}
OUT = {"key": "node.kubernetes.io/out-of-service", "value": "nodeshutdown", "effect": "NoExecute"}
MANUAL = render(Record(state=NodeState.QUARANTINED, owner="person/ada", evidence="new cable", since_s=NOW_S))


@pytest.mark.parametrize(
    ("node", "state", "why", "back"),
    [
        ({"conditions": [READY]}, "healthy", "", ""),
        (
            {"conditions": [SILENT]},
            "not-ready",
            "Ready is Unknown: NodeStatusUnknown: Kubelet stopped posting node status.",
            "it takes workers when its kubelet reports that it is ready",
        ),
        ({"conditions": []}, "not-ready", "its kubelet has not reported", "it takes workers when its kubelet reports"),
        (
            {"conditions": [READY], "unschedulable": True},
            "cordoned",
            "spec.unschedulable is true",
            "kubectl uncordon n",
        ),
        (
            {"conditions": [READY], "taints": [OUT]},
            "out-of-service",
            "taint node.kubernetes.io/out-of-service",
            "kubectl taint node n node.kubernetes.io/out-of-service-",
        ),
        (
            {"conditions": [SILENT], "taints": [{"key": HEALTH}], "annotation": MANUAL},
            "quarantined",
            "new cable; not-ready: Ready is Unknown: NodeStatusUnknown",
            "person/ada returns it: kubectl polyreme release n; then it takes workers when its kubelet reports",
        ),
    ],
)
def test_nodes_shows_every_node_that_takes_no_new_workers(
    node: dict[str, Any], state: str, why: str, back: str
) -> None:
    notes = {} if "annotation" not in node else {HEALTH: node["annotation"]}
    manifest = {
        "metadata": {"name": "n", "uid": "u", "resourceVersion": "1", "annotations": notes},
        "spec": {"taints": node.get("taints", []), "unschedulable": node.get("unschedulable", False)},
        "status": {"conditions": node["conditions"]},
    }
    (row,) = nodes.rows_of([manifest], everything=True)
    assert row.state == state
    assert why in row.why
    assert row.back.startswith(back)
    assert bool(nodes.rows_of([manifest], everything=False)) is (state != "healthy")
