"""`kubectl polyreme nodes`, `quarantine` and `release`, on the embedded cluster."""

from __future__ import annotations

import asyncio

import pytest

from polyreme.plugin import nodes
from polyreme_api.errors import InvalidConfigError, NotFoundError, RefusedError
from polyreme_local.api_server.cluster import EmbeddedCluster
from polyreme_local.api_server.store import Store
from polyreme_operator.health.owners import REPAIR_OWNER
from polyreme_operator.health.record import HEALTH, NodeState, Record, Repair, RepairAction, RepairPhase, render
from polyreme_operator.port import ObjectRef

NOW_S = 1_800_000_000.0
FOREIGN = {"key": "example.com/keep", "effect": "NoSchedule"}


def _cluster() -> EmbeddedCluster:
    numbers = iter(range(1000))
    store = Store(new_uid=lambda: f"{next(numbers):08x}", now_s=lambda: NOW_S)
    faulty = [{"type": "polyreme.dev/GPU", "status": "True", "reason": "Xid79", "message": "fell off the bus"}]
    for name, conditions in (("a", []), ("b", faulty)):
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}, "spec": {"taints": [FOREIGN]}}
        store.create({**node, "status": {"conditions": conditions}})
    return EmbeddedCluster(store)


def test_a_quarantine_is_shown_with_its_reason_and_a_release_ends_it() -> None:
    async def story() -> None:
        cluster = _cluster()
        await nodes.quarantine(cluster, "b", who="ada", reason="new cable", for_s=0.0, evict=False, now_s=NOW_S)
        row = nodes.rows_of(await nodes.read_nodes(cluster), everything=False)[0]
        assert (row.name, row.state, row.owner) == ("b", "quarantined", "person/ada")
        assert "new cable" in row.why
        assert row.back == "person/ada returns it: kubectl polyreme release b"
        with pytest.raises(RefusedError, match="out of service already"):
            await nodes.quarantine(cluster, "b", who="eve", reason="again", for_s=0.0, evict=False, now_s=NOW_S)
        await nodes.release(cluster, "b", who="ada", reason="replaced", now_s=NOW_S + 60.0)
        node = await cluster.get(ObjectRef(kind="Node", name="b"))
        assert node["spec"]["taints"] == [FOREIGN]
        assert "Xid79" in node["metadata"]["annotations"][HEALTH]
        assert nodes.rows_of(await nodes.read_nodes(cluster), everything=False) == []
        assert len(nodes.rows_of(await nodes.read_nodes(cluster), everything=True)) == 2

    asyncio.run(story())


def test_a_repair_and_another_tool_that_repairs_are_shown() -> None:
    async def story() -> None:
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
        first, second = nodes.rows_of(await nodes.read_nodes(cluster), everything=False)
        assert first.back.startswith("repair: Reset, attempt 2, Check, Job node-repair-1; then an examination")
        assert second.repair_owner == "nvsentinel"

    asyncio.run(story())


def test_wrong_changes_are_refused_in_one_sentence() -> None:
    async def story() -> None:
        cluster = _cluster()
        with pytest.raises(NotFoundError, match="there is no node 'z'"):
            await nodes.release(cluster, "z", who="", reason="r", now_s=NOW_S)
        with pytest.raises(RefusedError, match="is not out of service"):
            await nodes.release(cluster, "a", who="", reason="r", now_s=NOW_S)
        with pytest.raises(InvalidConfigError, match="needs a reason"):
            await nodes.quarantine(cluster, "a", who="", reason=" ", for_s=0.0, evict=False, now_s=NOW_S)

    asyncio.run(story())
