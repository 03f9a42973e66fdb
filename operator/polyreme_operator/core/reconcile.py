"""One job: from what is seen to what is done, level-triggered; applied twice it asks for nothing more.

A change of the attempt is one status write and nothing else: pods follow in the next pass, from the new record.
Decisions that end an attempt because of its pods first have the Lease read, since the success of a job stands there
before its pods end, and watches of two kinds keep no order between them.
"""

from __future__ import annotations

import dataclasses

from polyreme_api import labels
from polyreme_api.job import TrainingJobSpec, TrainingJobStatus
from polyreme_api.job.status import AttemptStatus
from polyreme_api.progress import Outcome, ProgressRecord, RankPhase
from polyreme_api.times import rfc3339
from polyreme_operator.core import manifests, transition
from polyreme_operator.core.accounting import close_attempt, with_checkpoint
from polyreme_operator.core.hang import Stall, find_stall
from polyreme_operator.core.manifests import PodDefaults
from polyreme_operator.core.observe import Failure, current_pods, current_record, silence_deadline_s
from polyreme_operator.core.reasons import Cause, ConditionType, Reason
from polyreme_operator.core.recovery import GiveUp, Restart, judge
from polyreme_operator.core.status import drop_condition, finish, with_condition, withdraw
from polyreme_operator.core.transition import STOP_GRACE_S
from polyreme_operator.port import ObjectRef
from polyreme_operator.types.actions import (
    Action,
    CreateLease,
    CreatePod,
    CreateSecret,
    CreateService,
    Decision,
    DeleteJob,
    DeletePod,
    EmitEvent,
    ReadLease,
    WriteStatus,
)
from polyreme_operator.types.snapshot import JobScene
from polyreme_operator.types.timestamps import parse_time_or
from polyreme_operator.types.views import PodPhase, PodView

RUNNING_PHASES = {
    RankPhase.STARTING: Reason.STARTING,
    RankPhase.WAITING_FOR_DATA: Reason.WAITING_FOR_DATA,
    RankPhase.LOADING: Reason.LOADING,
    RankPhase.TRAINING: Reason.TRAINING,
    RankPhase.CHECKPOINTING: Reason.TRAINING,
    RankPhase.EVALUATING: Reason.EVALUATING,
    RankPhase.EXPORTING: Reason.EXPORTING,
    RankPhase.DONE: Reason.EXPORTING,
}
_WORKING = frozenset({Reason.TRAINING, Reason.EVALUATING, Reason.EXPORTING})


def reconcile(scene: JobScene, now_s: float, *, defaults: PodDefaults) -> Decision:
    """Decide what one job needs now."""
    job, status = scene.job, scene.job.status
    spec = job.spec
    if job.deleting or (spec is not None and spec.managed_by != labels.MANAGER):
        return Decision()
    if status.finished:
        return _finished(scene, now_s)
    if spec is None:
        return _unreadable(scene, now_s)
    deadline_s = _deadline_s(status, spec)
    if deadline_s is not None and now_s >= deadline_s and not _succeeded(scene):
        message = f"ran longer than activeDeadlineSeconds, {spec.active_deadline_seconds} s"
        return _fail(scene, Reason.DEADLINE_EXCEEDED, message, None, now_s)
    if not job.admitted:
        decision = _waiting(scene, spec, now_s)
    elif transition.stops_for_resize(job) and not spec.suspend:
        decision = _resizing(scene, spec, now_s)
    elif status.attempt is not None and (spec.suspend or status.attempt.desired == "Stop"):
        decision = _stopping(scene, spec, now_s)
    else:
        decision = _running(scene, spec, now_s, defaults)
    return _wake(decision, deadline_s)


