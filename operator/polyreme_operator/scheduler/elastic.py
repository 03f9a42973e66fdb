"""Elastic jobs: worker counts that fit, and when growing is worth its cost.

``spec.workers.replicas`` is the requested count. With ``minReplicas`` a job starts smaller rather than wait; with
``maxReplicas`` it may use idle capacity beyond its request. Every count has its own plan (``cache/plan_book.py``); an
Explicit layout scales only its dp.
"""

from __future__ import annotations

from collections.abc import Sequence

from polyreme_api.job import TrainingJobStatus
from polyreme_api.progress import ProgressRecord, RankPhase
from polyreme_operator.reconcile.observe import began_s
from polyreme_operator.types.reasons import Cause
from polyreme_operator.types.timestamps import parse_time_or
from polyreme_operator.types.views import JobView

GAIN_FACTOR = 2.0
"""The gain must exceed the cost of the resize by this factor, since the remaining time is a rough estimate."""
RESIZE_COST_S = 60.0
"""Assumed cost of a resize until one was measured: checkpoint, new pods, load, first step."""
REFUSED_GROWTH_S = 3_600.0
"""How long a job does not grow after the API server refused pods of it."""
MILLISECONDS = 1000


def sizes(job: JobView) -> Sequence[int]:
    """Return the worker counts with which a job may start: the requested one, then smaller ones in descending order.

    After an attempt whose pods the API server refused, for example by a ResourceQuota, only smaller ones are tried,
    also by a job of fixed size that has trained with fewer workers.
    """
    if job.spec is None:
        return ()
    requested, attempt, records = job.replicas, job.attempt, job.status.restart_records[-1:]
    planned = sorted((plan.replicas for plan in job.plans if plan.replicas <= requested), reverse=True)
    least = job.spec.workers.min_replicas or requested
    counts = [count for count in planned if count >= least]
    if attempt is None or not records or records[0].attempt != attempt.number:
        return counts
    if records[0].cause != Cause.CREATE_REFUSED:
        return counts
    return [count for count in planned if count < attempt.replicas] or counts


def was_refused_lately(job: JobView, now_s: float) -> bool:
    """Tell whether pods of a job were refused in the last hour, so that more workers would probably be refused too."""
    times_s = (
        parse_time_or(record.at, 0.0) for record in job.status.restart_records if record.cause == Cause.CREATE_REFUSED
    )
    return any(now_s - at_s < REFUSED_GROWTH_S for at_s in times_s)


def was_refused_last(job: JobView, now_s: float) -> bool:
    """Tell whether pods of the attempt before this one were refused, within the last hour."""
    last = job.status.restart_records[-1:]
    return bool(last) and last[0].cause == Cause.CREATE_REFUSED and was_refused_lately(job, now_s)


def larger_sizes(job: JobView, current: int) -> Sequence[int]:
    """Return the worker counts above ``current`` that a running job may grow to, largest first."""
    return sorted((plan.replicas for plan in job.plans if plan.replicas > current), reverse=True)


def worth_growing(
    record: ProgressRecord | None, job: JobView, *, current: int, larger: int, now_s: float, cooldown_s: float
) -> bool:
    """Tell whether ending an attempt to continue with more workers saves more time than it costs.

    The rest of the run is taken to shrink in proportion to the workers; steps are counted on rank 0's own clock. An
    attempt is not ended to grow before it has run for ``cooldown_s``.
    """
    attempt = job.attempt
    if attempt is None or record is None or record.step_seconds is None or larger <= current:
        return False
    if record.phase is not RankPhase.TRAINING or record.outcome is not None or not record.released:
        return False
    if now_s - began_s(job, attempt) < cooldown_s:
        return False
    rest_s = max(0, record.steps - record.step) * record.step_seconds
    gained_s = rest_s * (1.0 - current / larger)
    return gained_s > GAIN_FACTOR * resize_cost_s(job.status)


def resize_cost_s(status: TrainingJobStatus) -> float:
    """Return what beginning an attempt has cost this job on average; a guess before the first is over."""
    attempt = status.attempt
    lost = {entry.cause: entry.milliseconds for entry in status.accounting.lost}
    began = lost.get(Cause.STARTING, 0) + lost.get(Cause.RESIZE, 0)
    closed = 0 if attempt is None else attempt.number - 1
    if closed <= 0 or began <= 0:
        return RESIZE_COST_S
    return began / MILLISECONDS / closed
