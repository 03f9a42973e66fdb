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
from polyreme_operator.core import binding, environment_runtime, manifests, stopping, transition
from polyreme_operator.core.accounting import close_attempt, settle, settlement_due_s, with_checkpoint
from polyreme_operator.core.events import events_of
from polyreme_operator.core.hang import Stall, find_stall
from polyreme_operator.core.manifests import PodDefaults
from polyreme_operator.core.observe import (
    REFUSED_S,
    UNSCHEDULABLE_S,
    Failure,
    current_pods,
    current_record,
    silence_deadline_s,
)
from polyreme_operator.core.quarantine import with_degraded
from polyreme_operator.core.recovery import GiveUp, Restart, judge
from polyreme_operator.core.status import drop_condition, finish, with_class, with_condition
from polyreme_operator.core.stopping import STOP_GRACE_S, StopFor
from polyreme_operator.port import ObjectRef
from polyreme_operator.types.actions import (
    Action,
    CreateChild,
    CreatePod,
    CreateSecret,
    Decision,
    DeleteJob,
    DeletePod,
    ReadLease,
    WriteStatus,
)
from polyreme_operator.types.reasons import Cause, ConditionType, Reason
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
PLANNING_WORDS = "its layout is being planned, for each worker count that it accepts"
_WORKING = frozenset({Reason.TRAINING, Reason.EVALUATING, Reason.EXPORTING})


def reconcile(scene: JobScene, now_s: float, *, defaults: PodDefaults) -> Decision:
    """Decide what one job needs now."""
    job = scene.job
    if job.deleting or (job.spec is not None and job.spec.managed_by != labels.MANAGER):
        return Decision()
    if job.unreadable or (job.fault and not job.fault_in_round):
        decision = Decision()
    elif job.status.finished:
        return _wake(_finished(scene, now_s), _fence_deadline_s(scene, now_s))
    else:
        decision = _wake(_unfinished(scene, now_s, defaults), _fence_deadline_s(scene, now_s))
    return with_degraded(job, decision, now_s)


def _unfinished(scene: JobScene, now_s: float, defaults: PodDefaults) -> Decision:
    job, status = scene.job, scene.job.status
    spec = job.spec
    if spec is None:
        return _fail(scene, Reason.MISCONFIGURED, job.invalid, None, now_s)
    if defaults.binding == "GangBinder" and not scene.pods and (refused := binding.refusal(spec)):
        return _fail(scene, Reason.MISCONFIGURED, refused, None, now_s)
    deadline_s = _deadline_s(status, spec)
    if deadline_s is not None and now_s >= deadline_s and not _succeeded(scene):
        message = f"ran longer than activeDeadlineSeconds, {spec.active_deadline_seconds} s"
        return _fail(scene, Reason.DEADLINE_EXCEEDED, message, None, now_s)
    if not job.admitted:
        decision = _waiting(scene, spec, now_s)
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
    if _succeeded(scene):
        return _succeed(scene, now_s)
    verdict = judge(scene, spec, now_s)
    if isinstance(verdict, GiveUp | Restart) and not scene.lease_read and _hangs_on_lease(verdict.failure):
        return Decision(actions=(ReadLease(ref=_lease_ref(scene)),))
    if isinstance(verdict, GiveUp):
        return _fail(scene, verdict.reason, verdict.message, verdict.failure, now_s)
    if isinstance(verdict, Restart):
        return _restart(scene, attempt, verdict, now_s)
    children = _children(scene, spec, defaults)
    if scene.lease is None:
        # Pods come behind it: whether an attempt was ever released must be readable before a pod is created anew.
        return Decision(actions=children)
    pods = _pod_actions(scene, spec, attempt, defaults, now_s)
    creates = any(isinstance(action, CreatePod) for action in pods)
    if creates and _would_renew_secret(scene):
        # First: beside pods that have read another Secret no new one could join.
        return Decision(actions=children)
    if creates and not scene.lease_read:
        return Decision(actions=(ReadLease(ref=_lease_ref(scene)),))
    stall = find_stall(scene, spec, record)
    status = _observed(scene, attempt, record, stall, now_s)
    actions = (*children, *pods, *_status_write(scene, status, tells=True))
    settle_s = settlement_due_s(status)
    # One that is due already waits for its turn to be written, or for the leader's next record.
    settle_s = settle_s if settle_s is not None and settle_s > now_s else None
    return _wake(Decision(actions=actions, wake_at_s=_next_deadline_s(scene, spec)), settle_s)


def _restart(scene: JobScene, attempt: AttemptStatus, verdict: Restart, now_s: float) -> Decision:
    job, status = scene.job, scene.job.status
    if verdict.failure.cause is Cause.CREATE_REFUSED:
        return Decision(actions=_status_write(scene, transition.give_up_place(scene, verdict, now_s)))
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
    return Decision(actions=_status_write(scene, after))


