"""The record of a node's health: one annotation, written in the same patch as the taint and the label.

Every client that may patch nodes may write this annotation. So it is parsed strictly, and text that is foreign or
broken is reported and never trusted: the operator then judges the node as one about which nothing is known.
"""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic.alias_generators import to_camel

from polyreme_api import labels
from polyreme_api.times import parse_rfc3339, rfc3339

HEALTH = f"{labels.GROUP}/health"
"""Key of the taint (value: class of the fault), of the label (value: state) and of the annotation (value: record)."""
PROBATION = f"{labels.GROUP}/probation"
"""Key of the taint by which placement sees a node in probation under load. No node has it: it is in the operator's view
alone, so that pods that are no workers are not kept away."""
RECORD_BYTES_MAX = 16_384
CODES_MAX = 16
"""Codes whose counts a record keeps; the one seen least recently is dropped first."""
DEVICES_MAX = 16
FATAL_TIMES_MAX = 5
REPAIRS_MAX = 5
EVIDENCE_CHARACTERS_MAX = 256
OWNER_CHARACTERS_MAX = 253
SHOWN_TIMES = ("since_s", "examine_at_s", "until_s")
"""Fields that are written as RFC 3339, for people; to the millisecond, so that they read back as they were."""
OPERATOR = "operator"
"""Owner of a taint whose policy is gone, or whose record could not be read."""
PERSON = "person"
"""Owner of a taint that a person added; ``person/NAME`` if it is known who."""


class NodeState(StrEnum):
    """States of a node."""

    HEALTHY = "healthy"
    AT_RISK = "at-risk"
    """Nothing is done to it, but placement prefers calmer nodes."""
    QUARANTINED = "quarantined"
    """Tainted: it gets no new pods."""
    DRAINING = "draining"
    """Tainted, and the workers on it leave by their job's policy."""
    REPAIRING = "repairing"
    """Tainted and empty: it waits for the action that its record names."""
    PROBATION = "probation"
    """Back in service after its examination; a recurrence escalates."""
    RETIRED = "retired"
    """Tainted until a person releases it."""

    @property
    def is_out(self) -> bool:
        """Whether a node in this state has the taint."""
        return self in _OUT


_OUT = frozenset({NodeState.QUARANTINED, NodeState.DRAINING, NodeState.REPAIRING, NodeState.RETIRED})


