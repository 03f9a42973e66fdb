"""Jobs whose pods do not start give up their place after a while, so that they keep neither quota nor victims.

The queue says how long pods may take. A job that was set aside waits longer each time, and preempts no other job until
all of its pods have started once. What it is tried for again is free capacity only.
"""

from __future__ import annotations

from polyreme_api.job import TrainingJobStatus
from polyreme_api.job.status import AttemptStatus, SetAside
from polyreme_api.times import rfc3339
from polyreme_operator.reconcile import environment_runtime
from polyreme_operator.reconcile.observe import current_pods, current_record, late_start
from polyreme_operator.reconcile.status_builder import StatusBuilder
from polyreme_operator.types.reasons import Cause, ConditionType, Reason
from polyreme_operator.types.snapshot import JobSnapshot
from polyreme_operator.types.timestamps import parse_time_or

FIRST_WAIT_S = 60.0
LONGEST_WAIT_S = 3_600.0
SKEW_S = 5.0
"""Largest accepted difference between the clocks of two operators."""


def due_s(snapshot: JobSnapshot) -> float | None:
    """Return when the job is set aside; None while all of its pods run, or its ranks do.

    The time counts from the admission, or from when the pods were ready last, and again after a failover: no clock of
    another machine can shorten it.
    """
    job, attempt, record = snapshot.job, snapshot.job.attempt, current_record(snapshot)
    if attempt is None or job.spec is None or not job.admitted or not snapshot.start_limit_s:
        return None
    if environment_runtime.is_used(job.spec):
        if environment_runtime.started(snapshot) == attempt.replicas:
            return None
    elif (record is not None and record.released) or _all_started(snapshot, attempt):
        return None
    return None if job.unready_s is None else job.unready_s + snapshot.start_limit_s


def until_s(status: TrainingJobStatus, now_s: float) -> float | None:
    """Return until when a job stays set aside; None if it is not, or may be admitted again.

    A wait that would last longer than any may was written by a clock that is ahead of ours: it is over.
    """
    aside = status.set_aside
    until = None if aside is None else parse_time_or(aside.until, None)
    if aside is None or until is None or not now_s < until <= now_s + _wait_s(aside.times) + SKEW_S:
        return None
    return until


def set_aside(snapshot: JobSnapshot, now_s: float) -> TrainingJobStatus:
    """Withdraw the admission of a job whose pods did not start, and let it wait."""
    job, attempt = snapshot.job, snapshot.job.attempt
    assert attempt is not None, "only an admitted job is set aside"
    failure = late_start(snapshot, attempt, f"its pods did not all start in {snapshot.start_limit_s:g} s")
    times = 1 if job.status.set_aside is None else job.status.set_aside.times + 1
    until = rfc3339(now_s + _wait_s(times))
    words = f"{failure.message}; {_until(until)}"
    after = StatusBuilder(job, now_s)
    after.close_attempt(current_record(snapshot), ended_by=Cause.START_TIMED_OUT)
    after.remember_nodes(failure.avoid, failure.cause).withdraw(Reason.SET_ASIDE, words).request_stop()
    after.drop(ConditionType.RESTARTING).update(retry_at=None, set_aside=SetAside(times=times, until=until))
    return after.set(ConditionType.QUEUED, True, Reason.SET_ASIDE, words).build()


def message(status: TrainingJobStatus) -> str:
    """Return what a job reports while it is set aside: as it was when it was, unless its queue was closed meanwhile."""
    queued = status.condition(ConditionType.QUEUED)
    if queued is not None and queued.reason == Reason.SET_ASIDE:
        return queued.message
    assert status.set_aside is not None, "only a job that is set aside reports it"
    return f"its pods did not all start in time; {_until(status.set_aside.until)}"


def _until(until: str) -> str:
    return f"set aside until {until}, then tried again without preempting others"


def _wait_s(times: int) -> float:
    """Return how long a job waits after it was set aside so many times in a row."""
    return min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** min(times - 1, 30))


def _all_started(snapshot: JobSnapshot, attempt: AttemptStatus) -> bool:
    pods = current_pods(snapshot)
    return len(pods) == attempt.replicas and all(pod.start.ran for pod in pods.values())
