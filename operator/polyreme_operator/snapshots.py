"""Snapshots of the cache: of one job, of the cluster for the scheduler, and of queues for their statuses."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable

from polyreme_operator.cluster_cache import ClusterCache
from polyreme_operator.publishing.queue_status import queue_statuses, topology_status
from polyreme_operator.scheduler import ClusterSnapshot
from polyreme_operator.types.actions import WriteQueueStatus
from polyreme_operator.types.observer import CycleReport
from polyreme_operator.types.snapshot import JobSnapshot


def job_snapshot(
    cache: ClusterCache,
    uid: str,
    *,
    now_s: float,
    lease_read: bool = False,
    runs: Callable[[str], bool] = lambda _: False,
) -> JobSnapshot | None:
    """Return the snapshot from which one job is reconciled; None for a job that does not exist."""
    job = cache.job(uid)
    if job is None:
        return None
    pods, names, known = cache.pods.by_job.get(uid, {}), _places(cache, uid), cache.nodes.views
    until_s = cache.notes.children.until_s(uid)
    return JobSnapshot(
        job=job,
        pods=tuple(sorted(pods.values(), key=lambda pod: (pod.namespace, pod.name))),
        nodes={name: known[name] for name in names if name in known} | cache.node_kind.absent(names, now_s),
        lease=cache.leases.by_job.get(uid),
        pending=cache.pending_reasons.pending(job, tree=cache.queues.tree, now_s=now_s),
        refused=cache.pending_reasons.size_refused(job),
        children=cache.notes.children.known(uid, now_s=now_s),
        children_until_s=until_s if until_s is not None and until_s > now_s else None,
        refusals=cache.notes.refusals.of(job),
        lease_read=lease_read,
        leaders_running=frozenset(pod.uid for pod in pods.values() if pod.index == 0 and runs(pod.uid)),
        levels=cache.topology.levels,
        start_limit_s=0.0 if job.spec is None else cache.queues.tree.set_aside_s(job.spec.queue_name),
    )


def cluster_snapshot(
    cache: ClusterCache, *, now_s: float, leases_read: frozenset[str] = frozenset()
) -> ClusterSnapshot:
    """Return the snapshot from which the scheduler decides."""
    jobs = cache.jobs
    asking = {name for uid in cache.notes.asking for name in _places(cache, uid)}
    return ClusterSnapshot(
        inventory=cache.nodes.snapshot(),
        jobs=jobs.views,
        waiting=jobs.waiting,
        running=jobs.running,
        resizing=jobs.resizing,
        exclusive=jobs.exclusive,
        victims_of=jobs.victims_of,
        asking=cache.notes.asking,
        pods=cache.pods.by_job,
        leases=cache.leases.by_job,
        nodes=ChainMap(cache.node_kind.absent(asking, now_s), cache.nodes.views),
        tree=cache.queues.tree,
        used=cache.ledger.used,
        refused=cache.pending_reasons.unschedulable_classes,
        intents=cache.intents.assumed(),
        settled=cache.intents.settled,
        leases_read=leases_read,
        spares=cache.topology.spares,
    )


def queue_status_writes(cache: ClusterCache, *, now_s: float) -> list[WriteQueueStatus]:
    """Return the status writes of queues and topology that have changed."""
    views, used, offered = cache.queues.views, cache.ledger.used, cache.nodes.offered
    found = queue_statuses(
        views, cache.queues.tree, cache.jobs, used, cache.pending_reasons, now_s=now_s, offered=offered
    )
    topology = cache.topology.view
    if topology is not None:
        spares = cache.nodes.spares(topology.spares)
        found += topology_status(topology, cache.nodes.arrangement(), spares=spares, now_s=now_s)
    return found


def cycle_report(cache: ClusterCache, *, cycle_s: float, placement_s: tuple[float, ...]) -> CycleReport:
    """Return the figures of a scheduling cycle, for metrics."""
    return CycleReport(
        cycle_s=cycle_s,
        placement_s=placement_s,
        waiting=cache.pending_reasons.counts(),
        used=dict(cache.ledger.used),
        quota={
            (queue.name, quota.resource): quota.nominal
            for queue in cache.queues.views.values()
            for quota in queue.quotas
        },
        objects={kind: len(refs) for kind, refs in cache.seen.present.items()},
        quarantined=len(cache.jobs.quarantined),
    )


def _places(cache: ClusterCache, uid: str) -> set[str]:
    """Return the nodes that a job's pods and placement name."""
    job = cache.job(uid)
    names = {pod.place for pod in cache.pods.by_job.get(uid, {}).values() if pod.place}
    if job is not None and job.attempt is not None:
        names.update(job.attempt.placement.node_by_index())
    return names
