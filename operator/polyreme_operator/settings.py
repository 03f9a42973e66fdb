"""What an installation of the operator may change."""

from __future__ import annotations

import dataclasses

from polyreme_operator.reconcile.worker_pods import PodDefaults
from polyreme_operator.scheduler import Limits


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What an installation may change."""

    namespace: str = "polyreme-system"
    """Where the intents lie."""
    defaults: PodDefaults = dataclasses.field(default_factory=PodDefaults)
    relist_s: float = 300.0
    """How often every kind is listed anew, to find what a watch lost."""
    limits: Limits = dataclasses.field(default_factory=Limits)
    """What one round of the scheduler may spend."""
    cycle_every_s: float = 0.1
    """Least time from the end of one round of the scheduler to the next: what happens meanwhile is decided at once."""
    reconcile_share: float = 0.25
    """Largest share of its time that the operator spends on looking at one job: large gangs change with every pod."""
    reconciles_max: int = 32
    """Jobs reconciled at a time."""
    writes_max: int = 64
    """Objects of one pass, or statuses of one round, written at a time."""
    informational_after_s: float = 1.0
    """Least time from a write of a job's status, or the first sight of the job, to a write that only tells."""
    informational_per_s: float = 50.0
    """Budget of writes that only tell; all others never wait. They are made one after another, so that an API server
    that is slow to answer gets fewer."""
    informational_burst: int = 100
    events_per_s: float = 20.0
    """Events written; what waits behind a thousand others is dropped."""
    events_burst: int = 200
    queue_status_every_s: float = 1.0
    """Least time between two writes of one queue's or topology's status."""
    queue_statuses_per_s: float = 10.0
    """Statuses of queues and topology written a second, all together."""
    queue_status_share: float = 0.2
    """Largest share of its time that is spent on writing them: one that names a hundred waiting jobs costs the API
    server several jobs' writes, so the slower it answers, the rarer they are."""
    queue_status_rest_max_s: float = 60.0
    """Longest that they rest for that."""
    retry_initial_s: float = 0.05
    retry_max_s: float = 30.0
    idle_s: float = 60.0
    """Longest time that the dispatcher sleeps."""

    def queue_status_rest_s(self, writes: int, *, took_s: float) -> float:
        """From the beginning of writing statuses of queues and topology, so many and for so long, to the next time."""
        least_s = max(self.queue_status_every_s, writes / self.queue_statuses_per_s)
        return max(least_s, min(took_s / self.queue_status_share, self.queue_status_rest_max_s))

    def backoff_s(self, failures: int) -> float:
        """Longest wait before something is tried again that failed so many times in a row."""
        return min(self.retry_max_s, self.retry_initial_s * 2.0 ** min(failures - 1, 30))
