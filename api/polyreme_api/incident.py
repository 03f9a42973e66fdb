"""The NodeIncident: what happened to a node from the time it left service until it is healthy again, and the cost."""

from typing import Annotated, Literal

from pydantic import Field

from polyreme_api.fields import MESSAGE_CHARACTERS_MAX, Message, Part, StatusPart, Time
from polyreme_api.metadata import ClusterMeta, Object

STEPS_MAX = 64
JOBS_MAX = 64
EVIDENCE_CHARACTERS_MAX = 512
"""Bound of the evidence; escaping may make a record's 256 characters longer."""


class NodeIncidentSpec(Part):
    """The fault as it was when the node left service. It never changes; what follows is in the status."""

    node: Annotated[str, Field(min_length=1, max_length=253)]
    """Name of the node."""
    hardware: Annotated[str, Field(max_length=253)] = ""
    """The machine: systemUUID of the node, else its providerID, else the UID of the Node object."""
    device: Annotated[str, Field(max_length=128)] = ""
    """Device with the fault, such as a GPU's UUID; empty: the whole machine."""
    since: Annotated[str, Field(min_length=1, max_length=32)]
    """When the node left service, as its record says."""
    fault_class: Annotated[str, Field(max_length=63)] = ""
    """Class of the fault; ``planned`` where a person took the node out."""
    reason: Annotated[str, Field(max_length=128)] = ""
    """Code of the fault, such as ``Xid79``."""
    evidence: Annotated[str, Field(max_length=EVIDENCE_CHARACTERS_MAX)] = ""
    """What was seen. Text of other programs: control characters are escaped, and it is cut."""
    condition: Annotated[str, Field(max_length=316)] = ""
    """Type of the node's condition that showed it."""
    owner: Annotated[str, Field(max_length=253)] = ""
    """Who took it out: ``policy/NAME``, ``person/NAME`` or ``operator``."""
    rule: Annotated[str, Field(max_length=63)] = ""
    """Rule of the policy that decided, or ``fault table``; empty if a person did, or if it is no longer known."""


class IncidentStep(StatusPart):
    """One thing that was done, and why."""

    at: Time
    """When."""
    action: Annotated[str, Field(max_length=63)]
    """What, such as ``Quarantined``, ``Examined`` or ``Returned``."""
    why: Annotated[Message, Field(max_length=MESSAGE_CHARACTERS_MAX)] = ""
    """Why, for people."""


class IncidentJob(StatusPart):
    """A job that had workers on the node, and what the incident cost it."""

    uid: Annotated[str, Field(max_length=64)]
    """UID of the job."""
    namespace: Annotated[str, Field(max_length=63)] = ""
    """Its namespace."""
    name: Annotated[str, Field(max_length=63)] = ""
    """Its name."""
    attempt: Annotated[int, Field(ge=0)] = 0
    """Attempt that ran on the node."""
    devices: Annotated[int, Field(ge=0)] = 0
    """Devices of the whole gang, since all of them wait for one."""
    stopped_at: Time = ""
    """When the gang stopped; empty: it did not."""
    resumed_at: Time = ""
    """When its first new step began."""
    repeated_steps: Annotated[int, Field(ge=0)] = 0
    """Steps after the last checkpoint, which were trained again."""
    outcome: Annotated[str, Field(max_length=32)] = ""
    """``Resumed``, ``Finished``, ``Suspended``, ``Preempted``, ``Deleted``, ``Stayed``, ``GivenUp``, or
    ``NeverTrained`` (there, so it lost nothing); empty while it is open."""
    lost_seconds: Annotated[int, Field(ge=0)] = 0
    """Device-seconds lost: from the stop to the first new step, plus repeated steps, times devices."""


class NodeIncidentStatus(StatusPart):
    """The course of the incident."""

    state: Annotated[str, Field(max_length=32)] = ""
    """State of the node when last written; ``ended`` when the incident is over."""
    ended_at: Time = ""
    """When the node was healthy again, or the incident ended otherwise."""
    ended: Annotated[str, Field(max_length=32)] = ""
    """How it ended: ``Healthy``, ``Released``, ``Recurred`` or ``NodeDeleted``."""
    steps: Annotated[list[IncidentStep], Field(max_length=STEPS_MAX)] = Field(default_factory=list)
    """What was done, in the order of time."""
    steps_dropped: Annotated[int, Field(ge=0)] = 0
    """Steps left out of the middle of the list, since it was full."""
    jobs: Annotated[list[IncidentJob], Field(max_length=JOBS_MAX)] = Field(default_factory=list)
    """Jobs that had workers on the node."""
    lost_seconds: Annotated[int, Field(ge=0)] = 0
    """Device-seconds lost by all jobs."""
    device_hours: Annotated[str, Field(max_length=32)] = ""
    """The same in hours, for people."""


class NodeIncident(Object):
    """One time that a node was out of service: the fault, the evidence, each step and its reason, and the cost."""

    kind: Literal["NodeIncident"]
    metadata: ClusterMeta
    spec: NodeIncidentSpec
    status: NodeIncidentStatus = Field(default_factory=NodeIncidentStatus)