def _running(scene: JobScene, spec: TrainingJobSpec, now_s: float, defaults: PodDefaults) -> Decision:
    job = scene.job
    attempt, record = job.attempt, current_record(scene)
    if attempt is None:
        return Decision()
    if record is not None and record.outcome is Outcome.SUCCEEDED:
        return _succeed(scene, record, now_s)
    verdict = judge(scene, spec, now_s)
    if isinstance(verdict, GiveUp | Restart) and not scene.lease_read and _hangs_on_lease(verdict.failure):
        return Decision(actions=(ReadLease(ref=_lease_ref(scene)),))
    if isinstance(verdict, GiveUp):
        return _fail(scene, verdict.reason, verdict.message, verdict.failure, now_s)
    if isinstance(verdict, Restart):
        return _restart(scene, attempt, verdict, now_s)
    children = _children(scene, spec)
    if scene.lease is None:
        # Pods come behind it: whether an attempt was ever released must be readable before a pod is created anew.
        return Decision(actions=children)
    pods = _pod_actions(scene, spec, attempt, defaults, now_s)
    if any(isinstance(action, CreatePod) for action in pods) and not scene.lease_read:
        return Decision(actions=(ReadLease(ref=_lease_ref(scene)),))
    stall = find_stall(scene, spec, record)
    status = _observed(scene, attempt, record, stall, now_s)
    told = () if stall is None or not _is_new(scene) else (_event(scene, Reason.STALLED, stall.message, warning=True),)
    actions = (*children, *pods, *_status_write(scene, status), *told)
    return Decision(actions=actions, wake_at_s=_next_deadline_s(scene, spec))


def _restart(scene: JobScene, attempt: AttemptStatus, verdict: Restart, now_s: float) -> Decision:
    job, status = scene.job, scene.job.status
    if verdict.due_s > now_s:
        cause, message = verdict.failure.cause, verdict.failure.message
        status = status.model_copy(update={"retry_at": rfc3339(verdict.due_s)})
        status = with_condition(
            status, ConditionType.RESTARTING, True, cause, message, now_s=now_s, generation=job.generation
        )
        status = with_condition(
            status, ConditionType.RUNNING, False, Reason.STARTING, now_s=now_s, generation=job.generation
        )
        return Decision(actions=_status_write(scene, status), wake_at_s=verdict.due_s)
    if verdict.move:
        # Another place is the cluster's to give: ``schedule`` writes this attempt.
        return Decision(reschedule=True)
    nodes = attempt.placement.node_by_index()
    after = transition.restart(scene, verdict, nodes, now_s)
    event = _event(scene, verdict.scope.value, verdict.failure.message, warning=True)
    return Decision(actions=(*_status_write(scene, after), event))


def _observed(
    scene: JobScene, attempt: AttemptStatus, record: ProgressRecord | None, stall: Stall | None, now_s: float
) -> TrainingJobStatus:
    """Bring the status of a healthy attempt up to what is seen."""
    job, status = scene.job, scene.job.status
    pods = current_pods(scene)
    running = sum(pod.phase is PodPhase.RUNNING for pod in pods.values())
    joined = 0 if record is None else min(record.joined, attempt.replicas)
    released = record is not None and record.released
    ready = running == attempt.replicas and (released or joined == attempt.replicas)

    def say(kind: ConditionType, holds: bool, reason: Reason, message: str = "") -> None:
        nonlocal status
        status = with_condition(status, kind, holds, reason, message, now_s=now_s, generation=job.generation)

    if ready:
        say(ConditionType.PODS_READY, True, Reason.JOINED)
    else:
        say(ConditionType.PODS_READY, False, Reason.WAITING_FOR_PODS, f"{running} of {attempt.replicas} pods run")
    reason = RUNNING_PHASES[record.phase] if record is not None and released else Reason.STARTING
    if stall is None:
        say(ConditionType.RUNNING, released and reason in _WORKING, reason)
    elif _is_new(scene):
        # Said once: what launchers see of their ranks changes with every look.
        say(ConditionType.RUNNING, False, Reason.STALLED, stall.message)
    if reason in _WORKING and status.is_true(ConditionType.RESTARTING):
        say(ConditionType.RESTARTING, False, Reason.RECOVERED)
    if job.plan is not None and job.plan.replicas == attempt.replicas:
        status = drop_condition(status, ConditionType.RESIZE_REFUSED)
    elif scene.refused:
        say(ConditionType.RESIZE_REFUSED, True, Reason.NO_FIT, scene.refused)
    changed = status is not job.status
    status = status.model_copy(
        update={
            "replicas": len(pods),
            "ready_replicas": attempt.replicas if released else joined,
            "observed_generation": job.generation,
            "retry_at": None,
        }
    )
    status = with_checkpoint(status, record, now_s=now_s)
    if record is not None and (changed or status != job.status):
        status = status.model_copy(update={"step": max(status.step, record.step)})
    return status


