"""Finds the failure of a running attempt in its pods, nodes and Lease; ``failure_policy`` decides what follows."""

from __future__ import annotations

import dataclasses

from polyreme_api import labels
from polyreme_api.exit_codes import ExitCode, code_of_signal, distance_from_cause
from polyreme_api.job import TrainingJobSpec, TrainingJobStatus
from polyreme_api.job.status import AttemptStatus
from polyreme_api.progress import Outcome, ProgressRecord, RankExit, RankPhase
from polyreme_operator.placement.eligible import tolerated
from polyreme_operator.reconcile import failed_nodes, pre_checks, refusals
from polyreme_operator.reconcile.evacuation import Departure, departure_of
from polyreme_operator.reconcile.hang import find_stall
from polyreme_operator.reconcile.pod_ending import how_it_ended
from polyreme_operator.reconcile.pod_waiting import explain, not_started
from polyreme_operator.types.reasons import Cause, ConditionType, Reason
from polyreme_operator.types.snapshot import JobSnapshot
from polyreme_operator.types.timestamps import parse_time_or
from polyreme_operator.types.views import JobView, NodeView, PodPhase, PodView

RUNNING_PHASES = {
    RankPhase.STARTING: Reason.STARTING,
    RankPhase.WAITING_FOR_DATA: Reason.WAITING_FOR_DATA,
    RankPhase.LOADING: Reason.LOADING,
    RankPhase.SCORING: Reason.SCORING,
    RankPhase.TRAINING: Reason.TRAINING,
    RankPhase.CHECKPOINTING: Reason.TRAINING,
    RankPhase.EVALUATING: Reason.EVALUATING,
    RankPhase.EXPORTING: Reason.EXPORTING,
    RankPhase.DONE: Reason.EXPORTING,
}
WORKING = frozenset({Reason.SCORING, Reason.TRAINING, Reason.EVALUATING, Reason.EXPORTING})
NO_LAUNCHER = (
    "their containers run, but no launcher has reported; a container that runs a command of its own needs "
    "workers.runtime.mode: Environment"
)
UNSCHEDULABLE_S = 10.0
"""How long a pod may stay unschedulable before it is placed on another node."""
REFUSED_S = 3.0
"""How long a pod may be refused before its gang gives up its nodes: quota usage lags deleted pods."""
RUNNING_SILENCES = 10
"""Heartbeat timeouts that a leader may be silent whose process is seen to run: on a busy machine it has no turn."""
SLOW_START_S = 60.0
"""How long pods may take to start before the status says which has not."""
KEY_LOST = "the installation has another key than when the pods were made, so what they report can't be verified"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One failed attempt, by its first cause."""

    cause: Cause
    message: str
    index: int | None = None
    """The worker at fault, if it is one."""
    code: int | None = None
    """Exit code of the rank at fault; 128 + n for signal n."""
    pod_code: int | None = None
    """Exit code of the container at fault of the pod at fault, if that failed by itself."""
    replace: frozenset[int] = frozenset()
    """Indices whose pods must be replaced."""
    move: frozenset[int] = frozenset()
    """Those of these indices that need another node."""
    avoid: frozenset[int] = frozenset()
    """Those of these whose node failed them: they may return only where no other node has room."""


def current_record(snapshot: JobSnapshot) -> ProgressRecord | None:
    """Return the progress record, if the current attempt's current leader wrote it; None if it is stale."""
    attempt, lease = snapshot.job.attempt, snapshot.lease
    if attempt is None or lease is None or lease.record is None or lease.job_uid != snapshot.job.uid:
        return None
    record = lease.record
    if record.attempt != attempt.number or record.replacement != attempt.replacement(0):
        return None
    return record


def current_pods(snapshot: JobSnapshot) -> dict[int, PodView]:
    """Return, by worker index, the pods that fill the current attempt's places."""
    attempt = snapshot.job.attempt
    if attempt is None:
        return {}
    numbers = attempt.replacement_by_index
    return {
        pod.index: pod
        for pod in snapshot.pods
        if pod.index < attempt.replicas and pod.replacement == numbers.get(pod.index, 0)
    }