class Leave(StrEnum):
    """How workers leave a tainted node."""

    STAY = "Stay"
    """They don't; the node only gets no new ones."""
    DRAIN = "Drain"
    """By their job's policy: at once, after a checkpoint, or when the job ends."""
    EVICT = "Evict"
    """At once, whatever their job's policy says."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", alias_generator=to_camel, populate_by_name=True)

    def but(self, **fields: object) -> Self:
        """Return it with other values of some fields."""
        return self.model_copy(update=fields)


_Name = Annotated[str, Field(max_length=OWNER_CHARACTERS_MAX)]
_Text = Annotated[str, Field(max_length=EVIDENCE_CHARACTERS_MAX)]
_Seconds = Annotated[float, Field(ge=0.0, le=1e11, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=0, le=1_000_000_000)]


class Release(_Part):
    """The last time that a person returned the node to service."""

    by: _Name = PERSON
    reason: _Text = ""
    at_s: _Seconds = 0.0


class RepairAction(StrEnum):
    """Actions that hooks carry out; each is graver than the one before it."""

    RESET = "Reset"
    REBOOT = "Reboot"
    REPLACE = "Replace"


class RepairPhase(StrEnum):
    """Phases of a repair."""

    WAIT = "Wait"
    """The next attempt is chosen and not begun."""
    REPAIR = "Repair"
    CHECK = "Check"
    SETTLE = "Settle"
    """Its Jobs have succeeded, and the fault has to be gone."""
    STOP = "Stop"
    """Its Job is being deleted."""


class StopThen(StrEnum):
    """What follows when a Job is gone that was stopped."""

    NEXT = "Next"
    """The next attempt."""
    SAME = "Same"
    """The same attempt, later."""
    END = "End"
    """Nothing: the node is in service."""


class Repair(_Part):
    """The repair that is under way."""

    action: RepairAction
    attempt: Annotated[int, Field(ge=1, le=5)] = 1
    phase: RepairPhase
    job: Annotated[str, Field(max_length=63)] = ""
    """Name of its Job."""
    uid: Annotated[str, Field(max_length=64)] = ""
    """UID of its Job, once it was seen."""
    at_s: _Seconds = 0.0
    """When the phase began."""
    deadline_s: _Seconds = 0.0
    """When the phase ends at the latest; 0: not before its Job exists."""
    then: StopThen = StopThen.NEXT
    why: Annotated[str, Field(max_length=128)] = ""
    """Why it is stopped."""


class Seen(_Part):
    """What was last counted of one code on one device."""

    boot: Annotated[str, Field(max_length=64)] = ""
    count: _Count = 0
    at_s: _Seconds = 0.0


class Record(_Part):
    """What the operator knows of a node's health."""

    version: Literal[1] = 1
    state: NodeState = NodeState.HEALTHY
    owner: _Name = ""
    """Who set the taint: ``policy/NAME``, ``person/NAME`` or ``operator``; empty: no taint is set."""
    fault_class: Annotated[str, Field(max_length=63)] = ""
    """Class of the gravest fault; the value of the taint."""
    reason: Annotated[str, Field(max_length=128)] = ""
    """Code of that fault."""
    device: Annotated[str, Field(max_length=128)] = ""
    action: Annotated[str, Field(max_length=32)] = ""
    """What would repair it."""
    leave: Leave = Leave.STAY
    evidence: _Text = ""
    condition: Annotated[str, Field(max_length=316)] = ""
    """Type of the condition that showed it, and that must be clear before the taint is lifted."""
    since_s: _Seconds = 0.0
    examine_at_s: _Seconds = 0.0
    """When the taint is examined next; every tainted node has one."""
    examinations: _Count = 0
    until_s: _Seconds = 0.0
    """End of a person's quarantine, after which it is examined like any other; 0: when a person releases it."""
    recurrences: _Count = 0
    """Faults during probation, since the node was last healthy for a week."""
    repair: Repair | None = None
    repaired_at_s: _Seconds = 0.0
    """When a repair reported success: what was seen of events before then is no fault any more."""
    opt_in: bool = False
    """Whether only jobs that accept it are placed on it during its probation."""
    loaded_s: _Seconds = 0.0
    """How long workers have run on it in this probation."""
    loaded_at_s: _Seconds = 0.0
    """Until when that is counted; 0: nothing ran there at the last look."""
    repairs_s: Annotated[tuple[_Seconds, ...], Field(max_length=REPAIRS_MAX)] = ()
    """When it returned from quarantine, newest last."""
    fatal_s: Annotated[dict[_Name, tuple[_Seconds, ...]], Field(max_length=DEVICES_MAX)] = Field(default_factory=dict)
    """Times of the newest fatal faults, by device."""
    seen: Annotated[dict[_Name, Seen], Field(max_length=CODES_MAX)] = Field(default_factory=dict)
    """What has been counted, by code and device: the same evidence never counts twice."""
    score: Annotated[float, Field(ge=0.0, le=64.0, allow_inf_nan=False)] = 0.0
    """Decayed, weighted count of faults at ``score_at_s``."""
    score_at_s: _Seconds = 0.0
    risk: Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)] = 0.0
    """Probability of failure that placement reads."""
    released: Release | None = None

    def in_state(self, state: NodeState, now_s: float) -> Record:
        """Return it as it is when a state begins that leaves nothing of the last time out of service."""
        return self.but(state=state, since_s=now_s, **_BLANK)

    @field_validator("*", mode="before")
    @classmethod
    def _times_are_written_for_people(cls, value: object, info: object) -> object:
        name = getattr(info, "field_name", "")
        return value if name not in SHOWN_TIMES or not isinstance(value, str) else round(parse_rfc3339(value), 3)

    @property
    def is_persons(self) -> bool:
        """Whether a person set the taint."""
        return self.owner == PERSON or self.owner.startswith(f"{PERSON}/")


_BLANK = Record().model_dump(
    include={
        *("owner", "fault_class", "reason", "device", "action", "leave", "evidence", "condition", "examine_at_s"),
        *("examinations", "until_s", "opt_in", "loaded_s", "loaded_at_s"),
    }
)


def render(record: Record) -> str:
    """Write a record; times that people read are RFC 3339."""
    shown = record.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    for name in map(to_camel, SHOWN_TIMES):
        if name in shown:
            shown[name] = rfc3339(shown[name])
    return json.dumps({"version": 1, **shown}, separators=(",", ":"), sort_keys=True)


def parse(text: str | None) -> tuple[Record | None, str]:
    """Read a record; None with the reason if the text can't be trusted, None and no reason if there is none."""
    if not text:
        return None, ""
    if len(text) > RECORD_BYTES_MAX:
        return None, f"annotation {HEALTH} has {len(text)} characters, at most {RECORD_BYTES_MAX} are read"
    try:
        return Record.model_validate_json(text), ""
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        return None, f"annotation {HEALTH} can't be read{f' at {where}' if where else ''}: {first['msg']}"[:512]
    except (ValueError, RecursionError, OverflowError) as error:
        return None, f"annotation {HEALTH} can't be read: {error}"[:512]
