"""What belongs to a job is what it controls, under the derived name and in its namespace: labels only select."""

import asyncio
from typing import Any

import pytest

from polyreme_api import labels
from polyreme_cluster.port import ObjectRef
from polyreme_local.kubelet.container import is_leader, job_of
from polyreme_operator.cluster_cache import ClusterCache
from polyreme_operator.snapshots import cluster_snapshot, job_snapshot
from tests.unit.operator.operator_scenes import DEVICE, NOW_S, admitted, job, job_manifest, owner_reference
from tests.unit.operator.operator_stories import Story, play

UID = "uid-j"
SUCCEEDED = '{"attempt": 1, "released": true, "joined": 2, "outcome": "Succeeded"}'


def running() -> ClusterCache:
    model = ClusterCache()
    model.put(job_manifest(status=admitted(job()).status), now_s=NOW_S)
    return model


def pod_manifest(name: str = "", *, version: int = 2, where: str = "n0", **metadata: Any) -> dict[str, Any]:
    """A pod in which everything is right for worker 0 of job ``j``, unless ``metadata`` says otherwise."""
    tags = {
        labels.LABEL_JOB: "j",
        labels.LABEL_JOB_UID: UID,
        labels.LABEL_QUEUE: "default",
        labels.LABEL_INDEX: "0",
        labels.LABEL_REPLACEMENT: "0",
    }
    own = {
        "name": name or labels.pod_name("j", UID, index=0, replacement=0),
        "namespace": "default",
        "uid": "pod",
        "resourceVersion": str(version),
        "labels": tags,
        "ownerReferences": [owner_reference("j")],
    }
    container = {"resources": {"limits": {DEVICE: "1"}}}
    spec: dict[str, Any] = {"nodeName": where, "containers": [container]}
    return {"kind": "Pod", "metadata": {**own, **metadata}, "spec": spec, "status": {"phase": "Failed"}}


def lease_manifest(**metadata: Any) -> dict[str, Any]:
    own = {
        "name": labels.job_object_name("j", UID),
        "namespace": "default",
        "uid": "lease",
        "resourceVersion": "2",
        "labels": {labels.LABEL_JOB: "j", labels.LABEL_JOB_UID: UID},
        "annotations": {labels.ANNOTATION_PROGRESS: SUCCEEDED},
        "ownerReferences": [owner_reference("j")],
    }
    return {"kind": "Lease", "metadata": {**own, **metadata}, "spec": {}}


FOREIGN = {
    "of another namespace": {"namespace": "elsewhere"},
    "under another name": {"name": "something-else"},
    "without an owner": {"ownerReferences": []},
    "not controlled by the job": {"ownerReferences": [{**owner_reference("j"), "controller": False}]},
    "of another kind": {"ownerReferences": [{**owner_reference("j"), "kind": "Job", "apiVersion": "batch/v1"}]},
    "of another job": {"ownerReferences": [{**owner_reference("j"), "uid": "uid-other"}]},
}


@pytest.mark.parametrize("metadata", FOREIGN.values(), ids=FOREIGN)
def test_a_foreign_lease_says_nothing_about_a_job(metadata: dict[str, Any]) -> None:
    model = running()
    assert not model.put(lease_manifest(**metadata), now_s=NOW_S).jobs
    snapshot = job_snapshot(model, UID, now_s=NOW_S)
    assert snapshot is not None
    assert snapshot.lease is None
    assert UID not in cluster_snapshot(model, now_s=NOW_S).leases


@pytest.mark.parametrize("metadata", FOREIGN.values(), ids=FOREIGN)
def test_a_foreign_pod_is_no_worker(metadata: dict[str, Any]) -> None:
    model = running()
    used = dict(model.ledger.used)
    assert UID not in model.put(pod_manifest(**metadata), now_s=NOW_S).jobs
    snapshot = job_snapshot(model, UID, now_s=NOW_S)
    assert snapshot is not None
    assert snapshot.pods == ()
    assert dict(model.ledger.used) == used


def test_the_jobs_own_lease_and_pod_count() -> None:
    model = running()
    assert model.put(lease_manifest(), now_s=NOW_S).jobs == {UID}
    assert model.put(pod_manifest(), now_s=NOW_S).jobs == {UID}
    snapshot = job_snapshot(model, UID, now_s=NOW_S)
    assert snapshot is not None
    assert snapshot.lease is not None
    assert len(snapshot.pods) == 1


