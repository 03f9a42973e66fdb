"""Signs of faults: what a node's conditions say, with the class and the action of the fault table."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from polyreme_api.faults.table import FaultRow
from polyreme_api.node_report import COUNT_MAX, REASON_ABSENT, NodeEvent

AGENT_SILENT_S = 180.0
"""How long the agent's heartbeat may stand still before its conditions count as unknown."""
SIGNS_MAX = 64
"""Signs of one node that are judged at a time; the remaining ones are left for the next examination."""
DOMAIN_FAULT = "DomainFault"
"""Code of the sign that a node has since its domain is faulty, and beginning of the condition's name in a record. No
node has such a condition."""
_KNOWN = frozenset({"True", "False"})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ConditionView:
    """A condition of a Node."""

    type: str
    status: str
    reason: str = ""
    message: str = ""
    since_s: float = 0.0
    """Since when it shows a fault; 0: it does not, or that is unknown."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """A fault that a node shows."""

    row: FaultRow
    condition: str
    """Type of the condition that shows it."""
    status: str = "True"
    """Status by which that condition shows it."""
    device: str = ""
    count: int = 1
    last_s: float = 0.0
    """When it last occurred; never in the future. 0: unknown."""
    boot: str = ""
    message: str = ""
    known: bool = True
    """Whether the fault table has its code; an unknown one is reported and triggers no action."""
    since_s: float = 0.0
    """Since when its condition shows a fault; never in the future. 0: unknown."""
    rule: str = ""
    """The evacuation rule that found the fault in the node's domain; empty: the node shows it itself."""

    @property
    def at_s(self) -> float:
        """When it last occurred, as far as is known."""
        return self.last_s or self.since_s

    @property
    def key(self) -> str:
        """Code and device."""
        return f"{self.row.code}/{self.device}" if self.device else self.row.code


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What the conditions of one node say."""

    signs: tuple[Sign, ...] = ()
    clear: frozenset[str] = frozenset()
    """Types of conditions that were examined and show no fault."""
    unknown: tuple[str, ...] = ()
    """Types of conditions that can't be examined."""
    absent: tuple[str, ...] = ()
    """Types of conditions that have nothing to examine on this node; never proof that something is well."""
    cured: bool = False
    """Whether events were left out that a repair has cured."""
    problems: tuple[str, ...] = ()
    """What could not be read, and why."""


Decode = Callable[[ConditionView], tuple[Sequence[NodeEvent], str]]
Lookup = Callable[[str, str], FaultRow | None]
"""FaultRow by type of the condition and code; None if the table has none."""


def read_conditions(
    conditions: Sequence[ConditionView],
    *,
    decode: Decode,
    lookup: Lookup,
    polarity: Callable[[str], str | None],
    is_agents: Callable[[str], bool],
    silent: bool,
    now_s: float,
) -> Reading:
    """Read the signs of one node.

    Args:
        conditions: All conditions of the node.
        decode: Reads the events of a condition; it never raises.
        lookup: The fault table.
        polarity: Returns the status by which a type of condition shows a fault; None: it says nothing about faults.
        is_agents: Tells whether the node agent writes this type of condition.
        silent: Whether the agent's heartbeat stands still: then what it said last is not known to hold.
        now_s: The time.
    """
    signs: list[Sign] = []
    clear: set[str] = set()
    unknown: list[str] = []
    absent: list[str] = []
    problems: list[str] = []
    for condition in sorted(conditions, key=lambda each: each.type):
        faulty = polarity(condition.type)
        if faulty is None:
            continue
        if condition.status == faulty:
            events, problem = decode(condition)
            if problem:
                problems.append(f"condition {condition.type}: {problem}")
            events = events or (NodeEvent(code=condition.reason or condition.type),)
            signs += [_sign(event, condition, lookup, now_s) for event in events]
        elif silent and is_agents(condition.type):
            unknown.append(condition.type)
        elif condition.status in _KNOWN:
            clear.add(condition.type)
        elif condition.reason == REASON_ABSENT and is_agents(condition.type):
            absent.append(condition.type)
        else:
            unknown.append(condition.type)
    if len(signs) > SIGNS_MAX:
        problems.append(f"{len(signs)} faults are reported, at most {SIGNS_MAX} are judged")
    return Reading(
        signs=tuple(signs[:SIGNS_MAX]),
        clear=frozenset(clear),
        unknown=tuple(unknown),
        absent=tuple(absent),
        problems=tuple(problems),
    )


def _sign(event: NodeEvent, condition: ConditionView, lookup: Lookup, now_s: float) -> Sign:
    row = lookup(condition.type, event.code)
    known = row is not None
    row = row or FaultRow(code=event.code[:128], fault_class="unknown", action="None")
    if known and event.action:
        # The driver's own verdict outranks the table.
        row = dataclasses.replace(row, action=event.action)
    return Sign(
        row=row,
        condition=condition.type,
        status=condition.status,
        device=event.device[:128],
        count=max(1, min(event.count, COUNT_MAX)),
        # A clock in the future must not keep a window open for ever.
        last_s=max(0.0, min(event.last_s, now_s)),
        boot=event.boot[:64],
        message=condition.message.split("\n", 1)[0][:256],
        known=known,
        since_s=max(0.0, min(condition.since_s, now_s)),
    )
