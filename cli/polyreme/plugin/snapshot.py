"""The cluster as the plugin's commands see it: what was read, parsed once, then only computed on."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from pydantic import ValidationError

from polyreme_api.labels import KIND_JOB
from polyreme_api.queue import TrainingQueueStatus
from polyreme_api.topology import DEFAULT_TOPOLOGY
from polyreme_cluster.port import Manifest, ObjectRef
from polyreme_operator.cache.leases import LeaseIndex
from polyreme_operator.cache.pods import is_worker_of
from polyreme_operator.types.job_keys import JobKeys
from polyreme_operator.types.parse import parse_foreign_pod, parse_job_view, parse_node, parse_pod
from polyreme_operator.types.parse_settings import parse_queue, parse_topology
from polyreme_operator.types.queues import QueueView
from polyreme_operator.types.reasons import ConditionType, Reason
from polyreme_operator.types.views import ForeignPod, JobView, LeaseView, NodeView, PodView, TopologyView

_View = TypeVar("_View")
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What a command looks at. Kinds that it did not ask for are empty."""

    jobs: tuple[JobView, ...] = ()
    queues: tuple[QueueView, ...] = ()
    nodes: tuple[NodeView, ...] = ()
    pods: tuple[PodView, ...] = ()
    foreign: tuple[ForeignPod, ...] = ()
    leases: Mapping[str, LeaseView] = dataclasses.field(default_factory=dict)
    """By UID of the job."""
    topology: TopologyView | None = None
    manifests: Mapping[str, Manifest] = dataclasses.field(default_factory=dict)
    """Jobs as they came, by UID."""
    now_s: float = 0.0


def snapshot_of(found: Mapping[str, list[Manifest]], *, now_s: float) -> Snapshot:
    """Parse what was read. An object that can't be read is left out with a warning, as the operator leaves it out."""
    jobs = _readable(read_view, found, KIND_JOB)
    by_uid = {job.uid: job for job in jobs}
    pods = _readable(lambda item: (_worker(item, by_uid), item), found, "Pod")
    foreign = _readable(parse_foreign_pod, {"Pod": [item for pod, item in pods if pod is None]}, "Pod")
    # Only the operator can tell whether a record is the leader's own, so it is shown as it is.
    leases = LeaseIndex(JobKeys(), {job.ref: job for job in jobs}.get)
    _readable(lambda item: leases.put(_lease_ref(item), item, now_s), found, "Lease")
    topologies = _readable(parse_topology, found, "ClusterTopology")
    return Snapshot(
        jobs=tuple(sorted(jobs, key=lambda job: (job.namespace, job.name))),
        queues=tuple(sorted(_readable(parse_queue, found, "TrainingQueue"), key=lambda queue: queue.name)),
        nodes=tuple(sorted(_readable(parse_node, found, "Node"), key=lambda node: node.name)),
        pods=tuple(pod for pod, _ in pods if pod is not None),
        foreign=tuple(pod for pod in foreign if pod is not None),
        leases=leases.by_job,
        topology=next((view for view in topologies if view is not None and view.name == DEFAULT_TOPOLOGY), None),
        manifests={item["metadata"]["uid"]: item for item in found.get(KIND_JOB, ())},
        now_s=now_s,
    )


def queue_status(view: QueueView | None) -> TrainingQueueStatus:
    """Return what the operator has written of a queue; nothing if that can't be read."""
    try:
        return TrainingQueueStatus.model_validate({} if view is None else view.status)
    except ValidationError:
        return TrainingQueueStatus()


def read_view(manifest: Manifest) -> JobView:
    """Parse a job. Its priority, and what its queue says of it, are those that the operator has found.

    Users may read neither PriorityClasses nor the labels of namespaces.
    """
    job = parse_job_view(manifest)
    queued = job.status.condition(ConditionType.QUEUED)
    if queued is not None and (queued.status, queued.reason) == ("True", Reason.QUEUE_REFUSED):
        job = dataclasses.replace(job, queue_refusal=queued.message)
    return job if job.status.priority is None else dataclasses.replace(job, priority=job.status.priority)


def _readable(parse: Callable[[Manifest], _View], found: Mapping[str, Iterable[Manifest]], kind: str) -> list[_View]:
    """Parse the objects of a kind; name those that can't be parsed, and leave them out."""
    views = []
    for item in found.get(kind, ()):
        try:
            views.append(parse(item))
        except Exception as error:  # noqa: BLE001 - no stored object may stop a command
            name = item["metadata"].get("name", "")
            _log.warning("%s %s can't be read and is left out: %s", kind, name, str(error).partition("\n")[0])
    return views


def _lease_ref(item: Manifest) -> ObjectRef:
    return ObjectRef(kind="Lease", namespace=item["metadata"].get("namespace", ""), name=item["metadata"]["name"])


def _worker(item: Manifest, jobs: Mapping[str, JobView]) -> PodView | None:
    """Read a worker pod; None for a pod of none of these jobs."""
    pod = parse_pod(item)
    job = None if pod is None else jobs.get(pod.job_uid)
    return pod if pod is not None and job is not None and is_worker_of(job, pod) else None
