"""The cluster as the plugin's commands see it: everything read once, then only computed on."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TypeVar

from polyreme_api.errors import NotFoundError, RefusedError
from polyreme_api.labels import KIND_JOB
from polyreme_api.topology import DEFAULT_TOPOLOGY
from polyreme_operator.cache.leases import LeaseIndex
from polyreme_operator.cache.plan_book import planned
from polyreme_operator.cache.pods import is_worker_of
from polyreme_operator.port import ClusterPort, Manifest, ObjectRef
from polyreme_operator.port import NotFoundError as PortNotFoundError
from polyreme_operator.types.job_keys import JobKeys
from polyreme_operator.types.parse import parse_foreign_pod, parse_job_view, parse_node, parse_pod
from polyreme_operator.types.parse_settings import parse_priority_class, parse_queue, parse_topology
from polyreme_operator.types.queues import QueueView
from polyreme_operator.types.views import ForeignPod, JobView, LeaseView, NodeView, PodView, TopologyView

PAGES_MAX = 400
"""Pages of one kind: with 500 objects each, more than any cluster holds."""
NOT_INSTALLED = "this cluster has no TrainingJob resource: apply polyreme's manifests/crds, or choose another --context"
JOBS = frozenset({KIND_JOB, "PriorityClass"})
QUEUES = frozenset({KIND_JOB, "PriorityClass", "TrainingQueue", "Node"})
PROGRESS = frozenset({KIND_JOB, "PriorityClass", "Lease"})
ALL = QUEUES | {"Pod", "ClusterTopology", "Lease"}
_View = TypeVar("_View")
_log = logging.getLogger(__name__)
_OPTIONAL = frozenset({"TrainingQueue", "ClusterTopology", "PriorityClass"})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What a command looks at. Kinds that it did not ask for are empty."""

    jobs: tuple[JobView, ...] = ()
    """Of all namespaces."""
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

    def job(self, namespace: str, name: str) -> JobView:
        """Return one job.

        Raises:
            NotFoundError: Naming those that exist.
        """
        found = next((job for job in self.jobs if (job.namespace, job.name) == (namespace, name)), None)
        if found is not None:
            return found
        raise no_job(namespace, name, [job.name for job in self.jobs if job.namespace == namespace])


def no_job(namespace: str, name: str, known: Iterable[str]) -> NotFoundError:
    """Say that there is no such job, and which was probably meant."""
    from polyreme.output import nearest

    return NotFoundError(f"no job {name!r} in namespace {namespace!r}: {nearest(name, sorted(known))}", field="JOB")


async def look(cluster: ClusterPort, kinds: Collection[str], *, now_s: float) -> Snapshot:
    """Read the kinds that a command needs, side by side.

    Raises:
        NotFoundError: If the cluster has no TrainingJobs at all.
    """
    wanted = sorted(kinds)
    lists = await asyncio.gather(*(list_all(cluster, kind) for kind in wanted))
    return snapshot_of(dict(zip(wanted, lists, strict=True)), now_s=now_s)


def snapshot_of(found: Mapping[str, list[Manifest]], *, now_s: float) -> Snapshot:
    """Parse what was read. An object that can't be read is left out with a warning, as the operator leaves it out."""
    classes = _readable(lambda item: (item["metadata"]["name"], parse_priority_class(item)), found, "PriorityClass")
    priorities = dict(classes)
    jobs = _readable(lambda item: planned(parse_job_view(item, priorities=priorities)), found, KIND_JOB)
    by_uid = {job.uid: job for job in jobs}
    pods = _readable(lambda item: (_worker(item, by_uid), item), found, "Pod")
    foreign = _readable(parse_foreign_pod, {"Pod": [item for pod, item in pods if pod is None]}, "Pod")
    # Only the operator can tell whether a record is the leader's own, so it is shown as it is.
    leases = LeaseIndex(JobKeys(), {job.ref: job for job in jobs}.get)
    _readable(lambda item: leases.put(_lease_ref(item), item, seen_s=now_s), found, "Lease")
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


async def list_all(cluster: ClusterPort, kind: str, *, namespace: str | None = None) -> list[Manifest]:
    """Read every page of a kind; a kind that is not installed has none, except for the jobs.

    Raises:
        NotFoundError: If the cluster has no TrainingJobs.
        RefusedError: If there are more pages than anyone can have.
    """
    items: list[Manifest] = []
    token: str | None = None
    for _ in range(PAGES_MAX):
        try:
            page = await cluster.list(kind, namespace=namespace, continue_=token)
        except PortNotFoundError as error:
            if kind == KIND_JOB:
                raise NotFoundError(NOT_INSTALLED) from error
            if kind in _OPTIONAL:
                return []
            raise
        items += page.items
        token = page.continue_
        if token is None:
            return items
    raise RefusedError(f"list of {kind} has more than {PAGES_MAX} pages; name a namespace")
