"""Reconciles one job: a level-triggered, idempotent function from its snapshot to actions.

A change of the attempt is a single status write; pods follow in the next pass, from the new record. Before a decision
ends an attempt because of its pods, the Lease is read: a job's success is recorded there before its pods end, and
watches of two kinds are not ordered.
"""

from __future__ import annotations

import dataclasses

from polyreme_api import labels
from polyreme_api.job import TrainingJobSpec, TrainingJobStatus
from polyreme_api.job.status import AttemptStatus
from polyreme_api.progress import Outcome, ProgressRecord, RankPhase
from polyreme_api.times import rfc3339
from polyreme_cluster.port import ObjectRef
from polyreme_operator.reconcile import (
    binding,
    children,
    deadlines,
    environment_runtime,
    evacuation,
    pre_checks,
    rank_reports,
    refusals,
    set_aside,
    stopping,
    transition,
    worker_count,
    worker_pods,
)
from polyreme_operator.reconcile.accounting import settlement_due_s, suspended_by_user
from polyreme_operator.reconcile.data_gate import awaits_data, pending_data
from polyreme_operator.reconcile.events import events_of
from polyreme_operator.reconcile.failure_policy import GiveUp, Healthy, Pause, Restart, Verdict, judge
from polyreme_operator.reconcile.hang import Stall, find_stall
from polyreme_operator.reconcile.observe import (
    RUNNING_PHASES,
    WORKING,
    Failure,
    current_pods,
    current_record,
    slow_start,
)
from polyreme_operator.reconcile.pod_waiting import explain
from polyreme_operator.reconcile.quarantine import with_degraded
from polyreme_operator.reconcile.status_builder import StatusBuilder
from polyreme_operator.reconcile.stopping import STOP_GRACE_S
from polyreme_operator.reconcile.torn import is_gang_torn
from polyreme_operator.reconcile.worker_pods import PodDefaults
from polyreme_operator.types.actions import (
    Action,
    CreatePod,
    Decision,
    DeleteJob,
    DeletePod,
    ReadLease,
    WriteStatus,
)
from polyreme_operator.types.reasons import Cause, ConditionType, Reason
from polyreme_operator.types.snapshot import JobSnapshot, Pending
from polyreme_operator.types.timestamps import parse_time_or
from polyreme_operator.types.views import PodPhase, PodView

PLANNING_WORDS = "its layout is being planned for each worker count that it accepts"


def reconcile(snapshot: JobSnapshot, now_s: float, *, defaults: PodDefaults) -> Decision:
    """Decide the next actions of one job."""
    job = snapshot.job
    if job.deleting or (job.spec is not None and job.spec.managed_by != labels.MANAGER):
        return Decision()
    if job.unreadable or (job.fault and not job.fault_in_cycle):
        decision = Decision()
    elif job.status.finished:
        return _wake(_finished(snapshot, now_s), deadlines.fence_s(snapshot, now_s))
    else:
        decision = _wake(_unfinished(snapshot, now_s, defaults), deadlines.fence_s(snapshot, now_s))
    return with_degraded(job, decision, now_s)


def _unfinished(snapshot: JobSnapshot, now_s: float, defaults: PodDefaults) -> Decision:
    job, status = snapshot.job, snapshot.job.status
    spec = job.spec
    if spec is None:
        return _misconfigured(snapshot, now_s)
    if defaults.binding == "GangBinder" and not snapshot.pods and (refused := binding.refusal(spec)):
        return _fail(snapshot, Reason.MISCONFIGURED, refused, None, now_s)
    deadline_s = deadlines.active_deadline_s(job, spec)
    if deadline_s is not None and now_s >= deadline_s and not _succeeded(snapshot):
        message = f"ran longer than activeDeadlineSeconds ({spec.active_deadline_seconds} s)"
        return _fail(snapshot, Reason.DEADLINE_EXCEEDED, message, None, now_s)
    if not job.admitted:
        decision = _waiting(snapshot, spec, now_s)
    elif status.attempt is not None and (spec.suspend or status.attempt.desired == "Stop"):
        decision = _stopping(snapshot, spec, now_s)
    else:
        decision = _running(snapshot, spec, now_s, defaults)
    return _wake(decision, deadline_s)