def test_what_was_seen_before_its_job_is_the_jobs_once_it_is_known() -> None:
    model = ClusterCache()
    for version, phase in ((2, "Running"), (3, "Running")):
        early = pod_manifest(version=version)
        early["status"] = {"phase": phase}
        model.put(early, now_s=NOW_S)
    model.put(lease_manifest(), now_s=NOW_S)
    assert not any(model.ledger.used.values())
    assert cluster_snapshot(model, now_s=NOW_S).inventory.busy_N.sum() == 0
    model.put(job_manifest(), now_s=NOW_S)
    snapshot = job_snapshot(model, UID, now_s=NOW_S)
    assert snapshot is not None
    assert (len(snapshot.pods), snapshot.lease is not None) == (1, True)
    assert model.ledger.used["default", DEVICE] == 1
    model.remove(ObjectRef.of(pod_manifest()), version=9)
    assert not any(model.ledger.used.values())


def test_an_unbound_pod_of_an_invented_job_takes_no_quota() -> None:
    model = ClusterCache()
    name = labels.pod_name("j", "uid-invented", index=0, replacement=0)
    pod = pod_manifest(name, ownerReferences=[{**owner_reference("j"), "uid": "uid-invented"}])
    pod["metadata"]["labels"][labels.LABEL_JOB_UID] = "uid-invented"
    here = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n0"]}]}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [here]}}
    pod["spec"] = {**pod["spec"], "nodeName": "", "affinity": {"nodeAffinity": required}}
    pod["status"] = {"phase": "Pending"}
    model.put(pod, now_s=NOW_S)
    assert not any(model.ledger.used.values())
    assert not list(model.ledger.jobs_on("n0"))


def test_a_bound_pod_of_an_invented_job_takes_room_of_its_node_and_no_quota() -> None:
    model = ClusterCache()
    metadata = {"name": "n0", "resourceVersion": "1"}
    model.put({"kind": "Node", "metadata": metadata, "status": {"allocatable": {DEVICE: "4"}}}, now_s=NOW_S)
    pod = pod_manifest()
    pod["status"] = {"phase": "Running"}
    model.put(pod, now_s=NOW_S)
    assert not any(model.ledger.used.values())
    inventory = cluster_snapshot(model, now_s=NOW_S).inventory
    column = inventory.column(DEVICE)
    assert column is not None
    assert inventory.used_NR[0, column] == 1


def test_the_kubelet_gives_the_leaders_address_to_the_jobs_own_pod_only() -> None:
    own, labelled = pod_manifest(), pod_manifest(ownerReferences=[])
    assert (job_of(own), is_leader(own)) == (("j", UID), True)
    assert (job_of(labelled), is_leader(labelled)) == (("", ""), False)


@pytest.mark.parametrize("kind", ["Pod", "Lease"])
def test_a_name_taken_by_a_foreign_object_is_reported_and_waited_for(kind: str) -> None:
    async def told(story: Story) -> None:
        story.node(devices=4)
        uid = story.job("j", failurePolicy={"maxRestarts": 100, "backoff": {"initialSeconds": 1, "maxSeconds": 1}})
        name = labels.pod_name("j", uid, index=0, replacement=0)
        name = name if kind == "Pod" else labels.job_object_name("j", uid)
        tags = {labels.LABEL_JOB: "j", labels.LABEL_JOB_UID: uid}
        version = {"Pod": "v1", "Lease": "coordination.k8s.io/v1"}[kind]
        metadata = {"name": name, "namespace": "default", "labels": tags}
        story.store.create({"apiVersion": version, "kind": kind, "metadata": metadata, "spec": {}})
        async with story.operator():
            await asyncio.sleep(6.5)
            said = story.status("j")["restartRecords"][0]["message"]
            assert f"{kind} default/{name} exists and is not controlled by the job" in said
            if kind == "Lease":
                story.delete(kind, name)
            await asyncio.sleep(30.0)
            # A replacement has another name; of Leases there is one.
            assert story.admitted("j")
            own = [each for each in story.objects("Pod") if each["metadata"].get("ownerReferences")]
            assert len(own) == 1

    play(told)
