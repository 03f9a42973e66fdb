"""The fault table as decisions read it, and the conditions that say whether a node has a fault."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from polyreme_api.faults.table import FaultRow, fault_table
from polyreme_api.node_report import (
    CONDITION_AGENT,
    CONDITION_POD_START,
    CONDITION_PRE_CHECK,
    CONDITION_PREFIX,
    NodeEvent,
)
from polyreme_api.node_report import decode as decode_message
from polyreme_operator.health.signs import ConditionView

_OPERATORS = frozenset({CONDITION_PRE_CHECK, CONDITION_POD_START})
"""Conditions that the operator writes."""


@functools.cache
def _detectors() -> frozenset[str]:
    """Return the types of conditions of node-problem-detector and its like."""
    return frozenset(code for code, row in fault_table().items() if row.is_condition)


def lookup(condition: str, code: str) -> FaultRow | None:
    """Return the row of a code; a detector's condition without a known code has the row of its type."""
    return fault_table().get(code) or fault_table().get(condition)


def polarity(condition: str) -> str | None:
    """Return the status by which a condition shows a fault; None: it is none of the detectors'."""
    ours = condition.startswith(CONDITION_PREFIX) and condition != CONDITION_AGENT
    return "True" if ours or condition in _detectors() else None


def is_agents(condition: str) -> bool:
    """Tell whether the node agent writes a condition."""
    return condition.startswith(CONDITION_PREFIX) and condition not in _OPERATORS


def decode(condition: ConditionView) -> tuple[Sequence[NodeEvent], str]:
    """Read the events of a condition: by its reason alone, where its message has no events."""
    if not is_agents(condition.type) and condition.type != CONDITION_POD_START:
        return (), ""
    return decode_message(condition.message)