def _running(snapshot: JobSnapshot, spec: TrainingJobSpec, now_s: float, defaults: PodDefaults) -> Decision:
    job = snapshot.job
    attempt, record = job.attempt, current_record(snapshot)
    if attempt is None:
        return Decision()
    if _succeeded(snapshot):
        return _succeed(snapshot, now_s)
    aside_s = set_aside.due_s(snapshot)
    ended = _ended(snapshot, attempt, judge(snapshot, spec, now_s), aside_s, now_s)
    if ended is not None:
        return ended
    if left := evacuation.leaving(snapshot, spec, now_s):
        asked = transition.stop_for_move(job, now_s, message=evacuation.message_of(left))
        return Decision(actions=_status_write(snapshot, asked))
    missing = children.missing(snapshot, spec, record, defaults, now_s)
    if snapshot.lease is None:
        # No pod is created before the Lease exists: it tells whether the attempt was released before.
        return Decision(actions=missing)
    pods = _pod_actions(snapshot, spec, attempt, defaults, now_s)
    if missing:
        # They come first: the API server refuses a pod whose ServiceAccount does not exist.
        pods = tuple(action for action in pods if not isinstance(action, CreatePod))
    if any(isinstance(action, CreatePod) for action in pods) and not snapshot.lease_read:
        return Decision(actions=(ReadLease(ref=_lease_ref(snapshot)),))
    stall = find_stall(snapshot, spec, record)
    status = _observed(snapshot, attempt, record, stall, now_s)
    if status is not job.status and status != job.status:
        # Never written alone: a server whose CRD is of an older release drops the field.
        where = worker_pods.checkpoint_url(job, spec, defaults)
        status = StatusBuilder(job, now_s, status).update(checkpoint_location=where).build()
    actions = (*missing, *pods, *_status_write(snapshot, status, informational=True))
    settle_s = settlement_due_s(status)
    # A settlement that is due waits for its status update, or for the leader's next record.
    settle_s = settle_s if settle_s is not None and settle_s > now_s else None
    return _wake(_wake(Decision(actions=actions, wake_at_s=deadlines.failure_s(snapshot, spec)), settle_s), aside_s)


def _ended(
    snapshot: JobSnapshot, attempt: AttemptStatus, verdict: Verdict, aside_s: float | None, now_s: float
) -> Decision | None:
    """Answer the end of an attempt; None while it runs."""
    aside = aside_s is not None and now_s >= aside_s
    # The Lease may hold newer information, but for rank exits, which were read from it.
    unsure = aside if isinstance(verdict, Healthy) else verdict.failure.code is None
    if unsure and not snapshot.lease_read:
        return Decision(actions=(ReadLease(ref=_lease_ref(snapshot)),))
    if isinstance(verdict, GiveUp):
        return _fail(snapshot, verdict.reason, verdict.message, verdict.failure, now_s)
    if isinstance(verdict, Pause):
        return Decision(actions=_status_write(snapshot, transition.pause(snapshot, verdict, now_s)))
    if aside:
        return Decision(actions=_status_write(snapshot, set_aside.set_aside(snapshot, now_s)))
    if isinstance(verdict, Restart):
        return _wake(_restart(snapshot, attempt, verdict, now_s), aside_s)
    return None


def _restart(snapshot: JobSnapshot, attempt: AttemptStatus, verdict: Restart, now_s: float) -> Decision:
    if verdict.failure.cause is Cause.CREATE_REFUSED:
        return Decision(actions=_status_write(snapshot, transition.give_up_place(snapshot, verdict, now_s)))
    if verdict.due_s > now_s:
        after = StatusBuilder(snapshot.job, now_s).update(retry_at=rfc3339(verdict.due_s))
        known = snapshot.job.status.condition(ConditionType.RESTARTING)
        # The scheduler may have added why the worker waits.
        if known is None or not known.message.startswith(verdict.failure.message):
            after.set(ConditionType.RESTARTING, True, verdict.failure.cause, verdict.failure.message)
        after.set(ConditionType.RUNNING, False, Reason.STARTING)
        return Decision(actions=_status_write(snapshot, after.build()), wake_at_s=verdict.due_s)
    if verdict.move or is_gang_torn(snapshot):
        # Rescheduling is the scheduler's decision: ``schedule`` writes this attempt.
        return Decision(reschedule=True)
    restarted = transition.restart(snapshot, verdict, attempt.placement.node_by_index(), now_s)
    restarted = pre_checks.with_passed(snapshot.job, restarted, snapshot.nodes, now_s)
    return Decision(actions=_status_write(snapshot, restarted))


