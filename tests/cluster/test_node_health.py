"""A NodeFaultPolicy on a real API server: the taint, the record and the charge, with the rights of the manifests."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

import pytest

from polyreme_cluster.adapters.kubernetes.cluster import KubernetesCluster
from polyreme_cluster.adapters.kubernetes.connection import from_kubeconfig
from polyreme_cluster.port import Manifest, NotFoundError, ObjectRef, TooManyRequestsError
from polyreme_operator.health.record import HEALTH, parse
from tests.cluster.kube import kubectl
from tests.cluster.operators import nodes

PREFIX = "health"
FOREIGN = {"key": "example.com/keep", "effect": "NoSchedule"}
POLICY = ObjectRef(kind="NodeFaultPolicy", name="of-this-test")
WITHIN_S = 30.0
HARDENED = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
"""Another page's commands may have put the namespace at the restricted level."""


async def _until(cluster: KubernetesCluster, ref: ObjectRef, holds: Callable[[Manifest], Any]) -> Manifest:
    until_s = time.monotonic() + WITHIN_S
    while not holds(found := await cluster.get(ref)):
        assert time.monotonic() < until_s, found
        await asyncio.sleep(0.05)
    return found


def _taints(node: Manifest) -> list[str]:
    return [taint["key"] for taint in node["spec"].get("taints") or ()]


async def test_a_fault_is_tainted_and_a_removed_taint_is_a_release(operated: str) -> None:
    async with KubernetesCluster(from_kubeconfig(operated)) as cluster, nodes(cluster, PREFIX, 3, devices=1):
        ref = ObjectRef(kind="Node", name=f"{PREFIX}-1")
        await cluster.patch(ref, {"metadata": {"labels": {"pool": PREFIX}}, "spec": {"taints": [FOREIGN]}})
        spec = {"mode": "Enforce", "classes": ["gpu-lost"], "nodeSelector": {"pool": PREFIX}}
        policy = {"apiVersion": "polyreme.dev/v1alpha1", "kind": POLICY.kind, "metadata": {"name": POLICY.name}}
        made = await cluster.create({**policy, "spec": spec})
        try:
            await _until(cluster, POLICY, lambda found: (found.get("status") or {}).get("nodes") == 1)
            sign = {"type": "polyreme.dev/GPU", "status": "True", "reason": "Xid79", "message": "fell off the bus"}
            known = (await cluster.get(ref))["status"]["conditions"]
            await cluster.patch(ref, {"status": {"conditions": [*known, sign]}}, subresource="status")
            node = await _until(cluster, ref, lambda found: HEALTH in _taints(found))
            assert FOREIGN["key"] in _taints(node)
            record, why = parse(node["metadata"]["annotations"][HEALTH])
            assert record is not None, why
            assert (record.owner, record.reason) == (f"policy/{POLICY.name}", "Xid79")
            status = (await cluster.get(POLICY))["status"]
            assert [charge["node"] for charge in status["breaker"]["charges"]] == [ref.name]
            await cluster.patch(ref, {"spec": {"taints": [FOREIGN]}})
            node = await _until(cluster, ref, lambda found: "released" in found["metadata"]["annotations"][HEALTH])
            assert HEALTH not in _taints(node)
        finally:
            with contextlib.suppress(NotFoundError):
                await cluster.delete(POLICY, uid=made["metadata"]["uid"])


async def test_an_eviction_is_refused_by_a_budget(operated: str) -> None:
    pod: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "guarded", "namespace": "default", "labels": {"app": "guarded"}},
        "spec": {
            "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [{"name": "main", "image": "none", "securityContext": HARDENED}],
            "nodeName": "nowhere",
        },
    }
    budget = ("create", "poddisruptionbudget", "guarded", "--selector=app=guarded", "--min-available=1")
    async with KubernetesCluster(from_kubeconfig(operated)) as cluster:
        made = await cluster.create(pod)
        ref, uid = ObjectRef.of(made), made["metadata"]["uid"]
        try:
            await cluster.patch(ref, {"status": {"phase": "Running"}}, subresource="status")
            kubectl(operated, *budget)
            with pytest.raises(TooManyRequestsError):
                await cluster.evict(ref, uid=uid)
            assert "deletionTimestamp" not in (await cluster.get(ref))["metadata"]
        finally:
            kubectl(operated, "delete", "poddisruptionbudget", "guarded", "--ignore-not-found")
            await cluster.delete(ref, uid=uid, grace_period_s=0)
