"""The TrainingQueue: where jobs wait, what they may take, whom they may displace. A queue with children is a cohort."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from polyreme_api.fields import (
    SECONDS_MAX,
    Amount,
    Condition,
    NameOrNone,
    Part,
    ResourceName,
    Seconds,
    StatusPart,
    Time,
)
from polyreme_api.label_selector import LabelSelector
from polyreme_api.metadata import ClusterMeta, Object

QUOTAS_MAX = 32
PRIORITY_LIMIT = 2_000_000_000
"""Priority of Kubernetes' own class ``system-cluster-critical``; classes of users have less."""
HEAD_MAX = 100
"""Waiting jobs whose place the status tells; the command line works out the rest."""


class QueueQuota(Part):
    """What the queue and all queues below it may use of one resource."""

    resource: ResourceName
    """Resource as nodes name it, ``nvidia.com/gpu``; ``cpu`` in thousandths of a core, ``memory`` in bytes."""
    nominal: Amount
    """Its own quota; what other queues have borrowed of it is reclaimed when this queue needs it."""
    borrowing_limit: Amount | None = None
    """Largest amount that it may borrow from its cohort; none: all that other queues lend."""
    lending_limit: Amount | None = None
    """Largest amount of its own quota that the cohort may borrow while it is unused; none: all."""

    @model_validator(mode="after")
    def _lends_its_own(self) -> "QueueQuota":
        if self.lending_limit is not None and self.lending_limit > self.nominal:
            raise ValueError(
                f"lendingLimit {self.lending_limit} is above nominal {self.nominal} of {self.resource}; "
                "lower lendingLimit or raise nominal"
            )
        return self


class FairSharing(Part):
    """How the queues of a cohort share quota that none of them owns."""

    half_life_seconds: Seconds = 86_400
    """Time in which half of what a queue has used is forgotten; 0: only what it uses now counts."""


class QueuePreemption(Part):
    """Which jobs a job of this queue may preempt, and how often a job of this queue may be preempted."""

    within_queue: Literal["Never", "LowerPriority"] = "LowerPriority"
    """Whether it may preempt jobs of its own queue that have a lower priority."""
    reclaim: Literal["Never", "LowerPriority", "Any"] = "Any"
    """Whether it may preempt jobs of other queues that have borrowed this queue's quota."""
    min_runtime_seconds: Seconds = 0
    """How long every job of this queue runs, once started, before it may be preempted."""
    max_per_job: Annotated[int, Field(ge=0, le=1000)] = 3
    """Preemptions of one job within the window; after that it is not preempted."""
    window_seconds: Annotated[int, Field(ge=1, le=31_536_000)] = 86_400
    """Sliding window of ``maxPerJob``."""
    cooldown_seconds: Seconds = 60
    """Time after an admission or a preemption in which a job is not preempted."""


class Backfill(Part):
    """Whether smaller jobs may start ahead of the first one that waits."""

    mode: Literal["Off", "Conservative"] = "Conservative"
    """``Conservative``: later jobs may start if they do not delay the first one; ``Off``: strictly in order."""


class TrainingQueueSpec(Part):
    """The desired state of the queue; every field may change at any time."""

    parent: NameOrNone = ""
    """TrainingQueue whose cohort this queue belongs to; the queues of a cohort lend and borrow quota. Empty: it is a
    root."""
    quotas: Annotated[list[QueueQuota], Field(max_length=QUOTAS_MAX)] = Field(default_factory=list)
    """Quota by resource; a resource that neither the queue nor any parent names is unlimited."""
    weight: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    """Share of this queue among the queues of one parent."""
    stop_policy: Literal["None", "Hold", "HoldAndDrain"] = "None"
    """``Hold`` admits nothing more; ``HoldAndDrain`` also asks running jobs to save a checkpoint and stop."""
    fair_sharing: FairSharing = Field(default_factory=FairSharing)
    """How queues of one cohort take turns."""
    aging_seconds: Seconds = 0
    """Waiting time that is worth one point of priority, so that no job waits forever; 0: none."""
    preemption: QueuePreemption = Field(default_factory=QueuePreemption)
    """Whom jobs may displace."""
    set_aside_seconds: Annotated[int, Field(ge=10, le=SECONDS_MAX)] = 900
    """How long the pods of an admitted job may take to start. After that the job is set aside: it gives up its place,
    and is tried again later without preempting other jobs. The least of the queue and its parents applies."""
    backfill: Backfill = Field(default_factory=Backfill)
    """Who may pass the first job that waits."""
    namespace_selector: LabelSelector | None = None
    """Labels of the namespaces whose jobs the queue accepts; none, or one without requirements: all namespaces. A job
    must be accepted by the queue and all of its parents."""
    priority_max: Annotated[int, Field(ge=-PRIORITY_LIMIT, le=PRIORITY_LIMIT)] | None = None
    """Largest priority of jobs that the queue accepts; none: any. The least of the queue and its parents applies."""
    unnamed_resources: Literal["Allow", "Refuse"] = "Allow"
    """Whether jobs may request resources that neither the queue nor any parent names: without limit, or not at all.
    ``Refuse`` of the queue or of a parent applies."""

    @model_validator(mode="after")
    def _quotas_fit(self) -> "TrainingQueueSpec":
        names = [quota.resource for quota in self.quotas]
        if doubled := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"quotas: two entries for {doubled[0]!r}; resources are unique, drop one")
        for quota in self.quotas:
            limited = quota.borrowing_limit is not None or quota.lending_limit is not None
            if not self.parent and limited:
                raise ValueError(
                    f"quotas: {quota.resource} has a borrowingLimit or a lendingLimit, but parent is empty: a root has "
                    "no cohort to borrow from or lend to; set parent or drop the limit"
                )
        return self


