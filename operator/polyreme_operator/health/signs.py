"""Signs of faults: what a node's conditions say, with the class and the action of the fault table."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from polyreme_api.faults.table import FaultRow, fault_table
from polyreme_api.node_report import (
    CONDITION_AGENT,
    CONDITION_POD_START,
    CONDITION_PRE_CHECK,
    CONDITION_PREFIX,
    CONDITION_SLOW_RANK,
    COUNT_MAX,
    REASON_ABSENT,
    NodeEvent,
    decode,
)

AGENT_SILENT_S = 180.0
"""How long the agent's heartbeat may be frozen before its conditions count as unknown."""
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


_COUNTED = frozenset({CONDITION_POD_START, CONDITION_SLOW_RANK})
_OPERATORS = _COUNTED | {CONDITION_PRE_CHECK}
"""Conditions that the operator writes; those whose failures it counts have events."""


@functools.cache
def _detectors() -> frozenset[str]:
    """Return the types of conditions of node-problem-detector and its like."""
    return frozenset(code for code, row in fault_table().items() if row.is_condition)


def _polarity(condition: str) -> str | None:
    """Return the status by which a condition shows a fault; None: it says nothing about faults."""
    ours = condition.startswith(CONDITION_PREFIX) and condition != CONDITION_AGENT
    return "True" if ours or condition in _detectors() else None


def _is_agents(condition: str) -> bool:
    return condition.startswith(CONDITION_PREFIX) and condition not in _OPERATORS


def _events_of(condition: ConditionView) -> tuple[Sequence[NodeEvent], str]:
    """Read the events of a condition; none where its message has none, so that its reason alone counts."""
    if not _is_agents(condition.type) and condition.type not in _COUNTED:
        return (), ""
    return decode(condition.message)


def read_conditions(
    conditions: Sequence[ConditionView],
    *,
    silent: bool,
    now_s: float,
    polarity: Mapping[str, str] = MappingProxyType({}),
    events_of: Callable[[ConditionView], tuple[Sequence[NodeEvent], str]] = _events_of,
) -> Reading:
    """Read the signs of one node.

    Args:
        conditions: All conditions of the node.
        silent: Whether the agent's heartbeat stays the same: then what it said last is not known to hold.
        now_s: The time.
        polarity: The status by which further types of conditions show a fault.
        events_of: Reads the events of a condition, and says what could not be read; it never raises.
    """
    signs: list[Sign] = []
    clear: set[str] = set()
    unknown: list[str] = []
    absent: list[str] = []
    problems: list[str] = []
    for condition in sorted(conditions, key=lambda each: each.type):
        faulty = polarity.get(condition.type) or _polarity(condition.type)
        if faulty is None:
            continue
        if condition.status == faulty:
            events, problem = events_of(condition)
            if problem:
                problems.append(f"condition {condition.type}: {problem}")
            events = events or (NodeEvent(code=condition.reason or condition.type),)
            signs += [_sign(event, condition, now_s) for event in events]
        elif silent and _is_agents(condition.type):
            unknown.append(condition.type)
        elif condition.status in _KNOWN:
            clear.add(condition.type)
        elif condition.reason == REASON_ABSENT and _is_agents(condition.type):
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


def _sign(event: NodeEvent, condition: ConditionView, now_s: float) -> Sign:
    # A detector's condition without a known code has the row of its type.
    row = fault_table().get(event.code) or fault_table().get(condition.type)
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
        # A clock in the future must not keep a window open forever.
        last_s=max(0.0, min(event.last_s, now_s)),
        boot=event.boot[:64],
        message=condition.message.split("\n", 1)[0][:256],
        known=known,
        since_s=max(0.0, min(condition.since_s, now_s)),
    )
