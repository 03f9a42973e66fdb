"""Metrics of scheduling cycles, and of what the cluster looked like in the newest one."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import Gauge

from polyreme_cluster.metric_registry import MetricRegistry
from polyreme_operator.types.observer import CycleReport, Observer

QUEUES_MAX = 1_000
"""Queues with series of their own; the remaining ones, by name, are summed up as ``OTHER_QUEUES``."""
OTHER_QUEUES = "(others)"
DECISION_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
"""Buckets of the time that a decision takes."""


class CycleMetrics(Observer):
    """Durations of cycles, and the waiting jobs, usage and quotas of queues."""

    def __init__(self, registry: MetricRegistry) -> None:
        self.pending_jobs = registry.gauge("pending_jobs", "Waiting jobs, by queue and reason.", "queue", "reason")
        self.scheduling_cycle_seconds = registry.histogram(
            "scheduling_cycle_seconds", "Time of one scheduling cycle.", DECISION_S
        )
        self.placement_seconds = registry.histogram(
            "placement_seconds", "Time of one placement search for a gang.", DECISION_S
        )
        self.queue_used = registry.gauge(
            "queue_used", "Amount of a resource that a queue's jobs hold.", "queue", "resource"
        )
        self.queue_quota = registry.gauge("queue_quota", "Nominal quota of a queue.", "queue", "resource")
        self.quarantined_jobs = registry.gauge(
            "quarantined_jobs", "Jobs in quarantine (condition Degraded): no decision is made about them."
        )
        self.model_objects = registry.gauge("model_objects", "Objects in the operator's cache.", "kind")

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
