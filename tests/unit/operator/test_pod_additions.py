"""Nodes and queues are charged what the API server stores for a pod, before the pod is created where that is known."""

import asyncio
from typing import Any

import pytest

from polyreme_api import labels
from polyreme_cluster.port import Manifest, ObjectRef
from polyreme_operator.cluster_cache import ClusterCache
from polyreme_operator.reconcile.worker_pods import PodDefaults
from polyreme_operator.settings import Settings
from polyreme_operator.types.admission import parse_limit_range
from polyreme_operator.types.resources import amounts, canonical
from tests.unit.operator.operator_scenes import DEVICE, NOW_S, admitted, answered, job, job_manifest, owner_reference
from tests.unit.operator.operator_stories import NAMESPACE, Story, play

CORE = 1000


def limit_range(**limits: Any) -> Manifest:
    spec = {"limits": [{"type": "Container", **limits}]}
    return {
        "apiVersion": "v1",
        "kind": "LimitRange",
        "metadata": {"name": "defaults", "namespace": NAMESPACE},
        "spec": spec,
    }


def runtime_class(cpu: str) -> Manifest:
    head = {
        "apiVersion": "node.k8s.io/v1",
        "kind": "RuntimeClass",
        "metadata": {"name": "sandboxed"},
        "handler": "kata",
    }
    return {**head, "overhead": {"podFixed": {"cpu": cpu}}}


def nodes(story: Story, count: int, *, cpu: str = "8") -> None:
    """Store nodes with four devices each."""
    for at in range(count):
        amounts_ = {DEVICE: "4", "cpu": cpu, "memory": "64Gi", "pods": "110"}
        status = {"allocatable": amounts_, "conditions": [{"type": "Ready", "status": "True"}]}
        story.store.create({"apiVersion": "v1", "kind": "Node", "metadata": {"name": f"n{at}"}, "status": status})


def queue(story: Story, cores: int) -> None:
    spec = {"quotas": [{"resource": "cpu", "nominal": cores * CORE}]}
    head = {"apiVersion": labels.API_VERSION, "kind": labels.KIND_QUEUE, "metadata": {"name": "q"}}
    story.store.create({**head, "spec": spec})


def used_nodes(story: Story) -> list[str]:
    return sorted(pod["spec"]["nodeName"] for pod in story.objects("Pod"))


KNOWN_BEFORE: dict[str, tuple[Manifest, dict[str, Any]]] = {
    "default request": (limit_range(defaultRequest={"cpu": "6"}), {}),
    "default limit": (limit_range(default={"cpu": "6"}), {}),
    "runtime class": (runtime_class("6"), {"runtimeClassName": "sandboxed"}),
}


@pytest.mark.parametrize("case", KNOWN_BEFORE)
def test_what_the_api_server_adds_counts_before_a_pod_is_created(case: str) -> None:
    """Workers that request no cpu themselves get 6 of a node's 8 cores each."""
    added, body = KNOWN_BEFORE[case]

    async def told(story: Story) -> None:
        nodes(story, 3)
        queue(story, 11)
        story.store.create(added)
        workers = {"replicas": 3, "template": {"spec": body}}
        story.job("apart", workers=workers)
        story.job("over", queueName="q", workers={**workers, "replicas": 2})
        async with story.operator():
            await asyncio.sleep(5.0)
            assert used_nodes(story) == ["n0", "n1", "n2"]
            assert story.status("apart")["attempt"]["number"] == 1
            queued = story.condition("over", "Queued")
            assert queued[1] == "ExceedsQuota", queued
            assert "needs 12000 of cpu" in queued[2]
            story.store.delete(ObjectRef.of(added), uid=None)
            await asyncio.sleep(5.0)
            assert story.admitted("over")

    play(told)


def test_what_a_webhook_adds_is_learned_from_the_first_pod_and_counts_for_the_next_placement() -> None:
    """The operator can't know of it before; kube-scheduler refuses the node, and the second place is right."""

    async def told(story: Story) -> None:
        nodes(story, 3)
        create = story.store.create

        def injecting(manifest: Manifest, *, dry_run: bool = False) -> Manifest:
            if manifest["kind"] == "Pod":
                body = dict(manifest["spec"])
                sidecar = {"name": "mesh", "restartPolicy": "Always", "resources": {"requests": {"cpu": "6"}}}
                manifest = {**manifest, "spec": {**body, "initContainers": [sidecar]}}
            return create(manifest, dry_run=dry_run)

        story.store.create = injecting  # type: ignore[method-assign]
        story.job("j", replicas=3)
        async with story.operator():
            for _ in range(40):
                await asyncio.sleep(0.5)
                bind_like_kube_scheduler(story, cores=8, each=6)
            assert used_nodes(story) == ["n0", "n1", "n2"]
            assert [record["cause"] for record in story.status("j")["restartRecords"]] == ["Unschedulable"]

    play(told, Settings(defaults=PodDefaults(binding="NodeAffinity")))


