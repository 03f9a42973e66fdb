"""What no node could ever satisfy is reported by name, before quota and capacity, until a node appears that could."""

from typing import Any

import pytest

from polyreme_operator.cluster_cache import ClusterCache
from polyreme_operator.scheduler import ClusterSnapshot, cluster_of, schedule
from polyreme_operator.snapshots import cluster_snapshot
from polyreme_operator.types.intents import INTENTS_KEY
from polyreme_operator.types.inventory import LevelView, Taint
from polyreme_operator.types.queues import QueueView, Quota
from polyreme_operator.types.snapshot import Pending
from polyreme_operator.types.views import JobView, NodeView
from tests.unit.operator.operator_scenes import DEVICE, NOW_S, admitted, answered, job, job_manifest, node, why

GPU = "nvidia.com/gpu"
RACKS = (LevelView(name="rack", node_label="rack"),)
FULL_QUOTA = (QueueView(name="default", quotas=(Quota(resource=DEVICE, nominal=2), Quota(resource=GPU, nominal=0))),)


def template(**spec: Any) -> dict[str, Any]:
    return {"template": {"spec": spec}}


def asking(name: str = "j", *, replicas: int = 2, devices: int = 1, workers: Any = (), **spec: Any) -> JobView:
    return job(name, workers={"replicas": replicas, "devices": devices, **dict(workers)}, **spec)


def affinity(value: str) -> dict[str, Any]:
    term = {"matchExpressions": [{"key": "gen", "operator": "In", "values": [value]}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}}


def full(*jobs: JobView, nodes: tuple[NodeView, ...] = ()) -> ClusterSnapshot:
    """Two racks of two nodes with 4 devices each, one of them full, and a queue without any quota left."""
    racks = tuple(node(f"n{at}", 4, labels=(("gen", "2"), ("rack", f"r{at // 2}"))) for at in range(4))
    holds = admitted(job("holds"), ("n0", "n0"))
    return cluster_of(jobs=(holds, *jobs), nodes=(*racks, *nodes), queues=FULL_QUOTA, levels=RACKS)


def said(cluster: ClusterSnapshot, name: str = "j") -> Pending:
    return why(cluster, schedule(cluster, NOW_S))[f"uid-{name}"]


REQUESTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "a device that no node has": (
        {"workers": {"deviceResource": GPU}},
        "WaitingForNodes",
        f"no node has {GPU}, and each worker needs 1 {GPU}; nodes have {DEVICE}",
    ),
    "another resource that no node has": (
        {"workers": template(containers=[{"resources": {"requests": {"example.com/rdma": 2}}}])},
        "WaitingForNodes",
        f"no node has example.com/rdma, and each worker needs 2 example.com/rdma; nodes have {DEVICE}",
    ),
    "a selector that no node matches": (
        {"workers": template(nodeSelector={"gen": "9"})},
        "WaitingForNodes",
        "none of 4 nodes matches the pod template's nodeSelector (gen=9)",
    ),
    "an affinity that no node matches": (
        {"workers": template(affinity=affinity("9"))},
        "WaitingForNodes",
        "none of 4 nodes matches the pod template's required node affinity",
    ),
    "a worker larger than any node": (
        {"devices": 5},
        "Misconfigured",
        f"a worker needs 5 {DEVICE}; the largest node has 4 {DEVICE}; ask for less in each worker",
    ),
    "a gang larger than any domain": (
        {"replicas": 3, "devices": 4, "topology": {"required": "rack"}},
        "WaitingForTopology",
        "needs 3 workers in one rack; room for 2 in r0 when it is empty",
    ),
    "a gang larger than what its selector leaves": (
        {"replicas": 4, "devices": 3, "workers": template(nodeSelector={"rack": "r0"})},
        "WaitingForNodes",
        (
            "needs 4 workers; room for 2 when nothing else runs there; "
            "of 4 nodes that could hold a worker 2 do not bear the labels that the pod template selects"
        ),
    ),
    "a gang larger than the cluster": (
        {"replicas": 6, "devices": 4, "training": {"steps": 50, "packsPerStep": 24}},
        "WaitingForCapacity",
        "needs 24 devices; room for 16 on 4 nodes when nothing else runs there",
    ),
    "an unknown level": (
        {"topology": {"required": "row"}},
        "Misconfigured",
        "topology.required names level 'row'; there are rack, host",
    ),
}


@pytest.mark.parametrize(("fields", "reason", "message"), REQUESTS.values(), ids=REQUESTS)
def test_a_request_that_no_node_could_satisfy_says_so_though_quota_and_cluster_are_full(
    fields: dict[str, Any], reason: str, message: str
) -> None:
    found = said(full(asking(**fields)))
    assert (found.reason, found.message) == (reason, message)
    assert found.permanent


