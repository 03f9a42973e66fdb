"""Input and output of the decision about the health of nodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping

from polyreme_cluster.port import Manifest, ObjectRef
from polyreme_operator.health.domains import Domain, DomainKey
from polyreme_operator.health.facts import NodeFacts, Note
from polyreme_operator.health.incidents import Incident, Kept
from polyreme_operator.health.node import HealthNode
from polyreme_operator.health.policy import Judged, PolicyView
from polyreme_operator.health.record import Record, Repair
from polyreme_operator.health.repair import JobSight
from polyreme_operator.health.status import NodeSummary, StatusFacts
from polyreme_operator.reconcile.incident_cost import JobFacts
from polyreme_operator.types.actions import EmitEvent
from polyreme_operator.types.views import JobView


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What was decided when a record was written, for the history."""

    record: Record | None = None
    notes: tuple[Note, ...] = ()
    rule: str = ""
    """Rule that decided; empty: none took the node out."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """A node that is decided about."""

    node: HealthNode
    facts: NodeFacts
    """What is known of it but for its policy, and what it shows."""
    silent: bool
    """Whether its agent has fallen silent."""
    jobs: tuple[JobView, ...]
    """Jobs with workers that have not left it."""
    others: tuple[ObjectRef, ...]
    """Pods on it that are no workers, and that a repair would end."""
    refused: int
    """Consecutive rounds of evictions that were refused."""
    evicted_s: float
    """When the last round was."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What was last decided about a node. It is rebuilt after a restart, so nothing may depend on its being there."""

    policies: tuple[str, ...] = ()
    """Policies that select it; with two, none is in force."""
    keys: tuple[DomainKey, ...] = ()
    judged: tuple[Judged, ...] = ()
    """What it shows itself."""
    summary: NodeSummary = dataclasses.field(default=NodeSummary())
    state: str = ""
    """State of the node; empty: it is deleted."""
    problem: str = ""
    """What could not be read, as it was reported."""
    blocked: str = ""
    """Why a repair can't begin, as it was reported."""
    observed: frozenset[str] = frozenset()
    """Faults that were counted without acting on them."""
    record: Record | None = None
    """The record that its history has."""
    incidents: Mapping[str, Incident] = dataclasses.field(default_factory=dict)
    """By name, those that are open, or whose costs are not known, as they are to be stored."""
    history_at_s: float | None = None
    """When they are written next."""
    look_s: float = 0.0
    """How long the next look at the costs is waited for."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PolicyWrite:
    """A policy's status to store, by compare-and-swap."""

    policy: PolicyView
    patch: Manifest
    nodes: tuple[str, ...] = ()
    """Nodes that are decided about again if it is not stored."""
    event: EmitEvent | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """What one policy may take out."""

    nodes: frozenset[str] = frozenset()
    write: PolicyWrite | None = None
    """The status that must be stored before."""
    current: StatusFacts | None = None
    """Facts with which the stored status is known to agree."""
    status_at_s: float = 0.0
    """When the status is looked at next if that only informs."""
    too_large: Mapping[DomainKey, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    """Faulty domains that the breaker has no room for, and the nodes of each that stay in service."""
    events: tuple[EmitEvent, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What was decided before."""

    nodes: Mapping[str, Seen] = dataclasses.field(default_factory=dict)
    domains: Mapping[DomainKey, Domain] = dataclasses.field(default_factory=dict)
    grants: Mapping[str, Grant] = dataclasses.field(default_factory=dict)
    """By policy."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Settings that decisions depend on."""

    repairs: bool
    """Whether hooks may run."""
    namespace: str
    """Namespace of their Jobs."""
    of_node: int
    """Incidents of one node that are kept."""
    of_all: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What is known of nodes, policies and incidents at one time."""

    now_s: float
    limits: Limits
    due: Collection[str]
    """Nodes that have changed or are looked at again."""
    view: Callable[[str], NodeView | None]
    """Returns what is known of a node; None: it was deleted."""
    present: Collection[str]
    """All nodes."""
    tainted: Collection[str]
    not_ready_since_s: Collection[float]
    policies: Mapping[str, PolicyView]
    levels: tuple[tuple[str, str], ...]
    """Name and label of the topology's levels."""
    said: Mapping[str, Said]
    """By node whose record was written since the last decision."""
    jobs: Mapping[str, JobView]
    costs: Mapping[str, JobFacts | None]
    """Jobs whose cost by an incident of these nodes is not known yet, by UID; None: the job was deleted."""
    incidents: Mapping[str, Mapping[str, Incident]]
    """By node and name, stored ones that are open or whose costs are not known, as far as they are read."""
    writable: bool
    """Whether they are read, and none is being written."""
    kept: Mapping[str, Kept]
    """All stored incidents."""
    refused: Collection[str]
    """Names of incidents that the API server refuses."""
    memory: Memory


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeWrite:
    """A record to store on its node, in one patch with taint and label."""

    node: HealthNode
    """As it was decided about; if anything but its version has changed, it is decided about again."""
    record: Record | None
    charge: str = ""
    """Policy whose status must have been stored before; empty: none."""
    said: Said
    events: tuple[EmitEvent, ...]
    repairs: tuple[tuple[str, str], ...]
    """Action and result of the repairs that this begins or ends."""
    takes_out: Judged | None = None
    """For which fault it takes the node out; None: it does not."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class IncidentWrite:
    """An incident to store; it is created if it has no UID."""

    incident: Incident
    deletes: tuple[Kept, ...] = ()
    """Older ones that make room."""
    fits: bool = True
    """Whether there is room; if not, it is dropped."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RepairWrite:
    """What is done for the repair of a node: one of these."""

    node: str
    look: Repair | None = None
    """The repair whose Job is read, and what is needed to create it."""
    template: str = ""
    """PodTemplate of that Job."""
    create: Manifest | None = None
    delete: JobSight | None = None
    evict: tuple[ObjectRef, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What is to be done, in this order: policies, nodes; then, without waiting for it, incidents and repairs."""

    policies: tuple[PolicyWrite, ...]
    nodes: tuple[NodeWrite, ...]
    incidents: tuple[IncidentWrite, ...]
    repairs: tuple[RepairWrite, ...]
    events: tuple[EmitEvent, ...]
    observed: tuple[Judged, ...]
    """Faults that are seen for the first time and not acted on."""
    failed: Mapping[str, Exception]
    """Nodes about which a decision raised an error."""
    wake_at_s: Mapping[str, float]
    """By node, when time alone may change the decision."""
    fences_held: bool
    """Whether no node counts as lost, since the view of them has probably failed."""
    memory: Memory
