"""Attempts that are asked to checkpoint and stop: one way for suspend, preemption, drained queues and resizes.

The request is a status write that sets ``desired: Stop`` and says why: the launchers checkpoint and report an outcome.
``has_stopped`` tells when that was heard, or when its time is over. Then, in one more write, the attempt is closed and
its admission given back (``transition.give_back``), or the next attempt begins (``transition.resize``). Pods go behind
that write, and until the last of them is gone its place stays charged and the job is not admitted anew. So an operator
that dies between any two of these finds in the status what the next step is.
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
"""How long beyond its checkpoint's grace a stop may take, and how long launchers of a finished job may take to end."""


class StopFor(StrEnum):
    """Why an attempt was asked to stop."""

    SUSPEND = "Suspend"
    PREEMPTION = "Preemption"
    DRAIN = "Drain"
    RESIZE = "Resize"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """A request that stands."""

    why: StopFor
    asked_s: float | None
    """None where the record can't be read: then it was asked for just now."""
    deadline_s: float | None = None
    """When the request itself says that its time is over; else the job's grace counts from ``asked_s``."""


def requested_stop(job: JobView) -> Stop | None:
    """Return the request under which the attempt stops; of several, the one that gives its devices to others first."""
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
    if restarting is not None and restarting.status == "True" and restarting.reason == Cause.RESIZE:
        return Stop(why=StopFor.RESIZE, asked_s=parse_time_or(restarting.last_transition_time, None))
    return None


def stop_grace_s(spec: TrainingJobSpec) -> float:
    """How long an attempt may take to checkpoint and stop, where the request sets no deadline of its own."""
    return spec.checkpoint.preemption_grace_seconds + STOP_GRACE_S


def stop_deadline_s(job: JobView, stop: Stop, now_s: float) -> float:
    """When the attempt is closed even if nothing was heard of it.

    Measured from when we first saw the request: it may have been written by another machine's clock.
    """
    if stop.deadline_s is not None and (stop.asked_s is None or not job.attempt_seen_s):
        return stop.deadline_s
    asked_s = now_s if stop.asked_s is None else stop.asked_s
    grace_s = STOP_GRACE_S if job.spec is None else stop_grace_s(job.spec)
    if stop.deadline_s is not None:
        grace_s = stop.deadline_s - asked_s
    return (job.attempt_seen_s or asked_s) + grace_s


def has_stopped(snapshot: JobSnapshot, now_s: float) -> bool:
    """Tell whether an attempt that was asked to stop has, or has had its time."""
    job, record = snapshot.job, current_record(snapshot)
    stop = requested_stop(job)
    if stop is None:
        return False
    pods = current_pods(snapshot).values()
    if job.attempt is not None and job.spec is not None and environment_runtime.is_used(job.spec):
        if environment_runtime.has_succeeded(snapshot, job.attempt):
            # It has ended, but not because it was asked to: ``reconcile`` writes the success.
            return False
        # Nobody reports an outcome there: being deleted is how such a pod is asked, its end is the answer.
        quiet = all(pod.ended for pod in pods)
    elif record is not None and record.outcome is not None:
        quiet = True
    else:
        # Whoever was released had all of its pods: the watch of pods may be behind the Lease, and has yet to show them.
        all_seen = record is None or not record.released or job.attempt is None or len(pods) >= job.attempt.replicas
        quiet = all_seen and all(pod.ended or pod.deleting for pod in pods)
    return quiet or now_s >= stop_deadline_s(job, stop, now_s)


def given_back_for(job: JobView, stop: Stop) -> tuple[Reason, str]:
    """Return the reason, and the sentence, with which a stopped job's admission is withdrawn."""
    asked = job.status.preemption
    match stop.why:
        case StopFor.PREEMPTION if asked is not None:
            words = f"preempted by {asked.by_name or asked.by}"
            if asked.reclaim:
                return Reason.RECLAIMED, f"{words}, whose queue reclaims its quota"
            return Reason.PREEMPTED, words
        case StopFor.DRAIN if asked is not None:
            return Reason.QUEUE_STOPPED, f"stopped because its queue {asked.by_name} is drained"
        case _:
            return Reason.SUSPENDED, "stopped on request"
