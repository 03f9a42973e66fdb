"""The cluster as it was last seen: kept up to date by watch events, by lists, and by the answers to our own writes.

Nothing here goes back in time: of two states of one object the one with the larger resource version stays, whichever
way it came. (Resource versions of one kind are ordered integers: KEP-5504.)
"""

from __future__ import annotations

import dataclasses
import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping

from pydantic import ValidationError

from polyreme_operator.port import Manifest, ObjectRef, WatchEvent, WatchEventType
from polyreme_operator.types.intents import Intents
from polyreme_operator.types.parse import (
    parse_intents_object,
    parse_job_view,
    parse_lease,
    parse_node,
    parse_pod,
    parse_queue,
)
from polyreme_operator.types.snapshot import Cluster, JobScene, Pending
from polyreme_operator.types.views import JobView, LeaseView, NodeView, PodView, QueueView

WATCHED_KINDS = ("TrainingJob", "TrainingQueue", "Pod", "Node", "Lease", "ConfigMap")

_log = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class Changes:
    """What a change of the model calls for."""

    jobs: set[str] = dataclasses.field(default_factory=set)
    """UIDs of jobs to look at."""
    capacity: bool = False
    """Whether admission and placement may decide otherwise now."""

    def __or__(self, other: Changes) -> Changes:
        """Join two."""
        return Changes(jobs=self.jobs | other.jobs, capacity=self.capacity or other.capacity)


