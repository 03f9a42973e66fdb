"""Pods are given up when they are gone, their node is out of service, or was not seen ready for ``nodeLostSeconds``."""

from typing import Any

from polyreme_cluster.port import ObjectRef
from polyreme_operator.cluster_cache import ClusterCache
from polyreme_operator.scheduler import schedule
from polyreme_operator.snapshots import cluster_snapshot, job_snapshot
from polyreme_operator.types.actions import Decision, DeletePod
from polyreme_operator.types.intents import INTENTS_KEY
from polyreme_operator.types.snapshot import JobSnapshot
from tests.unit.operator.operator_scenes import DEVICE, NOW_S, admitted, decide, job, job_manifest
from tests.unit.operator.test_operator_identity import UID, lease_manifest, pod_manifest

LOST_S = 60.0
N1 = ObjectRef(kind="Node", name="n1")
PLACES = ("n0", "n1")


def node_manifest(name: str, version: int, *, ready: bool = True, taints: tuple[str, ...] = ()) -> dict[str, Any]:
    # As reported by a machine whose clock is an hour slower than ours.
    condition = {"type": "Ready", "status": str(ready), "lastTransitionTime": "2023-11-14T21:13:20Z"}
    return {
        "kind": "Node",
        "metadata": {"name": name, "resourceVersion": str(version)},
        "spec": {"taints": [{"key": key, "effect": "NoExecute"} for key in taints]},
        "status": {"allocatable": {DEVICE: "4"}, "conditions": [condition]},
    }


def worker_manifest(index: int, version: int, **metadata: Any) -> dict[str, Any]:
    made = pod_manifest(f"j-uidj-{index}-0", version=version, where=PLACES[index], uid=f"pod-{index}", **metadata)
    made["metadata"]["labels"]["polyreme.dev/index"] = str(index)
    made["status"] = {"phase": "Running"}
    return made


def running(**metadata: Any) -> ClusterCache:
    """A job that trains on two nodes."""
    model = ClusterCache()
    for at, name in enumerate(PLACES, start=1):
        model.put(node_manifest(name, at), now_s=NOW_S)
    model.put(job_manifest(version=3, status=admitted(job(), PLACES).status), now_s=NOW_S)
    for index in range(2):
        model.put(worker_manifest(index, 4 + index, **metadata), now_s=NOW_S)
    hear(model, NOW_S)
    return model


def hear(model: ClusterCache, at_s: float) -> None:
    """Have the leader renew its Lease: it hears nothing of worker 1."""
    record = '{"attempt": 1, "released": true, "joined": 2, "phase": "Training", "step": 3, "leaving": [1]}'
    version = str(int(at_s - NOW_S) + 100)
    model.put(lease_manifest(resourceVersion=version, annotations={"polyreme.dev/progress": record}), now_s=at_s)


def snapshot(model: ClusterCache, at_s: float) -> JobSnapshot:
    found = job_snapshot(model, UID, now_s=at_s, lease_read=True)
    assert found is not None
    return found


def looked_at(model: ClusterCache, at_s: float) -> Decision:
    hear(model, at_s)
    return decide(snapshot(model, at_s), at_s)


def is_moved(model: ClusterCache, at_s: float) -> bool:
    """Whether the job gives up a place."""
    return looked_at(model, at_s).reschedule


def test_a_node_object_that_is_absent_for_a_moment_costs_nothing() -> None:
    model = running()
    assert not is_moved(model, NOW_S)
    assert model.remove(N1, version=10).jobs == {UID}
    gone = looked_at(model, NOW_S)
    assert not gone.reschedule
    assert not any(isinstance(action, DeletePod) for action in gone.actions)
    model.put(node_manifest("n1", 11), now_s=NOW_S + 1)
    assert not is_moved(model, NOW_S + LOST_S + 10)


def test_a_node_that_stays_absent_is_lost_when_its_time_is_over() -> None:
    model = running()
    model.remove(N1, version=10)
    first = looked_at(model, NOW_S)
    assert first.wake_at_s is not None
    assert first.wake_at_s <= NOW_S + LOST_S
    assert not is_moved(model, NOW_S + LOST_S - 1)
    assert is_moved(model, NOW_S + LOST_S)


