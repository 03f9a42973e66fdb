"""Transitions of a job: admission, stop, restart, resize, eviction; each is a single status write.

Attempt numbers increase strictly. A worker index never gets the same replacement number twice, so the launcher of a
deleted pod that wakes up late on a lost node can tell that it is stale.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from polyreme_api import labels
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
from polyreme_operator.reconcile import environment_runtime, pre_checks, stopping, worker_count
from polyreme_operator.reconcile.failure_policy import Pause, Restart
from polyreme_operator.reconcile.observe import current_record
from polyreme_operator.reconcile.status_builder import StatusBuilder
from polyreme_operator.reconcile.stopping import Stop, StopFor
from polyreme_operator.types.reasons import Cause, ConditionType, Reason, Scope
from polyreme_operator.types.snapshot import JobSnapshot
from polyreme_operator.types.views import JobView
from polyreme_planner.plan import Plan


def admit(job: JobView, nodes: Sequence[str], now_s: float, *, plan: Plan | None = None) -> TrainingJobStatus:
    """Admit a waiting job: a new attempt with a new pod for every place, and its conditions.

    Args:
        job: The job.
        nodes: Node of each worker; an elastic job may get fewer than it requests.
        now_s: The time.
        plan: Plan for that many workers, where they are not ``spec.workers.replicas``.
    """
    plan = plan or job.plan
    assert plan is not None, "only a job with a plan is admitted"
    before = job.attempt
    after = StatusBuilder(job, now_s).close_wait()
    begin_attempt(
        after,
        nodes=nodes,
        replace=range(0 if before is None else before.replicas),
        scope=Scope.START if before is None else Scope.RESUME,
        plan=plan,
    )
    after.set(ConditionType.QUEUED, False, Reason.ADMITTED).lower(ConditionType.PREEMPTED, Reason.ADMITTED)
    after.drop(ConditionType.SUSPENDED)
    worker_count.report_admission(after, len(nodes))
    return (
        after.report_data()
        .update(
            preemption=None,
            first_admitted_at=job.status.first_admitted_at or rfc3339(now_s),
            selector=f"{labels.LABEL_JOB_UID}={job.uid}",
            replicas_in_force=job.status.replicas_in_force or plan.replicas,
            priority=job.priority,
            observed_generation=job.generation,
        )
        .build()
    )


def restart(snapshot: JobSnapshot, verdict: Restart, nodes: Sequence[str], now_s: float) -> TrainingJobStatus:
    """Begin a new attempt after a failure, on ``nodes``; the failed one is closed and charged."""
    cause, lease = verdict.failure.cause, snapshot.lease
    hung_s = lease.seen_s - lease.advanced_seen_s if cause is Cause.HUNG and lease is not None else 0.0
    after = StatusBuilder(snapshot.job, now_s)
    after.close_attempt(current_record(snapshot), ended_by=cause, hung_s=hung_s)
    after.record_restart(verdict.record).remember_nodes(verdict.avoid, cause)
    begin_attempt(after, nodes=nodes, replace=verdict.replace, scope=verdict.scope)
    return after.set(ConditionType.RESTARTING, True, cause, verdict.failure.message).build()


def stop_for_resize(job: JobView, now_s: float) -> TrainingJobStatus:
    """Ask a running attempt to checkpoint and stop, since another size fits; the next one begins after its outcome."""
    after = StatusBuilder(job, now_s).request_stop(checkpoint=True)
    # A condition that is True already would keep its old time, from which the grace period counts.
    after.drop(ConditionType.RESTARTING).set(ConditionType.RESTARTING, True, Cause.RESIZE)
    return after.update(observed_generation=job.generation).build()


def stop_for_move(job: JobView, now_s: float, *, message: str) -> TrainingJobStatus:
    """Ask a running attempt to checkpoint and stop, since workers must leave their nodes; the others keep theirs."""
    after = StatusBuilder(job, now_s).request_stop(checkpoint=True)
    return after.drop(ConditionType.RESTARTING).set(ConditionType.RESTARTING, True, Cause.NODE_FAULT, message).build()


def stop_for_suspend(job: JobView, now_s: float) -> TrainingJobStatus:
    """Ask a running attempt to checkpoint and stop, as its user wants."""
    after = StatusBuilder(job, now_s).request_stop(checkpoint=True)
    after.set(ConditionType.SUSPENDED, False, Reason.SUSPENDING)
    after.set(ConditionType.RUNNING, False, Reason.SUSPENDING)
    return after.update(observed_generation=job.generation).build()


def stop_for_preemption(job: JobView, by: JobView, *, reclaim: bool, now_s: float) -> TrainingJobStatus:
    """Ask a running attempt to checkpoint and stop for another job, unless it already stops for good."""
    verb = "reclaim its quota" if reclaim else "run"
    name = f"{by.namespace}/{by.name}"
    return _stop_for_others(
        job, by=by.uid, by_name=name, reclaim=reclaim, message=f"preempted to let {name} {verb}", now_s=now_s
    )


def stop_for_drain(job: JobView, *, queue: str, now_s: float) -> TrainingJobStatus:
    """Ask a running attempt to checkpoint and stop, since its queue drains. It does not count as a preemption."""
    message = f"asked to stop: queue {queue} is drained (stopPolicy HoldAndDrain)"
    return _stop_for_others(job, by="", by_name=queue, reclaim=False, message=message, now_s=now_s)


def _stop_for_others(
    job: JobView, *, by: str, by_name: str, reclaim: bool, message: str, now_s: float
) -> TrainingJobStatus:
    assert job.spec is not None, "a job that can't be read is left alone"
    stop = stopping.requested_stop(job)
    if stop is not None and stop.why not in stopping.CONTINUES:
        return job.status
    grace_s = float(job.spec.checkpoint.preemption_grace_seconds)
    asked = Preemption(
        by=by, by_name=by_name, requested_at=rfc3339(now_s), deadline=rfc3339(now_s + grace_s), reclaim=reclaim
    )
    after = StatusBuilder(job, now_s).request_stop(checkpoint=True).update(preemption=asked, retry_at=None)
    after.set(ConditionType.PREEMPTED, True, Reason.PREEMPTING, message)
    return after.set(ConditionType.RUNNING, False, Reason.PREEMPTING).build()


_CAUSES = {StopFor.SUSPEND: Cause.SUSPEND, StopFor.MOVE: Cause.NODE_FAULT}


def give_back(snapshot: JobSnapshot, stop: Stop, now_s: float) -> TrainingJobStatus:
    """Close an attempt that has stopped for good, and withdraw its admission.

    Only the time since its newest durable checkpoint is lost.
    """
    job = snapshot.job
    assert job.spec is not None, "a job that can't be read is left alone"
    suspends, moves = stop.why is StopFor.SUSPEND, stop.why is StopFor.MOVE
    reason, message = stopping.given_back_for(job, stop)
    after = StatusBuilder(job, now_s)
    after.close_attempt(current_record(snapshot), ended_by=_CAUSES.get(stop.why, Cause.PREEMPTED))
    after.withdraw(reason, message).drop(ConditionType.RESTARTING)
    if suspends or moves:
        after.drop(ConditionType.PREEMPTED)
    else:
        after.set(ConditionType.PREEMPTED, True, reason, message)
        if stop.why is StopFor.PREEMPTION:
            _record_preemption(after)
    if suspends or job.spec.suspend:
        return after.set(ConditionType.SUSPENDED, job.spec.suspend, Reason.SUSPENDED).build()
    return after.drop(ConditionType.SUSPENDED).set(ConditionType.QUEUED, True, reason, message).build()


def _record_preemption(after: StatusBuilder) -> None:
    """Record the preemption: the queue's budgets count it, and the same job never preempts this one twice."""
    status = after.job.status
    asked = status.preemption
    if asked is not None:
        records = [*status.preemptions, PreemptionRecord(by=asked.by, at=asked.requested_at)]
        after.update(preemptions=records[-PREEMPTION_RECORDS_MAX:], preemption_count=status.preemption_count + 1)


