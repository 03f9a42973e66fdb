"""Worker count of a job that is in force, and the condition ResizeRefused: why it is not the one of the spec.

A count is accepted when it has a layout, and in force once the job trains with it. A job keeps the count in force while
another one is refused, also without an admission (``JobView.replicas``), so a refused count never ends it.
"""

from __future__ import annotations

from polyreme_api.job.status import AttemptStatus
from polyreme_operator.reconcile.status_builder import StatusBuilder
from polyreme_operator.types.reasons import Cause, ConditionType
from polyreme_operator.types.snapshot import JobSnapshot


def report_waiting(snapshot: JobSnapshot, after: StatusBuilder) -> None:
    """Report on the count of a job without an admission.

    A count that could fit, though not now, is waited for. One that the nodes could never satisfy is refused if the job
    has trained with another.
    """
    job, pending = snapshot.job, snapshot.pending
    if job.spec is None or job.planning is not None:
        return
    requested, kept = job.spec.workers.replicas, job.replicas_in_force
    if job.size_refused:
        after.refuse_size(kept, job.size_refused)
    elif pending is not None and pending.permanent and job.attempt is not None and job.replicas > kept:
        after.refuse_size(kept, pending.message)
    elif not job.is_resize_refused:
        after.drop(ConditionType.RESIZE_REFUSED)
    if job.attempt is None and job.plan is not None and job.replicas == requested:
        after.update(replicas_in_force=requested)


def report_admission(after: StatusBuilder, count: int) -> None:
    """Report whether a job is admitted with a count that is not the one of its spec."""
    job, last = after.job, after.job.status.restart_records[-1:]
    assert job.spec is not None, "a job that can't be read is left alone"
    if job.replicas == job.spec.workers.replicas:
        after.drop(ConditionType.RESIZE_REFUSED)
    fixed = job.spec.workers.min_replicas is None
    if count < job.replicas and fixed and last and last[0].cause == Cause.CREATE_REFUSED:
        after.refuse_size(count, last[0].message)


def report_running(snapshot: JobSnapshot, attempt: AttemptStatus, after: StatusBuilder) -> None:
    """Report on the count of a job that has devices."""
    job = snapshot.job
    if job.spec is not None and job.spec.workers.replicas == attempt.replicas:
        after.drop(ConditionType.RESIZE_REFUSED)
    elif job.size_refused or snapshot.refused:
        after.refuse_size(attempt.replicas, job.size_refused or snapshot.refused)


def note_training(attempt: AttemptStatus, after: StatusBuilder, *, changed: bool) -> None:
    """Note the count of an attempt that trains.

    Of a job from an older operator it is noted with the next change: until then the attempt itself says it.
    """
    known = after.job.status.replicas_in_force
    if known != attempt.replicas and (known or changed):
        after.update(replicas_in_force=attempt.replicas)
