"""The writes that begin an attempt: admission, restart, move, resize; each is one whole status.

Attempt numbers rise strictly. A worker index never gets the same replacement number twice, so a launcher of a deleted
pod that wakes late on a lost node knows itself to be of the past.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from polyreme_api.job import TrainingJobSpec, TrainingJobStatus
from polyreme_api.job.status import AttemptStatus, Placement, replacement_runs
from polyreme_api.times import rfc3339
from polyreme_operator.core.accounting import close_attempt
from polyreme_operator.core.observe import current_pods, current_record
from polyreme_operator.core.reasons import Cause, ConditionType, Reason, Scope
from polyreme_operator.core.recovery import Restart, with_restart
from polyreme_operator.core.status import drop_condition, selector, with_condition, withdraw
from polyreme_operator.types.snapshot import JobScene
from polyreme_operator.types.timestamps import parse_time_or
from polyreme_operator.types.views import JobView

STOP_GRACE_S = 30.0
"""How long beyond its checkpoint's grace a stop may take, and how long launchers of a finished job may take to end."""


def admit(job: JobView, nodes: Sequence[str], now_s: float) -> TrainingJobStatus:
    """Admit a waiting job: a new attempt, every place with a fresh pod, and its condition, in one status."""
    assert job.plan is not None, "a job without a plan waits for nothing"
    before = job.attempt
    reused = range(0 if before is None else before.replicas)
    status = begin_attempt(
        job, job.status, nodes=nodes, replace=reused, scope=Scope.START if before is None else Scope.RESUME, now_s=now_s
    )
    generation = job.generation
    status = with_condition(status, ConditionType.QUEUED, False, Reason.ADMITTED, now_s=now_s, generation=generation)
    status = _with_admission(job, status, nodes, now_s)
    status = drop_condition(status, ConditionType.SUSPENDED, ConditionType.RESIZE_REFUSED)
    return status.model_copy(
        update={
            "first_admitted_at": status.first_admitted_at or rfc3339(now_s),
            "selector": selector(job),
            "observed_generation": generation,
        }
    )


def restart(scene: JobScene, verdict: Restart, nodes: Sequence[str], now_s: float) -> TrainingJobStatus:
    """Begin a new attempt after a failure, on ``nodes``; the failed one is closed and charged."""
    job = scene.job
    status = close_attempt(job.status, current_record(scene), ended_by=verdict.failure.cause, now_s=now_s)
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
    return with_condition(
        stopped(job.status, checkpoint=True),
        ConditionType.RESTARTING,
        True,
        Cause.RESIZE,
        now_s=now_s,
        generation=job.generation,
    )


def stops_for_resize(job: JobView) -> bool:
    """Tell whether the attempt was asked to stop for a resize, and not for good."""
    restarting = job.status.condition(ConditionType.RESTARTING)
    asked = restarting is not None and restarting.status == "True" and restarting.reason == Cause.RESIZE
    return asked and job.attempt is not None and job.attempt.desired == "Stop"


def stop_grace_s(spec: TrainingJobSpec) -> float:
    """How long an attempt may take to checkpoint and stop."""
    return spec.checkpoint.preemption_grace_seconds + STOP_GRACE_S


def has_stopped(scene: JobScene, grace_s: float, now_s: float) -> bool:
    """Tell whether an attempt that was asked to stop has, or has had its time."""
    record, asked = current_record(scene), scene.job.status.condition(ConditionType.RESTARTING)
    asked_s = parse_time_or(None if asked is None else asked.last_transition_time, now_s)
    quiet = all(pod.ended or pod.deleting for pod in current_pods(scene).values())
    return quiet or (record is not None and record.outcome is not None) or now_s >= asked_s + grace_s


def resize(scene: JobScene, nodes: Sequence[str], now_s: float) -> TrainingJobStatus:
    """Begin a new attempt with the plan of the new worker count; workers that stay keep pod and node."""
    job = scene.job
    assert job.attempt is not None, "only an admitted job is resized"
    status = close_attempt(job.status, current_record(scene), ended_by=Cause.RESIZE, now_s=now_s)
    dropped = range(len(nodes), job.attempt.replicas)
    status = begin_attempt(job, status, nodes=nodes, replace=dropped, scope=Scope.RESIZE, now_s=now_s)
    status = _with_admission(job, status, nodes, now_s)
    return status.model_copy(update={"observed_generation": job.generation})


def evict(scene: JobScene, verdict: Restart, now_s: float) -> TrainingJobStatus:
    """Take the gang off its nodes, since no place is free for what it lost; it waits in the queue again."""
    job = scene.job
    status = close_attempt(job.status, current_record(scene), ended_by=verdict.failure.cause, now_s=now_s)
    record = verdict.record.model_copy(update={"scope": Scope.GANG.value})
    status = with_restart(status, record)
    status = withdraw(job, status, Reason.EVICTED, verdict.failure.message, now_s=now_s)
    return with_condition(
        stopped(status),
        ConditionType.QUEUED,
        True,
        Reason.EVICTED,
        verdict.failure.message,
        now_s=now_s,
        generation=job.generation,
    )


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
) -> TrainingJobStatus:
    """Put the next attempt on the status. ``replace`` names the indices whose replacement number rises."""
    before = status.attempt
    plan = job.plan
    unchanged = before is not None and before.replicas == len(nodes) and (plan is None or plan.replicas != len(nodes))
    if unchanged and before is not None:
        plan_hash, devices = before.plan_hash, before.devices
    else:
        assert plan is not None, "only a restart goes on without a plan"
        plan_hash, devices = plan.hash, plan.devices
    numbers = {} if before is None else before.replacement_by_index
    for index in replace:
        numbers[index] = numbers.get(index, 0) + 1
    attempt = AttemptStatus(
        number=1 if before is None else before.number + 1,
        plan_hash=plan_hash,
        replicas=len(nodes),
        devices=devices,
        replacements=replacement_runs(numbers),
        placement=Placement.of(list(nodes)),
        started_at=rfc3339(now_s),
        scope=scope.value,
    )
    kept = 0 if before is None or scope in {Scope.START, Scope.RESUME} else min(before.replicas, len(nodes))
    here = kept - sum(1 for index in replace if index < kept)
    layout = str(plan.layout) if plan is not None and plan.replicas == len(nodes) else status.layout
    status = status.model_copy(
        update={"attempt": attempt, "retry_at": None, "ready_replicas": 0, "replicas": max(0, here), "layout": layout}
    )
    for kind in (ConditionType.PODS_READY, ConditionType.RUNNING):
        status = with_condition(status, kind, False, Reason.STARTING, now_s=now_s, generation=job.generation)
    return status


def _with_admission(job: JobView, status: TrainingJobStatus, nodes: Sequence[str], now_s: float) -> TrainingJobStatus:
    """Say what the job holds: with each attempt, since a restart may move workers and a resize changes them."""
    message = f"{_counted(len(nodes), 'worker')} on {_counted(len(set(nodes)), 'node')}"
    return with_condition(
        status, ConditionType.ADMITTED, True, Reason.ADMITTED, message, now_s=now_s, generation=job.generation
    )


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