def _observed(
    snapshot: JobSnapshot, attempt: AttemptStatus, record: ProgressRecord | None, stall: Stall | None, now_s: float
) -> TrainingJobStatus:
    """Update the status of a healthy attempt."""
    job, after = snapshot.job, StatusBuilder(snapshot.job, now_s)
    pods = current_pods(snapshot)
    running = sum(pod.phase is PodPhase.RUNNING for pod in pods.values())
    joined = 0 if record is None else min(record.joined, attempt.replicas)
    released = record is not None and record.released
    phase = RankPhase.TRAINING if record is None else record.phase
    if job.spec is not None and environment_runtime.is_used(job.spec):
        # There is no launcher to join or release: pods that run or have succeeded count as joined.
        running = joined = environment_runtime.started(snapshot)
        released = running == attempt.replicas
    ready = running == attempt.replicas and (released or joined == attempt.replicas)

    refused = refusals.explain_children(snapshot, record)
    if ready:
        why = Reason.CREATE_REFUSED if refused else Reason.JOINED
        after.set(ConditionType.PODS_READY, True, why, refused).update(set_aside=None)
    else:
        ending = "" if (found := refusals.ending(snapshot)) is None else found.message
        waits = explain(pods.values()) or slow_start(snapshot, now_s)
        joins = "their launchers have not all joined" if running == attempt.replicas else ""
        parts = (f"{running} of {attempt.replicas} pods run", joins, ending, refused, waits)
        why = Reason.CREATE_REFUSED if refused else Reason.WAITING_FOR_PODS
        after.set(ConditionType.PODS_READY, False, why, "; ".join(filter(None, parts)))
    reason = RUNNING_PHASES[phase] if released else Reason.STARTING
    report = None if record is None else record.pre_check
    if report is not None and report.done:
        holds = not (report.failed or report.warning)
        words = "; ".join(filter(None, (report.warning, "" if record is None else pre_checks.message(record))))
        after.set(ConditionType.NODES_CHECKED, holds, Reason.CHECKS_PASSED if holds else Reason.CHECKS_FAILED, words)
    elif report is not None and not released:
        after.set(ConditionType.NODES_CHECKED, False, Reason.CHECKING_NODES, report.waits)
    if stall is None:
        words = ""
        if record is not None and reason in {Reason.SCORING, Reason.TRAINING}:
            words = record.message if reason is Reason.SCORING else record.notice
        after.set(ConditionType.RUNNING, released and reason in WORKING, reason, words)
    elif _is_new(snapshot):
        # Reported once, since the message changes with every observation.
        after.set(ConditionType.RUNNING, False, Reason.STALLED, stall.message)
    if reason in WORKING and job.status.is_true(ConditionType.RESTARTING):
        after.set(ConditionType.RESTARTING, False, Reason.RECOVERED)
    rank_reports.report(attempt, record, after)
    worker_count.report_running(snapshot, attempt, after)
    after.report_missing_class().report_schedule().report_template()
    changed = after.report_data().build() is not job.status
    after.update(
        replicas=len(pods),
        ready_replicas=attempt.replicas if released else joined,
        priority=job.priority,
        observed_generation=job.planned_generation,
        retry_at=None,
    )
    if released and reason in WORKING:
        worker_count.note_training(attempt, after, changed=changed)
    idle_s = 0.0 if snapshot.lease is None else snapshot.lease.seen_s - snapshot.lease.advanced_seen_s
    status = after.settle(record, idle_s=idle_s).build()
    if record is not None and (changed or (status is not job.status and status != job.status)):
        status = after.update(step=max(status.step, record.step), progress_sequence=record.sequence).build()
    return status


def _is_new(snapshot: JobSnapshot) -> bool:
    """Tell whether a stall is not reported yet."""
    known = snapshot.job.status.condition(ConditionType.RUNNING)
    return known is None or known.reason != Reason.STALLED


def _pod_actions(
    snapshot: JobSnapshot, spec: TrainingJobSpec, attempt: AttemptStatus, defaults: PodDefaults, now_s: float
) -> tuple[Action, ...]:
    """Delete pods of earlier attempts; when all of them have ended, create missing ones.

    A pod that is stuck on a node is waited for only by a worker that is placed there: ranks that live on in it are
    fenced like those on a lost node, and what it holds stays charged to its node.
    """
    pods = current_pods(snapshot)
    names = {pod.name for pod in pods.values()}
    past = [pod for pod in snapshot.pods if pod.name not in names]
    removed = _removals(snapshot, past, spec, now_s)
    nodes = attempt.placement.node_by_index()
    places = set(enumerate(nodes))
    ending = [pod for pod in past if not pod.ended]
    if any((pod.index, pod.node) in places or not pod.is_stuck(now_s) for pod in ending):
        return removed
    mode = binding.mode_of(defaults.binding, snapshot, attempt)
    missing = [(index, node) for index, node in enumerate(nodes) if index not in pods]
    created: tuple[CreatePod, ...] = ()
    if missing:
        pattern = worker_pods.WorkerPods(snapshot.job, spec, attempt, defaults=defaults, mode=mode)
        binds = mode == "GangBinder"
        created = tuple(CreatePod(pattern=pattern, index=index, node=node, binds=binds) for index, node in missing)
    return (*removed, *created, *binding.binds(snapshot, attempt))


