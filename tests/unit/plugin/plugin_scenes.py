"""A small cluster as the plugin sees it, from objects as the API server hands them out."""

import io
from typing import Any

from rich.console import RenderableType

from polyreme.plugin.printing import show
from polyreme.plugin.snapshot import Snapshot, snapshot_of
from polyreme_api import labels
from polyreme_api.job.placement import Placement
from polyreme_api.times import rfc3339
from polyreme_cluster.port import Manifest
from polyreme_operator.types.views import JobView
from tests.unit.operator.operator_scenes import owner_reference

NOW_S = 1_700_000_000.0
GPU = "nvidia.com/gpu"


def text(*parts: RenderableType) -> str:
    """Return what the plugin prints."""
    stream = io.StringIO()
    show(*parts, stream=stream)
    return stream.getvalue()


def job(
    name: str, *, status: Manifest | None = None, age_s: float = 600, replicas: int = 2, devices: int = 4, **spec: Any
) -> Manifest:
    return {
        "apiVersion": labels.API_VERSION,
        "kind": labels.KIND_JOB,
        "metadata": {
            "name": name,
            "namespace": "team",
            "uid": f"uid-{name}",
            "resourceVersion": "1",
            "generation": 1,
            "creationTimestamp": rfc3339(NOW_S - age_s),
        },
        "spec": {
            "model": {"preset": "kimi-vl-nano"},
            "data": {"sources": [{"name": "a", "dataset": "sample/digits"}], "sequenceTokens": 128},
            "training": {"steps": 50, "packsPerStep": 16},
            "workers": {"replicas": replicas, "devices": devices, "deviceResource": GPU},
            **spec,
        },
        "status": status or {},
    }


def condition(kind: str, reason: str, message: str = "") -> Manifest:
    at = rfc3339(NOW_S - 60)
    return {"type": kind, "status": "True", "reason": reason, "message": message, "lastTransitionTime": at}


def waits(reason: str, message: str = "") -> Manifest:
    return {"conditions": [condition("Queued", reason, message)]}


def runs(*nodes: str, devices: int = 4, **status: Any) -> Manifest:
    placed = Placement.of(list(nodes)).model_dump(mode="json", by_alias=True, exclude_none=True)
    attempt = {
        "number": 1,
        "planHash": "h",
        "replicas": len(nodes),
        "devices": devices,
        "placement": placed,
        "startedAt": rfc3339(NOW_S - 100),
    }
    conditions = [condition("Admitted", "Admitted"), condition("Running", "Training")]
    return {"conditions": conditions, "attempt": attempt, "readyReplicas": len(nodes), "step": 7, **status}


def queue(name: str, *, parent: str = "", gpus: int | None = None, **spec: Any) -> Manifest:
    quotas = [] if gpus is None else [{"resource": GPU, "nominal": gpus}]
    return {
        "metadata": {"name": name, "uid": f"uid-{name}", "resourceVersion": "1", "generation": 1},
        "spec": {"parent": parent, "quotas": quotas, **spec},
    }


def node(name: str, *, block: str = "", rack: str = "", gpus: int = 8, **spec: Any) -> Manifest:
    tags = {"kubernetes.io/hostname": name} | ({"block": block} if block else {}) | ({"rack": rack} if rack else {})
    return {
        "metadata": {"name": name, "labels": tags, "resourceVersion": "1"},
        "spec": spec,
        "status": {
            "allocatable": {GPU: str(gpus), "cpu": "64", "memory": "1Ti", "pods": "110"},
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


def topology() -> Manifest:
    levels = [{"name": "block", "nodeLabel": "block"}, {"name": "rack", "nodeLabel": "rack"}]
    return {
        "metadata": {"name": "default", "uid": "t", "resourceVersion": "1", "generation": 1},
        "spec": {"levels": levels},
    }


def snapshot(*jobs: Manifest, **found: list[Manifest]) -> Snapshot:
    return snapshot_of({labels.KIND_JOB: list(jobs), **found}, now_s=NOW_S)


def job_of(seen: Snapshot, name: str) -> JobView:
    (found,) = [job for job in seen.jobs if job.name == name]
    return found


def pod(owner: str, index: int, where: str, *, gpus: int = 4, phase: str = "Running", ours: bool = True) -> Manifest:
    tags = {
        labels.LABEL_JOB: owner,
        labels.LABEL_JOB_UID: f"uid-{owner}",
        labels.LABEL_INDEX: str(index),
        labels.LABEL_REPLACEMENT: "0",
    }
    name = labels.pod_name(owner, f"uid-{owner}", index=index, replacement=0)
    return {
        "metadata": {
            "name": name,
            "namespace": "team",
            "uid": f"pod-{name}",
            "resourceVersion": "1",
            "labels": tags if ours else {},
            "ownerReferences": [owner_reference(owner)] if ours else [],
        },
        "spec": {"nodeName": where, "containers": [{"name": "main", "resources": {"limits": {GPU: str(gpus)}}}]},
        "status": {"phase": phase},
    }
