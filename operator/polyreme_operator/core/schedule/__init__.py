"""Who is admitted, where: one decision for the whole cluster, made by one task, written as intents before any job."""

from polyreme_operator.core.schedule.cluster import Cluster, cluster_of
from polyreme_operator.core.schedule.limits import Limits
from polyreme_operator.core.schedule.round import Batch, Stopwatch, schedule

__all__ = ["Batch", "Cluster", "Limits", "Stopwatch", "cluster_of", "schedule"]