class ClusterModel:
    """Views by object, with the indices that decisions need."""

    def __init__(self) -> None:
        self._versions: dict[ObjectRef, int] = {}
        self._present: dict[str, set[ObjectRef]] = defaultdict(set)
        self._jobs: dict[ObjectRef, JobView] = {}
        self._job_refs: dict[str, ObjectRef] = {}
        self._pods: dict[ObjectRef, PodView] = {}
        self._pods_by_job: dict[str, set[ObjectRef]] = defaultdict(set)
        self._nodes: dict[str, NodeView] = {}
        self._leases: dict[ObjectRef, LeaseView] = {}
        self._lease_by_job: dict[str, ObjectRef] = {}
        self._queues: dict[str, QueueView] = {}
        self._intents = Intents()
        self._children: dict[str, set[str]] = defaultdict(set)
        self._pending: Mapping[str, Pending] = {}
        self._refused: Mapping[str, str] = {}

    def apply(self, event: WatchEvent, *, now_s: float) -> Changes:
        """Take one watch event."""
        if event.type is WatchEventType.BOOKMARK:
            return Changes()
        ref = ObjectRef.of(event.object)
        if event.type is WatchEventType.DELETED:
            return self.remove(ref, version=int(event.resource_version))
        return self.put(event.object, now_s=now_s)

    def put(self, manifest: Manifest, *, now_s: float) -> Changes:
        """Take the state of one object, unless a newer one is known."""
        ref, version = ObjectRef.of(manifest), int(manifest["metadata"]["resourceVersion"])
        if version <= self._versions.get(ref, -1):
            return Changes()
        self._versions[ref] = version
        self._present[ref.kind].add(ref)
        try:
            return self._parse(ref, manifest, now_s)
        except (ValidationError, KeyError, TypeError, ValueError) as error:
            _log.warning("object can't be read and is left out: %s, %s", ref, error)
            return self._forget(ref)

    def remove(self, ref: ObjectRef, *, version: int | None) -> Changes:
        """Take the deletion of one object at ``version``; None: it was looked for and is not there."""
        known = self._versions.get(ref, -1)
        if version is not None:
            if version < known:
                return Changes()
            self._versions[ref] = version
        return self._forget(ref)

    def replace(self, kind: str, manifests: Iterable[Manifest], *, version: int, now_s: float) -> Changes:
        """Take a whole list of a kind: what it lacks and is not newer than it is gone. This finds what a watch lost."""
        changes = Changes()
        listed: set[ObjectRef] = set()
        for manifest in manifests:
            listed.add(ObjectRef.of(manifest))
            changes |= self.put(manifest, now_s=now_s)
        for ref in sorted(self._present[kind] - listed):
            if self._versions[ref] <= version:
                changes |= self._forget(ref)
        self._versions = {
            ref: seen
            for ref, seen in self._versions.items()
            if ref.kind != kind or ref in self._present[kind] or seen > version
        }
        return changes

    def decided(self, pending: Mapping[str, Pending], refused: Mapping[str, str]) -> Changes:
        """Take the scheduler's last words; jobs for which they differ must be told."""
        told = {
            uid
            for uid in {*self._pending, *pending, *self._refused, *refused}
            if self._pending.get(uid) != pending.get(uid) or self._refused.get(uid) != refused.get(uid)
        }
        self._pending, self._refused = dict(pending), dict(refused)
        return Changes(jobs=told)

    def note_child(self, uid: str, kind: str) -> None:
        """Remember that a job has its Service or Secret."""
        self._children[uid].add(kind)

    def job(self, uid: str) -> JobView | None:
        """Return a job by UID."""
        ref = self._job_refs.get(uid)
        return None if ref is None else self._jobs[ref]

    def lease_ref(self, uid: str) -> ObjectRef | None:
        """Return the reference of a job's Lease."""
        return self._lease_by_job.get(uid)

    def scene(self, uid: str, *, lease_read: bool = False) -> JobScene | None:
        """Return what one job's reconcile sees; None for a job that is gone."""
        job = self.job(uid)
        if job is None:
            return None
        pods = tuple(self._pods[ref] for ref in sorted(self._pods_by_job.get(uid, ())))
        names = {pod.node for pod in pods}
        if job.attempt is not None:
            names.update(job.attempt.placement.node_by_index())
        lease = self._lease_by_job.get(uid)
        return JobScene(
            job=job,
            pods=pods,
            nodes={name: self._nodes[name] for name in sorted(names) if name in self._nodes},
            lease=None if lease is None else self._leases[lease],
            pending=self._pending.get(uid),
            refused=self._refused.get(uid, ""),
            children=frozenset(self._children.get(uid, ())),
            lease_read=lease_read,
        )

    def cluster(self, *, leases_read: frozenset[str] = frozenset()) -> Cluster:
        """Return what admission and placement see."""
        return Cluster(
            jobs=tuple(self._jobs.values()),
            pods=tuple(self._pods.values()),
            nodes=tuple(self._nodes.values()),
            leases=tuple(self._leases.values()),
            queues=tuple(self._queues.values()),
            intents=self._intents,
            leases_read=leases_read,
        )

    def _parse(self, ref: ObjectRef, manifest: Manifest, now_s: float) -> Changes:
        match ref.kind:
            case "TrainingJob":
                return self._put_job(ref, parse_job_view(manifest, self._jobs.get(ref)))
            case "Pod":
                pod = parse_pod(manifest)
                return self._forget(ref) if pod is None else self._put_pod(ref, pod)
            case "Node":
                return self._put_node(parse_node(manifest))
            case "Lease":
                lease = parse_lease(manifest, seen_s=now_s, known=self._leases.get(ref))
                return self._forget(ref) if lease is None else self._put_lease(ref, lease)
            case "TrainingQueue":
                self._queues[ref.name] = parse_queue(manifest)
                return Changes(capacity=True)
            case "ConfigMap":
                intents = parse_intents_object(manifest)
                if intents is not None:
                    self._intents = intents
                return Changes(capacity=intents is not None)
            case _:
                return Changes()

    def _put_job(self, ref: ObjectRef, job: JobView) -> Changes:
        before = self._jobs.get(ref)
        changes = Changes(jobs={job.uid})
        if before is not None and before.uid != job.uid:
            changes |= self._forget(ref)
            before = None
        self._present[ref.kind].add(ref)
        self._jobs[ref] = job
        self._job_refs[job.uid] = ref
        changes.capacity = changes.capacity or before is None or _weight(before) != _weight(job)
        return changes

    def _put_pod(self, ref: ObjectRef, pod: PodView) -> Changes:
        before = self._pods.get(ref)
        if before is not None and before.job_uid != pod.job_uid:
            self._pods_by_job[before.job_uid].discard(ref)
        self._pods[ref] = pod
        self._pods_by_job[pod.job_uid].add(ref)
        return Changes(jobs={pod.job_uid}, capacity=before is None or before.ended != pod.ended)

    def _put_node(self, node: NodeView) -> Changes:
        before = self._nodes.get(node.name)
        self._nodes[node.name] = node
        if before == node:
            return Changes()
        return Changes(jobs=self._jobs_on(node.name), capacity=True)

    def _put_lease(self, ref: ObjectRef, lease: LeaseView) -> Changes:
        self._leases[ref] = lease
        self._lease_by_job[lease.job_uid] = ref
        return Changes(jobs={lease.job_uid})

    def _jobs_on(self, node: str) -> set[str]:
        placed = {
            job.uid
            for job in self._jobs.values()
            if job.admitted and job.attempt is not None and node in job.attempt.placement.node_by_index()
        }
        return placed | {pod.job_uid for pod in self._pods.values() if pod.node == node}

    def _forget(self, ref: ObjectRef) -> Changes:
        self._present[ref.kind].discard(ref)
        match ref.kind:
            case "TrainingJob":
                job = self._jobs.pop(ref, None)
                if job is None:
                    return Changes()
                self._job_refs.pop(job.uid, None)
                self._children.pop(job.uid, None)
                return Changes(jobs={job.uid}, capacity=True)
            case "Pod":
                pod = self._pods.pop(ref, None)
                if pod is None:
                    return Changes()
                self._pods_by_job[pod.job_uid].discard(ref)
                if not self._pods_by_job[pod.job_uid]:
                    del self._pods_by_job[pod.job_uid]
                return Changes(jobs={pod.job_uid}, capacity=True)
            case "Node":
                jobs = self._jobs_on(ref.name)
                known = self._nodes.pop(ref.name, None) is not None
                return Changes(jobs=jobs, capacity=known)
            case "Lease":
                lease = self._leases.pop(ref, None)
                if lease is None:
                    return Changes()
                if self._lease_by_job.get(lease.job_uid) == ref:
                    del self._lease_by_job[lease.job_uid]
                return Changes(jobs={lease.job_uid})
            case "TrainingQueue":
                return Changes(capacity=self._queues.pop(ref.name, None) is not None)
            case _:
                return Changes()


def _weight(job: JobView) -> tuple[object, ...]:
    """What of a job admission and placement look at."""
    attempt = job.attempt
    return (
        job.generation,
        job.deleting,
        job.admitted,
        job.status.finished,
        job.status.cancelled_admissions,
        attempt.number if attempt is not None else 0,
        attempt.desired if attempt is not None else "",
    )
