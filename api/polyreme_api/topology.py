"""The ClusterTopology: which labels of nodes say how near two nodes are."""

from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field, model_validator

from polyreme_api.fields import Condition, LabelKey, Name, Part, StatusPart
from polyreme_api.metadata import ClusterMeta, Object

LEVELS_MAX = 8
UNLABELLED_MAX = 10
"""Nodes without labels that the status names."""
SPARES_MAX = 1_000
"""Spares of one domain."""
SPARES_SHOWN_MAX = 100
"""Spares that the status names."""
HOST_NAME = "host"
HOST_LABEL = "kubernetes.io/hostname"
DEFAULT_TOPOLOGY = "default"
"""Name of the topology that the operator uses."""


class TopologyLevel(Part):
    """One level: nodes with the same value of the label, within one domain of the level above, are one domain."""

    name: Name
    """Name by which jobs ask for it, such as ``rack``."""
    node_label: LabelKey
    """Label of the nodes whose value names their domain."""
    distance: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Cost of a byte between two nodes whose nearest common domain is at this level, relative to the other levels'; by
    default it doubles from level to level upwards, and once more where even the top level differs."""


class Spares(Part):
    """Nodes in service that are kept for repairs: new gangs leave them free."""

    level: Name
    """Level, such as ``rack``: each of its domains keeps spares of its own."""
    nodes: Annotated[int, Field(ge=1, le=SPARES_MAX)] | None = None
    """Nodes that each domain keeps. Workers that leave a lost or faulty node are placed there; a gang that must be
    placed as a whole is not."""
    percent: Annotated[int, Field(ge=1, le=50)] | None = None
    """Share of its nodes that each domain keeps, rounded up, in place of ``nodes``."""

    @model_validator(mode="after")
    def _one_of_both(self) -> "Spares":
        if (self.nodes is None) == (self.percent is None):
            seen = "neither" if self.nodes is None else f"nodes {self.nodes} and percent {self.percent}"
            raise ValueError(f"spares of level {self.level} need nodes or percent, seen {seen}; set one of them")
        return self


class ClusterTopologySpec(Part):
    """The network from its widest domains to its narrowest; the host is always below the last level."""

    levels: Annotated[list[TopologyLevel], Field(min_length=1, max_length=LEVELS_MAX)]
    """Levels, top to bottom: zone, block, rack, NVLink domain."""
    spares: Spares | None = None
    """Nodes that each domain keeps for repairs; none: every free node is for any gang."""

    @model_validator(mode="after")
    def _levels_fit(self) -> "ClusterTopologySpec":
        for field, values in (
            ("name", [level.name for level in self.levels]),
            ("nodeLabel", [level.node_label for level in self.levels]),
        ):
            if doubled := sorted({value for value in values if values.count(value) > 1}):
                raise ValueError(f"levels: two levels have the {field} {doubled[0]!r}; each is unique, change one")
        for level in self.levels:
            if level.name == HOST_NAME or level.node_label == HOST_LABEL:
                raise ValueError(
                    f"levels: level {level.name!r} with nodeLabel {level.node_label!r} is the host, which is always "
                    "below the last level; drop it"
                )
        names = [level.name for level in self.levels]
        if self.spares is not None and self.spares.level not in names:
            raise ValueError(
                f"spares.level {self.spares.level} is no level, the levels are {', '.join(names)}; name one of them"
            )
        given = [level for level in self.levels if level.distance is not None]
        for upper, lower in pairwise(given):
            if (upper.distance or 0) < (lower.distance or 0):
                raise ValueError(
                    f"levels: distance {upper.distance} of {upper.name!r} is below distance {lower.distance} of "
                    f"{lower.name!r} below it; distances fall from top to bottom, change one"
                )
        return self


class LevelCount(StatusPart):
    """Domains of one level."""

    level: Annotated[str, Field(max_length=63)]
    """Name of the level."""
    count: Annotated[int, Field(ge=0)]
    """Domains that nodes belong to."""


class ClusterTopologyStatus(StatusPart):
    """What the operator sees of the nodes' labels."""

    observed_generation: int = 0
    """Generation of the spec that this status describes."""
    conditions: Annotated[list[Condition], Field(max_length=16)] = Field(default_factory=list)
    """Whether the labels form a tree, and if not, why."""
    domains: Annotated[list[LevelCount], Field(max_length=LEVELS_MAX + 1)] = Field(default_factory=list)
    """Domains by level, top to bottom."""
    nodes: Annotated[int, Field(ge=0)] = 0
    """Nodes that have every label."""
    unlabelled: Annotated[int, Field(ge=0)] = 0
    """Nodes that lack a label; no gang is placed there."""
    unlabelled_nodes: Annotated[list[Annotated[str, Field(max_length=253)]], Field(max_length=UNLABELLED_MAX)] = Field(
        default_factory=list
    )
    """The first of them."""
    spares: Annotated[int, Field(ge=0)] = 0
    """Nodes that are kept as spares now."""
    spare_nodes: Annotated[list[Annotated[str, Field(max_length=253)]], Field(max_length=SPARES_SHOWN_MAX)] = Field(
        default_factory=list
    )
    """The first of them."""


class ClusterTopology(Object):
    """How near nodes are to each other, read off their labels; the one that is named ``default`` is used."""

    kind: Literal["ClusterTopology"]
    metadata: ClusterMeta
    spec: ClusterTopologySpec
    status: ClusterTopologyStatus = Field(default_factory=ClusterTopologyStatus)
