"""Views of cluster objects, with only the fields that decisions use."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from polyreme_api.data_report import DataReport
from polyreme_api.job import TrainingJobSpec, TrainingJobStatus
from polyreme_api.job.status import AttemptStatus
from polyreme_api.progress import ProgressRecord
from polyreme_cluster.port import ObjectRef
from polyreme_operator.health.record import HEALTH, Leave
from polyreme_operator.types.inventory import Constraints, LevelView, Requests, SparesView, Taint
from polyreme_operator.types.plans import PlanRequest
from polyreme_operator.types.pod_start import RAN, PodStart
from polyreme_operator.types.pod_waiting import Waiting
from polyreme_operator.types.reasons import ConditionType, Reason
from polyreme_planner.plan import Plan

ENDS_WITHIN_S = 60.0
"""How long after its grace period a deleted pod may take to end. After that it is stuck, and nothing waits for it."""


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
    """Node to which it is bound; empty if it is not bound."""
    wanted: str = ""
    """The only node that its affinity permits."""
    scheduler: str = ""
    """Who binds it, by ``schedulerName``."""
    requests: Requests = ()
    """Its requests, including devices."""
    generation: int = 0
    """How often its spec was written; beyond 1 its resources may have been changed in place."""
    phase: PodPhase = PodPhase.PENDING
    seen_s: float = 0.0
    """When it was first seen, by the operator's clock."""
    deleting: bool = False
    ends_by_s: float | None = None
    """When the grace period of its deletion ends."""
    exit_code: int | None = None
    """Of the container that its end is attributed to."""
    container: str = ""
    """Name of that container, if it is not the pod's first."""
    termination: str = ""
    """Why that container ended, in the kubelet's word: ``Error``, ``OOMKilled``, ``StartError``, ..."""
    memory_limited: bool = True
    """Whether a limit of memory is stated for that container or for the pod."""
    reason: str = ""
    message: str = ""
    """Termination message of that container."""
    conditions: tuple[tuple[str, str], ...] = ()
    """Pairs of condition type and status."""
    unschedulable_since_s: float | None = None
    """Since when it is unschedulable."""
    unschedulable: str = ""
    """The scheduler's message about it."""
    waiting: Waiting | None = None
    """Why a container of it can't be started."""
    start: PodStart = RAN
    """How far it has come."""

    @property
    def place(self) -> str:
        """Node on which it uses capacity, bound or not; empty for none."""
        return self.node or self.wanted

    @property
    def ref(self) -> ObjectRef:
        """Reference of the pod."""
        return ObjectRef(kind="Pod", namespace=self.namespace, name=self.name)

    @property
    def ended(self) -> bool:
        """Whether its containers have ended for good, so that it holds no devices."""
        return self.phase in {PodPhase.SUCCEEDED, PodPhase.FAILED}

    def is_stuck(self, now_s: float) -> bool:
        """Tell whether it was deleted and did not end within a minute after its grace period."""
        return not self.ended and self.ends_by_s is not None and now_s >= self.ends_by_s + ENDS_WITHIN_S


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ForeignPod:
    """A pod of another owner that uses capacity of a node."""

    node: str
    requests: Requests
    stays: bool = False
    """Whether it stays on a node that is emptied: a DaemonSet's, or one that the kubelet runs by itself."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """A node."""

    name: str
    allocatable: Requests = ()
    ready: bool = True
    not_ready_since_s: float | None = None
    unschedulable: bool = False
    out_of_service: bool = False
    """Whether it has the ``out-of-service`` taint, by which an administrator confirms that nothing runs there."""
    labels: tuple[tuple[str, str], ...] = ()
    """Labels by name, without the host's, so that similar nodes share them."""
    host: str = ""
    """Value of the label ``kubernetes.io/hostname``."""
    taints: tuple[Taint, ...] = ()
    risk: float = 0.0
    owned: bool = False
    """Whether it has the taint of nodes on which the operator binds pods."""
    leave: Leave = Leave.STAY
    """How workers leave it, since it is out of service."""
    leave_since_s: float = 0.0
    """Since when."""
    fault: str = ""
    """Why, for people."""
    checked_s: float | None = None
    """When its checks before training ended last; None: never."""
    check_failed: bool = False
    """Whether it failed them."""
    start_failed: bool = False
    """Whether it has failed to start or to end pods since the last one that started on it."""
    slow_rank: bool = False
    """Whether a rank was slow there, and none has trained there since that was not."""
    held: bool = False
    """Whether it is part of a mass outage: its pods don't count as lost then, however long it is not ready."""

    def capacity(self, resource: str) -> int:
        """Return the allocatable amount of a resource."""
        return next((amount for name, amount in self.allocatable if name == resource), 0)

    @property
    def health(self) -> tuple[object, ...]:
        """The part of its state that matters to jobs running there."""
        state = self.ready, self.not_ready_since_s, self.unschedulable, self.out_of_service, self.taints
        return *state, self.leave, self.held

    @property
    def usable(self) -> bool:
        """Whether new pods may be placed here."""
        return self.ready and not self.unschedulable and not self.out_of_service

    @property
    def is_faulty(self) -> bool:
        """Whether it has the taint of nodes that are out of service."""
        return any(taint.key == HEALTH for taint in self.taints)

    def lost(self, now_s: float, *, node_lost_s: float) -> bool:
        """Tell whether its pods count as lost."""
        if self.out_of_service or self.held:
            return self.out_of_service
        return self.not_ready_since_s is not None and now_s - self.not_ready_since_s >= node_lost_s


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeaseView:
    """A job's Lease, with the leader's heartbeat and its newest progress record."""

    namespace: str
    name: str
    uid: str
    resource_version: str
    job_uid: str
    record: ProgressRecord | None = None
    seen_s: float = 0.0
    """When it last changed, by the operator's clock, since the clocks of nodes differ."""
    advanced_seen_s: float = 0.0
    """When this step, attempt and phase was first seen, by the operator's clock."""
    advanced_said_s: float = 0.0
    """When that was written, by the leader's clock."""

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
    spares: SparesView | None = None
    status: Mapping[str, Any] = dataclasses.field(default_factory=dict, compare=False)
    """Its last written status."""


