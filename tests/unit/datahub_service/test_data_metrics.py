"""Metrics of the datahub: what a worker did, what is due, bounded in their series."""

from polyreme_datahub.registry.backlog import Backlog
from polyreme_datahub.registry.rows import OperationCount
from polyreme_datahub.registry.work_items import WorkItem
from polyreme_datahub_service.metrics import OPERATIONS_MAX, OTHER, DataMetrics


def value(metrics: DataMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"polyreme_datahub_{name}", labels)


def item(stage: str) -> WorkItem:
    return WorkItem(key=stage, flow="f", operation=stage, version_id=1, first=0, count=1)


def test_a_worker_counts_its_items_and_records() -> None:
    metrics = DataMetrics()
    metrics.on_item(item("compose"), 0.3, True)
    metrics.on_item(item("compose"), 0.2, False)
    metrics.on_counts(
        [OperationCount(operation="compose", misses=5, hits=1, dead=2), OperationCount(operation="ingest", dropped=3)]
    )
    assert value(metrics, "items_total", operation="compose", outcome="done") == 1
    assert value(metrics, "items_total", operation="compose", outcome="failed") == 1
    assert value(metrics, "item_duration_seconds_count", operation="compose") == 2
    assert value(metrics, "records_total", operation="compose", outcome="dead") == 2
    assert value(metrics, "records_total", operation="ingest", outcome="dropped") == 3


def test_what_is_due_replaces_what_was_and_a_replica_that_does_not_lead_shows_none() -> None:
    metrics = DataMetrics()
    metrics.show_work(
        [Backlog(operation="compose", device="cpu", items=4, records=40, leased=2)], {"compose": 1.5, "tokenize": 0.5}
    )
    metrics.show_jobs({"Waiting": 3})
    assert value(metrics, "backlog_items", operation="compose") == 4
    assert value(metrics, "item_seconds", operation="tokenize") == 0.5
    metrics.show_work([], {})
    assert value(metrics, "backlog_items", operation="compose") is None
    assert value(metrics, "jobs", state="Waiting") == 3
    metrics.leader.set(1)
    metrics.clear_gauges()
    assert value(metrics, "jobs", state="Waiting") is None
    assert value(metrics, "leader") == 0


def test_operations_beyond_the_limit_share_one_series() -> None:
    metrics = DataMetrics()
    for number in range(OPERATIONS_MAX + 5):
        metrics.on_item(item(f"operation-{number}"), 0.1, True)
    assert value(metrics, "items_total", operation=OTHER, outcome="done") == 5
