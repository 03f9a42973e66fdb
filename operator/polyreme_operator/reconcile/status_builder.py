"""Building a job's status: conditions by KEP-1623, at most one terminal condition, times only where a state changed."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, Self

from polyreme_api.fields import Condition, bounded_message
from polyreme_api.job import TrainingJobStatus
from polyreme_api.job.status import EarlierRestarts, RestartRecord
from polyreme_api.progress import ProgressRecord
from polyreme_api.times import rfc3339
from polyreme_operator.reconcile import accounting, failed_nodes
from polyreme_operator.reconcile.data_gate import readiness
from polyreme_operator.reconcile.failure_policy import with_restart
from polyreme_operator.types.reasons import Cause, ConditionType, Reason
from polyreme_operator.types.views import JobView

_ENDED_WITH_THE_JOB = (
    ConditionType.QUEUED,
    ConditionType.ADMITTED,
    ConditionType.PREEMPTED,
    ConditionType.PODS_READY,
    ConditionType.RUNNING,
)
_DROPPED_WITH_THE_JOB = (
    ConditionType.STRAGGLERS_FOUND,
    ConditionType.HANG_DETECTION_OFF,
    ConditionType.RESTARTING,
    ConditionType.RESIZE_REFUSED,
    ConditionType.PRIORITY_CLASS_MISSING,
    ConditionType.SCHEDULE_CHANGE_IGNORED,
    ConditionType.TEMPLATE_FIELDS_UNKNOWN,
    ConditionType.DEGRADED,
    ConditionType.SUSPENDED,
)
_REOPENABLE = frozenset({Reason.ENVIRONMENT_FAILED, Reason.DATA_DAMAGED})
_ORDER = {kind.value: place for place, kind in enumerate(ConditionType)}


class StatusBuilder:
    """The next status of a job. While nothing changes, ``build`` returns the status that it started from.

    Args:
        job: The job.
        now_s: The time of every change.
        status: The status to start from; None: the job's own.
    """

    def __init__(self, job: JobView, now_s: float, status: TrainingJobStatus | None = None) -> None:
        self.job, self.now_s = job, now_s
        self._status = job.status if status is None else status

    def build(self) -> TrainingJobStatus:
        """Return the status as built so far."""
        return self._status

    def update(self, **fields: object) -> Self:
        """Set fields."""
        changed = {name: value for name, value in fields.items() if getattr(self._status, name) != value}
        if changed:
            self._status = self._status.model_copy(update=changed)
        return self

    def set(self, kind: ConditionType, holds: bool, reason: str, message: str = "") -> Self:
        """Set one condition. Its transition time changes only with its truth."""
        before = self._status.condition(kind)
        truth: Literal["True", "False"] = "True" if holds else "False"
        kept = before is not None and before.status == truth
        if before is not None and kept and _is_current(before, str(reason), message, self.job.generation):
            return self
        condition = Condition(
            type=kind.value,
            status=truth,
            reason=str(reason),
            message=message,
            last_transition_time=before.last_transition_time if before is not None and kept else rfc3339(self.now_s),
            observed_generation=self.job.generation,
        )
        others = [entry for entry in self._status.conditions if entry.type != kind]
        return self.update(
            conditions=sorted([*others, condition], key=lambda entry: _ORDER.get(entry.type, len(_ORDER)))
        )

    def lower(self, kind: ConditionType, reason: str) -> Self:
        """Set a condition to False if it exists."""
        return self if self._status.condition(kind) is None else self.set(kind, False, reason)

    def drop(self, *kinds: ConditionType) -> Self:
        """Remove conditions that no longer apply."""
        return self.update(conditions=[entry for entry in self._status.conditions if entry.type not in kinds])

    def refuse_size(self, kept: int, why: str) -> Self:
        """Report that the worker count of the spec is refused, and which one stays in force."""
        requested = 0 if self.job.spec is None else self.job.spec.workers.replicas
        workers = "1 worker stays" if kept == 1 else f"{kept} workers stay"
        words = f"spec.workers.replicas {requested} is refused, {workers} in force{': ' if why else ''}{why}"
        return self.set(ConditionType.RESIZE_REFUSED, True, Reason.NO_FIT, words)

    def report_missing_class(self) -> Self:
        """Report that the job's PriorityClass is missing, for as long as it is."""
        job, spec = self.job, self.job.spec
        if not job.class_missing or spec is None:
            return self.drop(ConditionType.PRIORITY_CLASS_MISSING)
        name = spec.priority_class_name
        advice = "create it" if job.admitted else "create it or change spec.priorityClassName"
        message = f"there is no PriorityClass {name}; spec.priority {spec.priority} applies until it exists; {advice}"
        return self.set(ConditionType.PRIORITY_CLASS_MISSING, True, Reason.NOT_FOUND, message)

    def report_schedule(self) -> Self:
        """Report an appended change of the mixture that can't be applied. It can't be taken away again."""
        fault = self.job.schedule_fault
        if not fault:
            return self.drop(ConditionType.SCHEDULE_CHANGE_IGNORED)
        message = f"this change is left out: {fault.partition(';')[0]}; append one with a later fromStep"
        return self.set(ConditionType.SCHEDULE_CHANGE_IGNORED, True, Reason.MISCONFIGURED, message)

    def report_template(self) -> Self:
        """Report fields of the pod template that Kubernetes does not know."""
        unknown = self.job.template_unknown
        if not unknown:
            return self.drop(ConditionType.TEMPLATE_FIELDS_UNKNOWN)
        return self.set(ConditionType.TEMPLATE_FIELDS_UNKNOWN, True, Reason.UNKNOWN_FIELDS, unknown)

    def report_data(self) -> Self:
        """Repeat what the datahub controller reports of the job's data; the condition of an older report stays."""
        known = readiness(self.job)
        return self if known is None else self.set(ConditionType.DATA_READY, known.ready, known.reason, known.message)

    def close_attempt(self, record: ProgressRecord | None, *, ended_by: Cause | None, hung_s: float = 0.0) -> Self:
        """Charge the time of the current attempt; see ``accounting.close_attempt``."""
        self._status = accounting.close_attempt(
            self._status, record, ended_by=ended_by, now_s=self.now_s, hung_s=hung_s
        )
        return self

    def note_progress(self, record: ProgressRecord) -> Self:
        """Note the newest step and durable checkpoint that were reported; charge no time."""
        self._status = accounting.with_checkpoint(self._status, record, now_s=self.now_s)
        return self.update(step=max(self._status.step, record.step))

    def settle(self, record: ProgressRecord | None, *, idle_s: float) -> Self:
        """Note the newest durable checkpoint, and charge what is certain of a running attempt's time, if due."""
        status = accounting.with_checkpoint(self._status, record, now_s=self.now_s)
        use = accounting.overhead(self.job.status)
        self._status = accounting.settle(status, record, now_s=self.now_s, use=use, idle_s=idle_s)
        return self

    def close_wait(self) -> Self:
        """Charge the time for which the job has waited until now; see ``accounting.close_wait``."""
        job = self.job
        self._status = accounting.close_wait(self._status, job.spec, created_s=job.created_s, now_s=self.now_s)
        return self

    def record_restart(self, record: RestartRecord) -> Self:
        """Record a restart."""
        self._status = with_restart(self._status, record)
        return self

    def remember_nodes(self, indices: Collection[int], cause: Cause) -> Self:
        """Remember the nodes of workers of the current attempt on which these have failed."""
        attempt = self._status.attempt
        if attempt is None or not (indices or self._status.failed_nodes):
            return self
        return self.update(failed_nodes=failed_nodes.with_failures(self._status, attempt, indices, cause, self.now_s))

    def request_stop(self, *, checkpoint: bool = False) -> Self:
        """Ask the launchers to stop the ranks, after a checkpoint if asked for."""
        attempt = self._status.attempt
        if attempt is None:
            return self
        update = {"desired": "Stop", "checkpoint_requested": checkpoint or attempt.checkpoint_requested}
        return self.update(attempt=attempt.model_copy(update=update))

    def withdraw(self, reason: Reason, message: str = "") -> Self:
        """Withdraw the admission: the job holds no devices beyond those of pods that still run."""
        for kind in (ConditionType.ADMITTED, ConditionType.PODS_READY, ConditionType.RUNNING):
            self.set(kind, False, reason, message)
        return self.update(ready_replicas=0)

    def finish(self, *, succeeded: bool, reason: Reason, message: str) -> Self:
        """End the job for good: set the one terminal condition and request that everything stops."""
        for kind in _ENDED_WITH_THE_JOB:
            self.lower(kind, Reason.FINISHED)
        self.drop(*_DROPPED_WITH_THE_JOB)
        self.set(ConditionType.SUCCEEDED if succeeded else ConditionType.FAILED, True, reason, message)
        attempt = self._status.attempt
        return self.update(
            attempt=None if attempt is None else attempt.model_copy(update={"desired": "Stop"}),
            retry_at=None,
            preemption=None,
            ready_replicas=0,
            completed_at=rfc3339(self.now_s),
            observed_generation=self.job.generation,
        )


