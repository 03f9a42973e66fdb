"""Building a job's status: conditions by KEP-1623, one terminal condition at most, times only where a state changed."""

from __future__ import annotations

from typing import Literal

from polyreme_api import labels
from polyreme_api.fields import Condition
from polyreme_api.job import TrainingJobStatus
from polyreme_api.job.status import EarlierRestarts
from polyreme_api.times import rfc3339
from polyreme_operator.types.reasons import ConditionType, Reason
from polyreme_operator.types.views import JobView

_ENDED_WITH_THE_JOB = (
    ConditionType.QUEUED,
    ConditionType.ADMITTED,
    ConditionType.PREEMPTED,
    ConditionType.PODS_READY,
    ConditionType.RUNNING,
)
_MENDABLE = frozenset({Reason.ENVIRONMENT_FAILED, Reason.DATA_DAMAGED})
_ORDER = {kind.value: place for place, kind in enumerate(ConditionType)}


def with_condition(
    status: TrainingJobStatus,
    kind: ConditionType,
    holds: bool,
    reason: str,
    message: str = "",
    *,
    now_s: float,
    generation: int,
) -> TrainingJobStatus:
    """Set one condition. Its transition time changes only with its truth; nothing changes when nothing does."""
    before = status.condition(kind)
    truth: Literal["True", "False"] = "True" if holds else "False"
    kept = before is not None and before.status == truth
    condition = Condition(
        type=kind.value,
        status=truth,
        reason=str(reason),
        message=message,
        last_transition_time=before.last_transition_time if before is not None and kept else rfc3339(now_s),
        observed_generation=generation,
    )
    if condition == before:
        return status
    others = [entry for entry in status.conditions if entry.type != kind]
    conditions = sorted([*others, condition], key=lambda entry: _ORDER.get(entry.type, len(_ORDER)))
    return status.model_copy(update={"conditions": conditions})


def with_class(job: JobView, status: TrainingJobStatus, *, now_s: float) -> TrainingJobStatus:
    """Say that the job's PriorityClass is missing, for as long as it is."""
    spec = job.spec
    if not job.class_missing or spec is None:
        return drop_condition(status, ConditionType.PRIORITY_CLASS_MISSING)
    name = spec.priority_class_name
    message = (
        f"there is no PriorityClass {name}; spec.priority {spec.priority} applies until it exists; "
        "create it or change spec.priorityClassName"
    )
    kind = ConditionType.PRIORITY_CLASS_MISSING
    return with_condition(status, kind, True, Reason.NOT_FOUND, message, now_s=now_s, generation=job.generation)


def finish(
    job: JobView, status: TrainingJobStatus, *, succeeded: bool, reason: Reason, message: str, now_s: float
) -> TrainingJobStatus:
    """End the job for good: the one terminal condition, nothing desired any more, no devices beyond its last pods'."""
    kind = ConditionType.SUCCEEDED if succeeded else ConditionType.FAILED
    for ended in _ENDED_WITH_THE_JOB:
        status = _lower(status, ended, Reason.FINISHED, now_s=now_s, generation=job.generation)
    status = _drop(
        status,
        ConditionType.RESTARTING,
        ConditionType.RESIZE_REFUSED,
        ConditionType.PRIORITY_CLASS_MISSING,
        ConditionType.DEGRADED,
        ConditionType.SUSPENDED,
    )
    status = with_condition(status, kind, True, reason, message, now_s=now_s, generation=job.generation)
    attempt = status.attempt.model_copy(update={"desired": "Stop"}) if status.attempt is not None else None
    return status.model_copy(
        update={
            "attempt": attempt,
            "retry_at": None,
            "preemption": None,
            "ready_replicas": 0,
            "completed_at": rfc3339(now_s),
            "observed_generation": job.generation,
        }
    )


def reopen(status: TrainingJobStatus) -> TrainingJobStatus:
    """Let a job continue that only its environment or its stored data failed: whoever asks has mended it.

    Any other end stands, and the same status comes back.
    """
    failed = status.condition(ConditionType.FAILED)
    if failed is None or failed.status != "True" or failed.reason not in _MENDABLE:
        return status
    return _drop(status, ConditionType.FAILED).model_copy(
        update={"completed_at": None, "retry_at": None, "restart_records": [], "earlier_restarts": EarlierRestarts()}
    )


def withdraw(
    job: JobView, status: TrainingJobStatus, reason: Reason, message: str = "", *, now_s: float
) -> TrainingJobStatus:
    """Take the admission back: the job holds no devices beyond those of pods that still run."""
    for ended in (ConditionType.ADMITTED, ConditionType.PODS_READY, ConditionType.RUNNING):
        status = with_condition(status, ended, False, reason, message, now_s=now_s, generation=job.generation)
    return status.model_copy(update={"ready_replicas": 0})


def drop_condition(status: TrainingJobStatus, *kinds: ConditionType) -> TrainingJobStatus:
    """Remove conditions that say nothing any more."""
    return _drop(status, *kinds)


def selector(job: JobView) -> str:
    """Label selector of the job's pods, for the scale subresource."""
    return f"{labels.LABEL_JOB_UID}={job.uid}"


def _lower(
    status: TrainingJobStatus, kind: ConditionType, reason: Reason, *, now_s: float, generation: int
) -> TrainingJobStatus:
    if status.condition(kind) is None:
        return status
    return with_condition(status, kind, False, reason, now_s=now_s, generation=generation)


def _drop(status: TrainingJobStatus, *kinds: ConditionType) -> TrainingJobStatus:
    kept = [entry for entry in status.conditions if entry.type not in kinds]
    return status if len(kept) == len(status.conditions) else status.model_copy(update={"conditions": kept})
