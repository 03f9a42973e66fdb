"""Finds the failure of a running attempt in its pods, nodes and Lease; ``failure_policy`` decides what follows."""

from __future__ import annotations

import dataclasses

from polyreme_api.exit_codes import ExitCode, code_of_signal
from polyreme_api.job import TrainingJobSpec
from polyreme_api.job.status import AttemptStatus
from polyreme_api.progress import Outcome, ProgressRecord, RankExit, name_stopped
from polyreme_operator.placement.eligible import tolerated
from polyreme_operator.reconcile import pre_checks
from polyreme_operator.reconcile.evacuation import Departure, departure_of
from polyreme_operator.reconcile.hang import find_stall
from polyreme_operator.reconcile.pod_waiting import explain
from polyreme_operator.types.reasons import Cause
from polyreme_operator.types.snapshot import JobSnapshot
from polyreme_operator.types.timestamps import parse_time_or
from polyreme_operator.types.views import JobView, PodPhase, PodView

UNSCHEDULABLE_S = 10.0
"""How long a pod may stay unschedulable before it is placed on another node."""
REFUSED_S = 3.0
"""How long a pod may be refused before its gang gives up its nodes: quota usage lags behind deleted pods."""
SECRET_RENEWED = "the job's Secret was deleted and created again; pods that have read the old one can't join new ones"


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
    """Exit code of the first container of the pod at fault, if it failed."""
    replace: frozenset[int] = frozenset()
    """Indices whose pods must be replaced."""
    move: frozenset[int] = frozenset()
    """Those of these indices that need another node."""


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
    if gone is not None:
        return gone
    if snapshot.secret_renewed and 0 < len(current_pods(snapshot)) < attempt.replicas:
        return Failure(cause=Cause.POD_LOST, message=SECRET_RENEWED, replace=frozenset(range(attempt.replicas)))
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
    refusal = snapshot.refusal
    if refusal is None or not refusal.ends_attempt or now_s - refusal.since_s < REFUSED_S:
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
    joins_since_s = _joins_since_s(snapshot, started_s)
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
    all_created = all_created or status.retry_at is not None
    lost: dict[int, _Lost] = {}
    for index, node in enumerate(attempt.placement.node_by_index()):
        if index in done:
            continue
        missing = all_created and index not in pods
        found = _lost_place(snapshot, spec, node, pods.get(index), missing=missing, now_s=now_s)
        if found is not None:
            lost[index] = found
    return None if not lost else _one_failure(lost)


@dataclasses.dataclass(frozen=True, slots=True)
class _Lost:
    """The loss of one place."""

    cause: Cause
    why: str
    move: bool = False
    code: int | None = None


def _lost_place(
    snapshot: JobSnapshot, spec: TrainingJobSpec, node: str, pod: PodView | None, *, missing: bool, now_s: float
) -> _Lost | None:
    view = snapshot.nodes.get(node)
    if view is not None and view.lost(now_s, node_lost_s=spec.health.node_lost_seconds):
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
        return _Lost(Cause.POD_LOST, "its pod is gone", move=leaves) if missing else None
    evicted = ("DisruptionTarget", "True") in pod.conditions
    if pod.deleting:
        cause = Cause.EVICTED if evicted else Cause.POD_LOST
        return _Lost(cause, f"pod {pod.name} is {'evicted' if evicted else 'being deleted'}", move=leaves)
    if pod.ended:
        return _ended_place(pod, evicted=evicted, move=leaves)
    since_s = pod.unschedulable_since_s
    if since_s is not None and not pod.node and now_s - since_s >= UNSCHEDULABLE_S:
        why = f": {pod.unschedulable}" if pod.unschedulable else ""
        return _Lost(Cause.UNSCHEDULABLE, f"pod {pod.name} could not be scheduled on node {node}{why}", move=True)
    return None


def _ended_place(pod: PodView, *, evicted: bool, move: bool) -> _Lost:
    said = f" ({pod.reason})" if pod.reason else ""
    code = "" if pod.exit_code is None else f" with exit code {pod.exit_code}"
    why = f": {pod.message}" if pod.message else ""
    failed = pod.phase is PodPhase.FAILED
    cause = Cause.POD_FAILED if failed else Cause.POD_LOST
    if pod.reason == Cause.HOST_RESTARTED:
        cause = Cause.HOST_RESTARTED
    elif evicted:
        cause = Cause.EVICTED
    words = f"pod {pod.name} ended as {pod.phase}{said}{code}{why}"
    return _Lost(cause, words, move=move, code=pod.exit_code if failed else None)


