"""The objects of a cluster as decisions see them: only the fields that some decision reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from polyreme_api.job import TrainingJobSpec, TrainingJobStatus
from polyreme_api.job.status import AttemptStatus
from polyreme_api.progress import ProgressRecord
from polyreme_operator.port import ObjectRef
from polyreme_operator.types.inventory import Constraints, LevelView, Requests, Taint
from polyreme_operator.types.plans import PlanRequest
from polyreme_operator.types.reasons import Reason
from polyreme_planner.plan import Plan


class PodPhase(StrEnum):
    """``status.phase`` of a pod."""

    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    UNKNOWN = "Unknown"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PodView:
    """A worker pod."""

    namespace: str
    name: str
    uid: str
    resource_version: str
    job_name: str
    job_uid: str
    queue: str
    index: int
    replacement: int
    node: str
    """Node that it is bound to; empty while it is not."""
    wanted: str = ""
    """The one node that its affinity lets it be bound to."""
    scheduler: str = ""
    """Who binds it, by ``schedulerName``."""
    requests: Requests = ()
    """What it takes of its node, devices included."""
    phase: PodPhase = PodPhase.PENDING
    deleting: bool = False
    ends_by_s: float | None = None
    """When the grace of one that is being deleted is over."""
    exit_code: int | None = None
    reason: str = ""
    message: str = ""
    """What its container said last, where it says so."""
    conditions: tuple[tuple[str, str], ...] = ()
    """Pairs of condition type and status."""
    unschedulable_since_s: float | None = None
    """Since when its scheduler has found no room for it."""
    unschedulable: str = ""
    """Why, in its scheduler's words."""

    @property
    def place(self) -> str:
        """Node that it takes room of, bound or not; empty for none."""
        return self.node or self.wanted

    @property
    def ref(self) -> ObjectRef:
        """Reference of the pod."""
        return ObjectRef(kind="Pod", namespace=self.namespace, name=self.name)

    @property
    def ended(self) -> bool:
        """Whether its containers have ended for good; it holds no devices any more."""
        return self.phase in {PodPhase.SUCCEEDED, PodPhase.FAILED}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ForeignPod:
    """A pod that is none of ours and takes room of a node."""

    node: str
    requests: Requests


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """A node: what it gives, and to whom."""

    name: str
    allocatable: Requests = ()
    ready: bool = True
    not_ready_since_s: float | None = None
    unschedulable: bool = False
    out_of_service: bool = False
    """Bears the taint by which an administrator says that nothing runs there any more."""
    labels: tuple[tuple[str, str], ...] = ()
    """Labels by name, without the host's, so that like nodes share them."""
    host: str = ""
    """Value of the label ``kubernetes.io/hostname``."""
    taints: tuple[Taint, ...] = ()
    risk: float = 0.0
    owned: bool = False
    """Bears the taint of nodes where the operator binds pods itself."""

    def capacity(self, resource: str) -> int:
        """Return the allocatable amount of a resource."""
        return next((amount for name, amount in self.allocatable if name == resource), 0)

    @property
    def health(self) -> tuple[object, ...]:
        """What matters of it to jobs that run there."""
        return self.ready, self.not_ready_since_s, self.unschedulable, self.out_of_service, self.taints

    @property
    def usable(self) -> bool:
        """Whether new pods may be placed here."""
        return self.ready and not self.unschedulable and not self.out_of_service

    def lost(self, now_s: float, *, node_lost_s: float) -> bool:
        """Tell whether its pods are taken for gone."""
        if self.out_of_service:
            return True
        return self.not_ready_since_s is not None and now_s - self.not_ready_since_s >= node_lost_s


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeaseView:
    """A job's Lease: the leader's sign of life and its newest progress record."""

    namespace: str
    name: str
    uid: str
    resource_version: str
    job_uid: str
    record: ProgressRecord | None = None
    seen_s: float = 0.0
    """When we last saw it change, on our clock: the clocks of nodes do not agree."""
    advanced_seen_s: float = 0.0
    """When we first saw this step, of this attempt in this phase, on our clock."""
    advanced_said_s: float = 0.0
    """When that was written, on the leader's clock."""

    @property
    def ref(self) -> ObjectRef:
        """Reference of the Lease."""
        return ObjectRef(kind="Lease", namespace=self.namespace, name=self.name)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TopologyView:
    """The ClusterTopology."""

    name: str
    uid: str = ""
    resource_version: str = ""
    generation: int = 0
    levels: tuple[LevelView, ...] = ()
    """Top to bottom, without the host's."""
    status: Mapping[str, Any] = dataclasses.field(default_factory=dict, compare=False)
    """As it was last written."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """A TrainingJob, parsed and planned."""

    namespace: str
    name: str
    uid: str
    resource_version: str
    generation: int
    created_s: float
    deleting: bool
    spec: TrainingJobSpec | None
    """None when it can't be read; ``invalid`` then says why."""
    plan: Plan | None
    """Plan for ``spec.workers.replicas``; None when no layout fits, or while it is being made."""
    invalid: str
    status: TrainingJobStatus
    requests: Requests = ()
    """Of each worker."""
    constraints: Constraints = dataclasses.field(default_factory=Constraints)
    """Which nodes its workers accept."""
    plans: tuple[Plan, ...] = ()
    """For every worker count that it accepts, ``plan`` first."""
    planning: PlanRequest | None = None
    """What its plans are to be made from; None once they are, or where its spec can't be read."""
    priority: int = 0
    """Its class's, or its own."""
    class_missing: bool = False
    """Whether it names a PriorityClass that there is not."""
    unreadable: str = ""
    """Why a part of the stored object can't be read; what was known of that part before is kept."""
    fault: str = ""
    """The error that a decision about this job raised; it stays until the job is retried, or its spec changes."""
    fault_reason: Reason = Reason.INTERNAL_ERROR
    """Which kind of fault it is."""
    fault_in_cycle: bool = False
    """Whether only the scheduler's decision raised it: the job's own passes go on."""

    @property
    def quarantined(self) -> str:
        """Why no decision is made about the job; empty where it is not in quarantine."""
        return self.unreadable or self.fault

    attempt_seen_s: float = 0.0
    """When we first saw the attempt with what is desired of it now, on our clock; 0 where nobody looked at the time."""
    first_admitted_s: float | None = None
    """When it was first admitted, on our clock: when we saw that, else as its status says, but never in the future.
    None if it was not."""
    admitted_s: float | None = None
    """When it got the admission that it holds, measured the same way."""
    finished_s: float | None = None
    """When it finished, measured the same way."""

    @property
    def ref(self) -> ObjectRef:
        """Reference of the job."""
        return ObjectRef(kind="TrainingJob", namespace=self.namespace, name=self.name)

    @property
    def attempt(self) -> AttemptStatus | None:
        """The current or last attempt."""
        return self.status.attempt

    @property
    def admitted(self) -> bool:
        """Whether it holds its devices."""
        return self.status.is_true("Admitted")
