"""What Prometheus reads of the operator: names in the manner of Kueue's, each worked out of what has been written.

Counted where the cluster has accepted it, so that a refused write counts nothing. The number of series is bounded:
queues and reasons are few, and of jobs only the newest ``GOODPUT_JOBS_MAX`` have a series, and those that trained last
some of their training.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping

from prometheus_client import Gauge

from polyreme_api.job import TrainingJobStatus
from polyreme_api.job.status import Accounting, RestartRecord
from polyreme_cluster.metric_registry import MetricRegistry
from polyreme_operator.reconcile.observe import current_record
from polyreme_operator.types.observer import CycleReport, Observer
from polyreme_operator.types.reasons import ConditionType, Reason, Scope
from polyreme_operator.types.snapshot import JobSnapshot
from polyreme_operator.types.timestamps import parse_time_or
from polyreme_operator.types.views import JobView

GOODPUT_JOBS_MAX = 200
"""Jobs with series of their own; the one whose status was written least recently is evicted first."""
TRAINING_JOBS_MAX = 50
"""Jobs with training series, some of them by layer."""
QUEUES_MAX = 1_000
"""Queues with series of their own; the remaining ones, by name, are summed up as ``OTHER_QUEUES``."""
OTHER_QUEUES = "(others)"
_DECISION_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_WAIT_S = (1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1_800, 3_600, 7_200, 14_400, 43_200, 86_400, 259_200, 604_800)
_START_S = (0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 180, 300, 600, 1_200, 1_800, 3_600)
_RESTARTS = frozenset({Scope.PROCESS.value, Scope.POD.value, Scope.GANG.value})
_STARTS = frozenset({Scope.START.value, Scope.RESUME.value})


class Metrics(MetricRegistry, Observer):
    """The operator's metrics."""

    def __init__(self) -> None:
        super().__init__()
        self._jobs: OrderedDict[str, tuple[str, str]] = OrderedDict()
        self.pending_jobs = self._gauge("pending_jobs", "Waiting jobs, by queue and reason.", "queue", "reason")
        self.admission_wait_seconds = self._histogram(
            "admission_wait_seconds", "Time from entering the queue to admission.", _WAIT_S, "queue"
        )
        self.admitted_until_ready_seconds = self._histogram(
            "admitted_until_ready_seconds", "Time from admission until every worker has joined.", _START_S, "queue"
        )
        self.evictions_total = self._counter(
            "evictions_total", "Admissions withdrawn before the job finished.", "reason"
        )
        self.preemptions_total = self._counter(
            "preemptions_total", "Running jobs that were preempted for another job.", "reason"
        )
        self.restarts_total = self._counter(
            "restarts_total", "Failed attempts, by scope of the restart and cause.", "scope", "cause"
        )
        self.recovery_seconds = self._histogram(
            "recovery_seconds",
            "Time of a restart: workers (new attempt until all workers have joined), ranks (until they run), whole.",
            _START_S,
            "phase",
        )
        self.job_goodput_ratio = self._gauge(
            "job_goodput_ratio",
            "Time of retained steps without waits for data, divided by the time of all attempts; "
            f"the newest {GOODPUT_JOBS_MAX} jobs.",
            "namespace",
            "job",
        )
        self._add_training()
        self._add_node_health()
        self._add_refusals()
        self.lost_gpu_seconds_total = self._counter(
            "lost_gpu_seconds_total", "GPU-seconds that produced no retained step.", "cause"
        )
        self.scheduling_cycle_seconds = self._histogram(
            "scheduling_cycle_seconds", "Time of one scheduling cycle.", _DECISION_S
        )
        self.placement_seconds = self._histogram(
            "placement_seconds", "Time of one placement search for a gang.", _DECISION_S
        )
        self.queue_used = self._gauge(
            "queue_used", "Amount of a resource that a queue's jobs hold.", "queue", "resource"
        )
        self.queue_quota = self._gauge("queue_quota", "Nominal quota of a queue.", "queue", "resource")
        self.status_writes_total = self._counter("status_writes_total", "Writes of job status.", "code")
        self.internal_errors_total = self._counter(
            "internal_errors_total",
            "Decisions that raised an error; the job that caused it is quarantined and retried.",
            "error",
        )
        self.quarantined_jobs = self._gauge(
            "quarantined_jobs", "Jobs in quarantine (condition Degraded): no decision is made about them."
        )
        self.events_dropped_total = self._counter(
            "events_dropped_total", "Events dropped by the rate limiter.", "reason"
        )
        self.api_requests_total = self._counter(
            "api_requests_total", "Requests to the API server.", "verb", "kind", "code"
        )
        self.model_objects = self._gauge("model_objects", "Objects in the operator's cache.", "kind")
        self.leader = self._gauge("leader", "1 while this replica leads.")

    def _add_refusals(self) -> None:
        """Add the metrics of objects and records that are ignored."""
        self.unreadable_objects_total = self._counter(
            "unreadable_objects_total", "Object versions that could not be parsed.", "kind"
        )
        self.progress_records_refused_total = self._counter(
            "progress_records_refused_total",
            "Progress records on Leases that don't count: unsigned, forged, or written again after a newer one.",
            "fault",
        )

    def _add_node_health(self) -> None:
        """Add the metrics of NodeFaultPolicies."""
        self.node_faults_total = self._counter(
            "node_faults_total",
            "Faults of nodes, by class and by what was done (Observe...: only counted).",
            "class",
            "action",
        )
        self.node_repairs_total = self._counter(
            "node_repairs_total",
            "Hooks that repair nodes, by action and by result: Started, Succeeded, Failed.",
            "action",
            "result",
        )
        self.detect_to_taint_seconds = self._histogram(
            "detect_to_taint_seconds",
            "Time from the first sight of a node's condition to its stored taint.",
            _DECISION_S,
        )
        self.node_health = self._gauge("node_health", "Nodes by state of their health.", "state")
        self.node_incident_lost_device_seconds_total = self._counter(
            "node_incident_lost_device_seconds_total",
            "Device-seconds that jobs lost to nodes that left service, by class of the fault.",
            "class",
        )
        self.node_incidents_dropped_total = self._counter(
            "node_incidents_dropped_total",
            "Sights of nodes that were not added to the history: the queue or the history was full, or it was refused.",
        )

    def _add_training(self) -> None:
        """Add the metrics that ranks report with their newest step."""
        of_job, newest = ("namespace", "job"), f"the {TRAINING_JOBS_MAX} jobs that trained last"
        self.job_step = self._gauge("job_step", f"Newest step of a job; {newest}.", *of_job)
        self.job_loss = self._gauge("job_loss", f"Loss of the newest step; {newest}.", *of_job)
        self.job_held_out_loss = self._gauge(
            "job_held_out_loss", f"Newest held-out loss, over all sets; {newest}.", *of_job
        )
        self.job_expert_load_ratio = self._gauge(
            "job_expert_load_ratio",
            "Tokens of a layer's busiest expert divided by the mean of its experts, in the newest step; 1 is even.",
            *of_job,
            "layer",
        )
        self.job_router_entropy_nats = self._gauge(
            "job_router_entropy_nats",
            "Mean entropy of a token's router scores, by layer, in the newest step.",
            *of_job,
            "layer",
        )
        self.job_rows_dropped = self._gauge(
            "job_rows_dropped",
            "Rows dropped because experts were at capacity, by layer, in the newest step.",
            *of_job,
            "layer",
        )
        self._training: OrderedDict[str, tuple[str, str]] = OrderedDict()

    # ----------------------------------------------------------------------------------------- what has been written

    def on_status_written(self, job: JobView, after: TrainingJobStatus, *, now_s: float) -> None:
        """Count the changes of a status write that the cluster has accepted."""
        before, queue = job.status, job.spec.queue_name if job.spec is not None else ""
        if _rose(before, after, ConditionType.ADMITTED):
            queued = before.condition(ConditionType.QUEUED)
            since = None if queued is None or queued.status != "True" else queued.last_transition_time
            waited_s = max(0.0, now_s - parse_time_or(since, job.created_s))
            self.admission_wait_seconds.labels(queue).observe(waited_s)
        if _fell(before, after, ConditionType.ADMITTED) and not after.finished:
            self.evictions_total.labels(_reason(after, ConditionType.ADMITTED)).inc()
        asked = after.preemption
        if asked is not None and (before.preemption is None or before.preemption.requested_at != asked.requested_at):
            self.preemptions_total.labels((Reason.RECLAIMED if asked.reclaim else Reason.PREEMPTED).value).inc()
        self._count_restarts(before, after)
        self._time_start(before, after, queue=queue, now_s=now_s)
        self._account(job, after)

    def on_job_deleted(self, uid: str) -> None:
        """Drop the series of a job."""
        known = self._jobs.pop(uid, None)
        if known is not None:
            self.job_goodput_ratio.remove(*known)
        self._forget_training(uid)

    def on_job_observed(self, snapshot: JobSnapshot) -> None:
        """Show the newest step's metrics of the current attempt."""
        job, record = snapshot.job, current_record(snapshot)
        if record is None or record.loss is None or job.status.finished:
            return
        own = job.namespace, job.name
        self._training[job.uid] = own
        self._training.move_to_end(job.uid)
        self.job_step.labels(*own).set(record.step)
        self.job_loss.labels(*own).set(record.loss)
        if record.held_out_loss is not None:
            self.job_held_out_loss.labels(*own).set(record.held_out_loss)
        if (routing := record.routing) is not None:
            for gauge, values in (
                (self.job_expert_load_ratio, routing.load_max),
                (self.job_router_entropy_nats, routing.entropy),
                (self.job_rows_dropped, routing.dropped),
            ):
                for layer, value in enumerate(values, start=routing.first_layer):
                    gauge.labels(*own, str(layer)).set(value)
        if len(self._training) > TRAINING_JOBS_MAX:
            self._forget_training(next(iter(self._training)))

    def _forget_training(self, uid: str) -> None:
        own = self._training.pop(uid, None)
        if own is not None:
            for gauge in self._of_training():
                gauge.remove_by_labels(dict(zip(("namespace", "job"), own, strict=True)))

    def _of_training(self) -> tuple[Gauge, ...]:
        return (
            self.job_step,
            self.job_loss,
            self.job_held_out_loss,
            self.job_expert_load_ratio,
            self.job_router_entropy_nats,
            self.job_rows_dropped,
        )

    def on_event_dropped(self, reason: str) -> None:
        """Count an event that was dropped."""
        self.events_dropped_total.labels(reason).inc()

    def on_job_failed(self, uid: str, error: Exception) -> None:
        """Count a decision that raised an error."""
        del uid  # a label per job would be unbounded
        self.internal_errors_total.labels(type(error).__name__).inc()

    def on_object_unreadable(self, kind: str) -> None:
        """Count an object that can't be read."""
        self.unreadable_objects_total.labels(kind).inc()

    def on_record_refused(self, fault: str) -> None:
        """Count a progress record that does not count."""
        self.progress_records_refused_total.labels(fault).inc()

    def on_node_fault(self, fault_class: str, action: str) -> None:
        """Count a fault of a node."""
        self.node_faults_total.labels(fault_class, action).inc()

    def on_node_repair(self, action: str, result: str) -> None:
        """Count a step of a repair."""
        self.node_repairs_total.labels(action, result).inc()

    def on_node_tainted(self, after_s: float) -> None:
        """Time a taint."""
        self.detect_to_taint_seconds.observe(after_s)

    def on_node_states(self, states: Mapping[str, int]) -> None:
        """Replace the number of nodes by state."""
        self.node_health.clear()
        for state, nodes in states.items():
            self.node_health.labels(state).set(nodes)

    def on_incident_dropped(self) -> None:
        """Count what the history lacks."""
        self.node_incidents_dropped_total.inc()

    def on_incident_cost(self, fault_class: str, device_s: float) -> None:
        """Add the cost of an incident."""
        self.node_incident_lost_device_seconds_total.labels(fault_class).inc(device_s)

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

    def _account(self, job: JobView, after: TrainingJobStatus) -> None:
        """Charge lost time to the devices of its attempt, and update the job's goodput."""
        before, attempt = job.status.accounting, job.attempt
        if after.accounting == before:
            return
        devices = 0 if attempt is None else attempt.replicas * attempt.devices
        known = {entry.cause: entry.milliseconds for entry in before.lost}
        for entry in after.accounting.lost:
            more_ms = entry.milliseconds - known.get(entry.cause, 0)
            if more_ms > 0:
                self.lost_gpu_seconds_total.labels(entry.cause).inc(more_ms * devices / 1_000)
        ratio = goodput(after.accounting)
        if ratio is None:
            return
        self._jobs[job.uid] = (job.namespace, job.name)
        self._jobs.move_to_end(job.uid)
        self.job_goodput_ratio.labels(job.namespace, job.name).set(ratio)
        if len(self._jobs) > GOODPUT_JOBS_MAX:
            self.on_job_deleted(next(iter(self._jobs)))

    # ------------------------------------------------------------------------------------------- what has been decided

    def on_cycle_finished(self, seen: CycleReport) -> None:
        """Take the figures of a scheduling cycle."""
        self.scheduling_cycle_seconds.observe(seen.cycle_s)
        for took_s in seen.placement_s:
            self.placement_seconds.observe(took_s)
        _show(self.pending_jobs, _bounded(seen.waiting))
        _show(self.queue_used, _bounded(seen.used))
        _show(self.queue_quota, _bounded(seen.quota))
        self.quarantined_jobs.set(seen.quarantined)
        for kind, count in seen.objects.items():
            self.model_objects.labels(kind).set(count)

    def leads(self, leading: bool) -> None:
        """Note whether this replica leads; otherwise drop figures about the cluster, which are stale."""
        if not leading:
            self.clear_gauges()
            self._jobs.clear()
            self._training.clear()
        self.leader.set(int(leading))

    @contextlib.contextmanager
    def leading(self) -> Iterator[None]:
        """While this lasts, this replica leads."""
        self.leads(True)
        try:
            yield
        finally:
            self.leads(False)

    def requested(self, verb: str, kind: str, code: str, *, status: bool = False) -> None:
        """Count a call to the API server by its result."""
        self.api_requests_total.labels(verb, kind, code).inc()
        if status:
            self.status_writes_total.labels(code).inc()


