"""Who is admitted, where: one decision for the whole cluster, made by one task, written as intents before any job.

Order: settle the intents of an earlier batch; give workers of lost nodes another place; resize; then admit what
waits, larger priority first, older first. A gang is placed whole or not at all. A job that does not fit lets smaller
ones behind it pass.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Mapping

from polyreme_api.job import TrainingJobStatus
from polyreme_api.job.status import AttemptStatus, Placement
from polyreme_api.labels import MANAGER
from polyreme_api.progress import Outcome
from polyreme_operator.core import transition
from polyreme_operator.core.observe import current_record
from polyreme_operator.core.best_fit import Placer, place_best_fit
from polyreme_operator.core.reasons import Reason
from polyreme_operator.core.recovery import Restart, judge
from polyreme_operator.core.stopping import has_stopped
from polyreme_operator.core.usage import Charge, Usage, usage_of
from polyreme_operator.types.actions import WriteIntents, WriteStatus
from polyreme_operator.types.intents import Intent, IntentState, intent_state
from polyreme_operator.types.snapshot import Cluster, JobScene, Pending
from polyreme_operator.types.views import JobView, LeaseView, NodeView, PodView, QueueView


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One round of decisions. ``intents`` is written before ``writes``; each of ``writes`` stands by itself."""

    intents: WriteIntents | None = None
    writes: tuple[WriteStatus, ...] = ()
    pending: Mapping[str, Pending] = dataclasses.field(default_factory=dict)
    """Why each waiting job waits, by UID."""
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Why a running job keeps its size though its spec says another, by UID."""
    reads: frozenset[str] = frozenset()
    """UIDs of jobs whose Lease must be read before their attempt may be ended; then decide again."""


def schedule(cluster: Cluster, now_s: float, *, placer: Placer = place_best_fit) -> Batch:
    """Decide admissions, moves and resizes for the cluster as it is."""
    jobs = {job.uid: job for job in cluster.jobs}
    open_ = [entry for entry in cluster.intents.entries if intent_state(entry, jobs) is IntentState.OPEN]
    if open_:
        return Batch(writes=tuple(_cancel(jobs[entry.uid]) for entry in open_))
    round_ = _Round(cluster, now_s, placer)
    managed = sorted((job for job in cluster.jobs if _is_ours(job)), key=_queue_order)
    for job in managed:
        if job.admitted:
            round_.repair(job)
    for job in managed:
        if job.admitted:
            round_.resize(job)
    for job in managed:
        if _waits(job):
            round_.admit(job)
    return round_.batch()


class _Round:
    """The capacity that is left, and what this round has decided so far."""

    def __init__(self, cluster: Cluster, now_s: float, placer: Placer) -> None:
        self._now_s = now_s
        self._placer = placer
        self._usage: Usage = usage_of(cluster)
        self._nodes: dict[str, NodeView] = {node.name: node for node in sorted(cluster.nodes, key=lambda n: n.name)}
        self._queues: dict[str, QueueView] = {queue.name: queue for queue in cluster.queues}
        self._pods: dict[str, list[PodView]] = defaultdict(list)
        for pod in cluster.pods:
            self._pods[pod.job_uid].append(pod)
        self._leases: dict[str, LeaseView] = {lease.job_uid: lease for lease in cluster.leases}
        self._intents_version = cluster.intents.resource_version
        self._entries: list[Intent] = []
        self._writes: list[WriteStatus] = []
        self._pending: dict[str, Pending] = {}
        self._refused: dict[str, str] = {}
        self._positions: Counter[str] = Counter()
        self._changed: set[str] = set()
        self._leases_read = cluster.leases_read
        self._reads: set[str] = set()

    def batch(self) -> Batch:
        entries = tuple(self._entries)
        intents = WriteIntents(resource_version=self._intents_version, entries=entries) if entries else None
        return Batch(
            intents=intents,
            writes=tuple(self._writes),
            pending=self._pending,
            refused=self._refused,
            reads=frozenset(self._reads),
        )

    def repair(self, job: JobView) -> None:
        """Give the workers of lost nodes other places, or take the gang off if there are none."""
        attempt, spec = job.attempt, job.spec
        if attempt is None or spec is None or attempt.desired == "Stop":
            return
        scene = self._scene(job)
        record = current_record(scene)
        if record is not None and record.outcome is Outcome.SUCCEEDED:
            return
        verdict = judge(scene, spec, self._now_s)
        if not isinstance(verdict, Restart) or not verdict.move or verdict.due_s > self._now_s:
            return
        if self._must_read(job):
            return
        nodes = attempt.placement.node_by_index()
        moved = sorted(verdict.move)
        found = self._place(job, workers=len(moved), devices=attempt.devices)
        if found is None:
            self._write(job, transition.evict(scene, verdict, self._now_s))
            return
        for index, node in zip(moved, found, strict=True):
            nodes[index] = node
        self._take(job, nodes, attempt.devices)
        self._write(job, transition.restart(scene, verdict, nodes, self._now_s))

    def resize(self, job: JobView) -> None:
        """Give a job the worker count of its spec, if that fits: stop the attempt, hear its end, begin the next."""
        attempt, spec, plan = job.attempt, job.spec, job.plan
        if attempt is None or spec is None or spec.suspend or job.uid in self._changed:
            return
        stopping = transition.stops_for_resize(job)
        if attempt.desired == "Stop" and not stopping:
            return
        if plan is None:
            self._refused[job.uid] = job.invalid
        if not stopping and (plan is None or plan.replicas == attempt.replicas):
            return
        scene = self._scene(job)
        if stopping and not has_stopped(scene, self._now_s):
            return
        if self._must_read(job):
            return
        record = current_record(scene)
        if record is not None and record.outcome is not None and not stopping:
            return
        if record is not None and record.outcome is Outcome.SUCCEEDED:
            return
        nodes = self._resized(job, attempt, attempt.replicas if plan is None else plan.replicas)
        if stopping:
            nodes = nodes or attempt.placement.node_by_index()
            self._take(job, nodes, attempt.devices)
            self._write(job, transition.resize(scene, nodes, self._now_s))
        elif nodes is not None:
            self._write(job, transition.stop_for_resize(job, self._now_s))

    def _resized(self, job: JobView, attempt: AttemptStatus, workers: int) -> list[str] | None:
        """Place another count of workers, those that stay where they are; None, and why on record, if no fit."""
        nodes = attempt.placement.node_by_index()[:workers]
        more = workers - len(nodes)
        if more > 0:
            found = self._place(job, workers=more, devices=attempt.devices)
            if found is None:
                self._refused[job.uid] = self._misfit(job, workers=more, devices=attempt.devices).message
                return None
            nodes += found
        return nodes

    def admit(self, job: JobView) -> None:
        """Admit a waiting job, or say why it waits."""
        assert job.spec is not None
        assert job.plan is not None
        workers, devices = job.plan.replicas, job.plan.devices
        self._positions[job.spec.queue_name] += 1
        position = self._positions[job.spec.queue_name]
        lingering = sum(not pod.ended for pod in self._pods[job.uid])
        if lingering:
            message = f"waits for {lingering} of its own pods to end"
            self._pending[job.uid] = Pending(reason=Reason.WAITING_FOR_CAPACITY, message=message, position=position)
            return
        found = self._place(job, workers=workers, devices=devices)
        if found is None:
            self._pending[job.uid] = dataclasses.replace(
                self._misfit(job, workers=workers, devices=devices), position=position
            )
            return
        self._positions[job.spec.queue_name] -= 1
        self._take(job, found, devices)
        self._write(job, transition.admit(job, found, self._now_s))

    def _scene(self, job: JobView) -> JobScene:
        return JobScene(job=job, pods=tuple(self._pods[job.uid]), nodes=self._nodes, lease=self._leases.get(job.uid))

    def _must_read(self, job: JobView) -> bool:
        """Ask for the Lease first: the success of an attempt that is about to be ended may stand there unseen."""
        if job.uid in self._leases_read or job.uid not in self._leases:
            return False
        self._reads.add(job.uid)
        return True

    def _place(self, job: JobView, *, workers: int, devices: int) -> list[str] | None:
        assert job.spec is not None
        if self._quota_left(job) < workers * devices:
            return None
        return self._placer(self._free(job), workers=workers, devices=devices)

    def _free(self, job: JobView) -> dict[str, int]:
        assert job.spec is not None
        resource = job.spec.workers.device_resource
        return {
            name: max(0, node.capacity(resource) - self._usage.on_node(name, resource))
            for name, node in self._nodes.items()
            if node.usable and node.capacity(resource)
        }

    def _quota_left(self, job: JobView) -> float:
        assert job.spec is not None
        resource, name = job.spec.workers.device_resource, job.spec.queue_name
        limit = self._queues[name].limit(resource) if name in self._queues else None
        return float("inf") if limit is None else limit - self._usage.in_queue(name, resource)

    def _take(self, job: JobView, nodes: list[str], devices: int) -> None:
        """Charge a new placement and put it among the intents."""
        assert job.spec is not None
        queue, resource = job.spec.queue_name, job.spec.workers.device_resource
        for index, node in enumerate(nodes):
            self._usage.add(
                Charge(uid=job.uid, index=index, node=node, queue=queue, resource=resource, devices=devices)
            )
        self._entries.append(
            Intent(
                namespace=job.namespace,
                name=job.name,
                uid=job.uid,
                attempt=1 if job.attempt is None else job.attempt.number + 1,
                cancelled_admissions=job.status.cancelled_admissions,
                queue=queue,
                resource=resource,
                devices=devices,
                placement=Placement.of(nodes),
            )
        )

    def _write(self, job: JobView, after: TrainingJobStatus) -> None:
        self._changed.add(job.uid)
        self._writes.append(_write(job, after))

    def _misfit(self, job: JobView, *, workers: int, devices: int) -> Pending:
        """Say why a gang does not fit: misconfigured before quota before capacity."""
        assert job.spec is not None
        resource, queue = job.spec.workers.device_resource, job.spec.queue_name
        needed = workers * devices
        largest = max((node.capacity(resource) for node in self._nodes.values()), default=0)
        limit = self._queues[queue].limit(resource) if queue in self._queues else None
        free = [count for count in self._free(job).values() if count >= devices]
        if largest and devices > largest:
            reason = Reason.MISCONFIGURED
            message = f"a worker needs {devices} devices; the largest node has {largest} of {resource}"
        elif limit is not None and self._quota_left(job) < needed:
            reason = Reason.EXCEEDS_QUOTA
            taken = self._usage.in_queue(queue, resource)
            message = f"needs {needed} devices; queue {queue} has {max(0, limit - taken)} of {limit} left"
        else:
            reason = Reason.WAITING_FOR_CAPACITY
            nodes = "1 node" if len(free) == 1 else f"{len(free)} nodes"
            message = f"needs {needed} devices; {sum(free)} free on {nodes}"
        return Pending(reason=reason, message=message, position=1)


def _is_ours(job: JobView) -> bool:
    return not job.deleting and not job.status.finished and (job.spec is None or job.spec.managed_by == MANAGER)


def _waits(job: JobView) -> bool:
    return not job.admitted and job.spec is not None and job.plan is not None and not job.spec.suspend


def _queue_order(job: JobView) -> tuple[int, float, str, str, str]:
    priority = 0 if job.spec is None else job.spec.priority
    return (-priority, job.created_s, job.namespace, job.name, job.uid)


def _cancel(job: JobView) -> WriteStatus:
    """Take an admission back that may still be in flight: raise the job's count, and with it its resource version."""
    after = job.status.model_copy(update={"cancelled_admissions": job.status.cancelled_admissions + 1})
    return _write(job, after)


def _write(job: JobView, after: TrainingJobStatus) -> WriteStatus:
    return WriteStatus(ref=job.ref, uid=job.uid, resource_version=job.resource_version, before=job.status, after=after)
