"""The NodeFaultPolicy: which signs of a faulty node lead to which answer, and how much may be taken out at once."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from polyreme_api.faults.classes import FaultClass
from polyreme_api.fields import Condition, Message, Name, Part, Seconds, StatusPart, Time
from polyreme_api.metadata import ClusterMeta, Object

RULES_MAX = 64
EVACUATIONS_MAX = 8
CHARGES_MAX = 2_000
"""Nodes that one policy may have out of service at once, whatever its percentage says: its status must stay small."""


class NodeConditionMatch(Part):
    """Matches a condition of a node, as a node problem detector writes it."""

    type: Annotated[str, Field(min_length=1, max_length=316)]
    """Condition type, ``KernelDeadlock``."""
    status: Literal["True", "False", "Unknown"] = "True"
    """Condition status."""


class FaultRule(Part):
    """One rule; the first that matches decides."""

    name: Name
    """Name, shown where the rule decides."""
    action: Literal["Ignore", "Watch", "Taint", "Drain", "Evict"]
    """``Watch`` only counts; ``Taint`` keeps new pods away; ``Drain`` lets jobs checkpoint before they leave the node;
    ``Evict`` moves them at once."""
    on_xids: Annotated[list[Annotated[int, Field(ge=1, le=1023)]], Field(max_length=256)] = Field(default_factory=list)
    """Matches any of these XID codes of the NVIDIA driver."""
    on_node_conditions: Annotated[list[NodeConditionMatch], Field(max_length=20)] = Field(default_factory=list)
    """Matches if the node has any of these conditions."""
    count: Annotated[int, Field(ge=1, le=1000)] = 1
    """Number of times that it must be seen within the window."""
    window_seconds: Annotated[int, Field(ge=1, le=31_536_000)] = 86_400
    """Sliding window of ``count``."""
    fault_class: FaultClass | None = None
    """Class of what the rule matches; none: that of the fault table. A code that the table lacks is only counted
    unless its rule names a class."""

    @model_validator(mode="after")
    def _matches_something(self) -> "FaultRule":
        if bool(self.on_xids) == bool(self.on_node_conditions):
            raise ValueError(f"rule {self.name!r} has either onXids or onNodeConditions; set exactly one")
        return self


class EvacuationRule(Part):
    """When the nodes of a domain that are well leave service with the others: something that all share has failed."""

    name: Name
    """Name, shown where the rule decides."""
    level: Name
    """Level of the ClusterTopology, such as ``rack``."""
    fault_classes: Annotated[list[FaultClass], Field(min_length=1, max_length=8)]
    """Fault classes that count, such as ``network-link``."""
    nodes_percent: Annotated[int, Field(ge=1, le=100)] = 50
    """Share of the domain's nodes that show such a fault; three nodes at least."""
    window_seconds: Annotated[int, Field(ge=1, le=3_600)] = 60
    """Time within which these nodes began to show it."""
    action: Literal["Taint", "Drain", "Evict"] = "Drain"
    """What is done to the other nodes of the domain, as in ``rules``. None of them is repaired, and all are back in
    service when fewer nodes show the fault."""


class Breaker(Part):
    """Stops acting when too much of the cluster looks faulty, since then the detector is probably at fault."""

    nodes_percent: Annotated[int, Field(ge=1, le=100)] = 10
    """Largest share of the selected nodes that may be out of service at once, for any reason; one node always may. If
    more would have to go, none goes, and the breaker stays latched until a person changes ``reset``."""
    window_seconds: Annotated[int, Field(ge=1, le=86_400)] = 300
    """How long a node counts at least, even if it is back in service."""
    reset: Annotated[str, Field(max_length=128)] = ""
    """Any text; a change of it resets a latched breaker. Say why, such as ``2026-11-23 ada: replaced the detector``."""


class Probation(Part):
    """What a node must prove under load before any job may use it again."""

    loaded_seconds: Annotated[Seconds, Field(le=31_536_000)] = 0
    """How long workers must run on a node that is back in service until its probation ends; until then only jobs with
    ``acceptProbation`` are placed there. 0: any job is, and the probation ends after ``probationSeconds``."""
    max_seconds: Annotated[int, Field(ge=1, le=31_536_000)] = 86_400
    """Longest probation under ``loadedSeconds``: a node that no job has used for so long is examined, and is back in
    full service if no fault is found."""


class RepairHook(Part):
    """A Job that carries out one action on a node that is out of service and empty."""

    action: Literal["Reset", "Reboot", "Replace"]
    """Action, as the fault table names it for a fault; where it does not help, the next one that has a hook is tried,
    in the order of these values."""
    template: Name
    """PodTemplate (``core/v1``) in the namespace of repairs from which the Job's pod is made. Who may write
    PodTemplates there decides what runs on nodes; a policy only chooses among them."""
    run_on: Literal["Node", "Cluster"] = "Node"
    """``Node``: the pod runs on the faulty node. ``Cluster``: anywhere, as a call of a cloud or of a BMC."""
    deadline_seconds: Annotated[int, Field(ge=1, le=86_400)] = 900
    """How long the Job may take."""
    attempts: Annotated[int, Field(ge=1, le=5)] = 1
    """How often the action is tried before the next one is."""


class CheckHook(Part):
    """A Job that tests a node after each repair, on the node itself."""

    template: Name
    """PodTemplate (``core/v1``) in the namespace of repairs from which the Job's pod is made."""
    deadline_seconds: Annotated[int, Field(ge=1, le=86_400)] = 900
    """How long the Job may take."""