def _is_new(scene: JobScene) -> bool:
    """Whether a stall that is found now is not on record yet."""
    known = scene.job.status.condition(ConditionType.RUNNING)
    return known is None or known.reason != Reason.STALLED


def _pod_actions(
    scene: JobScene, spec: TrainingJobSpec, attempt: AttemptStatus, defaults: PodDefaults, now_s: float
) -> tuple[Action, ...]:
    """Remove pods of the past; when none lives any more, create those that are missing."""
    pods = current_pods(scene)
    names = {pod.name for pod in pods.values()}
    past = [pod for pod in scene.pods if pod.name not in names]
    removed = _removals(scene, past, spec, now_s)
    if any(not pod.ended for pod in past):
        return removed
    nodes = attempt.placement.node_by_index()
    created = tuple(
        CreatePod(manifest=manifests.pod(scene.job, spec, attempt, index=index, node=node, defaults=defaults))
        for index, node in enumerate(nodes)
        if index not in pods
    )
    return (*removed, *created)


def _removals(
    scene: JobScene, pods: list[PodView], spec: TrainingJobSpec | None, now_s: float
) -> tuple[DeletePod, ...]:
    """Delete pods, once each; by force only where their node is known to be lost."""
    lost_s = spec.health.node_lost_seconds if spec is not None else STOP_GRACE_S
    removed = []
    for pod in sorted(pods, key=lambda pod: (pod.index, pod.replacement)):
        node = scene.nodes.get(pod.node)
        lost = pod.node != "" and (node is None or node.lost(now_s, node_lost_s=lost_s))
        if lost or not pod.deleting:
            removed.append(DeletePod(ref=pod.ref, uid=pod.uid, grace_s=0 if lost else None))
    return tuple(removed)


def _waiting(scene: JobScene, spec: TrainingJobSpec, now_s: float) -> Decision:
    """A job that holds no admission: its pods go, and its status says why it waits."""
    job, status = scene.job, scene.job.status
    removed = _removals(scene, list(scene.pods), spec, now_s)
    generation = job.generation
    if spec.suspend:
        status = with_condition(
            status, ConditionType.SUSPENDED, True, Reason.SUSPENDED, now_s=now_s, generation=generation
        )
        status = drop_condition(status, ConditionType.QUEUED)
    elif job.plan is None:
        return _fail(scene, Reason.MISCONFIGURED, job.invalid, None, now_s)
    else:
        if status.is_true(ConditionType.SUSPENDED):
            status = with_condition(
                status, ConditionType.SUSPENDED, False, Reason.RESUMED, now_s=now_s, generation=generation
            )
        if scene.pending is not None:
            pending = scene.pending
            status = with_condition(
                status,
                ConditionType.QUEUED,
                True,
                pending.reason,
                pending.message,
                now_s=now_s,
                generation=generation,
            )
    status = status.model_copy(
        update={"replicas": len(scene.pods), "ready_replicas": 0, "observed_generation": generation}
    )
    return Decision(actions=(*removed, *_status_write(scene, status)))