def bind_like_kube_scheduler(story: Story, *, cores: int, each: int) -> None:
    """Bind each pod to the node that its affinity names if it has room, and say so if it has none."""
    for pod in story.objects("Pod"):
        ref = ObjectRef.of(pod)
        if pod["metadata"].get("deletionTimestamp"):
            story.store.delete(ref, uid=None, grace_period_s=0)
            continue
        if pod["spec"].get("nodeName"):
            continue
        required = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        node = required["nodeSelectorTerms"][0]["matchFields"][0]["values"][0]
        taken = sum(other["spec"].get("nodeName") == node for other in story.objects("Pod"))
        if (taken + 1) * each <= cores:
            story.store.bind(ref, uid=pod["metadata"]["uid"], node=node)
        elif not (pod.get("status") or {}).get("conditions"):
            refused = {
                "type": "PodScheduled",
                "status": "False",
                "reason": "Unschedulable",
                "message": "too little cpu",
            }
            story.store.change(ref, {"status": {"conditions": [refused]}}, subresource="status")


def placed(cache: ClusterCache, *, replicas: int = 2) -> str:
    """Store an admitted job without requests of cpu on node n0; return its UID."""
    manifest = job_manifest(replicas=replicas)
    owner = admitted(job(replicas=replicas), ("n0",) * replicas)
    status = owner.status.model_dump(mode="json", by_alias=True, exclude_none=True)
    cache.put({**manifest, "status": status}, now_s=NOW_S)
    answered(cache)
    return owner.uid


def stored_pod(index: int, cpu: str, *, version: int, generation: int = 1) -> Manifest:
    """A worker pod as the API server stored it."""
    tags = {labels.LABEL_INDEX: str(index), labels.LABEL_REPLACEMENT: "0", labels.LABEL_QUEUE: "default"}
    resources = {"limits": {DEVICE: "1"}, "requests": {"cpu": cpu}}
    metadata = {
        "name": labels.pod_name("j", "uid-j", index=index, replacement=0),
        "namespace": "default",
        "uid": f"pod-{index}",
        "resourceVersion": str(version),
        "generation": generation,
        "labels": tags,
        "ownerReferences": [owner_reference("j")],
    }
    spec = {"nodeName": "n0", "containers": [{"name": "launcher", "resources": resources}]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec, "status": {"phase": "Running"}}


def cpu_of(cache: ClusterCache) -> int:
    return cache.ledger.used["default", "cpu"]


def test_a_pod_that_was_stored_with_more_is_charged_that_and_so_are_those_to_come() -> None:
    cache = ClusterCache()
    uid = placed(cache)
    assert cpu_of(cache) == 0
    cache.put(stored_pod(0, "3", version=5), now_s=NOW_S)
    assert cpu_of(cache) == 2 * 3 * CORE
    cache.put(stored_pod(1, "2", version=6), now_s=NOW_S)
    assert cpu_of(cache) == 2 * 3 * CORE
    known = cache.job(uid)
    assert known is not None
    assert dict(known.requests)["cpu"] == 3 * CORE


def test_a_limit_range_that_is_seen_after_the_pods_it_made_counts_once() -> None:
    cache = ClusterCache()
    placed(cache)
    cache.put(stored_pod(0, "3", version=5), now_s=NOW_S)
    made = limit_range(defaultRequest={"cpu": "3"})
    cache.put({**made, "metadata": {**made["metadata"], "uid": "l", "resourceVersion": "6"}}, now_s=NOW_S)
    assert cpu_of(cache) == 2 * 3 * CORE


def test_a_pod_that_was_resized_in_place_is_charged_the_larger_and_others_are_not() -> None:
    cache = ClusterCache()
    uid = placed(cache)
    cache.put(stored_pod(0, "1", version=5), now_s=NOW_S)
    cache.put(stored_pod(0, "5", version=6, generation=2), now_s=NOW_S)
    assert cpu_of(cache) == (5 + 1) * CORE
    known = cache.job(uid)
    assert known is not None
    assert dict(known.requests)["cpu"] == CORE
    cache.put(stored_pod(0, "1", version=7, generation=3), now_s=NOW_S)
    assert cpu_of(cache) == 2 * CORE


def test_what_a_new_operator_finds_stored_is_charged() -> None:
    """Pods may be listed before their job."""
    cache = ClusterCache()
    cache.put(stored_pod(0, "3", version=5), now_s=NOW_S)
    placed(cache)
    assert cpu_of(cache) == 2 * 3 * CORE


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ([{"type": "Container", "defaultRequest": {"cpu": "2"}, "default": {"cpu": "4"}}], {"cpu": "2"}),
        ([{"type": "Container", "default": {"cpu": "4", "memory": "1Gi"}}], {"cpu": "4", "memory": "1Gi"}),
        ([{"type": "Container", "max": {"cpu": "8"}, "min": {"cpu": "1"}}], {"cpu": "8"}),
        ([{"type": "Container", "min": {"cpu": "1"}}], {"cpu": "1"}),
        ([{"type": "Pod", "max": {"cpu": "8"}}, {"type": "PersistentVolumeClaim", "min": {"storage": "1"}}], {}),
        ([], {}),
        (None, {}),
    ],
)
def test_a_limit_range_is_completed_as_by_the_api_server(limits: Any, expected: dict[str, str]) -> None:
    assert parse_limit_range({"spec": {"limits": limits}}) == canonical(amounts(expected))
