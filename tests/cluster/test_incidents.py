"""A NodeIncident on a real API server: its columns, its schema and the rights by which the operator writes it."""

from __future__ import annotations

import asyncio
import time

from polyreme.plugin.incidents import read_incidents
from polyreme_cluster.adapters.kubernetes.cluster import KubernetesCluster
from polyreme_cluster.adapters.kubernetes.connection import from_kubeconfig
from polyreme_cluster.port import ObjectRef
from polyreme_operator.health.incidents import Incident
from polyreme_operator.health.node import patch_of
from polyreme_operator.health.record import HEALTH, Leave, NodeState, Record
from polyreme_operator.health.states import quarantined_by, released_by
from polyreme_operator.types.parse_node import parse_health_node
from tests.cluster.kube import kubectl
from tests.cluster.operators import nodes

PREFIX = "history"
WITHIN_S = 30.0


async def _incident(cluster: KubernetesCluster, node: str, *, is_open: bool) -> Incident:
    until_s = time.monotonic() + WITHIN_S
    while True:
        found = [each for each in await read_incidents(cluster) if each.spec.node == node and each.status.steps]
        if found and found[-1].is_open == is_open:
            assert len(found) == 1
            return found[0]
        assert time.monotonic() < until_s, found
        await asyncio.sleep(0.2)


async def test_a_quarantine_and_its_release_are_one_incident_with_columns(operated: str) -> None:
    async with KubernetesCluster(from_kubeconfig(operated)) as cluster, nodes(cluster, PREFIX, 1, devices=1):
        ref, now_s = ObjectRef(kind="Node", name=f"{PREFIX}-0"), round(time.time(), 3)
        node = parse_health_node(await cluster.get(ref))
        out = quarantined_by(Record(), who="ada", reason="cable\x1b", until_s=0.0, leave=Leave.DRAIN, at_s=now_s)
        await cluster.patch(ref, patch_of(node, out))
        incident = await _incident(cluster, ref.name, is_open=True)
        assert (incident.spec.owner, incident.spec.evidence) == ("person/ada", "cable\\x1b")
        heads, line = kubectl(operated, "get", "incidents", incident.name).splitlines()
        assert heads.split() == ["NAME", "NODE", "CLASS", "REASON", "STATE", "SINCE", "DEVICE-HOURS"]
        assert line.split()[1:5] == [ref.name, "planned", "Manual", NodeState.QUARANTINED.value]
        node = parse_health_node(await cluster.get(ref))
        back = released_by(out, (), who="ada", reason="replaced", at_s=round(time.time(), 3))
        await cluster.patch(ref, patch_of(node, back))
        incident = await _incident(cluster, ref.name, is_open=False)
        assert (incident.status.ended, incident.status.steps[-1].action) == ("Released", "Released")
        assert "person/ada: replaced" in incident.status.steps[-1].why
        assert HEALTH not in str((await cluster.get(ref))["spec"])
