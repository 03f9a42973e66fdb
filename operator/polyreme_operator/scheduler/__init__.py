"""Who is admitted, where: one decision for the whole cluster, made by one task, written as intents before any job."""

from polyreme_operator.scheduler.cycle import Batch, Stopwatch, schedule
from polyreme_operator.scheduler.limits import Limits
from polyreme_operator.scheduler.snapshot import ClusterSnapshot, cluster_of

__all__ = ["Batch", "ClusterSnapshot", "Limits", "Stopwatch", "cluster_of", "schedule"]