def _stopping(scene: JobScene, spec: TrainingJobSpec, now_s: float) -> Decision:
    """Checkpoint, stop, delete the pods, and only then give the admission back."""
    job, status, record = scene.job, scene.job.status, current_record(scene)
    if record is not None and record.outcome is Outcome.SUCCEEDED:
        return _succeed(scene, record, now_s)
    generation = job.generation
    if status.condition(ConditionType.SUSPENDED) is None:
        status = transition.stopped(status, checkpoint=True)
        status = with_condition(
            status, ConditionType.SUSPENDED, False, Reason.SUSPENDING, now_s=now_s, generation=generation
        )
        status = with_condition(
            status, ConditionType.RUNNING, False, Reason.SUSPENDING, now_s=now_s, generation=generation
        )
        return Decision(actions=_status_write(scene, status))
    asked = status.condition(ConditionType.SUSPENDED)
    asked_s = parse_time_or(asked.last_transition_time if asked is not None else None, now_s)
    until_s = asked_s + transition.stop_grace_s(spec)
    pods = current_pods(scene)
    quiet = all(pod.ended or pod.deleting for pod in pods.values())
    if not (quiet or (record is not None and record.outcome is not None) or now_s >= until_s):
        return Decision(wake_at_s=until_s)
    if not scene.lease_read and scene.lease is not None:
        return Decision(actions=(ReadLease(ref=_lease_ref(scene)),))
    status = close_attempt(status, record, ended_by=_stop_cause(record, status), now_s=now_s)
    status = withdraw(job, status, Reason.SUSPENDED, now_s=now_s)
    status = with_condition(
        status, ConditionType.SUSPENDED, spec.suspend, Reason.SUSPENDED, now_s=now_s, generation=generation
    )
    status = drop_condition(status, ConditionType.RESTARTING, ConditionType.RESIZE_REFUSED)
    return Decision(actions=(*_status_write(scene, status), _event(scene, "Suspended", "stopped on request")))


def _resizing(scene: JobScene, spec: TrainingJobSpec, now_s: float) -> Decision:
    """Wait for the end of an attempt that makes way for another size; ``schedule`` begins the next."""
    record = current_record(scene)
    if record is not None and record.outcome is Outcome.SUCCEEDED:
        return _succeed(scene, record, now_s)
    grace_s = transition.stop_grace_s(spec)
    if transition.has_stopped(scene, grace_s, now_s):
        return Decision(reschedule=True)
    asked = scene.job.status.condition(ConditionType.RESTARTING)
    asked_s = parse_time_or(None if asked is None else asked.last_transition_time, now_s)
    return Decision(wake_at_s=asked_s + grace_s)


def _stop_cause(record: ProgressRecord | None, status: TrainingJobStatus) -> Cause | None:
    """A stop that checkpointed its newest step loses nothing."""
    durable = record.checkpoint if record is not None else None
    if record is not None and durable is not None and durable.step >= record.step and status.attempt is not None:
        return None
    return Cause.SUSPEND


def _finished(scene: JobScene, now_s: float) -> Decision:
    """Clear up behind a finished job: launchers that did not end by themselves, at last the job itself."""
    job, status = scene.job, scene.job.status
    completed_s = parse_time_or(status.completed_at, now_s)
    live = [pod for pod in scene.pods if not pod.ended]
    actions: list[Action] = []
    wake_s: float | None = None
    if live:
        record = current_record(scene)
        stopped = status.is_true(ConditionType.FAILED) and record is not None and record.outcome is not None
        if stopped or now_s >= completed_s + STOP_GRACE_S:
            actions += _removals(scene, live, job.spec, now_s)
        else:
            wake_s = completed_s + STOP_GRACE_S
    ttl_s = None if job.spec is None else job.spec.ttl_seconds_after_finished
    if ttl_s is not None:
        if now_s >= completed_s + ttl_s:
            actions.append(DeleteJob(ref=job.ref, uid=job.uid, resource_version=job.resource_version))
        else:
            wake_s = completed_s + ttl_s if wake_s is None else min(wake_s, completed_s + ttl_s)
    return Decision(actions=tuple(actions), wake_at_s=wake_s)


def _unreadable(scene: JobScene, now_s: float) -> Decision:
    if scene.job.admitted:
        return Decision()
    return _fail(scene, Reason.MISCONFIGURED, scene.job.invalid, None, now_s)