def find_failure(snapshot: JobSnapshot, spec: TrainingJobSpec, now_s: float) -> Failure | None:
    """Find what ended the current attempt; None while it runs. Of several causes the deepest is returned."""
    attempt = snapshot.job.attempt
    if attempt is None:
        return None
    record = current_record(snapshot)
    gone = lost_places(snapshot, spec, now_s)
    if snapshot.job.key_lost:
        # A new pod could not join those that stay.
        gone = dataclasses.replace(
            gone or Failure(cause=Cause.KEY_LOST, message=KEY_LOST), replace=frozenset(range(attempt.replicas))
        )
    if gone is not None:
        return gone
    bad = pre_checks.failed_workers(attempt, record)
    if bad and record is not None and attempt.desired == "Run":
        moved = frozenset(bad)
        message = pre_checks.message(record)
        return Failure(cause=Cause.PRE_CHECK, message=message, index=bad[0], replace=moved, move=moved)
    if record is not None and attempt.desired == "Run":
        exited = _failed_exit(record.exits)
        if exited is not None:
            return _rank_failure(exited, attempt, record)
        if record.outcome in {Outcome.FAILED, Outcome.STOPPED}:
            message = record.message or f"the attempt ended as {record.outcome}"
            if record.leaving:
                index, replace = record.leaving[0], frozenset(record.leaving)
                return Failure(cause=Cause.POD_LOST, message=message, index=index, replace=replace)
            cause = Cause.STOPPED if record.outcome is Outcome.STOPPED else Cause.RANK_EXITED
            return Failure(cause=cause, message=message)
    stall = find_stall(snapshot, spec, record)
    if stall is not None and stall.fatal:
        return Failure(cause=Cause.HUNG, message=stall.message, index=stall.index)
    return _silence(snapshot, spec, attempt, record, now_s)


def find_refusal(snapshot: JobSnapshot, now_s: float) -> Failure | None:
    """Return the failure of an attempt whose objects the API server keeps refusing; None if it does not."""
    refusal = refusals.ending(snapshot)
    if refusal is None or now_s - refusal.since_s < REFUSED_S:
        return None
    return Failure(cause=Cause.CREATE_REFUSED, message=refusal.message)


def began_s(job: JobView, attempt: AttemptStatus) -> float:
    """Return when an attempt began by this operator's clock, since another machine's clock wrote the recorded time.

    An operator that finds an attempt in progress gives it the full start timeout again.
    """
    return job.attempt_seen_s or parse_time_or(attempt.started_at, 0.0)


def silence_deadline_s(snapshot: JobSnapshot, spec: TrainingJobSpec) -> float | None:
    """Return when a missing heartbeat or start becomes a failure."""
    attempt = snapshot.job.attempt
    if attempt is None:
        return None
    record = current_record(snapshot)
    started_s = began_s(snapshot.job, attempt)
    joins_since_s = _joins_since_s(snapshot)
    heard_s = _heard_s(snapshot, attempt, started_s)
    beat_s = None if heard_s is None else heard_s + spec.health.heartbeat_timeout_seconds
    if joins_since_s is None or (record is not None and record.released):
        return beat_s
    start_s = joins_since_s + _start_timeout_s(spec, attempt)
    return start_s if beat_s is None else min(start_s, beat_s)


