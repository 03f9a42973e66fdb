"""Metrics of the datahub's controller and of its workers. The number of series is bounded by that of operations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from polyreme_cluster.metric_registry import MetricRegistry
from polyreme_datahub.registry.backlog import Backlog
from polyreme_datahub.registry.rows import OperationCount
from polyreme_datahub.registry.work_items import WorkItem

OPERATIONS_MAX = 200
"""Operations with series of their own; further ones are counted as ``OTHER``."""
OTHER = "(others)"
_ITEM_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1_800)


class DataMetrics(MetricRegistry):
    """Metrics of one process."""

    def __init__(self) -> None:
        super().__init__()
        self.ready = self.gauge("datahub_ready", "1 while registry, object store and topics answer.")
        self.leader = self.gauge("datahub_leader", "1 while this replica of the controller prepares data.")
        self.jobs = self.gauge(
            "datahub_jobs", "Jobs by the state of their data; Waiting: nothing is reported yet.", "state"
        )
        self.backlog_items = self.gauge(
            "datahub_backlog_items", "Work items that are not done, by operation.", "operation"
        )
        self.backlog_records = self.gauge(
            "datahub_backlog_records", "Records of the work items that are not done, by operation.", "operation"
        )
        self.leased_items = self.gauge(
            "datahub_leased_items", "Work items that a worker has at the moment, by operation.", "operation"
        )
        self.item_seconds = self.gauge(
            "datahub_item_seconds",
            "Time that a worker takes for one work item, over the last minutes and all workers, by operation.",
            "operation",
        )
        self.dead_letters = self.gauge(
            "datahub_dead_letters", "Dead letters in the registry, by operation.", "operation"
        )
        self.workers_wanted = self.gauge(
            "datahub_workers_wanted", "Replicas that the controller asks for, by Deployment.", "deployment"
        )
        self.items_total = self.counter(
            "datahub_items_total",
            "Tries of work items by this worker, by operation and outcome (done, failed).",
            "operation",
            "outcome",
        )
        self.item_duration_seconds = self.histogram(
            "datahub_item_duration_seconds", "Time of one try of a work item by this worker.", _ITEM_S, "operation"
        )
        self.records_total = self.counter(
            "datahub_records_total",
            "Records that this worker committed, by operation and outcome (made, reused, dead, dropped).",
            "operation",
            "outcome",
        )
        self._operations: set[str] = set()

    def on_item(self, item: WorkItem, took_s: float, done: bool) -> None:
        """Count a try of a work item."""
        name = self._name(item.operation)
        self.items_total.labels(name, "done" if done else "failed").inc()
        self.item_duration_seconds.labels(name).observe(took_s)

    def on_counts(self, counts: Sequence[OperationCount]) -> None:
        """Count what a commit brought."""
        for count in counts:
            name = self._name(count.operation)
            outcomes = {"made": count.misses, "reused": count.hits, "dead": count.dead, "dropped": count.dropped}
            for outcome, records in outcomes.items():
                if records:
                    self.records_total.labels(name, outcome).inc(records)

    def show_work(self, backlog: Sequence[Backlog], item_s: Mapping[str, float]) -> None:
        """Show what is due, and how long items take."""
        for gauge in (self.backlog_items, self.backlog_records, self.leased_items, self.item_seconds):
            gauge.clear()
        for one in backlog:
            name = self._name(one.operation)
            self.backlog_items.labels(name).inc(one.items)
            self.backlog_records.labels(name).inc(one.records)
            self.leased_items.labels(name).inc(one.leased)
        for operation, seconds in item_s.items():
            self.item_seconds.labels(self._name(operation)).set(seconds)

    def show_dead_letters(self, counts: Mapping[str, int]) -> None:
        """Show the dead letters."""
        self.dead_letters.clear()
        for operation, count in counts.items():
            self.dead_letters.labels(self._name(operation)).inc(count)

    def show_jobs(self, states: Mapping[str, int]) -> None:
        """Show the jobs."""
        self.jobs.clear()
        for state, count in states.items():
            self.jobs.labels(state).set(count)

    def _name(self, operation: str) -> str:
        if operation in self._operations or len(self._operations) < OPERATIONS_MAX:
            self._operations.add(operation)
            return operation
        return OTHER