def _observed(
    scene: JobScene, attempt: AttemptStatus, record: ProgressRecord | None, stall: Stall | None, now_s: float
) -> TrainingJobStatus:
    """Bring the status of a healthy attempt up to what is seen."""
    job, status = scene.job, scene.job.status
    pods = current_pods(scene)
    running = sum(pod.phase is PodPhase.RUNNING for pod in pods.values())
    joined = 0 if record is None else min(record.joined, attempt.replicas)
    released = record is not None and record.released
    phase = RankPhase.TRAINING if record is None else record.phase
    if job.spec is not None and environment_runtime.is_used(job.spec):
        # Nobody joins or releases there: pods that run, or have ended well before the others, are the gang.
        running = joined = environment_runtime.started(scene)
        released = running == attempt.replicas
    ready = running == attempt.replicas and (released or joined == attempt.replicas)

    def say(kind: ConditionType, holds: bool, reason: Reason, message: str = "") -> None:
        nonlocal status
        status = with_condition(status, kind, holds, reason, message, now_s=now_s, generation=job.generation)

    if ready:
        say(ConditionType.PODS_READY, True, Reason.JOINED)
    else:
        refused = "" if scene.refusal is None else f"; {scene.refusal.message}"
        words = f"{running} of {attempt.replicas} pods run{refused}"
        say(ConditionType.PODS_READY, False, Reason.WAITING_FOR_PODS, words)
    reason = RUNNING_PHASES[phase] if released else Reason.STARTING
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
    status = with_class(job, status, now_s=now_s)
    changed = status is not job.status
    status = _updated(
        status,
        replicas=len(pods),
        ready_replicas=attempt.replicas if released else joined,
        priority=job.priority,
        observed_generation=job.generation,
        retry_at=None,
    )
    idle_s = 0.0 if scene.lease is None else scene.lease.seen_s - scene.lease.advanced_seen_s
    status = settle(with_checkpoint(status, record, now_s=now_s), record, now_s=now_s, idle_s=idle_s)
    if record is not None and (changed or (status is not job.status and status != job.status)):
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
    mode = binding.mode_of(defaults.binding, scene, attempt)
    missing = [(index, node) for index, node in enumerate(nodes) if index not in pods]
    created: tuple[CreatePod, ...] = ()
    if missing:
        pattern = manifests.WorkerPods(scene.job, spec, attempt, defaults=defaults, mode=mode)
        binds = mode == "GangBinder"
        created = tuple(CreatePod(pattern=pattern, index=index, node=node, binds=binds) for index, node in missing)
    return (*removed, *created, *binding.binds(scene, attempt))


def _removals(
    scene: JobScene, pods: list[PodView], spec: TrainingJobSpec | None, now_s: float
) -> tuple[DeletePod, ...]:
    """Delete pods, once each; by force only where their node is known to be lost."""
    lost_s = _node_lost_s(spec)
    removed = []
    for pod in sorted(pods, key=lambda pod: (pod.index, pod.replacement)):
        node = scene.nodes.get(pod.node)
        lost = node is not None and node.lost(now_s, node_lost_s=lost_s)
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
    elif job.planning is not None:
        status = with_condition(
            status, ConditionType.QUEUED, True, Reason.PLANNING, PLANNING_WORDS, now_s=now_s, generation=generation
        )
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
    status = _updated(
        with_class(job, status, now_s=now_s),
        replicas=len(scene.pods),
        ready_replicas=0,
        priority=job.priority,
        observed_generation=generation,
    )
    resumed = spec.suspend or job.status.is_true(ConditionType.SUSPENDED)
    return Decision(actions=(*removed, *_status_write(scene, status, tells=not resumed)))


def _stopping(scene: JobScene, spec: TrainingJobSpec, now_s: float) -> Decision:
    """Checkpoint, stop, and only then give the devices back, or begin the attempt of another size."""
    job = scene.job
    if _succeeded(scene):
        return _succeed(scene, now_s)
    stop = stopping.standing(job)
    if stop is None or (stop.why is StopFor.RESIZE and spec.suspend):
        return Decision(actions=_status_write(scene, transition.stop_for_suspend(job, now_s)))
    ended = environment_runtime.endings(scene, spec)
    if not stopping.has_stopped(scene, now_s):
        return Decision(actions=ended, wake_at_s=stopping.stop_deadline_s(job, stop, now_s))
    if stop.why is StopFor.RESIZE:
        # Another placement is the cluster's to give: ``schedule`` begins the attempt.
        return Decision(reschedule=True)
    if not scene.lease_read and scene.lease is not None:
        return Decision(actions=(ReadLease(ref=_lease_ref(scene)),))
    return Decision(actions=_status_write(scene, transition.give_back(scene, stop, now_s)))


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


def _succeed(scene: JobScene, now_s: float) -> Decision:
    record = current_record(scene)
    status = close_attempt(scene.job.status, record, ended_by=None, now_s=now_s)
    message = "every pod ended well" if record is None else f"trained {record.step} steps"
    status = finish(scene.job, status, succeeded=True, reason=Reason.COMPLETED, message=message, now_s=now_s)
    return Decision(actions=_status_write(scene, status))