def is_paused(status: TrainingJobStatus, generation: int) -> bool:
    """Tell whether a job waits for a change of its spec, since rollbacks did not help."""
    known = status.condition(ConditionType.SUSPENDED)
    if known is None or known.status != "True" or known.reason != Reason.LOSS_SPIKES:
        return False
    return known.observed_generation == generation


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
    """None if it is invalid; ``invalid`` then says why."""
    invalid: str
    """Why the spec can't run at any worker count that is known to it."""
    status: TrainingJobStatus
    requests: Requests = ()
    """Of each worker, with what the API server adds."""
    stored: Requests = ()
    """Requests that its pods were stored with, where they have more than was known before."""
    constraints: Constraints = dataclasses.field(default_factory=Constraints)
    """Which nodes its workers accept."""
    plans: tuple[Plan, ...] = ()
    """Plans for every worker count that it accepts; none if no layout fits or while they are made."""
    size_refused: str = ""
    """Why ``spec.workers.replicas`` has no plan though the count in force has one."""
    planning: PlanRequest | None = None
    """Request for its plans; None once they exist, or if its spec is invalid."""
    priority: int = 0
    """By which it waits and is preempted (``types/priority.py``)."""
    class_missing: bool = False
    """Whether its PriorityClass does not exist."""
    queue_refusal: str = ""
    """Why its queue does not accept it; empty if it does. It waits for no capacity then, and preempts no job."""
    template_unknown: str = ""
    """Which fields of its pod template Kubernetes does not know; empty if it knows all."""
    schedule_fault: str = ""
    """What is wrong with appended changes of the mixture, which are left out; empty if nothing is."""
    unreadable: str = ""
    """Why a part of the stored object can't be read; the known value of that part is kept."""
    fault: str = ""
    """The error of a decision about this job; it stays until the job is retried or its spec changes."""
    fault_reason: Reason = Reason.INTERNAL_ERROR
    """Kind of the fault."""
    fault_in_cycle: bool = False
    """Whether only the scheduler's decision raised it, so that the job is still reconciled."""

    key_ids: tuple[str, ...] = ()
    """Names of the installation's keys: that of new gangs first. A reader that has none checks nothing."""

    data_gate: bool = False
    """Whether jobs are admitted only when their data is ready."""
    data_digest: str = ""
    """Digest of the data part of the spec; reports on other data don't count."""
    data_report: DataReport | None = None
    """The datahub controller's report; None if there is none that can be read."""
    data_unreadable: str = ""
    """Why the report can't be read."""

    @property
    def quarantined(self) -> str:
        """Why the job is in quarantine; empty if it is not."""
        return self.unreadable or self.fault

    @property
    def paused(self) -> bool:
        """Whether it waits for a change of its spec, since rollbacks did not help."""
        return is_paused(self.status, self.generation)

    @property
    def key_lost(self) -> bool:
        """Whether the installation has no longer the key with which the attempt's records are signed."""
        attempt = self.status.attempt
        return bool(self.key_ids) and attempt is not None and attempt.key_id not in ("", *self.key_ids)

    attempt_seen_s: float = 0.0
    """When the attempt was first seen with its present desired state, by the operator's clock; 0 if unknown."""
    first_admitted_s: float | None = None
    """When it was first admitted, by the operator's clock: when that was seen, else its recorded time, but never in the
    future. None if it was not."""
    admitted_s: float | None = None
    """When it got its present admission, measured in the same way."""
    finished_s: float | None = None
    """When it finished, measured in the same way."""
    unready_s: float | None = None
    """Since when this operator has seen it admitted while its pods were not ready; None if they are, or it is not."""

    @property
    def ref(self) -> ObjectRef:
        """Reference of the job."""
        return ObjectRef(kind="TrainingJob", namespace=self.namespace, name=self.name)

    @property
    def replicas(self) -> int:
        """The worker count that it asks for: that of its spec, or the one in force if that of its spec is refused.

        A count that is refused only because there is no room is asked for again once the job is admitted.
        """
        requested = 0 if self.spec is None else self.spec.workers.replicas
        kept = self.replicas_in_force
        if not kept or not (self.size_refused or (not self.admitted and self.is_resize_refused)):
            return requested
        return kept if self.plan_at(kept) is not None else requested

    @property
    def replicas_in_force(self) -> int:
        """The worker count of the admission; without one that of the last attempt that trained, or was accepted."""
        attempt, known = self.status.attempt, self.status.replicas_in_force
        return known if attempt is None or (known and not self.admitted) else attempt.replicas

    @property
    def is_resize_refused(self) -> bool:
        """Whether the status says that the worker count of this spec is refused."""
        refused = self.status.condition("ResizeRefused")
        return refused is not None and refused.status == "True" and refused.observed_generation == self.generation

    @property
    def planned_generation(self) -> int:
        """The generation of the spec that a status of now describes: not of one that is being planned."""
        return self.generation if self.planning is None else self.status.observed_generation

    @property
    def plan(self) -> Plan | None:
        """Plan for ``replicas``; None if no layout fits or while it is being planned."""
        return self.plan_at(self.replicas)

    def plan_at(self, replicas: int) -> Plan | None:
        """Return the plan for a worker count; None where no layout fits."""
        return next((plan for plan in self.plans if plan.replicas == replicas), None)

    @property
    def attempt(self) -> AttemptStatus | None:
        """The current or last attempt."""
        return self.status.attempt

    @property
    def admitted(self) -> bool:
        """Whether it holds its devices."""
        return self.status.is_true("Admitted")