def stops_for_move(job: JobView) -> bool:
    """Tell whether the attempt was asked to stop so that workers can leave their nodes."""
    stop = stopping.requested_stop(job)
    return stop is not None and stop.why is StopFor.MOVE


def move(snapshot: JobSnapshot, nodes: Sequence[str], replace: Collection[int], now_s: float) -> TrainingJobStatus:
    """Begin a new attempt after a stop for a move; workers that are not in ``replace`` keep their pods and nodes."""
    job = snapshot.job
    assert job.spec is not None, "a job that can't be read is left alone"
    after = StatusBuilder(job, now_s).close_attempt(current_record(snapshot), ended_by=Cause.NODE_FAULT)
    fixed = environment_runtime.is_used(job.spec)  # its pods know their peers from their environment
    whole = fixed or len(replace) == len(nodes)
    begin_attempt(
        after,
        nodes=nodes,
        replace=range(len(nodes)) if whole else replace,
        scope=Scope.GANG if whole and len(nodes) > 1 else Scope.POD if replace else Scope.PROCESS,
    )
    return after.build()


def stops_for_resize(job: JobView) -> bool:
    """Tell whether the attempt was asked to stop for a resize, and for nothing that frees its devices."""
    stop = stopping.requested_stop(job)
    return stop is not None and stop.why is StopFor.RESIZE


