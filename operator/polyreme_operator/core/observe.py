"""What is wrong with a running attempt, read from its pods, nodes and Lease. No judgement yet: that is ``recovery``."""

from __future__ import annotations

import dataclasses

from polyreme_api.job import TrainingJobSpec
from polyreme_api.job.status import AttemptStatus
from polyreme_api.progress import Outcome, ProgressRecord, RankExit
from polyreme_operator.core.hang import find_stall
from polyreme_operator.core.reasons import Cause
from polyreme_operator.types.snapshot import JobScene
from polyreme_operator.types.timestamps import parse_time_or
from polyreme_operator.types.views import PodPhase, PodView

SIGNAL_CODE_BASE = 128
CODE_BAD_CONFIG = 2
CODE_ENVIRONMENT = 7
CODE_RUN_FAILED = 100
"""Training failed by itself, as with a loss that is not finite: the same steps would fail again."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One failed attempt, by its first cause."""

    cause: Cause
    message: str
    index: int | None = None
    """Worker index at fault, where one is."""
    code: int | None = None
    """Exit code of the rank at fault; 128 + n for signal n."""
    replace: frozenset[int] = frozenset()
    """Indices whose pods are of no use any more."""
    move: frozenset[int] = frozenset()
    """Indices, among those, whose nodes are lost."""


def current_record(scene: JobScene) -> ProgressRecord | None:
    """Return the progress record, if the current attempt's current leader wrote it. A stale one never counts."""
    attempt, lease = scene.job.attempt, scene.lease
    if attempt is None or lease is None or lease.record is None or lease.job_uid != scene.job.uid:
        return None
    record = lease.record
    if record.attempt != attempt.number or record.replacement != attempt.replacement(0):
        return None
    return record


def current_pods(scene: JobScene) -> dict[int, PodView]:
    """Return, by worker index, the pods that fill the current attempt's places."""
    attempt = scene.job.attempt
    if attempt is None:
        return {}
    numbers = attempt.replacement_by_index
    return {
        pod.index: pod
        for pod in scene.pods
        if pod.index < attempt.replicas and pod.replacement == numbers.get(pod.index, 0)
    }


def find_failure(scene: JobScene, spec: TrainingJobSpec, now_s: float) -> Failure | None:
    """Find what ended the current attempt; None while nothing did. Of several causes the deepest is told."""
    attempt = scene.job.attempt
    if attempt is None:
        return None
    record = current_record(scene)
    gone = _lost_places(scene, spec, attempt, record, now_s)
    if gone is not None:
        return gone
    if record is not None and attempt.desired == "Run":
        exited = _failed_exit(record.exits)
        if exited is not None:
            return _rank_failure(exited, attempt, said=record.message)
        if record.outcome in {Outcome.FAILED, Outcome.STOPPED}:
            cause = Cause.STOPPED if record.outcome is Outcome.STOPPED else Cause.RANK_EXITED
            return Failure(cause=cause, message=record.message or f"the attempt ended as {record.outcome}")
    stall = find_stall(scene, spec, record)
    if stall is not None and stall.fatal:
        return Failure(cause=Cause.HUNG, message=stall.message)
    return _silence(scene, spec, attempt, record, now_s)


def silence_deadline_s(scene: JobScene, spec: TrainingJobSpec) -> float | None:
    """Return when silence becomes a failure, if nothing is heard until then."""
    attempt = scene.job.attempt
    if attempt is None:
        return None
    record = current_record(scene)
    started_s = parse_time_or(attempt.started_at, 0.0)
    start_s = started_s + spec.health.start_timeout_seconds
    heard_s = _heard_s(scene, attempt, started_s)
    beat_s = None if heard_s is None else heard_s + spec.health.heartbeat_timeout_seconds
    if record is not None and record.released:
        return beat_s
    return start_s if beat_s is None else min(start_s, beat_s)


