"""Queues and what decisions about order and preemption read of jobs: frozen values, no objects of the cluster."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from polyreme_operator.types.inventory import Requests, RowArray


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """What a queue may take of one resource."""

    resource: str
    nominal: int
    """Its own."""
    borrowing_limit: int | None = None
    """Most that it may take of others' beside its own; None: all that is lent."""
    lending_limit: int | None = None
    """Most of its own that others may take while it does not; None: all."""


class StopPolicy(StrEnum):
    """Whether a queue admits."""

    NONE = "None"
    HOLD = "Hold"
    """Admits nothing more; what runs goes on."""
    HOLD_AND_DRAIN = "HoldAndDrain"
    """Admits nothing more, and asks what runs to checkpoint and stop."""


class Reclaim(StrEnum):
    """Whom a queue may displace, of its own jobs or of those that borrow its quota."""

    NEVER = "Never"
    LOWER_PRIORITY = "LowerPriority"
    ANY = "Any"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QueueView:
    """A TrainingQueue. A queue that others name as their parent is a cohort; quotas count over its whole subtree."""

    name: str
    uid: str = ""
    resource_version: str = ""
    generation: int = 0
    parent: str = ""
    quotas: tuple[Quota, ...] = ()
    """A resource that neither the queue nor any of its parents names is unlimited."""
    weight: int = 1
    """Share among its siblings."""
    stop_policy: StopPolicy = StopPolicy.NONE
    half_life_s: float = 86_400.0
    """Time in which half of what was used is forgotten by the fair share; 0: only present use counts."""
    aging_s: float = 0.0
    """Waiting time that is worth one point of priority; 0: none."""
    within_queue: Reclaim = Reclaim.LOWER_PRIORITY
    reclaim: Reclaim = Reclaim.ANY
    min_runtime_s: float = 0.0
    """Lower bound of every job's own ``minRuntimeSeconds``."""
    preemptions_max: int = 3
    """Preemptions of one job within the window; then it is left alone."""
    preemption_window_s: float = 86_400.0
    cooldown_s: float = 60.0
    """Time after an admission or a preemption in which a job is not displaced (again)."""
    backfill: bool = True
    used_seconds: tuple[tuple[str, float], ...] = ()
    """Decayed use by resource [pieces x s], as the status says."""
    used_at_s: float = 0.0
    """When that was worked out."""
    status: Mapping[str, Any] = dataclasses.field(default_factory=dict, compare=False)
    """As it was last written."""

    def quota(self, resource: str) -> Quota | None:
        """Return the queue's own quota of a resource."""
        return next((quota for quota in self.quotas if quota.resource == resource), None)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A job that waits, as the order of the queue sees it."""

    uid: str
    queue: str
    priority: int
    since_s: float
    """When it was created: a preempted job keeps its place."""
    workers: int
    requests: Requests
    """Of each worker."""
    kind: int
    """Number of its equivalence class: jobs of one queue, one size, one template, one topology. When one of a class
    does not fit, none behind it does."""
    arrival: int = 0
    """Of jobs created in one second the smaller came first."""
    may_preempt: bool = True
    preemptible: bool = True
    """Whether it may be displaced once it runs, so that it may fill a hole without delaying the head."""
    ends_within_s: float | None = None
    """Its activeDeadlineSeconds, from admission."""
    min_runtime_s: float = 0.0
    """How long it is left alone once it runs."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A job that holds devices, as a possible victim."""

    uid: str
    namespace: str
    name: str
    queue: str
    priority: int
    requests: Requests
    """Of each worker."""
    devices: int
    """Devices of all workers."""
    rows_W: RowArray
    """Row of each worker's node; -1 where the node is gone."""
    admitted_s: float
    """When it was admitted for its present attempt series."""
    started_s: float
    """When it last began to lose work: its newest durable checkpoint, or the attempt's start."""
    min_runtime_s: float = 0.0
    preempted_at_s: tuple[float, ...] = ()
    """When it was preempted before."""
    preempted_for: frozenset[str] = frozenset()
    """UIDs of the jobs that it made way for before."""
    stopping_for: str = ""
    """UID of the job for which it has been asked to stop; empty: none."""
    stopping: bool = False
    """Whether it stops already, for whatever reason: what it holds comes free without a victim."""
    ends_at_s: float | None = None
    """When its activeDeadlineSeconds ends it."""