def lost_places(
    snapshot: JobSnapshot, spec: TrainingJobSpec, now_s: float, *, done: frozenset[int] = frozenset()
) -> Failure | None:
    """Find places whose pod or node is gone. An index whose pod was never created is not a loss.

    Args:
        snapshot: The job and what it has.
        spec: Its spec.
        now_s: The time.
        done: Indices that have finished.
    """
    attempt = snapshot.job.attempt
    if attempt is None:
        return None
    pods = current_pods(snapshot)
    record = current_record(snapshot)
    status = snapshot.job.status
    all_created = status.replicas >= attempt.replicas or (record is not None and record.released)
    # An attempt that waits for its restart had all of its pods, even if its Lease is gone: none is created again.
    all_created = all_created or (status.retry_at is not None and not _waits_for_start(status))
    lost: dict[int, _Lost] = {}
    for index, node in enumerate(attempt.placement.node_by_index()):
        if index in done:
            continue
        place = _Place(index=index, node=node, pod=pods.get(index), missing=all_created and index not in pods)
        found = _lost_place(snapshot, spec, place, now_s)
        if found is not None:
            lost[index] = found
    return None if not lost else _one_failure(lost)


def _waits_for_start(status: TrainingJobStatus) -> bool:
    """Tell whether the job waits for its restart since its pods did not start: then some may never have existed."""
    restarting = status.condition(ConditionType.RESTARTING)
    return restarting is not None and restarting.reason in failed_nodes.CAUSES


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    """The place of one worker in the current attempt."""

    index: int
    node: str
    pod: PodView | None
    missing: bool
    """Whether its pod existed, and does so no more."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Lost:
    """The loss of one place."""

    cause: Cause
    why: str
    move: bool = False
    avoid: bool = False
    code: int | None = None


def node_lost_at_s(snapshot: JobSnapshot, spec: TrainingJobSpec, index: int, node: NodeView) -> float | None:
    """Return when a worker's node counts as lost; None while nothing speaks for it.

    A node that is not ready while the worker's launcher reports is not lost: its kubelet is silent, the ranks are not.
    The leader names workers whose launchers say nothing any more.
    """
    if node.out_of_service or node.held or node.not_ready_since_s is None:
        return 0.0 if node.out_of_service else None
    record, lease = current_record(snapshot), snapshot.lease
    reports = record is not None and record.released and index not in record.leaving
    heard_s = lease.seen_s if reports and lease is not None else 0.0
    return max(node.not_ready_since_s, heard_s) + spec.health.node_lost_seconds


def _lost_place(snapshot: JobSnapshot, spec: TrainingJobSpec, place: _Place, now_s: float) -> _Lost | None:
    node, pod = place.node, place.pod
    view = snapshot.nodes.get(node)
    lost_at_s = None if view is None else node_lost_at_s(snapshot, spec, place.index, view)
    if lost_at_s is not None and now_s >= lost_at_s:
        return _Lost(Cause.NODE_LOST, f"node {node} is lost", move=True)
    departure = Departure.STAY if view is None else departure_of(view, spec, now_s)
    if view is not None and departure is not Departure.STAY:
        record = current_record(snapshot)
        # Before the ranks run there is nothing to save; while they stop, they are saving it.
        trains = record is not None and record.released
        stops = snapshot.job.attempt is not None and snapshot.job.attempt.desired == "Stop"
        if departure is Departure.NOW or not (trains or stops or spec.workers.runtime.mode == "Environment"):
            return _Lost(Cause.NODE_FAULT, f"node {node} is out of service ({view.fault})", move=True)
    if view is not None and view.is_faulty and pod is not None and not pod.node and not pod.deleting and not pod.ended:
        return _Lost(Cause.NODE_FAULT, f"node {node} was taken out of service before its pod was bound", move=True)
    # A worker can't return to a node that is absent, cordoned, or tainted since.
    leaves = view is None or view.unschedulable or not tolerated(snapshot.job.constraints.tolerations, view.taints)
    if pod is None:
        if not place.missing:
            return _blocked_place(snapshot, place, now_s)
        attempt = snapshot.job.attempt
        number = 0 if attempt is None else attempt.replacement(place.index)
        name = labels.pod_name(snapshot.job.name, snapshot.job.uid, index=place.index, replacement=number)
        return _Lost(Cause.POD_LOST, f"pod {name} is gone", move=leaves)
    evicted = ("DisruptionTarget", "True") in pod.conditions
    if pod.deleting:
        cause = Cause.EVICTED if evicted else Cause.POD_LOST
        return _Lost(cause, f"pod {pod.name} is {'evicted' if evicted else 'being deleted'}", move=leaves)
    if pod.ended:
        return _ended_place(pod, evicted=evicted, move=leaves)
    since_s = pod.unschedulable_since_s
    if since_s is not None and not pod.node and now_s - since_s >= UNSCHEDULABLE_S:
        why = f": {pod.unschedulable}" if pod.unschedulable else ""
        message = f"pod {pod.name} could not be scheduled on node {node}{why}"
        return _Lost(Cause.UNSCHEDULABLE, message, move=True, avoid=True)
    return None


def _blocked_place(snapshot: JobSnapshot, place: _Place, now_s: float) -> _Lost | None:
    """Find the pod of an earlier attempt that does not end, so that the worker's pod can't be created on its node."""
    view = snapshot.nodes.get(place.node)
    for pod in snapshot.pods if view is not None and view.ready else ():
        if (pod.index, pod.node) == (place.index, place.node) and pod.is_stuck(now_s):
            since = f"{now_s - (pod.ends_by_s or now_s):.0f} s after its grace period"
            message = f"pod {pod.name} on node {pod.node} is still terminating {since}, although the node is ready"
            return _Lost(Cause.POD_STUCK, message, move=True, avoid=True)
    return None


def _ended_place(pod: PodView, *, evicted: bool, move: bool) -> _Lost:
    failed = pod.phase is PodPhase.FAILED
    if pod.reason == Cause.HOST_RESTARTED:
        # Its exit code is the host's word for an end that was not observed.
        return _Lost(Cause.HOST_RESTARTED, how_it_ended(pod), move=move)
    if failed and pod.node and not pod.start.ran:
        said, why = f" ({pod.reason})" if pod.reason else "", f": {pod.message}" if pod.message else ""
        message = f"node {pod.node} rejected pod {pod.name}{said}{why}"
        return _Lost(Cause.POD_REJECTED, message, move=True, avoid=True)
    cause = Cause.EVICTED if evicted else Cause.POD_FAILED if failed else Cause.POD_LOST
    words = how_it_ended(pod)
    if failed and pod.start.failed:
        # What can't be started may be the template's fault or the node's: it costs budget, and another node is tried.
        words = f"{words}; node {pod.node} could not start its container"
        return _Lost(cause, words, move=True, avoid=bool(pod.node), code=pod.exit_code)
    return _Lost(cause, words, move=move, code=pod.exit_code if failed else None)


_DEEPEST_FIRST = (
    Cause.NODE_LOST,
    Cause.POD_FAILED,
    Cause.POD_LOST,
    Cause.EVICTED,
    Cause.POD_STUCK,
    Cause.POD_REJECTED,
    Cause.UNSCHEDULABLE,
    Cause.NODE_FAULT,
    Cause.HOST_RESTARTED,
)
"""The first of these causes is reported. Causes that no budget counts come last: they must be the only ones."""


def _one_failure(lost: dict[int, _Lost]) -> Failure:
    """Report several lost places as one failure, with the deepest cause."""
    first = min(lost, key=lambda index: (_DEEPEST_FIRST.index(lost[index].cause), index))
    more = f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
    return Failure(
        cause=lost[first].cause,
        message=f"worker {first}: {lost[first].why}{more}",
        index=first,
        pod_code=lost[first].code,
        replace=frozenset(lost),
        move=frozenset(index for index, place in lost.items() if place.move),
        avoid=frozenset(index for index, place in lost.items() if place.avoid),
    )


def _failed_exit(exits: tuple[RankExit, ...]) -> RankExit | None:
    """Return the exit that shows the cause: of equal ones the first, since later ones are mostly its consequences."""
    failed = [ended for ended in exits if ended.signal is not None or ended.code not in {ExitCode.OK, None}]
    return min(failed, key=lambda ended: distance_from_cause(ended.code), default=None)


def _rank_failure(ended: RankExit, attempt: AttemptStatus, record: ProgressRecord) -> Failure:
    index, why = (
        min(ended.rank // attempt.devices, attempt.replicas - 1),
        f": {record.message}" if record.message else "",
    )
    if record.leaving:
        return Failure(
            cause=Cause.EVICTED,
            message=f"worker {record.leaving[0]}: its launcher received SIGTERM; the ranks stopped",
            index=record.leaving[0],
            replace=frozenset(record.leaving),
        )
    suspects = () if record.stall is None else record.stall.suspects
    if record.stall is not None and suspects and ended.rank not in suspects and ended.code == ExitCode.ENVIRONMENT:
        # Ranks that gave up waiting are not the cause of the hang.
        return Failure(
            cause=Cause.HUNG,
            message=f"{record.stall.message}; rank {ended.rank} gave up waiting{why}",
            index=suspects[0] // attempt.devices,
            code=ended.code,
        )
    if ended.signal is not None:
        return Failure(
            cause=Cause.RANK_KILLED,
            message=f"rank {ended.rank} on worker {index} was killed by signal {ended.signal}{why}",
            index=index,
            code=code_of_signal(ended.signal),
        )
    code = ended.code or ExitCode.OK
    cause = _CAUSES.get(code, Cause.RANK_EXITED)
    if cause is Cause.LOSS_SPIKE:
        # All ranks end so, by agreement: no worker caused it.
        return Failure(cause=cause, message=record.message or "the loss spiked", index=None, code=code)
    nodes = attempt.placement.node_by_index() if cause is Cause.COPIES_DIFFER else []
    node = f" on node {nodes[index]}" if index < len(nodes) else ""
    return Failure(
        cause=cause,
        message=f"rank {ended.rank} on worker {index}{node} exited with code {code}{why}",
        index=index,
        code=code,
    )


_CAUSES: dict[int, Cause] = {
    ExitCode.ENVIRONMENT: Cause.ENVIRONMENT_FAILED,
    ExitCode.STEP_FAILED: Cause.STEP_FAILED,
    ExitCode.COPIES_DIFFER: Cause.COPIES_DIFFER,
    ExitCode.ROLLED_BACK: Cause.LOSS_SPIKE,
    ExitCode.SPIKES_PERSIST: Cause.LOSS_SPIKE,
}
"""Of ranks that end with these codes."""


def _silence(
    snapshot: JobSnapshot, spec: TrainingJobSpec, attempt: AttemptStatus, record: ProgressRecord | None, now_s: float
) -> Failure | None:
    started_s = began_s(snapshot.job, attempt)
    heard_s = _heard_s(snapshot, attempt, started_s)
    leader = current_pods(snapshot).get(0)
    runs = leader is not None and leader.uid in snapshot.leaders_running
    timeout_s = spec.health.heartbeat_timeout_seconds * (RUNNING_SILENCES if runs else 1)
    if heard_s is not None and now_s - heard_s >= timeout_s:
        return Failure(
            cause=Cause.LEADER_SILENT,
            message=f"the leader on worker 0 was last heard of {now_s - heard_s:.0f} s ago, the limit is {timeout_s} s",
            index=0,
            replace=frozenset({0}),
        )
    released = record is not None and record.released
    start_s = _start_timeout_s(spec, attempt)
    joins_since_s = _joins_since_s(snapshot)
    if not released and joins_since_s is not None and now_s - joins_since_s >= start_s:
        joined = 0 if record is None else record.joined
        silent = record is None and all(pod.start.ran for pod in current_pods(snapshot).values())
        words = f"{joined} of {attempt.replicas} workers joined in {start_s:g} s{f'; {NO_LAUNCHER}' if silent else ''}"
        return late_start(snapshot, attempt, words)
    return None


def late_start(snapshot: JobSnapshot, attempt: AttemptStatus, message: str) -> Failure:
    """Return the failure of an attempt that did not start in time.

    Pods that run keep their places. A worker whose pod has not started gets another node, unless no pod of the gang has
    and a container says why: then the template is at fault.
    """
    pods = current_pods(snapshot)
    idle = sorted(index for index in range(attempt.replicas) if index not in pods or not pods[index].start.ran)
    refused = refusals.explain_children(snapshot, current_record(snapshot))
    if not idle:
        words = f"{message}{'; ' if refused else ''}{refused}"
        return Failure(
            cause=Cause.START_TIMED_OUT, message=words, index=None, replace=frozenset(range(attempt.replicas))
        )
    stays = [pods[index] for index in idle if index in pods and pods[index].node]
    alone = len(idle) < attempt.replicas
    # No node is at fault while an object is refused that pods need.
    blamed = frozenset(pod.index for pod in stays if not refused and (alone or pod.waiting is None))
    why = "; ".join(filter(None, (refused, explain(stays) or not_started(stays))))
    return Failure(
        cause=Cause.START_TIMED_OUT,
        message=f"{message}{'; ' if why else ''}{why}",
        index=idle[0],
        replace=frozenset(idle),
        move=blamed,
        avoid=blamed,
    )


def _start_timeout_s(spec: TrainingJobSpec, attempt: AttemptStatus) -> float:
    return spec.health.start_timeout_seconds + pre_checks.start_extension_s(spec, attempt)


def _joins_since_s(snapshot: JobSnapshot) -> float | None:
    """Return since when the workers could have reported that they joined; None while a pod or the Lease is missing.

    A Lease without a record may have been deleted and created again while the gang works: its leader reports with its
    next renewal.
    """
    lease, since_s = snapshot.lease, created_s(snapshot)
    if lease is None or since_s is None:
        return None
    return max(since_s, lease.advanced_seen_s) if lease.record is None else since_s


def created_s(snapshot: JobSnapshot) -> float | None:
    """Return when the last pod of the attempt was created, or the attempt began with pods that it kept.

    None while a pod is missing: pods are created after the last one of an earlier attempt has ended, and a restart
    would not create them sooner.
    """
    attempt, pods = snapshot.job.attempt, current_pods(snapshot)
    if attempt is None or len(pods) < attempt.replicas:
        return None
    return max(began_s(snapshot.job, attempt), *(pod.seen_s for pod in pods.values()))


def slow_start_s(snapshot: JobSnapshot) -> float | None:
    """Return when it is worth reporting which pod has not started; None once all have."""
    since_s = created_s(snapshot)
    starts = since_s is not None and not all(pod.start.ran for pod in current_pods(snapshot).values())
    return since_s + SLOW_START_S if since_s is not None and starts else None


def slow_start(snapshot: JobSnapshot, now_s: float) -> str:
    """Say which pod has not started for a while, or which stuck pod of an earlier attempt a worker waits for."""
    due_s, pods = slow_start_s(snapshot), current_pods(snapshot)
    if due_s is not None and now_s >= due_s:
        return not_started(pods.values())
    names = {pod.name for pod in pods.values()}
    stuck = next((pod for pod in snapshot.pods if pod.name not in names and pod.is_stuck(now_s)), None)
    missing = len(pods) < (0 if snapshot.job.attempt is None else snapshot.job.attempt.replicas)
    return f"pod {stuck.name} on node {stuck.node} is still terminating" if missing and stuck is not None else ""


def _heard_s(snapshot: JobSnapshot, attempt: AttemptStatus, started_s: float) -> float | None:
    """Return when the current leader's pod last renewed the Lease, in any attempt; None before its first renewal."""
    lease = snapshot.lease
    if lease is None or lease.record is None or lease.record.replacement != attempt.replacement(0):
        return None
    return max(lease.seen_s, started_s)
