"""Metrics that the operator serves to Prometheus, with names in the manner of Kueue's.

They are counted where the cluster has accepted a write, so a refused write counts nothing. The number of series is
bounded: queues and reasons are few, and only some of the jobs have series of their own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from polyreme_cluster.metric_registry import MetricRegistry
from polyreme_operator.publishing.cycle_metrics import CycleMetrics
from polyreme_operator.publishing.job_metrics import JobMetrics
from polyreme_operator.publishing.node_metrics import NodeMetrics
from polyreme_operator.publishing.training_metrics import TrainingMetrics
from polyreme_operator.types.observer import Observer, Observers


class Metrics(MetricRegistry, Observers):
    """The operator's metrics: its own, and those of jobs, training, nodes and scheduling cycles."""

    def __init__(self) -> None:
        MetricRegistry.__init__(self)
        self.process = ProcessMetrics(self)
        self.jobs = JobMetrics(self)
        self.training = TrainingMetrics(self)
        self.nodes = NodeMetrics(self)
        self.scheduling = CycleMetrics(self)
        Observers.__init__(self, self.process, self.jobs, self.training, self.nodes, self.scheduling)

    def leads(self, leading: bool) -> None:
        """Note whether this replica leads; otherwise drop figures about the cluster, which are stale."""
        if not leading:
            self.clear_gauges()
            self.jobs.clear()
            self.training.clear()
        self.process.leader.set(int(leading))

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
        self.process.api_requests_total.labels(verb, kind, code).inc()
        if status:
            self.process.status_writes_total.labels(code).inc()


class ProcessMetrics(Observer):
    """Calls to the API server, errors, and what the operator ignores."""

    def __init__(self, registry: MetricRegistry) -> None:
        self.status_writes_total = registry.counter("status_writes_total", "Writes of job status.", "code")
        self.internal_errors_total = registry.counter(
            "internal_errors_total",
            "Decisions that raised an error; the job that caused it is quarantined and retried.",
            "error",
        )
        self.unreadable_objects_total = registry.counter(
            "unreadable_objects_total", "Object versions that could not be parsed.", "kind"
        )
        self.progress_records_refused_total = registry.counter(
            "progress_records_refused_total",
            "Progress records on Leases that don't count: unsigned, forged, or written again after a newer one.",
            "fault",
        )
        self.events_dropped_total = registry.counter(
            "events_dropped_total", "Events dropped by the rate limiter.", "reason"
        )
        self.api_requests_total = registry.counter(
            "api_requests_total", "Requests to the API server.", "verb", "kind", "code"
        )
        self.alerts_total = registry.counter(
            "alerts_total", "Alerts to the webhook, by result: Delivered, Retried, Dropped.", "result"
        )
        self.leader = registry.gauge("leader", "1 while this replica leads.")

    def on_alert(self, result: str) -> None:
        """Count what became of an alert."""
        self.alerts_total.labels(result).inc()

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
