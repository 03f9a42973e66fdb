"""The incremental model against a recount: whatever events come, in whatever order, stale ones and lists included."""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from polyreme_api import labels
from polyreme_cluster.port import Manifest, ObjectRef, WatchEvent, WatchEventType
from polyreme_operator.cache.plan_book import planned
from polyreme_operator.cache.usage import Charge, Place, placement_charges, pod_charge
from polyreme_operator.cluster_cache import ClusterCache
from polyreme_operator.reconcile.transition import admit
from polyreme_operator.scheduler import cluster_of
from polyreme_operator.snapshots import cluster_snapshot
from polyreme_operator.types.parse import parse_foreign_pod, parse_job_view, parse_node, parse_pod
from polyreme_operator.types.resources import larger
from polyreme_operator.types.views import JobView, PodView
from tests.unit.operator.operator_scenes import DEVICE, NOW_S, answered, owner_reference

NODES = ("n0", "n1", "n2")
JOBS = ("a", "b")
OTHERS = ("other-0", "other-1")


def job_manifest(name: str, version: int, placed: tuple[str, ...], *, finished: bool) -> Manifest:
    document: dict[str, Any] = {
        "apiVersion": labels.API_VERSION,
        "kind": labels.KIND_JOB,
        "metadata": {
            "name": name,
            "namespace": "default",
            "uid": f"uid-{name}",
            "resourceVersion": str(version),
            "generation": 1,
            "creationTimestamp": "2023-11-14T22:00:00Z",
        },
        "spec": {
            "queueName": f"q-{name}",
            "model": {"preset": "kimi-vl-nano"},
            "data": {"sources": [{"name": "a", "dataset": "sample/digits"}], "sequenceTokens": 128},
            "training": {"steps": 50, "packsPerStep": 12},
            "workers": {"replicas": 2, "template": {"spec": {"containers": [{"resources": {"requests": {"cpu": 1}}}]}}},
        },
    }
    if placed:
        status = admit(planned(parse_job_view(document)), placed, NOW_S)
        document["status"] = status.model_dump(mode="json", by_alias=True, exclude_none=True)
        if finished:
            document["status"]["conditions"] = [{"type": "Succeeded", "status": "True", "reason": "Completed"}]
    return document


def pod_manifest(
    name: str, index: int, replacement: int, node: str, version: int, phase: str, *, cpu: str = "500m"
) -> Manifest:
    uid = f"uid-{name}"
    tags = {
        labels.LABEL_JOB: name,
        labels.LABEL_JOB_UID: uid,
        labels.LABEL_INDEX: str(index),
        labels.LABEL_REPLACEMENT: str(replacement),
        labels.LABEL_QUEUE: f"q-{name}",
    }
    container = {"resources": {"limits": {DEVICE: "1"}, "requests": {"cpu": cpu}}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": labels.pod_name(name, uid, index=index, replacement=replacement),
            "namespace": "default",
            "uid": f"pod-{name}-{index}-{replacement}",
            "resourceVersion": str(version),
            "generation": 2,
            "labels": tags,
            "ownerReferences": [owner_reference(name)],
        },
        "spec": {"nodeName": node, "containers": [container]},
        "status": {"phase": phase},
    }


def foreign_manifest(name: str, node: str, version: int, phase: str, cpu: int) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "kube-system", "uid": name, "resourceVersion": str(version)},
        "spec": {"nodeName": node, "containers": [{"resources": {"requests": {"cpu": cpu}}}]},
        "status": {"phase": phase},
    }


def node_manifest(name: str, version: int, devices: int, rack: str, *, closed: bool) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "resourceVersion": str(version), "labels": {"rack": rack}},
        "spec": {"unschedulable": closed},
        "status": {
            "allocatable": {DEVICE: str(devices), "cpu": "8"},
            "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": "2023-11-14T22:00:00Z"}],
        },
    }


@st.composite
def manifests(draw: st.DrawFn, version: int) -> Manifest:
    node = draw(st.sampled_from(NODES))
    phase = draw(st.sampled_from(("Pending", "Running", "Succeeded")))
    match draw(st.sampled_from(("job", "pod", "foreign", "node"))):
        case "job":
            placed = draw(st.sampled_from(((), ("n0", "n1"), ("n1", "n1"), ("n2", "gone"))))
            return job_manifest(draw(st.sampled_from(JOBS)), version, placed, finished=draw(st.booleans()))
        case "pod":
            index, number = draw(st.integers(0, 1)), draw(st.integers(0, 1))
            # It may have been resized in place, below or above what its job was charged.
            cpu = draw(st.sampled_from(("500m", "1", "2")))
            return pod_manifest(draw(st.sampled_from(JOBS)), index, number, node, version, phase, cpu=cpu)
        case "foreign":
            return foreign_manifest(draw(st.sampled_from(OTHERS)), node, version, phase, draw(st.integers(1, 2)))
        case _:
            rack, closed = draw(st.sampled_from(("r0", "r1"))), draw(st.booleans())
            return node_manifest(node, version, draw(st.integers(0, 4)), rack, closed=closed)


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, Manifest]]:
    """Changes of a small cluster in the order of their versions: puts and deletions."""
    steps: list[tuple[str, Manifest]] = []
    for version in range(1, draw(st.integers(1, 25)) + 1):
        known = [manifest for what, manifest in steps if what == "put"]
        if known and draw(st.integers(0, 4)) == 0:
            gone = draw(st.sampled_from(known))
            metadata = {**gone["metadata"], "resourceVersion": str(version)}
            steps.append(("delete", {**gone, "metadata": metadata}))
        else:
            steps.append(("put", draw(manifests(version))))
    return steps