def _succeed(scene: JobScene, record: ProgressRecord, now_s: float) -> Decision:
    status = close_attempt(scene.job.status, record, ended_by=None, now_s=now_s)
    message = f"trained {record.step} steps"
    status = finish(scene.job, status, succeeded=True, reason=Reason.COMPLETED, message=message, now_s=now_s)
    return Decision(actions=(*_status_write(scene, status), _event(scene, Reason.COMPLETED, message)))


def _fail(scene: JobScene, reason: Reason, message: str, failure: Failure | None, now_s: float) -> Decision:
    record = current_record(scene)
    status = scene.job.status
    if scene.job.admitted:
        cause = Cause.STOPPED if failure is None else failure.cause
        status = close_attempt(status, record, ended_by=cause, now_s=now_s)
    status = finish(scene.job, status, succeeded=False, reason=reason, message=message, now_s=now_s)
    return Decision(actions=(*_status_write(scene, status), _event(scene, reason, message, warning=True)))


def _children(scene: JobScene, spec: TrainingJobSpec) -> tuple[Action, ...]:
    job = scene.job
    actions: list[Action] = []
    if "Service" not in scene.children:
        actions.append(CreateService(manifest=manifests.service(job)))
    if "Secret" not in scene.children:
        actions.append(CreateSecret(manifest=manifests.secret(job), keys=(labels.SECRET_KEY,)))
    if scene.lease is None:
        actions.append(CreateLease(manifest=manifests.lease(job, spec)))
    return tuple(actions)


def _hangs_on_lease(failure: Failure) -> bool:
    """Whether the Lease may say more than we have seen: what ranks reported came from the Lease itself."""
    return failure.code is None


def _succeeded(scene: JobScene) -> bool:
    record = current_record(scene)
    return record is not None and record.outcome is Outcome.SUCCEEDED


def _next_deadline_s(scene: JobScene, spec: TrainingJobSpec) -> float | None:
    """When time alone makes a failure: the leader's silence, or a node that is away for too long."""
    attempt = scene.job.attempt
    placed = [] if attempt is None else attempt.placement.nodes
    nodes = [scene.nodes[name] for name in placed if name in scene.nodes]
    away_s = [node.not_ready_since_s for node in nodes if node.not_ready_since_s is not None]
    times_s = [since_s + spec.health.node_lost_seconds for since_s in away_s]
    silent_s = silence_deadline_s(scene, spec)
    return min([*times_s, *([] if silent_s is None else [silent_s])], default=None)


def _lease_ref(scene: JobScene) -> ObjectRef:
    job = scene.job
    return ObjectRef(kind="Lease", namespace=job.namespace, name=labels.job_object_name(job.name, job.uid))


def _deadline_s(status: TrainingJobStatus, spec: TrainingJobSpec) -> float | None:
    admitted_s = parse_time_or(status.first_admitted_at, None)
    if admitted_s is None or spec.active_deadline_seconds is None:
        return None
    return admitted_s + spec.active_deadline_seconds


def _wake(decision: Decision, at_s: float | None) -> Decision:
    if at_s is None or (decision.wake_at_s is not None and decision.wake_at_s <= at_s):
        return decision
    return dataclasses.replace(decision, wake_at_s=at_s)


def _status_write(scene: JobScene, after: TrainingJobStatus) -> tuple[WriteStatus, ...]:
    job = scene.job
    if after == job.status:
        return ()
    return (
        WriteStatus(ref=job.ref, uid=job.uid, resource_version=job.resource_version, before=job.status, after=after),
    )


def _event(scene: JobScene, reason: str, message: str, *, warning: bool = False) -> EmitEvent:
    job = scene.job
    number = 0 if job.attempt is None else job.attempt.number
    return EmitEvent(
        ref=job.ref, uid=job.uid, reason=str(reason), message=message, warning=warning, key=f"{number}-{reason}".lower()
    )