def _is_current(known: Condition, reason: str, message: str, generation: int) -> bool:
    """Tell whether a condition says this already. Most do, and building one to compare costs more."""
    return (
        known.reason == reason and known.message == bounded_message(message) and known.observed_generation == generation
    )


def reopen(status: TrainingJobStatus) -> TrainingJobStatus:
    """Let a job continue that failed only because of its environment or its stored data: its user has repaired those.

    After any other end the same status is returned.
    """
    failed = status.condition(ConditionType.FAILED)
    if failed is None or failed.status != "True" or failed.reason not in _REOPENABLE:
        return status
    update = {
        "conditions": [entry for entry in status.conditions if entry is not failed],
        "completed_at": None,
        "retry_at": None,
        "restart_records": [],
        "earlier_restarts": EarlierRestarts(),
        "accounting": status.accounting.model_copy(update={"until": ""}),
    }
    return status.model_copy(update=update)


def continue_finished(status: TrainingJobStatus) -> TrainingJobStatus:
    """Let a job continue that has trained all of its steps, and was given more: as one that was stopped."""
    attempt = status.attempt and status.attempt.model_copy(update={"desired": "Stop"})
    update: dict[str, object] = {
        "conditions": [],
        "attempt": attempt,
        "ready_replicas": 0,
        "replicas": 0,
        "completed_at": None,
        "retry_at": None,
        "accounting": status.accounting.model_copy(update={"until": ""}),
    }
    return status.model_copy(update=update)