def truth(steps: list[tuple[str, Manifest]]) -> dict[ObjectRef, Manifest]:
    there: dict[ObjectRef, Manifest] = {}
    for what, manifest in steps:
        if what == "put":
            there[ObjectRef.of(manifest)] = manifest
        else:
            there.pop(ObjectRef.of(manifest), None)
    return there


def usage_of(jobs: Iterable[JobView], pods: Iterable[PodView]) -> Mapping[Place, Charge]:
    """Recompute usage from scratch, to check the ledger; what counts for a worker's queue comes last."""
    places: dict[Place, Charge] = {}
    taken = [pod_charge(pod) for pod in sorted(pods, key=lambda pod: pod.uid, reverse=True)]
    charges = [charge for charge in taken if charge is not None]
    for place, charge in [*charges, *(each for job in jobs for each in placement_charges(job))]:
        known = places.pop(place, charge)
        places[place] = Charge(charge.queue, larger(charge.requests, known.requests))
    return places


def by_queue(places: Mapping[Place, Charge]) -> Mapping[tuple[str, str], int]:
    """Sum charges by queue and resource, each worker once."""
    used: Counter[tuple[str, str]] = Counter()
    workers = {place[:2]: charge for place, charge in places.items()}
    for charge in workers.values():
        for resource, amount in charge.requests:
            used[charge.queue, resource] += amount
    return used


def check(model: ClusterCache, there: dict[ObjectRef, Manifest]) -> None:
    jobs = [planned(parse_job_view(each)) for ref, each in there.items() if ref.kind == labels.KIND_JOB]
    claims = {ref: pod for ref, each in there.items() if ref.kind == "Pod" and (pod := parse_pod(each)) is not None}
    known, kept = {job.uid for job in jobs}, cluster_snapshot(answered(model), now_s=NOW_S)
    # A pod whose job is gone is charged as its job's if the job was known before, else like any other pod.
    orphans = {ref for uid, pods in kept.pods.items() if uid not in known for ref in pods}
    pods = [pod for ref, pod in claims.items() if pod.job_uid in known or ref in orphans]
    ours = {pod.ref for pod in pods}
    nodes = [parse_node(each) for ref, each in there.items() if ref.kind == "Node"]
    foreign = [
        other
        for ref, each in there.items()
        if ref.kind == "Pod" and ref not in ours and (other := parse_foreign_pod(each)) is not None
    ]
    places = usage_of(jobs, pods)
    counted = {key: count for key, count in model.ledger.used.items() if count}
    assert counted == {key: count for key, count in by_queue(places).items() if count}
    fresh = cluster_of(jobs=jobs, pods=pods, nodes=nodes, foreign=foreign)
    for name in ("names", "resources", "levels"):
        assert getattr(kept.inventory, name) == getattr(fresh.inventory, name)
    for name in ("capacity_NR", "used_NR", "usable_N", "busy_N"):
        assert np.array_equal(getattr(kept.inventory, name), getattr(fresh.inventory, name)), name
    kinds = [[each.classes[at] for at in each.class_N] for each in (kept.inventory, fresh.inventory)]
    assert kinds[0] == kinds[1]
    for name in ("running", "resizing", "exclusive", "victims_of"):
        assert getattr(kept, name) == getattr(fresh, name), name
    # When a job came is what the first to see it knows, until the status says it: that is no matter of counting.
    assert {each.uid: dataclasses.replace(each, kind=0, arrival=0) for each in kept.waiting} == {
        each.uid: dataclasses.replace(each, kind=0, arrival=0) for each in fresh.waiting
    }
    on_nodes = {uid for name in (*NODES, "gone") for uid in model.ledger.jobs_on(name)}
    assert on_nodes == {uid for uid, _, _ in places}


