"""The writes that begin an attempt: admission, restart, move, resize; each is one whole status.

Attempt numbers rise strictly. A worker index never gets the same replacement number twice, so a launcher of a deleted
pod that wakes late on a lost node knows itself to be of the past.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from polyreme_api.job import TrainingJobStatus
from polyreme_api.job.placement import Placement
from polyreme_api.job.status import (
    PREEMPTION_RECORDS_MAX,
    AttemptStatus,
    Preemption,
    PreemptionRecord,
    replacement_runs,
)
from polyreme_api.times import rfc3339
from polyreme_operator.reconcile import environment_runtime, stopping
from polyreme_operator.reconcile.accounting import close_attempt
from polyreme_operator.reconcile.failure_policy import Restart, with_restart
from polyreme_operator.reconcile.observe import current_record
from polyreme_operator.reconcile.status import drop_condition, selector, with_condition, withdraw
from polyreme_operator.reconcile.stopping import Stop, StopFor
from polyreme_operator.types.reasons import Cause, ConditionType, Reason, Scope
from polyreme_operator.types.snapshot import JobSnapshot
from polyreme_operator.types.views import JobView
from polyreme_planner.plan import Plan


def admit(job: JobView, nodes: Sequence[str], now_s: float, *, plan: Plan | None = None) -> TrainingJobStatus:
    """Admit a waiting job: a new attempt, every place with a fresh pod, and its condition, in one status.

    Args:
        job: The job.
        nodes: Node of each worker; an elastic job may get fewer than it wishes.
        now_s: The time.
        plan: Plan for that many workers, where they are not ``spec.workers.replicas``.
    """
    plan = plan or job.plan
    assert plan is not None, "a job without a plan waits for nothing"
    before = job.attempt
    scope = Scope.START if before is None else Scope.RESUME
    reused = range(0 if before is None else before.replicas)
    status = begin_attempt(job, job.status, nodes=nodes, replace=reused, scope=scope, now_s=now_s, plan=plan)
    generation = job.generation
    status = with_condition(status, ConditionType.QUEUED, False, Reason.ADMITTED, now_s=now_s, generation=generation)
    if status.condition(ConditionType.PREEMPTED) is not None:
        status = with_condition(
            status, ConditionType.PREEMPTED, False, Reason.ADMITTED, now_s=now_s, generation=generation
        )
    status = _with_admission(job, status, nodes, now_s)
    status = drop_condition(status, ConditionType.SUSPENDED, ConditionType.RESIZE_REFUSED)
    return status.model_copy(
        update={
            "preemption": None,
            "first_admitted_at": status.first_admitted_at or rfc3339(now_s),
            "selector": selector(job),
            "priority": job.priority,
            "observed_generation": generation,
        }
    )


def restart(snapshot: JobSnapshot, verdict: Restart, nodes: Sequence[str], now_s: float) -> TrainingJobStatus:
    """Begin a new attempt after a failure, on ``nodes``; the failed one is closed and charged."""
    job = snapshot.job
    cause, lease = verdict.failure.cause, snapshot.lease
    hung_s = lease.seen_s - lease.advanced_seen_s if cause is Cause.HUNG and lease is not None else 0.0
    status = close_attempt(job.status, current_record(snapshot), ended_by=cause, now_s=now_s, hung_s=hung_s)
    status = with_restart(status, verdict.record)
    status = begin_attempt(job, status, nodes=nodes, replace=verdict.replace, scope=verdict.scope, now_s=now_s)
    status = _with_admission(job, status, nodes, now_s)
    return with_condition(
        status,
        ConditionType.RESTARTING,
        True,
        verdict.failure.cause,
        verdict.failure.message,
        now_s=now_s,
        generation=job.generation,
    )


def stop_for_resize(job: JobView, now_s: float) -> TrainingJobStatus:
    """Ask a running attempt to checkpoint and stop, since another size fits: its last word must be heard first."""
    # A condition that is True already would keep its old time, from which the grace counts.
    status = drop_condition(job.status, ConditionType.RESTARTING)
    return with_condition(
        stopped(status, checkpoint=True),
        ConditionType.RESTARTING,
        True,
        Cause.RESIZE,
        now_s=now_s,
        generation=job.generation,
    )


def stop_for_suspend(job: JobView, now_s: float) -> TrainingJobStatus:
    """Ask a running attempt to checkpoint and stop, as its user wants."""
    generation = job.generation
    status = with_condition(
        stopped(job.status, checkpoint=True),
        ConditionType.SUSPENDED,
        False,
        Reason.SUSPENDING,
        now_s=now_s,
        generation=generation,
    )
    return with_condition(status, ConditionType.RUNNING, False, Reason.SUSPENDING, now_s=now_s, generation=generation)


def stop_for_preemption(job: JobView, by: JobView, *, reclaim: bool, now_s: float) -> TrainingJobStatus:
    """Ask a running attempt to checkpoint and make way for another job, unless it stops for good already."""
    verb = "reclaim its quota" if reclaim else "run"
    name = f"{by.namespace}/{by.name}"
    return _stop_for_others(
        job, by=by.uid, by_name=name, reclaim=reclaim, message=f"preempted to let {name} {verb}", now_s=now_s
    )


def stop_for_drain(job: JobView, *, queue: str, now_s: float) -> TrainingJobStatus:
    """Ask a running attempt to checkpoint and stop, since its queue drains. No preemption: nobody pays for it."""
    message = f"asked to stop: queue {queue} is drained (stopPolicy HoldAndDrain)"
    return _stop_for_others(job, by="", by_name=queue, reclaim=False, message=message, now_s=now_s)


def _stop_for_others(
    job: JobView, *, by: str, by_name: str, reclaim: bool, message: str, now_s: float
) -> TrainingJobStatus:
    assert job.spec is not None, "a job that can't be read is left alone"
    stop = stopping.standing(job)
    if stop is not None and stop.why is not StopFor.RESIZE:
        return job.status
    grace_s = float(job.spec.checkpoint.preemption_grace_seconds)
    asked = Preemption(
        by=by, by_name=by_name, requested_at=rfc3339(now_s), deadline=rfc3339(now_s + grace_s), reclaim=reclaim
    )
    status = stopped(job.status, checkpoint=True).model_copy(update={"preemption": asked, "retry_at": None})
    generation = job.generation
    status = with_condition(
        status, ConditionType.PREEMPTED, True, Reason.PREEMPTING, message, now_s=now_s, generation=generation
    )
    return with_condition(status, ConditionType.RUNNING, False, Reason.PREEMPTING, now_s=now_s, generation=generation)


def give_back(snapshot: JobSnapshot, stop: Stop, now_s: float) -> TrainingJobStatus:
    """Close an attempt that has stopped for good, and take its admission back.

    Only what lies behind its newest durable checkpoint is lost time.
    """
    job = snapshot.job
    assert job.spec is not None, "a job that can't be read is left alone"
    generation = job.generation
    reason, message = stopping.given_back_for(job, stop)
    cause = Cause.SUSPEND if stop.why is StopFor.SUSPEND else Cause.PREEMPTED
    status = close_attempt(job.status, current_record(snapshot), ended_by=cause, now_s=now_s)
    status = withdraw(job, status, reason, message, now_s=now_s)
    status = drop_condition(status, ConditionType.RESTARTING, ConditionType.RESIZE_REFUSED)
    if stop.why is StopFor.SUSPEND:
        status = drop_condition(status, ConditionType.PREEMPTED)
    else:
        status = with_condition(
            status, ConditionType.PREEMPTED, True, reason, message, now_s=now_s, generation=generation
        )
        if stop.why is StopFor.PREEMPTION:
            status = _with_preemption(status)
    if stop.why is StopFor.SUSPEND or job.spec.suspend:
        suspended = job.spec.suspend
        return with_condition(
            status, ConditionType.SUSPENDED, suspended, Reason.SUSPENDED, now_s=now_s, generation=generation
        )
    status = drop_condition(status, ConditionType.SUSPENDED)
    return with_condition(status, ConditionType.QUEUED, True, reason, message, now_s=now_s, generation=generation)


def _with_preemption(status: TrainingJobStatus) -> TrainingJobStatus:
    """Put the preemption on record: the budgets of the queue count by it, and nobody preempts this job twice."""
    asked = status.preemption
    if asked is None:
        return status
    records = [*status.preemptions, PreemptionRecord(by=asked.by, at=asked.requested_at)]
    return status.model_copy(
        update={
            "preemptions": records[-PREEMPTION_RECORDS_MAX:],
            "preemption_count": status.preemption_count + 1,
        }
    )


def stops_for_resize(job: JobView) -> bool:
    """Tell whether the attempt was asked to stop for a resize, and for nothing that takes its devices."""
    stop = stopping.standing(job)
    return stop is not None and stop.why is StopFor.RESIZE


def resize(snapshot: JobSnapshot, nodes: Sequence[str], now_s: float, *, plan: Plan | None = None) -> TrainingJobStatus:
    """Begin a new attempt with the plan of another worker count; workers that stay keep pod and node.

    Args:
        snapshot: The job and what it has.
        nodes: Node of each worker.
        now_s: The time.
        plan: Plan for that many workers, where they are not ``spec.workers.replicas``.
    """
    job = snapshot.job
    assert job.attempt is not None, "only an admitted job is resized"
    assert job.spec is not None, "a job that can't be read is left alone"
    before = job.attempt
    status = close_attempt(job.status, current_record(snapshot), ended_by=Cause.RESIZE, now_s=now_s)
    fixed = environment_runtime.is_used(job.spec)  # its pods know their world size from their environment
    moved = [index for index, node in enumerate(before.placement.node_by_index()) if nodes[index : index + 1] != [node]]
    replace = range(max(before.replicas, len(nodes))) if fixed else moved
    status = begin_attempt(job, status, nodes=nodes, replace=replace, scope=Scope.RESIZE, now_s=now_s, plan=plan)
    status = _with_admission(job, status, nodes, now_s)
    return status.model_copy(update={"observed_generation": job.generation})


def evict(
    snapshot: JobSnapshot, verdict: Restart, now_s: float, *, reason: Reason = Reason.EVICTED
) -> TrainingJobStatus:
    """Take the gang off its nodes, since no place is free for what it lost; it waits in the queue again."""
    job = snapshot.job
    status = close_attempt(job.status, current_record(snapshot), ended_by=verdict.failure.cause, now_s=now_s)
    record = verdict.record.model_copy(update={"scope": Scope.GANG.value})
    status = with_restart(status, record)
    status = withdraw(job, status, reason, verdict.failure.message, now_s=now_s)
    return with_condition(
        stopped(status),
        ConditionType.QUEUED,
        True,
        reason,
        verdict.failure.message,
        now_s=now_s,
        generation=job.generation,
    )


def give_up_place(snapshot: JobSnapshot, verdict: Restart, now_s: float) -> TrainingJobStatus:
    """Take a gang off its nodes, since the API server refuses its pods; it may be admitted again when its wait is over.

    Nodes and quota are free for others meanwhile.
    """
    status = evict(snapshot, verdict, now_s, reason=Reason.CREATE_REFUSED)
    return status.model_copy(update={"retry_at": rfc3339(verdict.due_s)})


def stopped(status: TrainingJobStatus, *, checkpoint: bool = False) -> TrainingJobStatus:
    """Ask the launchers to stop the ranks, after a checkpoint if asked for."""
    if status.attempt is None:
        return status
    update = {"desired": "Stop", "checkpoint_requested": checkpoint or status.attempt.checkpoint_requested}
    return status.model_copy(update={"attempt": status.attempt.model_copy(update=update)})


def begin_attempt(
    job: JobView,
    status: TrainingJobStatus,
    *,
    nodes: Sequence[str],
    replace: Collection[int],
    scope: Scope,
    now_s: float,
    plan: Plan | None = None,
) -> TrainingJobStatus:
    """Put the next attempt on the status. ``replace`` names the indices whose replacement number rises.

    ``plan`` None is the job's own; an attempt that keeps its worker count keeps its plan where that has another.
    """
    before = status.attempt
    plan = plan or job.plan
    unchanged = before is not None and before.replicas == len(nodes) and (plan is None or plan.replicas != len(nodes))
    if unchanged and before is not None:
        plan_hash, plan_json, devices = before.plan_hash, before.plan, before.devices
    else:
        assert plan is not None, "only a restart may start without a plan"
        plan_hash, plan_json, devices = plan.hash, plan.to_json(), plan.devices
    numbers = {} if before is None else before.replacement_by_index
    for index in replace:
        numbers[index] = numbers.get(index, 0) + 1
    attempt = AttemptStatus(
        number=1 if before is None else before.number + 1,
        plan_hash=plan_hash,
        plan=plan_json,
        replicas=len(nodes),
        devices=devices,
        replacements=replacement_runs(numbers),
        placement=Placement.of(list(nodes)),
        started_at=rfc3339(now_s),
        scope=scope.value,
    )
    kept = 0 if before is None or scope in {Scope.START, Scope.RESUME} else min(before.replicas, len(nodes))
    here = kept - sum(1 for index in replace if index < kept)
    told: dict[str, object] = {"attempt": attempt, "retry_at": None, "ready_replicas": 0, "replicas": max(0, here)}
    if plan is not None and plan.replicas == len(nodes):
        told |= {"layout": str(plan.layout), "recompute": plan.made_anew}
    status = status.model_copy(update=told)
    for kind in (ConditionType.PODS_READY, ConditionType.RUNNING):
        status = with_condition(status, kind, False, Reason.STARTING, now_s=now_s, generation=job.generation)
    return status


def _with_admission(job: JobView, status: TrainingJobStatus, nodes: Sequence[str], now_s: float) -> TrainingJobStatus:
    """Say what the job holds: with each attempt, since a restart may move workers and a resize changes them."""
    message = f"{_counted(len(nodes), 'worker')} on {_counted(len(set(nodes)), 'node')}"
    before = job.attempt if job.admitted else None
    reason = Reason.ADMITTED
    if before is not None and before.replicas != len(nodes):
        reason = Reason.GROWN if len(nodes) > before.replicas else Reason.SHRUNK
        message = f"{message}, {reason.lower()} from {before.replicas}"
    if job.spec is not None and job.spec.workers.replicas != len(nodes):
        message = f"{message}; {_counted(job.spec.workers.replicas, 'worker')} requested"
    return with_condition(status, ConditionType.ADMITTED, True, reason, message, now_s=now_s, generation=job.generation)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