def _removals(
    snapshot: JobSnapshot, pods: list[PodView], spec: TrainingJobSpec | None, now_s: float
) -> tuple[DeletePod, ...]:
    """Delete each pod once; by force only if its node is known to be lost."""
    lost_s = deadlines.node_lost_s(spec)
    removed = []
    for pod in sorted(pods, key=lambda pod: (pod.index, pod.replacement)):
        node = snapshot.nodes.get(pod.node)
        lost = node is not None and node.lost(now_s, node_lost_s=lost_s)
        if lost or not pod.deleting:
            removed.append(DeletePod(ref=pod.ref, uid=pod.uid, grace_s=0 if lost else None))
    return tuple(removed)


def _waiting(snapshot: JobSnapshot, spec: TrainingJobSpec, now_s: float) -> Decision:
    """Delete the pods of a job without an admission, and report why it waits."""
    record = current_record(snapshot)
    if record is not None and record.outcome is Outcome.SUCCEEDED:
        # Reported after its time to stop was over: it needs no other place.
        return _succeed(snapshot, now_s)
    job, after = snapshot.job, StatusBuilder(snapshot.job, now_s)
    removed = _removals(snapshot, list(snapshot.pods), spec, now_s)
    worker_count.report_waiting(snapshot, after)
    if spec.suspend:
        if not suspended_by_user(job.status):
            after.close_wait()
        after.set(ConditionType.SUSPENDED, True, Reason.SUSPENDED).drop(ConditionType.QUEUED)
    elif job.paused:
        pass
    elif job.planning is not None:
        after.set(ConditionType.QUEUED, True, Reason.PLANNING, PLANNING_WORDS)
    elif job.plan is None:
        return _misconfigured(snapshot, now_s)
    else:
        if job.status.is_true(ConditionType.SUSPENDED):
            after.close_wait().set(ConditionType.SUSPENDED, False, Reason.RESUMED)
        refused = Pending(Reason.QUEUE_REFUSED, job.queue_refusal) if job.queue_refusal else None
        pending = refused or (pending_data(job) if awaits_data(job) else snapshot.pending)
        if pending is not None:
            after.set(ConditionType.QUEUED, True, pending.reason, pending.message)
    after.report_missing_class().report_schedule().report_template().report_data().update(
        replicas=len(snapshot.pods),
        ready_replicas=0,
        priority=job.priority,
        observed_generation=job.planned_generation,
    )
    resumed = spec.suspend or job.status.is_true(ConditionType.SUSPENDED)
    return Decision(actions=(*removed, *_status_write(snapshot, after.build(), informational=not resumed)))


def _misconfigured(snapshot: JobSnapshot, now_s: float) -> Decision:
    """End a new job whose spec can't run. One that ran before, for example by another operator, waits for a change."""
    job = snapshot.job
    if not job.replicas_in_force:
        return _fail(snapshot, Reason.MISCONFIGURED, job.invalid, None, now_s)
    after = StatusBuilder(job, now_s).set(ConditionType.QUEUED, True, Reason.MISCONFIGURED, job.invalid)
    after.update(replicas=len(snapshot.pods), ready_replicas=0, observed_generation=job.generation)
    removed = _removals(snapshot, list(snapshot.pods), job.spec, now_s)
    return Decision(actions=(*removed, *_status_write(snapshot, after.build())))


def _stopping(snapshot: JobSnapshot, spec: TrainingJobSpec, now_s: float) -> Decision:
    """Stop an attempt with a checkpoint, then release its devices or start the attempt with another size."""
    job = snapshot.job
    if _succeeded(snapshot):
        return _succeed(snapshot, now_s)
    stop = stopping.requested_stop(job)
    if stop is None or (stop.why in stopping.CONTINUES and spec.suspend):
        return Decision(actions=_status_write(snapshot, transition.stop_for_suspend(job, now_s)))
    ended = environment_runtime.endings(snapshot, spec)
    if not stopping.has_stopped(snapshot, now_s):
        return Decision(actions=ended, wake_at_s=stopping.stop_deadline_s(job, stop, now_s))
    if stop.why in stopping.CONTINUES:
        # Placement is the scheduler's decision: ``schedule`` begins the attempt.
        return Decision(reschedule=True)
    if not snapshot.lease_read and snapshot.lease is not None:
        return Decision(actions=(ReadLease(ref=_lease_ref(snapshot)),))
    return Decision(actions=_status_write(snapshot, transition.give_back(snapshot, stop, now_s)))


