"""Running jobs as candidates for preemption, and the preemption itself."""

from __future__ import annotations

from collections.abc import Iterator

from polyreme_operator.reconcile import transition
from polyreme_operator.reconcile.quarantine import blaming
from polyreme_operator.scheduler.cycle import SchedulingCycle
from polyreme_operator.scheduler.domains import rows_of
from polyreme_operator.scheduler.gangs import gang_of
from polyreme_operator.scheduler.preemption.search import Victims, choose_victims
from polyreme_operator.types.inventory import Inventory
from polyreme_operator.types.queues import Running, Waiting
from polyreme_operator.types.reasons import ConditionType
from polyreme_operator.types.timestamps import parse_time_or
from polyreme_operator.types.views import JobView

LOOK_AGAIN_S = 30.0
"""Delay until victims are searched again, since protections expire."""


def make_room(cycle: SchedulingCycle, waiting: Waiting, job: JobView) -> Victims | None:
    """Preempt others for a job that does not fit; None if no set of victims would let it start."""
    running = all_running(cycle)
    known = set(cycle.inventory.resources)
    if not running or any(resource not in known for resource, _ in job.requests):
        return None
    victims = choose_victims(
        cycle.inventory,
        gang_of(job, waiting.workers),
        waiting,
        running,
        tree=cycle.cluster.tree,
        ledger=cycle.quotas,
        now_s=cycle.now_s,
        blocked_N=cycle.blocked_for(job),
    )
    if victims is None:
        cycle.decisions.wake_at(cycle.now_s + LOOK_AGAIN_S)
        return None
    for uid in victims.uids:
        victim = cycle.cluster.jobs[uid]
        with blaming(uid):
            after = transition.stop_for_preemption(victim, job, reclaim=uid in victims.reclaim, now_s=cycle.now_s)
            cycle.write(victim, after)
    if victims.uids:
        cycle.reserve(cycle.reservation_of(job, victims.uids))
    return victims


def all_running(cycle: SchedulingCycle) -> list[Running]:
    """Return the jobs that hold capacity and were not changed in this cycle."""
    running = []
    for uid in cycle.cluster.running:
        if uid not in cycle.decisions.changed:
            with blaming(uid):
                found = running_of(cycle.inventory, cycle.cluster.jobs[uid])
            if found is not None:
                running.append(found)
    return [*running, *_leavers(cycle)]


def _leavers(cycle: SchedulingCycle) -> Iterator[Running]:
    """Yield jobs without an admission (finished, evicted, deleted) whose pods still hold capacity."""
    cluster = cycle.cluster
    for uid in cluster.pods:
        if uid in cluster.running or uid in cycle.decisions.changed:
            continue
        live = [pod for pod in cycle.leaving(uid) if pod.place]
        if not live:
            continue
        job, first = cluster.jobs.get(uid), live[0]
        if job is not None and job.quarantined and job.admitted:
            # Its pods keep running, so its capacity is not freed.
            continue
        asked = None if job is None else job.status.preemption
        yield Running(
            uid=uid,
            namespace=first.namespace,
            name=first.job_name,
            queue=first.queue,
            priority=0,
            requests=first.requests,
            devices=0,
            rows_W=rows_of(cycle.inventory, [pod.place for pod in live]),
            admitted_s=0.0,
            started_s=0.0,
            stopping_for="" if asked is None else asked.by,
            stopping=True,
        )


def running_of(inventory: Inventory, job: JobView) -> Running | None:
    """Return a running job as a candidate; cached per version of the job and the nodes."""
    kept: dict[str, tuple[str, Running]] = inventory.memo.setdefault("running", {})
    known = kept.get(job.uid)
    if known is not None and known[0] == job.resource_version:
        return known[1]
    running = _running(inventory, job)
    if running is not None:
        kept[job.uid] = job.resource_version, running
    return running


def _running(inventory: Inventory, job: JobView) -> Running | None:
    attempt, spec, status = job.attempt, job.spec, job.status
    if attempt is None or spec is None:
        return None
    admitted = status.condition(ConditionType.ADMITTED)
    recorded_s = parse_time_or(None if admitted is None else admitted.last_transition_time, 0.0)
    admitted_s = recorded_s if job.admitted_s is None else job.admitted_s
    began_s = parse_time_or(attempt.started_at, admitted_s)
    saved_s = 0.0 if status.last_checkpoint is None else parse_time_or(status.last_checkpoint.at, 0.0)
    first_s = parse_time_or(status.first_admitted_at, admitted_s)
    first_s = first_s if job.first_admitted_s is None else job.first_admitted_s
    limit_s = spec.active_deadline_seconds
    stopping = attempt.desired == "Stop"
    return Running(
        uid=job.uid,
        namespace=job.namespace,
        name=job.name,
        queue=spec.queue_name,
        priority=job.priority,
        requests=job.requests,
        devices=attempt.devices * attempt.replicas,
        rows_W=rows_of(inventory, attempt.placement.node_by_index()),
        admitted_s=admitted_s,
        started_s=max(began_s, saved_s),
        min_runtime_s=float(spec.min_runtime_seconds),
        # Before it was admitted again, whatever another machine's clock says.
        preempted_at_s=tuple(min(admitted_s, parse_time_or(record.at, 0.0)) for record in status.preemptions),
        preempted_for=frozenset(record.by for record in status.preemptions),
        stopping_for=status.preemption.by if stopping and status.preemption is not None else "",
        stopping=stopping,
        ends_at_s=None if limit_s is None else first_s + limit_s,
    )
