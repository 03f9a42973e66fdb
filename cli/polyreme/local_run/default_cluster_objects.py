"""Cluster objects that a job names, as one machine has them: a queue without quota, one domain of every level."""

from __future__ import annotations

from polyreme_api.job import TrainingJob
from polyreme_api.labels import API_VERSION, GROUP, KIND_QUEUE, KIND_TOPOLOGY
from polyreme_api.topology import DEFAULT_TOPOLOGY, HOST_LABEL, HOST_NAME
from polyreme_cluster.port import Manifest
from polyreme_operator.queueing.tree import DEFAULT_QUEUE


def cluster_objects(job: TrainingJob) -> list[Manifest]:
    """Return what a cluster would have before this job comes to it."""
    found: list[Manifest] = []
    if levels := _labels(job):
        named = [{"name": _name(level, depth), "nodeLabel": levels[level]} for depth, level in enumerate(levels)]
        found.append(_object(KIND_TOPOLOGY, DEFAULT_TOPOLOGY, {"levels": named}))
    if job.spec.queue_name != DEFAULT_QUEUE:
        found.append(_object(KIND_QUEUE, job.spec.queue_name, {}))
    return found


def node_labels(job: TrainingJob, node: str) -> dict[str, str]:
    """Return the labels of the only node: it is a domain of every level."""
    return dict.fromkeys(_labels(job).values(), node)


def _labels(job: TrainingJob) -> dict[str, str]:
    """Return the node label of each level that the job names, the widest first: a slice lies inside its gang."""
    asked = job.spec.topology
    levels = (asked.required, asked.preferred, asked.exclusive, asked.slice_level)
    return {
        level: level if "/" in level else f"{GROUP}/level-{level}"
        for level in levels
        if level is not None and level not in (HOST_NAME, HOST_LABEL)
    }


def _name(level: str, depth: int) -> str:
    """Name a level as the job does, unless it speaks of it by its node label, which is no name."""
    return f"level-{depth}" if "/" in level else level


def _object(kind: str, name: str, spec: Manifest) -> Manifest:
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": name}, "spec": spec}
