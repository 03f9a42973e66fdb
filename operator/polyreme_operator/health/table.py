"""The fault table as decisions read it, and the conditions that say whether a node has a fault."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from polyreme_api import labels
from polyreme_operator.health.signs import AGENT_CONDITION, ConditionView, Event, Row

AGENTS = f"{labels.GROUP}/"
"""Beginning of the types of conditions that the node agent writes."""
STICKY_S = 3 * 3_600.0
_STICKY = frozenset({74, 79, 95, 109, 119})
"""XIDs that come back although the condition is clear for a while (source S)."""
_XIDS: Mapping[tuple[str, str], tuple[int, ...]] = {
    ("gpu-lost", "Reboot"): (79,),
    ("gpu-memory", "Reset"): (48, 95, 140),
    ("gpu-memory", "Support"): (64,),
    ("gpu-memory", "Watch"): (63, 92, 94),
    ("gpu-hang", "Reset"): (46, 62, 109, 110, 143, 158),
    ("gpu-firmware", "Reset"): (119, 120),
    ("gpu-link", "Reboot"): (74,),
    ("gpu-link", "Reset"): (136, 155),
    ("gpu-power", "Support"): (54,),
    ("application", "RestartApplication"): (13, 31),
}
_OTHERS: Mapping[str, tuple[str, str]] = {
    "GPUMissing": ("gpu-lost", "Reboot"),
    "LinkDowned": ("network-link", "Replace"),
    "LinkFlap": ("network-link", "Watch"),
    "KernelDeadlock": ("kernel", "Reboot"),
    "ReadonlyFilesystem": ("disk", "Reboot"),
    "FrequentKubeletRestart": ("node-software", "Support"),
    "FrequentDockerRestart": ("node-software", "Support"),
    "FrequentContainerdRestart": ("node-software", "Support"),
    "NTPProblem": ("clock", "Support"),
}
_PROBLEM_DETECTOR = frozenset(name for name in _OTHERS if name not in {"GPUMissing", "LinkDowned", "LinkFlap"})
"""Conditions of node-problem-detector."""


def _rows() -> dict[str, Row]:
    rows = {
        f"Xid{xid}": Row(
            code=f"Xid{xid}",
            fault_class=fault_class,
            action=action,
            sticky_s=STICKY_S if xid in _STICKY else 0.0,
            fatal=action in {"Reset", "Reboot", "Support"},
        )
        for (fault_class, action), xids in _XIDS.items()
        for xid in xids
    }
    return rows | {
        code: Row(code=code, fault_class=fault_class, action=action) for code, (fault_class, action) in _OTHERS.items()
    }


ROWS = _rows()


def lookup(condition: str, code: str) -> Row | None:
    """Return the row of a code; a detector's condition without a known code has the row of its type."""
    return ROWS.get(code) or ROWS.get(condition)


def polarity(condition: str) -> str | None:
    """Return the status by which a condition shows a fault; None: it is none of the detectors'."""
    detector = condition in _PROBLEM_DETECTOR or (condition.startswith(AGENTS) and condition != AGENT_CONDITION)
    return "True" if detector else None


def is_agents(condition: str) -> bool:
    """Tell whether the node agent writes a condition."""
    return condition.startswith(AGENTS)


def decode(condition: ConditionView) -> tuple[Sequence[Event], str]:
    """Read the events of a condition: by its reason alone, where its message has no machine-readable part."""
    return (Event(code=condition.reason or condition.type),), ""