def _lost_places(
    scene: JobScene, spec: TrainingJobSpec, attempt: AttemptStatus, record: ProgressRecord | None, now_s: float
) -> Failure | None:
    """Find places whose pod or node is gone. An index whose pod was never created is no loss, but work to do."""
    pods = current_pods(scene)
    nodes = attempt.placement.node_by_index()
    grace_s = spec.health.node_lost_seconds
    all_created = scene.job.status.replicas >= attempt.replicas or (record is not None and record.released)
    replace: dict[int, str] = {}
    move: set[int] = set()
    for index, node in enumerate(nodes):
        view = scene.nodes.get(node)
        pod = pods.get(index)
        if view is None or view.lost(now_s, node_lost_s=grace_s):
            move.add(index)
            replace[index] = f"node {node} is lost"
        elif pod is None:
            if all_created:
                replace[index] = "its pod is gone"
        elif pod.deleting:
            replace[index] = f"pod {pod.name} is being deleted"
        elif pod.ended:
            said = f" ({pod.reason})" if pod.reason else ""
            code = "" if pod.exit_code is None else f" with exit code {pod.exit_code}"
            why = f": {pod.message}" if pod.message else ""
            replace[index] = f"pod {pod.name} ended as {pod.phase}{said}{code}{why}"
    if not replace:
        return None
    first = min(move) if move else min(replace)
    failed = not move and (pods.get(first) is not None and pods[first].phase is PodPhase.FAILED)
    cause = Cause.NODE_LOST if move else Cause.POD_FAILED if failed else Cause.POD_LOST
    if not move and all(index in pods and pods[index].reason == Cause.HOST_RESTARTED for index in replace):
        cause = Cause.HOST_RESTARTED
    more = f" (and {len(replace) - 1} more)" if len(replace) > 1 else ""
    return Failure(
        cause=cause,
        message=f"worker {first}: {replace[first]}{more}",
        index=first,
        replace=frozenset(replace),
        move=frozenset(move),
    )


def _failed_exit(exits: tuple[RankExit, ...]) -> RankExit | None:
    """Return the first exit that is a failure: those behind it are mostly its consequences."""
    return next((ended for ended in exits if ended.signal is not None or ended.code not in {0, None}), None)


def _rank_failure(ended: RankExit, attempt: AttemptStatus, *, said: str) -> Failure:
    index = min(ended.rank // attempt.devices, attempt.replicas - 1)
    if ended.signal is not None:
        return Failure(
            cause=Cause.RANK_KILLED,
            message=f"rank {ended.rank} on worker {index} was ended by signal {ended.signal}",
            index=index,
            code=SIGNAL_CODE_BASE + ended.signal,
        )
    code = ended.code or 0
    return Failure(
        cause=Cause.ENVIRONMENT_FAILED if code == CODE_ENVIRONMENT else Cause.RANK_EXITED,
        message=f"rank {ended.rank} on worker {index} exited with code {code}{': ' if said else ''}{said}",
        index=index,
        code=code,
    )


def _silence(
    scene: JobScene, spec: TrainingJobSpec, attempt: AttemptStatus, record: ProgressRecord | None, now_s: float
) -> Failure | None:
    started_s = parse_time_or(attempt.started_at, 0.0)
    heard_s = _heard_s(scene, attempt, started_s)
    timeout_s = spec.health.heartbeat_timeout_seconds
    if heard_s is not None and now_s - heard_s >= timeout_s:
        return Failure(
            cause=Cause.LEADER_SILENT,
            message=f"the leader's Lease was last renewed {now_s - heard_s:.0f} s ago, rule {timeout_s} s",
            index=0,
            replace=frozenset({0}),
        )
    released = record is not None and record.released
    timeout_s = spec.health.start_timeout_seconds
    if not released and now_s - started_s >= timeout_s:
        joined = 0 if record is None else record.joined
        return Failure(
            cause=Cause.START_TIMED_OUT,
            message=f"{joined} of {attempt.replicas} workers joined in {timeout_s} s",
            replace=frozenset(range(attempt.replicas)),
        )
    return None


def _heard_s(scene: JobScene, attempt: AttemptStatus, started_s: float) -> float | None:
    """When the current leader's pod last renewed the Lease, for whatever attempt; None before its first word."""
    lease = scene.lease
    if lease is None or lease.record is None or lease.record.replacement != attempt.replacement(0):
        return None
    return max(lease.seen_s, started_s)