def resize(snapshot: JobSnapshot, nodes: Sequence[str], now_s: float, *, plan: Plan | None = None) -> TrainingJobStatus:
    """Begin a new attempt with another worker count; remaining workers keep their pods and nodes.

    Args:
        snapshot: The job and its objects.
        nodes: Node of each worker.
        now_s: The time.
        plan: Plan for that many workers, where they are not ``spec.workers.replicas``.
    """
    job = snapshot.job
    assert job.attempt is not None, "only an admitted job is resized"
    assert job.spec is not None, "a job that can't be read is left alone"
    before = job.attempt
    after = StatusBuilder(job, now_s).close_attempt(current_record(snapshot), ended_by=Cause.RESIZE)
    fixed = environment_runtime.is_used(job.spec)  # its pods know their world size from their environment
    moved = [index for index, node in enumerate(before.placement.node_by_index()) if nodes[index : index + 1] != [node]]
    replace = range(max(before.replicas, len(nodes))) if fixed else moved
    begin_attempt(after, nodes=nodes, replace=replace, scope=Scope.RESIZE, plan=plan)
    return after.update(observed_generation=job.generation).build()


def evict(
    snapshot: JobSnapshot, verdict: Restart, now_s: float, *, reason: Reason = Reason.EVICTED
) -> TrainingJobStatus:
    """Evict a gang, since there is no place for its lost workers; it waits in the queue again."""
    record = verdict.record.model_copy(update={"scope": Scope.GANG.value})
    after = StatusBuilder(snapshot.job, now_s)
    after.close_attempt(current_record(snapshot), ended_by=verdict.failure.cause)
    after.record_restart(record).remember_nodes(verdict.avoid, verdict.failure.cause)
    after.withdraw(reason, verdict.failure.message).request_stop()
    return after.set(ConditionType.QUEUED, True, reason, verdict.failure.message).build()


def pause(snapshot: JobSnapshot, verdict: Pause, now_s: float) -> TrainingJobStatus:
    """Close an attempt after which no other helps, and withdraw the admission until the spec changes."""
    failure = verdict.failure
    after = StatusBuilder(snapshot.job, now_s)
    after.close_attempt(current_record(snapshot), ended_by=failure.cause).record_restart(verdict.record)
    words = f"{failure.message}; paused until the spec changes, or the job is suspended and resumed"
    after.withdraw(Reason.LOSS_SPIKES, words).request_stop().drop(ConditionType.RESTARTING, ConditionType.PREEMPTED)
    return after.set(ConditionType.SUSPENDED, True, Reason.LOSS_SPIKES, words).build()


