"""Admission and placement: one decision for the whole cluster, made by one task and written as intents first."""

from polyreme_operator.scheduler.cycle import Stopwatch
from polyreme_operator.scheduler.decisions import Batch
from polyreme_operator.scheduler.limits import Limits
from polyreme_operator.scheduler.schedule import schedule
from polyreme_operator.scheduler.snapshot import ClusterSnapshot, cluster_of

__all__ = ["Batch", "ClusterSnapshot", "Limits", "Stopwatch", "cluster_of", "schedule"]
