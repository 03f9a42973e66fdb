"""Metrics of jobs, counted once the cluster has accepted the status that shows them."""

from __future__ import annotations

from collections import OrderedDict

from polyreme_api.job import TrainingJobStatus
from polyreme_api.job.accounting import Use, ettr_of, goodput_of
from polyreme_api.job.status import RestartRecord
from polyreme_cluster.metric_registry import MetricRegistry
from polyreme_operator.types.observer import Observer
from polyreme_operator.types.reasons import ConditionType, Reason, Scope
from polyreme_operator.types.timestamps import parse_time_or
from polyreme_operator.types.views import JobView

MILLISECONDS = 1000
GOODPUT_JOBS_MAX = 200
"""Jobs with series of their own; the one whose status was written least recently is evicted first."""
_WAIT_S = (1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1_800, 3_600, 7_200, 14_400, 43_200, 86_400, 259_200, 604_800)
_START_S = (0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 180, 300, 600, 1_200, 1_800, 3_600)
_RESTARTS = frozenset({Scope.PROCESS.value, Scope.POD.value, Scope.GANG.value})
_STARTS = frozenset({Scope.START.value, Scope.RESUME.value})


class JobMetrics(Observer):
    """Admissions, starts, restarts and goodput of jobs."""

    def __init__(self, registry: MetricRegistry) -> None:
        self.admission_wait_seconds = registry.histogram(
            "admission_wait_seconds", "Time from entering the queue to admission.", _WAIT_S, "queue"
        )
        self.admitted_until_ready_seconds = registry.histogram(
            "admitted_until_ready_seconds", "Time from admission until every worker has joined.", _START_S, "queue"
        )
        self.evictions_total = registry.counter(
            "evictions_total", "Admissions withdrawn before the job finished.", "reason"
        )
        self.jobs_ended_total = registry.counter(
            "jobs_ended_total", "Jobs that succeeded or failed, by reason.", "queue", "result", "reason"
        )
        self.preemptions_total = registry.counter(
            "preemptions_total", "Running jobs that were preempted for another job.", "reason"
        )
        self.restarts_total = registry.counter(
            "restarts_total", "Failed attempts, by scope of the restart and cause.", "scope", "cause"
        )
        self.recovery_seconds = registry.histogram(
            "recovery_seconds",
            "Time of a restart: workers (new attempt until all workers have joined), ranks (until they run), whole.",
            _START_S,
            "phase",
        )
        self.job_goodput_ratio = registry.gauge(
            "job_goodput_ratio",
            "Device time of retained steps without waits for data, divided by that of all attempts; "
            f"the newest {GOODPUT_JOBS_MAX} jobs.",
            "namespace",
            "job",
        )
        self.job_ettr_ratio = registry.gauge(
            "job_ettr_ratio",
            "As the goodput, divided by the time in the queue too, but not by that of suspensions.",
            "namespace",
            "job",
        )
        self.device_seconds_total = registry.counter(
            "device_seconds_total",
            "Device-seconds of jobs, by what they were spent on and why; those in the queue were asked for only.",
            "queue",
            "what",
            "cause",
        )
        self.lost_gpu_seconds_total = registry.counter(
            "lost_gpu_seconds_total", "GPU-seconds of attempts that produced no retained step.", "cause"
        )
        self._jobs: OrderedDict[str, tuple[str, str]] = OrderedDict()

    def on_status_written(self, job: JobView, after: TrainingJobStatus, *, now_s: float) -> None:
        """Count the changes of a status write that the cluster has accepted."""
        before, queue = job.status, job.spec.queue_name if job.spec is not None else ""
        if _rose(before, after, ConditionType.ADMITTED):
            queued = before.condition(ConditionType.QUEUED)
            since = None if queued is None or queued.status != "True" else queued.last_transition_time
            waited_s = max(0.0, now_s - parse_time_or(since, job.created_s))
            self.admission_wait_seconds.labels(queue).observe(waited_s)
        if before.is_true(ConditionType.ADMITTED) and not (after.is_true(ConditionType.ADMITTED) or after.finished):
            self.evictions_total.labels(_reason(after, ConditionType.ADMITTED)).inc()
        for result in (ConditionType.SUCCEEDED, ConditionType.FAILED):
            if _rose(before, after, result):
                self.jobs_ended_total.labels(queue, result.value, _reason(after, result)).inc()
        asked = after.preemption
        if asked is not None and (before.preemption is None or before.preemption.requested_at != asked.requested_at):
            self.preemptions_total.labels((Reason.RECLAIMED if asked.reclaim else Reason.PREEMPTED).value).inc()
        self._count_restarts(before, after)
        self._time_start(before, after, queue=queue, now_s=now_s)
        self._account(job, after, queue=queue)

    def on_job_deleted(self, uid: str) -> None:
        """Drop the series of a job."""
        known = self._jobs.pop(uid, None)
        if known is not None:
            for gauge in (self.job_goodput_ratio, self.job_ettr_ratio):
                gauge.remove(*known)

    def clear(self) -> None:
        """Forget all jobs: another replica leads."""
        self._jobs.clear()

    def _count_restarts(self, before: TrainingJobStatus, after: TrainingJobStatus) -> None:
        known = {(record.attempt, record.at) for record in before.restart_records}
        for record in after.restart_records:
            if (record.attempt, record.at) not in known:
                self.restarts_total.labels(record.scope, record.cause).inc()

    def _time_start(self, before: TrainingJobStatus, after: TrainingJobStatus, *, queue: str, now_s: float) -> None:
        attempt = after.attempt
        if attempt is None:
            return
        restarted = attempt.scope in _RESTARTS
        if _rose(before, after, ConditionType.PODS_READY):
            took_s = max(0.0, now_s - parse_time_or(attempt.started_at, now_s))
            if attempt.scope in _STARTS:
                self.admitted_until_ready_seconds.labels(queue).observe(took_s)
            if restarted:
                self.recovery_seconds.labels("workers").observe(took_s)
        if restarted and _rose(before, after, ConditionType.RUNNING):
            ready = after.condition(ConditionType.PODS_READY)
            since_s = parse_time_or(None if ready is None else ready.last_transition_time, now_s)
            self.recovery_seconds.labels("ranks").observe(max(0.0, now_s - since_s))
            failed = _newest(after, before_attempt=attempt.number)
            if failed is not None:
                self.recovery_seconds.labels("whole").observe(max(0.0, now_s - parse_time_or(failed.at, now_s)))

    def _account(self, job: JobView, after: TrainingJobStatus, *, queue: str) -> None:
        """Count the device time that was charged, and update the job's ratios."""
        before, table = job.status.accounting, after.accounting.table
        if after.accounting == before:
            return
        attempt = job.attempt
        devices = 1 if attempt is None else attempt.replicas * attempt.devices
        known = before.table_with(devices=devices)
        for (what, why), time in table.items():
            more_s = (time - known.get((what, why), 0)) / MILLISECONDS
            if more_s > 0:
                self.device_seconds_total.labels(queue, what, why).inc(more_s)
                if what not in {Use.PRODUCTIVE, Use.QUEUED}:
                    self.lost_gpu_seconds_total.labels(why).inc(more_s)
        goodput, ettr = goodput_of(table), ettr_of(table)
        if goodput is None or ettr is None:
            return
        self._jobs[job.uid] = (job.namespace, job.name)
        self._jobs.move_to_end(job.uid)
        self.job_goodput_ratio.labels(job.namespace, job.name).set(goodput)
        self.job_ettr_ratio.labels(job.namespace, job.name).set(ettr)
        if len(self._jobs) > GOODPUT_JOBS_MAX:
            self.on_job_deleted(next(iter(self._jobs)))


def _rose(before: TrainingJobStatus, after: TrainingJobStatus, kind: ConditionType) -> bool:
    return after.is_true(kind) and not before.is_true(kind)


def _reason(status: TrainingJobStatus, kind: ConditionType) -> str:
    condition = status.condition(kind)
    return "Unknown" if condition is None else condition.reason


def _newest(status: TrainingJobStatus, *, before_attempt: int) -> RestartRecord | None:
    return next((record for record in reversed(status.restart_records) if record.attempt < before_attempt), None)