def give_up_place(snapshot: JobSnapshot, verdict: Restart, now_s: float) -> TrainingJobStatus:
    """Evict a gang, since the API server refuses its pods; it may be admitted again after its backoff.

    Its nodes and quota are free for others meanwhile.
    """
    status = evict(snapshot, verdict, now_s, reason=Reason.CREATE_REFUSED)
    return status.model_copy(update={"retry_at": rfc3339(verdict.due_s)})


def begin_attempt(
    after: StatusBuilder,
    *,
    nodes: Sequence[str],
    replace: Collection[int],
    scope: Scope,
    plan: Plan | None = None,
) -> None:
    """Set the next attempt. ``replace`` names the indices whose replacement number increases.

    Without ``plan`` the job's own is used; an attempt that keeps its worker count keeps its plan if the job's own is
    for another count.
    """
    job, before = after.job, after.job.attempt
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
    kept = 0 if before is None or scope in {Scope.START, Scope.RESUME} else min(before.replicas, len(nodes))
    here = max(0, kept - sum(1 for index in replace if index < kept))
    # Pods that stay hold the key of their time, and new ones must prove that they know it.
    key_id, secret_name = (before.key_id, before.secret_name) if before is not None and here else _new_key(job)
    attempt = AttemptStatus(
        number=1 if before is None else before.number + 1,
        plan_hash=plan_hash,
        plan=plan_json,
        replicas=len(nodes),
        devices=devices,
        replacements=replacement_runs(numbers),
        placement=Placement.of(list(nodes)),
        started_at=rfc3339(after.now_s),
        scope=scope.value,
        pre_checks=None if job.spec is None else pre_checks.order(job.spec, after.build(), passed=()),
        key_id=key_id,
        secret_name=secret_name,
    )
    after.update(attempt=attempt, retry_at=None, ready_replicas=0, replicas=here, progress_sequence=0)
    if plan is not None and plan.replicas == len(nodes):
        after.update(layout=str(plan.layout), recompute=plan.recompute_label)
    after.set(ConditionType.RUNNING, False, Reason.STARTING)
    ready = after.build().condition(ConditionType.PODS_READY)
    if ready is not None and ready.reason == Reason.CREATE_REFUSED:
        # A refusal is reported until the object is created, also while the next attempt begins.
        after.set(ConditionType.PODS_READY, False, Reason.CREATE_REFUSED, ready.message)
    else:
        after.set(ConditionType.PODS_READY, False, Reason.STARTING)
    if attempt.pre_checks is not None:
        after.set(ConditionType.NODES_CHECKED, False, Reason.STARTING)
    else:
        after.drop(ConditionType.NODES_CHECKED)
    _set_admitted(after, nodes)


def _new_key(job: JobView) -> tuple[str, str]:
    """Return the key of a gang of new pods, and its Secret's name. Secrets never change: another key has another."""
    key_id, before = next(iter(job.key_ids), ""), job.attempt
    if before is None or before.key_id == key_id:
        return key_id, "" if before is None else before.secret_name
    return key_id, f"{labels.job_object_name(job.name, job.uid)}-{key_id}"


def _set_admitted(after: StatusBuilder, nodes: Sequence[str]) -> None:
    """Report the size of the admission with each attempt, since a resize changes it and a restart may move workers."""
    job = after.job
    message = f"{_counted(len(nodes), 'worker')} on {_counted(len(set(nodes)), 'node')}"
    before = job.attempt if job.admitted else None
    reason = Reason.ADMITTED
    if before is not None and before.replicas != len(nodes):
        reason = Reason.GROWN if len(nodes) > before.replicas else Reason.SHRUNK
        message = f"{message}, {reason.lower()} from {before.replicas}"
    if job.spec is not None and job.spec.workers.replicas != len(nodes):
        message = f"{message}; {_counted(job.spec.workers.replicas, 'worker')} requested"
    after.set(ConditionType.ADMITTED, True, reason, message)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