@given(steps=histories(), order=st.randoms(use_true_random=False), looks=st.integers(0, 3))
@settings(max_examples=100)
def test_what_is_counted_along_equals_a_recount(steps: Any, order: Any, looks: int) -> None:
    """Events of one object may come late, twice, or never, once a list has shown how it ended."""
    model = ClusterCache()
    told = [step for step in steps if order.random() < 0.8]
    told += [step for step in steps if order.random() < 0.3]
    if order.random() < 0.5:
        order.shuffle(told)
    for at, (what, manifest) in enumerate(told):
        kind = WatchEventType.DELETED if what == "delete" else WatchEventType.MODIFIED
        model.apply(WatchEvent(type=kind, object=manifest), now_s=NOW_S)
        if looks and at % (looks + 1) == 0:
            cluster_snapshot(model, now_s=NOW_S)
    there = truth(steps)
    for kind_name in (labels.KIND_JOB, "Pod", "Node"):
        listed = {ref: manifest for ref, manifest in there.items() if ref.kind == kind_name}
        for manifest in listed.values():
            model.put(manifest, now_s=NOW_S)
        model.forget_unlisted(kind_name, set(listed), version=len(steps) + 1)
    check(model, there)


@given(steps=histories())
@settings(max_examples=40)
def test_it_is_right_after_every_event_in_order(steps: Any) -> None:
    model = ClusterCache()
    for at, (what, manifest) in enumerate(steps, start=1):
        kind = WatchEventType.DELETED if what == "delete" else WatchEventType.MODIFIED
        model.apply(WatchEvent(type=kind, object=manifest), now_s=NOW_S)
        check(model, truth(steps[:at]))


def test_a_pod_that_its_placement_has_charged_calls_for_no_round() -> None:
    model = ClusterCache()
    model.put(job_manifest("a", 1, ("n0", "n1"), finished=False), now_s=NOW_S)
    for index, node in enumerate(("n0", "n1")):
        for version, phase in ((2 + index, "Pending"), (4 + index, "Running"), (6 + index, "Succeeded")):
            changes = model.put(pod_manifest("a", index, 0, node, version, phase), now_s=NOW_S)
            assert (changes.jobs, changes.capacity, changes.asks) == ({"uid-a"}, False, False)
    assert model.put(job_manifest("a", 8, ("n0", "n1"), finished=True), now_s=NOW_S).capacity


def test_devices_of_a_pod_without_its_job_come_free_with_the_pod() -> None:
    model = ClusterCache()
    model.put(pod_manifest("a", 0, 0, "n0", 1, "Running"), now_s=NOW_S)
    assert model.put(pod_manifest("a", 0, 0, "n0", 2, "Failed"), now_s=NOW_S).left
    assert not any(model.ledger.used.values())


def test_pods_that_outlive_their_job_stay_charged_to_its_queue() -> None:
    model = ClusterCache()
    owner = job_manifest("a", 1, (), finished=False)
    model.put(owner, now_s=NOW_S)
    model.put(pod_manifest("a", 0, 0, "n0", 2, "Running"), now_s=NOW_S)
    model.remove(ObjectRef.of(owner), version=3)
    assert model.ledger.used["q-a", DEVICE] == 1
    assert model.put(pod_manifest("a", 0, 0, "n0", 4, "Failed"), now_s=NOW_S).capacity
    assert not any(model.ledger.used.values())


def test_slots_of_nodes_that_are_gone_are_used_again() -> None:
    """An autoscaler gives every node a name of its own: what the table holds follows the nodes that there are."""
    model = ClusterCache()
    for at in range(500):
        name = f"node-{at}"
        model.put(node_manifest(name, 3 * at + 1, 4, "r0", closed=False), now_s=NOW_S)
        model.put(foreign_manifest("other-0", name, 3 * at + 2, "Running", 1), now_s=NOW_S)
        ref = ObjectRef(kind="Node", name=name)
        # In either order: the node goes before what it held, or after.
        if at % 2:
            model.remove(ref, version=3 * at + 3)
            model.remove(ObjectRef(kind="Pod", namespace="kube-system", name="other-0"), version=3 * at + 3)
        else:
            model.remove(ObjectRef(kind="Pod", namespace="kube-system", name="other-0"), version=3 * at + 3)
            model.remove(ref, version=3 * at + 3)
    assert model.nodes.slots <= 2
    model.put(node_manifest("last", 9_000, 4, "r0", closed=False), now_s=NOW_S)
    assert not cluster_snapshot(model, now_s=NOW_S).inventory.used_NR.any()


def test_columns_of_unused_resources_are_reused() -> None:
    model = ClusterCache()
    model.put(node_manifest("n0", 1, 4, "r0", closed=False), now_s=NOW_S)
    for at in range(100):
        asks = foreign_manifest("other-0", "n0", 2 * at + 2, "Running", 1)
        asks["spec"]["containers"][0]["resources"]["requests"][f"example.com/invented-{at}"] = 1
        model.put(asks, now_s=NOW_S)
        assert cluster_snapshot(model, now_s=NOW_S).inventory.used_NR.sum() > 0
        model.put(foreign_manifest("other-0", "n0", 2 * at + 3, "Failed", 1), now_s=NOW_S)
    assert model.nodes.columns < 10
    assert not cluster_snapshot(model, now_s=NOW_S).inventory.used_NR.any()