class ResourceUsage(StatusPart):
    """What admitted jobs of the queue and of those below it hold of one resource."""

    resource: Annotated[str, Field(max_length=317)]
    """Resource."""
    used: Annotated[int, Field(ge=0)] = 0
    """Held now."""
    borrowed: Annotated[int, Field(ge=0)] = 0
    """Part of it that is borrowed from other queues of the cohort."""


class DecayedUsage(StatusPart):
    """What the queue has used of one resource, older use counting less."""

    resource: Annotated[str, Field(max_length=317)]
    """Resource."""
    seconds: Annotated[str, Field(max_length=40)] = "0"
    """Pieces times seconds, a decimal as text."""


class QueuedJob(StatusPart):
    """A job near the head of the queue."""

    position: Annotated[int, Field(ge=1)]
    """Place, from 1."""
    namespace: Annotated[str, Field(max_length=63)]
    """Namespace of the job."""
    name: Annotated[str, Field(max_length=253)]
    """Name of the job."""
    priority: int = 0
    """Priority by which it waits, aging included."""
    reason: Annotated[str, Field(max_length=63)] = ""
    """Why it waits (docs/reference/reasons.md)."""


class TrainingQueueStatus(StatusPart):
    """State of the queue as the operator sees it."""

    observed_generation: int = 0
    """Generation of the spec that this status describes."""
    conditions: Annotated[list[Condition], Field(max_length=16)] = Field(default_factory=list)
    """Whether the queue is valid, and if not, why."""
    pending: Annotated[int, Field(ge=0)] = 0
    """Jobs that wait."""
    admitted: Annotated[int, Field(ge=0)] = 0
    """Jobs that hold devices."""
    reserving: Annotated[int, Field(ge=0)] = 0
    """Jobs for which other jobs are being preempted."""
    refused: Annotated[int, Field(ge=0)] = 0
    """Jobs that the queue does not accept."""
    usage: Annotated[list[ResourceUsage], Field(max_length=QUOTAS_MAX)] = Field(default_factory=list)
    """What is held now, by resource."""
    decayed: Annotated[list[DecayedUsage], Field(max_length=QUOTAS_MAX)] = Field(default_factory=list)
    """What was used, older use counting less, by resource."""
    decayed_at: Time = ""
    """When that was computed."""
    head: Annotated[list[QueuedJob], Field(max_length=HEAD_MAX)] = Field(default_factory=list)
    """The first jobs that wait, in order."""


class TrainingQueue(Object):
    """A queue of TrainingJobs: quota, shares and rules of displacement, for the whole cluster."""

    kind: Literal["TrainingQueue"]
    metadata: ClusterMeta
    spec: TrainingQueueSpec = Field(default_factory=TrainingQueueSpec)
    status: TrainingQueueStatus = Field(default_factory=TrainingQueueStatus)

    @model_validator(mode="after")
    def _is_no_parent_of_itself(self) -> "TrainingQueue":
        if self.spec.parent == self.metadata.name:
            raise ValueError(
                f"spec.parent is {self.spec.parent!r}, the queue itself; name another queue or leave it empty"
            )
        return self
