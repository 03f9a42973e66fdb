"""Jobs that run at another worker count than they wish: which counts fit, and when growing back pays.

``spec.workers.replicas`` stays the wish. With ``minReplicas`` a job starts smaller rather than wait; with
``maxReplicas`` it may use idle room beyond its wish. Every count has a plan of its own (``planning.py``); an Explicit
layout scales its dp only.
"""

from __future__ import annotations

from collections.abc import Sequence

from polyreme_api.job import TrainingJobStatus
from polyreme_api.progress import ProgressRecord, RankPhase
from polyreme_operator.reconcile.observe import began_s
from polyreme_operator.types.reasons import Cause
from polyreme_operator.types.timestamps import parse_time_or
from polyreme_operator.types.views import JobView
from polyreme_planner.plan import Plan

GROW_COOLDOWN_S = 300.0
"""Time that an attempt is left alone before it is ended to grow."""
GAIN_FACTOR = 2.0
"""What is gained must be worth this many times what the resize costs: the estimate of the rest is rough."""
RESIZE_COST_S = 60.0
"""What a resize costs before any was measured: checkpoint, new pods, load, first step."""
REFUSED_GROWTH_S = 3_600.0
"""How long a job is not grown after the API server refused pods of it."""
MILLISECONDS = 1000


def sizes(job: JobView) -> Sequence[int]:
    """Return the worker counts that a job accepts to start with, best first: its requested, then smaller ones that fit.

    After an attempt whose pods the API server refused, as a quota of its namespace does, only smaller ones are tried.
    """
    if job.spec is None:
        return ()
    requested = job.spec.workers.replicas
    counts = sorted((plan.replicas for plan in job.plans if plan.replicas <= requested), reverse=True)
    attempt, records = job.attempt, job.status.restart_records[-1:]
    if attempt is None or not records or records[0].attempt != attempt.number:
        return counts
    if records[0].cause != Cause.CREATE_REFUSED:
        return counts
    return [count for count in counts if count < attempt.replicas] or counts


def was_refused_lately(job: JobView, now_s: float) -> bool:
    """Tell whether pods of a job were refused in the last hour: more workers would be refused as well."""
    times_s = (
        parse_time_or(record.at, 0.0) for record in job.status.restart_records if record.cause == Cause.CREATE_REFUSED
    )
    return any(now_s - at_s < REFUSED_GROWTH_S for at_s in times_s)


def larger_sizes(job: JobView, current: int) -> Sequence[int]:
    """Return the worker counts above ``current`` that a running job may grow to, largest first."""
    return sorted((plan.replicas for plan in job.plans if plan.replicas > current), reverse=True)


def plan_at(job: JobView, replicas: int) -> Plan | None:
    """Return the plan for a worker count; None where no layout fits."""
    return next((plan for plan in job.plans if plan.replicas == replicas), None)


def worth_growing(record: ProgressRecord | None, job: JobView, *, current: int, larger: int, now_s: float) -> bool:
    """Tell whether ending an attempt to go on with more workers saves more time than it costs.

    The rest of the run is taken to shrink in proportion to the workers; steps are counted on rank 0's own clock.
    """
    attempt = job.attempt
    if attempt is None or record is None or record.step_seconds is None or larger <= current:
        return False
    if record.phase is not RankPhase.TRAINING or record.outcome is not None or not record.released:
        return False
    if now_s - began_s(job, attempt) < GROW_COOLDOWN_S:
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