class Repairs(Part):
    """How nodes that are out of service are repaired; without hooks people do it."""

    hooks: Annotated[list[RepairHook], Field(max_length=3)] = Field(default_factory=list)
    """Hooks by action, at most one each. When all have failed, the node is retired."""
    check: CheckHook | None = None
    """What must succeed after a repair before the node is examined; none: the examination decides alone."""
    settle_seconds: Annotated[int, Field(ge=1, le=86_400)] = 600
    """How long after a repair the fault may still be shown, since a node that boots takes its time."""

    @model_validator(mode="after")
    def _one_hook_by_action(self) -> "Repairs":
        actions = [hook.action for hook in self.hooks]
        if doubled := sorted({action for action in actions if actions.count(action) > 1}):
            raise ValueError(f"repairs.hooks: two hooks have the action {doubled[0]}; keep one")
        return self


class NodeFaultPolicySpec(Part):
    """How faulty nodes are handled."""

    mode: Literal["Observe", "Enforce"] = "Observe"
    """``Observe`` reports what it would do; ``Enforce`` does it, for the classes in ``classes``."""
    classes: Annotated[list[FaultClass], Field(max_length=32)] = Field(default_factory=list)
    """Fault classes for which ``Enforce`` acts; faults of all other classes are only counted."""
    node_selector: Annotated[dict[str, Annotated[str, Field(max_length=63)]], Field(max_length=32)] = Field(
        default_factory=dict
    )
    """Labels of the nodes that the policy is for; empty: all."""
    rules: Annotated[list[FaultRule], Field(max_length=RULES_MAX)] = Field(default_factory=list)
    """Ordered rules; the first match decides. Without a match the fault table does."""
    evacuations: Annotated[list[EvacuationRule], Field(max_length=EVACUATIONS_MAX)] = Field(default_factory=list)
    """Rules by which whole domains leave service, for the classes in ``classes``. A domain goes whole or not at all: if
    it is more than the breaker allows, that is reported, and only nodes with a fault of their own go."""
    examine_seconds: Annotated[Seconds, Field(ge=1)] = 300
    """Time from a taint to its first examination; the time doubles with each that finds the fault still there, up to an
    hour. An examination that finds it gone lifts the taint."""
    probation_seconds: Seconds = 3_600
    """How long a node that is back in service counts as risky; a fault in this time escalates."""
    probation: Probation = Field(default_factory=Probation)
    """What it must prove under load in that time."""
    breaker: Breaker = Field(default_factory=Breaker)
    """How much may be taken out of service at once."""
    repairs: Repairs = Field(default_factory=Repairs)
    """Hooks that repair nodes. They run only if the operator was installed with ``operator.repairs.enabled``, and never
    while the breaker is latched."""

    @model_validator(mode="after")
    def _names_are_unique(self) -> "NodeFaultPolicySpec":
        names = [*(rule.name for rule in self.rules), *(rule.name for rule in self.evacuations)]
        if doubled := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"rules: two rules are named {doubled[0]!r}; names are unique, rename one")
        return self


class FaultCount(StatusPart):
    """Nodes with a fault of one class."""

    fault_class: Annotated[str, Field(max_length=63)]
    """Fault class."""
    nodes: Annotated[int, Field(ge=0)] = 0
    """Nodes that show such a fault now."""
    would_take_out: Annotated[int, Field(ge=0)] = 0
    """Those of them that would be out of service if the class were enforced."""


class BreakerCharge(StatusPart):
    """A node that counts towards the breaker's limit."""

    node: Annotated[str, Field(max_length=253)]
    """Name of the node."""
    at: Time
    """When it was charged, before it was tainted."""
    released_at: Time = ""
    """When it was back in service."""


class BreakerStatus(StatusPart):
    """State of the breaker; written by compare-and-swap before a node is tainted."""

    latched: bool = False
    """Whether nothing is taken out or repaired until a person changes ``spec.breaker.reset``."""
    since: Time = ""
    """Since when it is latched."""
    message: Annotated[Message, Field(max_length=32_768)] = ""
    """What it refused."""
    limit: Annotated[int, Field(ge=0)] = 0
    """How many nodes may be out of service at once."""
    reset: Annotated[str, Field(max_length=128)] = ""
    """Value of ``spec.breaker.reset`` that was last obeyed."""
    charges: Annotated[list[BreakerCharge], Field(max_length=CHARGES_MAX)] = Field(default_factory=list)
    """Nodes that count."""


class NodeFaultPolicyStatus(StatusPart):
    """State of the policy as the fault controller sees it."""

    observed_generation: int = 0
    """Generation of the spec that this status describes."""
    conditions: Annotated[list[Condition], Field(max_length=16)] = Field(default_factory=list)
    """Whether the policy is in force, and if not, why."""
    nodes: Annotated[int, Field(ge=0)] = 0
    """Nodes that are selected."""
    out_of_service: Annotated[int, Field(ge=0)] = 0
    """Selected nodes that have the taint, set by this policy or by a person."""
    would_take_out: Annotated[int, Field(ge=0)] = 0
    """Nodes that would be out of service if every class were enforced."""
    unknown: Annotated[int, Field(ge=0)] = 0
    """Nodes with a condition that can't be examined, such as those with a silent agent."""
    faults: Annotated[list[FaultCount], Field(max_length=32)] = Field(default_factory=list)
    """Nodes with a fault, by class."""
    breaker: BreakerStatus = Field(default_factory=BreakerStatus)
    """State of the breaker."""


class NodeFaultPolicy(Object):
    """Rules by which faulty nodes are taken out of service."""

    kind: Literal["NodeFaultPolicy"]
    metadata: ClusterMeta
    spec: NodeFaultPolicySpec = Field(default_factory=NodeFaultPolicySpec)
    status: NodeFaultPolicyStatus = Field(default_factory=NodeFaultPolicyStatus)