def test_a_request_that_empty_nodes_could_satisfy_waits_for_quota() -> None:
    found = said(full(asking(replicas=4, workers=template(affinity=affinity("2")))))
    assert (found.reason, found.permanent) == ("ExceedsQuota", True)


def test_untolerated_taints_are_named_and_those_of_an_outage_are_not() -> None:
    kept = (Taint(key="team", value="vision"),)
    cordoned = (Taint(key="node.kubernetes.io/unschedulable"),)
    found = said(cluster_of(jobs=(asking(),), nodes=(node(taints=kept),)))
    assert found.message == "the pod template tolerates the taints of none of 1 node (team=vision:NoSchedule)"
    out = said(cluster_of(jobs=(asking(),), nodes=(node(taints=cordoned, unschedulable=True),)))
    assert (out.reason, out.permanent) == ("WaitingForCapacity", False)


def test_a_worker_that_fits_no_accepted_node_is_not_measured_by_others() -> None:
    nodes = (node("n0", 8, labels=(("gen", "1"),)), node("n1", 2, labels=(("gen", "2"),)))
    found = said(cluster_of(jobs=(asking(devices=4, workers=template(nodeSelector={"gen": "2"})),), nodes=nodes))
    assert found.message.startswith(f"a worker needs 4 {DEVICE}; the largest node has 2 {DEVICE}")


def test_resources_that_no_node_has_together_are_named() -> None:
    nodes = (node("n0", 4, more={"cpu": "1"}), node("n1", 1, more={"cpu": "8"}))
    workers = template(containers=[{"resources": {"requests": {"cpu": 4}}}])
    found = said(cluster_of(jobs=(asking(devices=2, workers=workers),), nodes=nodes))
    assert found.message == f"no node has all that a worker needs, 4 cpu, 2 {DEVICE}; ask for less in each worker"


def test_an_elastic_job_is_unsatisfiable_only_if_its_smallest_size_is() -> None:
    elastic = asking(replicas=6, workers={"minReplicas": 2})
    assert not said(cluster_of(jobs=(admitted(job("holds")), elastic), nodes=(node(devices=3),))).permanent


def test_nothing_is_held_for_it() -> None:
    first = asking("first", priority=9, workers={"deviceResource": GPU})
    batch = schedule(cluster_of(jobs=(first, job("second")), nodes=(node(),)), NOW_S)
    assert [write.uid for write in batch.writes] == ["uid-second"]


def test_those_behind_it_may_have_others_make_way() -> None:
    first = asking("first", priority=9, workers={"deviceResource": GPU})
    holds = admitted(job("holds", priority=0), ("n0", "n0"))
    cluster = cluster_of(jobs=(holds, first, job("second", priority=5)), nodes=(node(devices=2),))
    (write,) = schedule(cluster, NOW_S).writes
    assert write.uid == "uid-holds"
    assert write.after.preemption is not None
    assert write.after.preemption.by == "uid-second"


def test_a_node_that_appears_ends_it_and_one_that_goes_brings_it_back() -> None:
    model = ClusterCache()
    metadata = {"name": "polyreme-intents", "resourceVersion": "1"}
    model.put({"kind": "ConfigMap", "metadata": metadata, "data": {INTENTS_KEY: "[]"}}, now_s=NOW_S)

    def put_node(name: str, version: int, resource: str) -> None:
        ready = {"type": "Ready", "status": "True"}
        status = {"allocatable": {resource: "4"}, "conditions": [ready]}
        metadata = {"name": name, "resourceVersion": str(version)}
        assert model.put({"kind": "Node", "metadata": metadata, "status": status}, now_s=NOW_S).capacity

    def reason() -> str:
        cluster = cluster_snapshot(model, now_s=NOW_S)
        batch = schedule(cluster, NOW_S)
        model.decided(batch, now_s=NOW_S)
        return "admitted" if batch.writes else why(cluster, batch)["uid-j"].message.split(",")[0]

    put_node("n0", 1, DEVICE)
    model.put(job_manifest(version=2, workers={"replicas": 2, "deviceResource": GPU}), now_s=NOW_S)
    answered(model)
    assert reason() == f"no node has {GPU}"
    assert reason() == f"no node has {GPU}"
    put_node("n1", 3, GPU)
    assert reason() == "admitted"
    put_node("n1", 4, DEVICE)
    assert reason() == f"no node has {GPU}"