def _finished(snapshot: JobSnapshot, now_s: float) -> Decision:
    """Clean up after a finished job: launchers that did not exit, and after its TTL the job itself."""
    job, status = snapshot.job, snapshot.job.status
    completed_s = parse_time_or(status.completed_at, now_s) if job.finished_s is None else job.finished_s
    live = [pod for pod in snapshot.pods if not pod.ended]
    actions: list[Action] = []
    wake_s: float | None = None
    if live:
        record = current_record(snapshot)
        stopped = status.is_true(ConditionType.FAILED) and record is not None and record.outcome is not None
        if stopped or now_s >= completed_s + STOP_GRACE_S:
            actions += _removals(snapshot, live, job.spec, now_s)
        else:
            # In a pod that has not started there is no launcher that could exit.
            actions += _removals(snapshot, [pod for pod in live if pod.phase is PodPhase.PENDING], job.spec, now_s)
            wake_s = completed_s + STOP_GRACE_S
    ttl_s = None if job.spec is None else job.spec.ttl_seconds_after_finished
    if ttl_s is not None:
        if now_s >= completed_s + ttl_s:
            actions.append(DeleteJob(ref=job.ref, uid=job.uid, resource_version=job.resource_version))
        else:
            wake_s = completed_s + ttl_s if wake_s is None else min(wake_s, completed_s + ttl_s)
    return Decision(actions=tuple(actions), wake_at_s=wake_s)


def _succeed(snapshot: JobSnapshot, now_s: float) -> Decision:
    record = current_record(snapshot)
    reason, message = Reason.COMPLETED, "every pod succeeded" if record is None else f"trained {record.step} steps"
    if record is not None and record.stopped_early:
        reason, message = Reason.STOPPED_EARLY, f"trained {record.step} of {record.steps} steps: {record.stopped_early}"
    after = StatusBuilder(snapshot.job, now_s)
    if snapshot.job.admitted:
        after.close_attempt(record, ended_by=None)
    else:
        # Its attempt was closed with its admission.
        after.close_wait()
        if record is not None:
            after.note_progress(record)
    after.finish(succeeded=True, reason=reason, message=message)
    return Decision(actions=_status_write(snapshot, after.build()))


def _fail(snapshot: JobSnapshot, reason: Reason, message: str, failure: Failure | None, now_s: float) -> Decision:
    after = StatusBuilder(snapshot.job, now_s)
    if snapshot.job.admitted:
        after.close_attempt(current_record(snapshot), ended_by=Cause.STOPPED if failure is None else failure.cause)
    else:
        after.close_wait()
    after.finish(succeeded=False, reason=reason, message=message)
    return Decision(actions=_status_write(snapshot, after.build()))


def _succeeded(snapshot: JobSnapshot) -> bool:
    attempt, spec = snapshot.job.attempt, snapshot.job.spec
    if attempt is not None and spec is not None and environment_runtime.is_used(spec):
        return environment_runtime.has_succeeded(snapshot, attempt)
    record = current_record(snapshot)
    return record is not None and record.outcome is Outcome.SUCCEEDED


def _lease_ref(snapshot: JobSnapshot) -> ObjectRef:
    job = snapshot.job
    return ObjectRef(kind="Lease", namespace=job.namespace, name=labels.job_object_name(job.name, job.uid))


def _wake(decision: Decision, at_s: float | None) -> Decision:
    if at_s is None or (decision.wake_at_s is not None and decision.wake_at_s <= at_s):
        return decision
    return dataclasses.replace(decision, wake_at_s=at_s)


def _status_write(
    snapshot: JobSnapshot, after: TrainingJobStatus, *, informational: bool = False
) -> tuple[Action, ...]:
    """Return the write of a status and the events of its changes; nothing if it is unchanged."""
    job = snapshot.job
    if after is job.status or after == job.status:
        return ()
    write = WriteStatus(
        ref=job.ref,
        uid=job.uid,
        resource_version=job.resource_version,
        before=job.status,
        after=after,
        informational=informational,
    )
    return (write, *events_of(write))
