"""Small worlds for tests of decisions."""

import dataclasses
from typing import Any

from polyreme_api import labels
from polyreme_api.job import TrainingJobStatus
from polyreme_api.progress import ProgressRecord
from polyreme_operator.cache.plan_book import plan_sizes, planned
from polyreme_operator.cluster_cache import ClusterCache
from polyreme_operator.reconcile.job import reconcile
from polyreme_operator.reconcile.transition import admit
from polyreme_operator.reconcile.worker_pods import PodDefaults
from polyreme_operator.scheduler import Batch, ClusterSnapshot
from polyreme_operator.types.actions import Decision, WriteStatus
from polyreme_operator.types.parse import parse_job_view
from polyreme_operator.types.resources import allocatable, canonical
from polyreme_operator.types.snapshot import JobSnapshot, Pending
from polyreme_operator.types.views import JobView, LeaseView, NodeView, PodPhase, PodView

NOW_S = 1_700_000_000.0
DEVICE = labels.RESOURCE_DEVICE


def job_manifest(
    name: str = "j",
    *,
    replicas: int = 2,
    devices: int = 1,
    status: TrainingJobStatus | None = None,
    created: str = "2023-11-14T22:00:00Z",
    generation: int = 1,
    version: int = 1,
    **spec: Any,
) -> dict[str, Any]:
    return {
        "apiVersion": labels.API_VERSION,
        "kind": labels.KIND_JOB,
        "metadata": {
            "name": name,
            "namespace": "default",
            "uid": f"uid-{name}",
            "resourceVersion": str(version),
            "generation": generation,
            "creationTimestamp": created,
        },
        "spec": {
            "model": {"preset": "kimi-vl-nano"},
            "data": {"sources": [{"name": "a", "dataset": "sample/digits"}], "sequenceTokens": 128},
            "training": {"steps": 50, "packsPerStep": 12},
            "workers": {"replicas": replicas, "devices": devices},
            **spec,
        },
        "status": {} if status is None else status.model_dump(mode="json", by_alias=True, exclude_none=True),
    }


def owner_reference(name: str) -> dict[str, Any]:
    """The reference by which a job of this name controls its objects."""
    return {
        "apiVersion": labels.API_VERSION,
        "kind": labels.KIND_JOB,
        "name": name,
        "uid": f"uid-{name}",
        "controller": True,
    }


def job(name: str = "j", **fields: Any) -> JobView:
    return planned(parse_job_view(job_manifest(name, **fields)))


def answered(model: ClusterCache) -> ClusterCache:
    """Answer all requests for plans, as the operator's planner does meanwhile."""
    while (request := model.plans.next()) is not None:
        model.take_plans(request, plan_sizes(request))
    return model


def node(name: str = "n0", devices: int = 4, **fields: Any) -> NodeView:
    given = {DEVICE: str(devices), **fields.pop("more", {})}
    return NodeView(name=name, allocatable=allocatable(given), host=name, **fields)


def pod(owner: JobView, index: int, *, replacement: int = 0, where: str = "n0", **fields: Any) -> PodView:
    fields.setdefault("phase", PodPhase.RUNNING)
    return PodView(
        namespace=owner.namespace,
        name=labels.pod_name(owner.name, owner.uid, index=index, replacement=replacement),
        uid=f"pod-{owner.name}-{index}-{replacement}",
        resource_version="1",
        job_name=owner.name,
        job_uid=owner.uid,
        queue="default",
        index=index,
        replacement=replacement,
        node=where,
        requests=canonical({DEVICE: fields.pop("devices", 1), "pods": 1}),
        **fields,
    )


def lease(owner: JobView, *, seen_s: float = NOW_S, **record: Any) -> LeaseView:
    return LeaseView(
        namespace=owner.namespace,
        name=labels.job_object_name(owner.name, owner.uid),
        uid="lease",
        resource_version="1",
        job_uid=owner.uid,
        record=ProgressRecord.model_validate({"attempt": 1, "released": True, "joined": 2, **record}),
        seen_s=seen_s,
    )


def snapshot(owner: JobView, *, pods: tuple[PodView, ...] = (), **fields: Any) -> JobSnapshot:
    fields.setdefault("nodes", {"n0": node(), "n1": node("n1")})
    fields.setdefault("children", frozenset({"Service", "Secret"}))
    fields.setdefault("lease_read", True)
    return JobSnapshot(job=owner, pods=pods, **fields)


def admitted(
    owner: JobView, nodes: tuple[str, ...] = ("n0", "n0"), *, at_s: float = NOW_S - 100, **status: Any
) -> JobView:
    """The job as it is once its first attempt's pods are all created."""
    after = admit(owner, nodes, at_s).model_copy(update={"replicas": len(nodes), **status})
    return dataclasses.replace(owner, status=after)


def decide(seen: JobSnapshot, now_s: float = NOW_S) -> Decision:
    return reconcile(seen, now_s, defaults=PodDefaults())


def written(decision: Decision) -> TrainingJobStatus:
    """The status that a decision writes; it writes one."""
    (write,) = [action for action in decision.actions if isinstance(action, WriteStatus)]
    return write.after


def why(cluster: ClusterSnapshot, batch: Batch) -> dict[str, Pending]:
    """Why each job waits, by UID, as a round has said it."""
    admitted_now = {write.uid for write in batch.writes if write.after.is_true("Admitted")}
    said = {}
    for waiting in cluster.waiting:
        pending = batch.pending.get(waiting.uid) or batch.kinds.get(waiting.kind)
        if pending is not None and waiting.uid not in admitted_now:
            said[waiting.uid] = pending
    return said