def goodput(accounting: Accounting) -> float | None:
    """Return effective time over all time of attempts; None before anything is accounted."""
    lost_ms = sum(entry.milliseconds for entry in accounting.lost)
    whole_ms = accounting.effective_milliseconds + lost_ms
    return accounting.effective_milliseconds / whole_ms if whole_ms else None


def _rose(before: TrainingJobStatus, after: TrainingJobStatus, kind: ConditionType) -> bool:
    return after.is_true(kind) and not before.is_true(kind)


def _fell(before: TrainingJobStatus, after: TrainingJobStatus, kind: ConditionType) -> bool:
    return before.is_true(kind) and not after.is_true(kind)


def _reason(status: TrainingJobStatus, kind: ConditionType) -> str:
    condition = status.condition(kind)
    return "Unknown" if condition is None else condition.reason


def _newest(status: TrainingJobStatus, *, before_attempt: int) -> RestartRecord | None:
    return next((record for record in reversed(status.restart_records) if record.attempt < before_attempt), None)


def _bounded(values: Mapping[tuple[str, str], int]) -> dict[tuple[str, str], int]:
    """Sum up the queues beyond the limit."""
    shown = set(sorted({queue for queue, _ in values})[:QUEUES_MAX])
    summed: dict[tuple[str, str], int] = {}
    for (queue, what), count in values.items():
        key = (queue if queue in shown else OTHER_QUEUES, what)
        summed[key] = summed.get(key, 0) + count
    return summed


def _show(gauge: Gauge, values: Mapping[tuple[str, str], int]) -> None:
    """Replace every series of a gauge."""
    gauge.clear()
    for key, value in values.items():
        gauge.labels(*key).set(value)
