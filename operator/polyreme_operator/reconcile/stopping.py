"""Stopping an attempt with a checkpoint: one protocol for suspend, preemption, drained queues and resizes.

The request is a status write that sets ``desired: Stop`` and the reason; launchers checkpoint and report an outcome.
``has_stopped`` tells when the outcome is known or the deadline has passed. A second write then closes the attempt and
withdraws its admission (``transition.give_back``), or begins the next attempt (``transition.resize``, ``move``).
Pods are deleted after that write. Until the last one is gone its place stays charged and the job is not admitted again.
An operator that dies between any two of these steps finds the next one in the status.
"""

from __future__ import annotations

import dataclasses
from enum import StrEnum

from polyreme_api.job import TrainingJobSpec
from polyreme_operator.reconcile import environment_runtime
from polyreme_operator.reconcile.observe import current_pods, current_record
from polyreme_operator.types.reasons import Cause, ConditionType, Reason
from polyreme_operator.types.snapshot import JobSnapshot
from polyreme_operator.types.timestamps import parse_time_or
from polyreme_operator.types.views import JobView

STOP_GRACE_S = 30.0
"""Time beyond the checkpoint's grace period for a stop, and for launchers of a finished job to exit."""


class StopFor(StrEnum):
    """Why an attempt was asked to stop."""

    SUSPEND = "Suspend"
    PREEMPTION = "Preemption"
    DRAIN = "Drain"
    RESIZE = "Resize"
    MOVE = "Move"
    """Workers leave nodes that were taken out of service; the others keep theirs."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """A stop request."""

    why: StopFor
    asked_s: float | None
    """None if the recorded time can't be read; the request then counts as made just now."""
    deadline_s: float | None = None
    """Deadline of the request itself; without one the job's grace period counts from ``asked_s``."""


_KEEPS_ADMISSION: dict[str, StopFor] = {Cause.RESIZE.value: StopFor.RESIZE, Cause.NODE_FAULT.value: StopFor.MOVE}
"""Stops after which the job continues at once, by the reason of its condition Restarting."""
CONTINUES = frozenset(_KEEPS_ADMISSION.values())


def requested_stop(job: JobView) -> Stop | None:
    """Return the stop request of the attempt; of several, first the one that frees its devices for others."""
    status = job.status
    if job.attempt is None or job.attempt.desired != "Stop" or not job.admitted:
        return None
    asked = status.preemption
    if asked is not None:
        why = StopFor.PREEMPTION if asked.by else StopFor.DRAIN
        asked_s, deadline_s = parse_time_or(asked.requested_at, None), parse_time_or(asked.deadline, None)
        return Stop(why=why, asked_s=asked_s, deadline_s=deadline_s)
    suspended = status.condition(ConditionType.SUSPENDED)
    if suspended is not None:
        return Stop(why=StopFor.SUSPEND, asked_s=parse_time_or(suspended.last_transition_time, None))
    restarting = status.condition(ConditionType.RESTARTING)
    if restarting is not None and restarting.status == "True" and restarting.reason in _KEEPS_ADMISSION:
        asked_s = parse_time_or(restarting.last_transition_time, None)
        why = _KEEPS_ADMISSION[restarting.reason]
        return Stop(
            why=why, asked_s=asked_s, deadline_s=_move_deadline_s(job, asked_s) if why is StopFor.MOVE else None
        )
    return None


def _move_deadline_s(job: JobView, asked_s: float | None) -> float | None:
    asked = None if job.spec is None else job.spec.failure_policy.on_node_fault
    if asked is None or asked_s is None or asked.action != "Checkpoint" or asked.deadline_seconds is None:
        return None
    return asked_s + asked.deadline_seconds


def stop_grace_s(spec: TrainingJobSpec) -> float:
    """Return how long an attempt may take to checkpoint and stop if the request has no deadline."""
    return spec.checkpoint.preemption_grace_seconds + STOP_GRACE_S


def stop_deadline_s(job: JobView, stop: Stop, now_s: float) -> float:
    """Return when the attempt is closed even without an outcome.

    It is measured from when this operator first saw the request, since another machine's clock may have written it.
    """
    if stop.deadline_s is not None and (stop.asked_s is None or not job.attempt_seen_s):
        return stop.deadline_s
    asked_s = now_s if stop.asked_s is None else stop.asked_s
    grace_s = STOP_GRACE_S if job.spec is None else stop_grace_s(job.spec)
    if stop.deadline_s is not None:
        grace_s = stop.deadline_s - asked_s
    return (job.attempt_seen_s or asked_s) + grace_s


def has_stopped(snapshot: JobSnapshot, now_s: float) -> bool:
    """Tell whether an attempt that was asked to stop has stopped, or its deadline has passed."""
    job, record = snapshot.job, current_record(snapshot)
    stop = requested_stop(job)
    if stop is None:
        return False
    pods = current_pods(snapshot).values()
    if job.attempt is not None and job.spec is not None and environment_runtime.is_used(job.spec):
        if environment_runtime.has_succeeded(snapshot, job.attempt):
            # It ended by itself: ``reconcile`` writes the success.
            return False
        # There is no launcher to report an outcome: such pods are deleted, and their end is the outcome.
        quiet = all(pod.ended for pod in pods)
    elif record is not None and record.outcome is not None:
        quiet = True
    else:
        # A released attempt had all of its pods, but the watch of pods may be later than the Lease's.
        all_seen = record is None or not record.released or job.attempt is None or len(pods) >= job.attempt.replicas
        quiet = all_seen and all(pod.ended or pod.deleting for pod in pods)
    return quiet or now_s >= stop_deadline_s(job, stop, now_s)


def given_back_for(job: JobView, stop: Stop) -> tuple[Reason, str]:
    """Return the reason and the message with which a stopped job's admission is withdrawn."""
    asked = job.status.preemption
    match stop.why:
        case StopFor.PREEMPTION if asked is not None:
            words = f"preempted by {asked.by_name or asked.by}"
            if asked.reclaim:
                return Reason.RECLAIMED, f"{words}, whose queue reclaims its quota"
            return Reason.PREEMPTED, words
        case StopFor.DRAIN if asked is not None:
            return Reason.QUEUE_STOPPED, f"stopped because its queue {asked.by_name} is drained"
        case StopFor.MOVE:
            restarting = job.status.condition(ConditionType.RESTARTING)
            why = "" if restarting is None else restarting.message
            return Reason.EVICTED, f"{why}; there is no room for its workers near the others"
        case _:
            return Reason.SUSPENDED, "stopped on request"