def _fail(scene: JobScene, reason: Reason, message: str, failure: Failure | None, now_s: float) -> Decision:
    record = current_record(scene)
    status = scene.job.status
    if scene.job.admitted:
        cause = Cause.STOPPED if failure is None else failure.cause
        status = close_attempt(status, record, ended_by=cause, now_s=now_s)
    status = finish(scene.job, status, succeeded=False, reason=reason, message=message, now_s=now_s)
    return Decision(actions=_status_write(scene, status))


def _children(scene: JobScene, spec: TrainingJobSpec, defaults: PodDefaults) -> tuple[Action, ...]:
    job = scene.job
    actions: list[Action] = []
    if "Service" not in scene.children:
        actions.append(CreateChild(manifest=manifests.service(job)))
    if "Secret" not in scene.children:
        renews = _would_renew_secret(scene)
        actions.append(CreateSecret(manifest=manifests.secret(job), keys=(labels.SECRET_KEY,), renews=renews))
    if defaults.launcher_rbac and not {"Role", "RoleBinding"} <= scene.children:
        bound = CreateChild(manifest=manifests.role_binding(job, spec))
        # The API server refuses the binding of a Role that it does not know.
        known = "Role" in scene.children
        actions.append(bound if known else CreateChild(manifest=manifests.role(job), then=bound))
    if scene.lease is None:
        actions.append(CreateChild(manifest=manifests.lease(job, spec)))
    return tuple(actions)


def _would_renew_secret(scene: JobScene) -> bool:
    """Whether pods run whose Secret may have been deleted since they read it."""
    running = (pod.phase is PodPhase.RUNNING for pod in current_pods(scene).values())
    return "Secret" not in scene.children and any(running)


def _hangs_on_lease(failure: Failure) -> bool:
    """Whether the Lease may say more than we have seen: what ranks reported came from the Lease itself."""
    return failure.code is None


def _succeeded(scene: JobScene) -> bool:
    attempt, spec = scene.job.attempt, scene.job.spec
    if attempt is not None and spec is not None and environment_runtime.is_used(spec):
        return environment_runtime.has_succeeded(scene, attempt)
    record = current_record(scene)
    return record is not None and record.outcome is Outcome.SUCCEEDED


def _next_deadline_s(scene: JobScene, spec: TrainingJobSpec) -> float | None:
    """When time alone makes a failure: silence, a node that is away or a pod that finds no room for too long."""
    attempt = scene.job.attempt
    placed = () if attempt is None else dict.fromkeys(attempt.placement.node_by_index())
    nodes = [scene.nodes[name] for name in placed if name in scene.nodes]
    times_s = [
        node.not_ready_since_s + spec.health.node_lost_seconds for node in nodes if node.not_ready_since_s is not None
    ]
    times_s += [
        pod.unschedulable_since_s + UNSCHEDULABLE_S for pod in scene.pods if pod.unschedulable_since_s is not None
    ]
    environment = environment_runtime.is_used(spec)
    silent_s = (environment_runtime.start_deadline_s if environment else silence_deadline_s)(scene, spec)
    refused_s = None if scene.refusal is None else scene.refusal.since_s + REFUSED_S
    times_s += [at_s for at_s in (silent_s, scene.children_until_s, refused_s) if at_s is not None]
    return min(times_s, default=None)


def _node_lost_s(spec: TrainingJobSpec | None) -> float:
    return STOP_GRACE_S if spec is None else spec.health.node_lost_seconds


def _fence_deadline_s(scene: JobScene, now_s: float) -> float | None:
    """When time alone makes a node lost that still holds a pod which is being deleted."""
    lost_s = _node_lost_s(scene.job.spec)
    nodes = (scene.nodes.get(pod.node) for pod in scene.pods if pod.deleting)
    since_s = (node.not_ready_since_s for node in nodes if node is not None)
    return min((at_s + lost_s for at_s in since_s if at_s is not None and at_s + lost_s > now_s), default=None)


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


def _updated(status: TrainingJobStatus, **fields: object) -> TrainingJobStatus:
    """Return a status with some fields as they are now; the same object where they are so already, as mostly."""
    changed = {name: value for name, value in fields.items() if getattr(status, name) != value}
    return status.model_copy(update=changed) if changed else status


def _status_write(scene: JobScene, after: TrainingJobStatus, *, tells: bool = False) -> tuple[Action, ...]:
    """Write a status, and tell what it changes; nothing where it changes nothing."""
    job = scene.job
    if after is job.status or after == job.status:
        return ()
    write = WriteStatus(
        ref=job.ref,
        uid=job.uid,
        resource_version=job.resource_version,
        before=job.status,
        after=after,
        tells=tells,
    )
    return (write, *events_of(write))
