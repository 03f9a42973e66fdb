"""The objects of a cluster as decisions see them: only the fields that some decision reads."""

from __future__ import annotations

import dataclasses
from enum import StrEnum

from polyreme_api.job import TrainingJobSpec, TrainingJobStatus
from polyreme_api.job.status import AttemptStatus
from polyreme_api.plan.plan import Plan
from polyreme_api.progress import ProgressRecord
from polyreme_operator.port import ObjectRef


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
    unschedulable_since_s: float | None = None
    unschedulable: str = ""
    scheduler: str = ""
    resource: str
    devices: int
    phase: PodPhase = PodPhase.PENDING
    deleting: bool = False
    exit_code: int | None = None
    reason: str = ""
    message: str = ""
    """What its container said last, where it says so."""
    conditions: tuple[tuple[str, str], ...] = ()
    """Pairs of condition type and status."""

    @property
    def ref(self) -> ObjectRef:
        """Reference of the pod."""
        return ObjectRef(kind="Pod", namespace=self.namespace, name=self.name)

    @property
    def ended(self) -> bool:
        """Whether its containers have ended for good; it holds no devices any more."""
        return self.phase in {PodPhase.SUCCEEDED, PodPhase.FAILED}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """A node and its devices."""

    name: str
    devices: tuple[tuple[str, int], ...]
    """Pairs of resource name and allocatable count."""
    owned: bool = False
    ready: bool = True
    not_ready_since_s: float | None = None
    unschedulable: bool = False
    out_of_service: bool = False
    """Bears the taint by which an administrator says that nothing runs there any more."""

    def capacity(self, resource: str) -> int:
        """Return the allocatable count of a resource."""
        return next((count for name, count in self.devices if name == resource), 0)

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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QueueView:
    """A TrainingQueue: how many devices its jobs may hold together."""

    name: str
    quota: tuple[tuple[str, int], ...] = ()
    """Pairs of resource name and count; a resource that is not named is unlimited."""

    def limit(self, resource: str) -> int | None:
        """Return the quota of a resource; None is unlimited."""
        return next((count for name, count in self.quota if name == resource), None)


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
    """Plan for ``spec.workers.replicas``; None when no layout fits."""
    invalid: str
    status: TrainingJobStatus

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
