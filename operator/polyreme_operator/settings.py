"""Settings of the operator."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

from polyreme_operator.reconcile.worker_pods import PodDefaults
from polyreme_operator.scheduler import Limits


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of an installation."""

    namespace: str = "polyreme-system"
    """Namespace of the intents' ConfigMap."""
    defaults: PodDefaults = dataclasses.field(default_factory=PodDefaults)
    default_unlimited: bool = True
    """Whether the queue ``default`` admits jobs without limit while it does not exist."""
    data_gate: bool = False
    """Whether a job is admitted only when a datahub controller has reported its data as ready. Without such a
    controller, no job that trains on data would start."""
    pod_runs: Callable[[str], bool] = lambda _: False
    """Tells of a pod's UID whether its process is known to run; False where that can't be seen from here."""
    node_health: bool = False
    """Whether NodeFaultPolicies are watched and carried out."""
    repairs: bool = False
    """Whether hooks of NodeFaultPolicies may repair nodes."""
    repairs_namespace: str = "polyreme-system"
    """Namespace of the hooks' PodTemplates and Jobs."""
    health_every_s: float = 0.05
    """Shortest time between two decisions about the health of nodes, which batches changes."""
    incidents_per_node: int = 50
    """NodeIncidents of one node that are kept; the oldest ended ones are deleted first."""
    incidents_max: int = 5_000
    """NodeIncidents that are kept in all."""
    relist_s: float = 300.0
    """How often every kind is listed again, to find changes that a watch missed."""
    limits: Limits = dataclasses.field(default_factory=Limits)
    """Budgets of one scheduling cycle."""
    cycle_every_s: float = 0.1
    """Shortest time from the end of one scheduling cycle to the next, which batches changes."""
    reconcile_share: float = 0.25
    """Largest share of the operator's time spent on deciding about one job, since large gangs change with every pod."""
    reconciles_max: int = 32
    """Jobs reconciled concurrently."""
    writes_max: int = 64
    """Objects of one pass, or statuses of one cycle, written concurrently."""
    informational_after_s: float = 1.0
    """Shortest time from a write of a job's status, or its first observation, to an informational update."""
    informational_per_s: float = 50.0
    """Rate of informational updates; other writes never wait. They are written one after another, so that a slow API
    server gets fewer."""
    informational_burst: int = 100
    events_per_s: float = 20.0
    """Rate of events; beyond a thousand queued ones further events are dropped."""
    events_burst: int = 200
    queue_status_every_s: float = 1.0
    """Shortest time between two writes of the status of one queue or topology."""
    queue_statuses_per_s: float = 10.0
    """Rate of status writes of all queues and topologies."""
    queue_status_share: float = 0.2
    """Largest share of time spent on writing them, since the status of a queue with a hundred waiting jobs is expensive
    for the API server."""
    queue_status_rest_max_s: float = 60.0
    """Longest pause for that reason."""
    retry_initial_s: float = 0.05
    retry_max_s: float = 30.0
    idle_s: float = 60.0
    """Longest time that the dispatcher sleeps."""

    def queue_status_rest_s(self, writes: int, *, took_s: float) -> float:
        """Return the time from the start of one batch of such writes, given its size and duration, to the next."""
        least_s = max(self.queue_status_every_s, writes / self.queue_statuses_per_s)
        return max(least_s, min(took_s / self.queue_status_share, self.queue_status_rest_max_s))

    def backoff_s(self, failures: int) -> float:
        """Return the longest delay of a retry after this many failures in a row."""
        return min(self.retry_max_s, self.retry_initial_s * 2.0 ** min(failures - 1, 30))

    def jittered_backoff_s(self, failures: int, rng: random.Random) -> float:
        """Return a random delay of a retry, so that replicas and jobs that failed together are not retried together."""
        return self.backoff_s(failures) * (0.5 + rng.random() / 2)