_DEEPEST_FIRST = (
    Cause.NODE_LOST,
    Cause.POD_FAILED,
    Cause.POD_LOST,
    Cause.EVICTED,
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
    )


def _failed_exit(exits: tuple[RankExit, ...]) -> RankExit | None:
    """Return the first exit that is a failure, since later ones are mostly its consequences.

    Damaged data takes precedence: ranks that lost the rank that found it may have been reported earlier.
    """
    failed = [ended for ended in exits if ended.signal is not None or ended.code not in {ExitCode.OK, None}]
    damaged = [ended for ended in failed if ended.code == ExitCode.DATA_DAMAGED]
    return next(iter([*damaged, *failed]), None)


def _rank_failure(ended: RankExit, attempt: AttemptStatus, record: ProgressRecord) -> Failure:
    index, said = min(ended.rank // attempt.devices, attempt.replicas - 1), record.message
    if record.leaving:
        return Failure(
            cause=Cause.EVICTED,
            message=f"worker {record.leaving[0]}: its launcher received SIGTERM; the ranks stopped",
            index=record.leaving[0],
            replace=frozenset(record.leaving),
        )
    if record.stopped and ended.rank not in record.stopped and ended.code == ExitCode.ENVIRONMENT:
        # Ranks that gave up waiting are not the cause of the hang.
        return Failure(
            cause=Cause.HUNG,
            message=f"{name_stopped(record.stopped, devices=attempt.devices)}; "
            f"rank {ended.rank} gave up waiting{': ' if said else ''}{said}",
            index=record.stopped[0] // attempt.devices,
            code=ended.code,
        )
    if ended.signal is not None:
        return Failure(
            cause=Cause.RANK_KILLED,
            message=f"rank {ended.rank} on worker {index} was killed by signal {ended.signal}",
            index=index,
            code=code_of_signal(ended.signal),
        )
    code = ended.code or ExitCode.OK
    return Failure(
        cause=Cause.ENVIRONMENT_FAILED if code == ExitCode.ENVIRONMENT else Cause.RANK_EXITED,
        message=f"rank {ended.rank} on worker {index} exited with code {code}{': ' if said else ''}{said}",
        index=index,
        code=code,
    )


def _silence(
    snapshot: JobSnapshot, spec: TrainingJobSpec, attempt: AttemptStatus, record: ProgressRecord | None, now_s: float
) -> Failure | None:
    started_s = began_s(snapshot.job, attempt)
    heard_s = _heard_s(snapshot, attempt, started_s)
    timeout_s = spec.health.heartbeat_timeout_seconds
    if heard_s is not None and now_s - heard_s >= timeout_s:
        return Failure(
            cause=Cause.LEADER_SILENT,
            message=f"the leader's Lease was last renewed {now_s - heard_s:.0f} s ago, the limit is {timeout_s} s",
            index=0,
            replace=frozenset({0}),
        )
    released = record is not None and record.released
    start_s = _start_timeout_s(spec, attempt)
    joins_since_s = _joins_since_s(snapshot, started_s)
    if not released and joins_since_s is not None and now_s - joins_since_s >= start_s:
        joined = 0 if record is None else record.joined
        why = explain(current_pods(snapshot).values())
        return Failure(
            cause=Cause.START_TIMED_OUT,
            message=f"{joined} of {attempt.replicas} workers joined in {start_s:g} s{'; ' if why else ''}{why}",
            replace=frozenset(range(attempt.replicas)),
        )
    return None


def _start_timeout_s(spec: TrainingJobSpec, attempt: AttemptStatus) -> float:
    return spec.health.start_timeout_seconds + pre_checks.start_extension_s(spec, attempt)


def _joins_since_s(snapshot: JobSnapshot, started_s: float) -> float | None:
    """Return since when the workers could have reported that they joined; None while there is no Lease.

    A Lease without a record may have been deleted and created again while the gang works: its leader reports with its
    next renewal.
    """
    lease = snapshot.lease
    if lease is None:
        return None
    return max(started_s, lease.advanced_seen_s) if lease.record is None else started_s


def _heard_s(snapshot: JobSnapshot, attempt: AttemptStatus, started_s: float) -> float | None:
    """Return when the current leader's pod last renewed the Lease, in any attempt; None before its first renewal."""
    lease = snapshot.lease
    if lease is None or lease.record is None or lease.record.replacement != attempt.replacement(0):
        return None
    return max(lease.seen_s, started_s)
