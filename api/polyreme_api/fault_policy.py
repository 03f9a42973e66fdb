"""The NodeFaultPolicy: which signs of a faulty node lead to which answer, and how much may be taken out at once."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from polyreme_api.fields import Condition, Name, Part, StatusPart
from polyreme_api.metadata import ClusterMeta, Object

RULES_MAX = 64


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

    @model_validator(mode="after")
    def _matches_something(self) -> "FaultRule":
        if bool(self.on_xids) == bool(self.on_node_conditions):
            raise ValueError(f"rule {self.name!r} has either onXids or onNodeConditions; set exactly one")
        return self


class Breaker(Part):
    """Stops acting when too much of the cluster looks faulty, since then the detector is probably at fault."""

    nodes_percent: Annotated[int, Field(ge=1, le=100)] = 10
    """Largest share of the selected nodes that may be out of service because of this policy."""
    window_seconds: Annotated[int, Field(ge=1, le=86_400)] = 300
    """Time window over which faults are counted for the breaker."""


class NodeFaultPolicySpec(Part):
    """How faulty nodes are handled."""

    mode: Literal["Observe", "Enforce"] = "Observe"
    """``Observe`` reports what it would do; ``Enforce`` does it."""
    node_selector: Annotated[dict[str, Annotated[str, Field(max_length=63)]], Field(max_length=32)] = Field(
        default_factory=dict
    )
    """Labels of the nodes that the policy is for; empty: all."""
    rules: Annotated[list[FaultRule], Field(max_length=RULES_MAX)] = Field(default_factory=list)
    """Ordered rules; the first match decides."""
    breaker: Breaker = Field(default_factory=Breaker)
    """How much may be taken out of service at once."""

    @model_validator(mode="after")
    def _names_are_unique(self) -> "NodeFaultPolicySpec":
        names = [rule.name for rule in self.rules]
        if doubled := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"rules: two rules are named {doubled[0]!r}; names are unique, rename one")
        return self


class NodeFaultPolicyStatus(StatusPart):
    """State of the policy as the fault controller sees it."""

    observed_generation: int = 0
    """Generation of the spec that this status describes."""
    conditions: Annotated[list[Condition], Field(max_length=16)] = Field(default_factory=list)
    """Whether the policy is in force, and if not, why."""
    nodes: Annotated[int, Field(ge=0)] = 0
    """Nodes that are selected."""
    out_of_service: Annotated[int, Field(ge=0)] = 0
    """Nodes that are out of service because of this policy."""


class NodeFaultPolicy(Object):
    """Rules by which faulty nodes are taken out of service."""

    kind: Literal["NodeFaultPolicy"]
    metadata: ClusterMeta
    spec: NodeFaultPolicySpec = Field(default_factory=NodeFaultPolicySpec)
    status: NodeFaultPolicyStatus = Field(default_factory=NodeFaultPolicyStatus)