def test_each_absence_is_measured_by_itself() -> None:
    model = running()
    for away_s in (0.0, 50.0, 100.0):
        version = 10 + int(away_s)
        model.remove(N1, version=version)
        assert not is_moved(model, NOW_S + away_s)
        model.put(node_manifest("n1", version + 1), now_s=NOW_S + away_s + 1)
    assert not is_moved(model, NOW_S + 101)


def test_a_node_that_was_not_ready_before_it_went_is_not_given_its_time_again() -> None:
    model = running()
    model.put(node_manifest("n1", 10, ready=False), now_s=NOW_S)
    model.remove(N1, version=11)
    assert not is_moved(model, NOW_S + 30)
    assert is_moved(model, NOW_S + LOST_S)


def test_what_another_machines_clock_says_does_not_shorten_the_fence() -> None:
    model = running()
    model.put(node_manifest("n1", 10, ready=False), now_s=NOW_S)
    assert not is_moved(model, NOW_S + LOST_S - 1)
    assert is_moved(model, NOW_S + LOST_S)


def test_a_restarted_operator_measures_an_absence_from_its_first_look() -> None:
    model = ClusterCache()
    model.put(node_manifest("n0", 1), now_s=NOW_S)
    model.put(job_manifest(version=3, status=admitted(job(), PLACES).status), now_s=NOW_S)
    for index in range(2):
        model.put(worker_manifest(index, 4 + index), now_s=NOW_S)
    assert not is_moved(model, NOW_S + 500)
    assert not is_moved(model, NOW_S + 500 + LOST_S - 1)
    assert is_moved(model, NOW_S + 500 + LOST_S)


def test_a_pod_that_is_gone_is_no_longer_fenced() -> None:
    model = running()
    model.remove(N1, version=10)
    assert not is_moved(model, NOW_S)
    model.remove(ObjectRef.of(worker_manifest(1, 11)), version=11)
    assert is_moved(model, NOW_S + 1)


def test_the_out_of_service_taint_ends_the_fence() -> None:
    model = running()
    tainted = node_manifest("n1", 10, ready=False, taints=("node.kubernetes.io/out-of-service",))
    model.put(tainted, now_s=NOW_S)
    assert is_moved(model, NOW_S)


def test_the_scheduler_leaves_a_gang_where_a_node_is_absent_for_a_moment() -> None:
    model = running()
    model.put(node_manifest("n2", 9), now_s=NOW_S)
    model.remove(N1, version=10)
    intents = {"name": "polyreme-intents", "resourceVersion": "12"}
    model.put({"kind": "ConfigMap", "metadata": intents, "data": {INTENTS_KEY: "[]"}}, now_s=NOW_S)
    model.notes.ask(UID, asks=True)
    snapshot(model, NOW_S)
    for at_s, writes in ((NOW_S, 0), (NOW_S + LOST_S, 1)):
        hear(model, at_s)
        cluster = cluster_snapshot(model, now_s=at_s, leases_read=frozenset({UID}))
        assert len(schedule(cluster, at_s).writes) == writes


def test_a_pod_that_waits_for_its_kubelet_is_removed_by_force_only_when_its_node_is_lost() -> None:
    model = running(deletionTimestamp="2023-11-14T22:13:20Z")
    waits = job_manifest(version=20, suspend=True)
    model.put(waits, now_s=NOW_S)
    model.remove(N1, version=21)
    first = decide(snapshot(model, NOW_S), NOW_S)
    assert not any(isinstance(action, DeletePod) for action in first.actions)
    assert first.wake_at_s == NOW_S + LOST_S
    last = decide(snapshot(model, NOW_S + LOST_S), NOW_S + LOST_S)
    (forced,) = [action for action in last.actions if isinstance(action, DeletePod)]
    assert (forced.uid, forced.grace_s) == ("pod-1", 0)
