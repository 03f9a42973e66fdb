"""Queues and jobs as order and preemption see them: frozen values, no cluster objects."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from polyreme_operator.types.inventory import Requests, RowArray
from polyreme_operator.types.label_selector import Selector


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """Quota of a queue for one resource."""

    resource: str
    nominal: int
    """The queue's own quota."""
    borrowing_limit: int | None = None
    """Limit of borrowing beyond its own quota; None: everything that is lent."""
    lending_limit: int | None = None
    """Limit of its own quota that others may borrow while it is unused; None: all of it."""


class StopPolicy(StrEnum):
    """Whether a queue admits jobs."""

    NONE = "None"
    HOLD = "Hold"
    """Admits no jobs; running jobs continue."""
    HOLD_AND_DRAIN = "HoldAndDrain"
    """Admits no jobs, and asks running jobs to checkpoint and stop."""


class Reclaim(StrEnum):
    """Which jobs a queue may preempt, of its own or of those that borrow its quota."""

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
    """Half-life of past usage in the fair share; 0: only present usage counts."""
    aging_s: float = 0.0
    """Waiting time that is worth one point of priority; 0: none."""
    within_queue: Reclaim = Reclaim.LOWER_PRIORITY
    reclaim: Reclaim = Reclaim.ANY
    min_runtime_s: float = 0.0
    """Lower bound of every job's own ``minRuntimeSeconds``."""
    preemptions_max: int = 3
    """Preemptions of one job within the window, after which it is protected."""
    preemption_window_s: float = 86_400.0
    cooldown_s: float = 60.0
    """Time after an admission or a preemption in which a job is protected."""
    backfill: bool = True
    set_aside_s: float = 900.0
    """How long the pods of an admitted job may take to start before it is set aside."""
    namespaces: Selector = ()
    """Requirements of the namespaces whose jobs it accepts."""
    priority_max: int | None = None
    """Largest priority of jobs that it accepts; None: any."""
    refuses_unnamed: bool = False
    """Whether it refuses jobs that request resources which neither it nor its parents name."""
    used_seconds: tuple[tuple[str, float], ...] = ()
    """Decayed usage by resource [amount x s], from the status."""
    used_at_s: float = 0.0
    """When that was computed."""
    status: Mapping[str, Any] = dataclasses.field(default_factory=dict, compare=False)
    """As it was last written."""

    @property
    def accepts_all(self) -> bool:
        """Whether it accepts every job."""
        return not self.namespaces and self.priority_max is None and not self.refuses_unnamed

    def quota(self, resource: str) -> Quota | None:
        """Return the queue's own quota of a resource."""
        return next((quota for quota in self.quotas if quota.resource == resource), None)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A waiting job, as the scheduling order sees it."""

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
    does not fit, none after it does."""
    arrival: int = 0
    """Order of arrival among jobs created in the same second."""
    may_preempt: bool = True
    preemptible: bool = True
    """Whether it may be preempted once it runs, so that it may backfill without delaying the head."""
    ends_within_s: float | None = None
    """Its activeDeadlineSeconds, from admission."""
    min_runtime_s: float = 0.0
    """How long it is protected once it runs."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A job that holds devices, as a candidate for preemption."""

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
    """Row of each worker's node; -1 if the node does not exist."""
    admitted_s: float
    """When it was admitted for its present attempt series."""
    started_s: float
    """Since when its work would be lost: its newest durable checkpoint, or the attempt's start."""
    min_runtime_s: float = 0.0
    preempted_at_s: tuple[float, ...] = ()
    """When it was preempted before."""
    preempted_for: frozenset[str] = frozenset()
    """UIDs of the jobs for which it was preempted before."""
    stopping_for: str = ""
    """UID of the job for which it has been asked to stop; empty: none."""
    stopping: bool = False
    """Whether it already stops for any reason, so that its capacity is freed without a preemption."""
    ends_at_s: float | None = None
    """When its activeDeadlineSeconds ends it."""
