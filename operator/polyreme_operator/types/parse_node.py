"""Parses Nodes to the views that placement and jobs read, and to those that the health of nodes is decided from."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from sys import intern
from typing import Any

from polyreme_api import labels
from polyreme_api.node_report import CONDITION_AGENT, CONDITION_POD_START, CONDITION_PRE_CHECK, CONDITION_SLOW_RANK
from polyreme_cluster.port import Manifest
from polyreme_operator.health.node import HealthNode
from polyreme_operator.health.owners import REPAIR_OWNER, other_owner
from polyreme_operator.health.record import HEALTH, PROBATION, Leave, NodeState, parse
from polyreme_operator.health.signs import ConditionView
from polyreme_operator.types.inventory import HOST_LEVEL, Taint
from polyreme_operator.types.resources import allocatable
from polyreme_operator.types.timestamps import parse_time_or
from polyreme_operator.types.views import NodeView

RISK = f"{labels.GROUP}/risk"
"""Annotation or label of a node with its failure probability, from 0 to 1."""
OWNED_TAINT = f"{labels.GROUP}/owned"
"""Taint of nodes on which only the operator binds pods."""
CONDITIONS_MAX = 128
"""Conditions of one node that are read."""
MESSAGE_CHARACTERS_MAX = 1_024
OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"
_MARKS = frozenset({CONDITION_PRE_CHECK, CONDITION_POD_START, CONDITION_SLOW_RANK})
_UNLISTED = frozenset({HOST_LEVEL, HEALTH})
"""Labels that are left out, so that nodes stay alike when one of them is tainted."""


def parse_node(manifest: Manifest) -> NodeView:
    """Parse a node."""
    metadata, status, spec = manifest["metadata"], manifest.get("status") or {}, manifest.get("spec") or {}
    ready = next((entry for entry in status.get("conditions") or () if entry["type"] == "Ready"), None)
    is_ready = ready is not None and ready["status"] == "True"
    since = parse_time_or(ready.get("lastTransitionTime"), 0.0) if ready is not None else 0.0
    tags: Mapping[str, str] = metadata.get("labels") or {}
    notes: Mapping[str, str] = metadata.get("annotations") or {}
    taints = spec.get("taints") or ()
    risk, leave, leave_since_s = _risk(notes.get(RISK) or tags.get(RISK)), Leave.STAY, 0.0
    record = parse(notes.get(HEALTH))[0] if HEALTH in notes else None
    if record is not None:
        risk = max(risk, record.risk)
        if record.state.is_out and any(taint["key"] == HEALTH for taint in taints):
            leave, leave_since_s = record.leave, record.since_s
        elif record.opt_in and record.state is NodeState.PROBATION:
            taints = (*taints, {"key": PROBATION, "value": "", "effect": "NoSchedule"})
    marks = {entry["type"]: entry for entry in status.get("conditions") or () if entry["type"] in _MARKS}
    check, start = marks.get(CONDITION_PRE_CHECK), marks.get(CONDITION_POD_START)
    return NodeView(
        name=intern(metadata["name"]),
        allocatable=allocatable(status.get("allocatable") or status.get("capacity")),
        ready=is_ready,
        not_ready_since_s=None if is_ready else since,
        unschedulable=bool(spec.get("unschedulable")),
        out_of_service=any(taint["key"] == OUT_OF_SERVICE for taint in taints),
        labels=kept(tuple(sorted((k, v) for k, v in tags.items() if k not in _UNLISTED))),
        host=intern(tags.get(HOST_LEVEL, metadata["name"])),
        taints=kept(
            tuple(_taint(taint["key"], taint.get("value") or "", taint.get("effect", "NoSchedule")) for taint in taints)
        ),
        risk=risk,
        owned=any(taint["key"] == OWNED_TAINT for taint in taints),
        leave=leave,
        leave_since_s=leave_since_s,
        checked_s=None if check is None else parse_time_or(check.get("lastHeartbeatTime"), None),
        check_failed=check is not None and check.get("status") == "True",
        slow_rank=(marks.get(CONDITION_SLOW_RANK) or {}).get("status") == "True",
        start_failed=start is not None and start.get("status") == "True",
        fault="" if record is None or leave is Leave.STAY else f"{record.fault_class}, {record.reason}",
    )


def parse_health_node(manifest: Manifest) -> HealthNode:
    """Parse what the health of a node is decided from."""
    metadata, status, spec = manifest["metadata"], manifest.get("status") or {}, manifest.get("spec") or {}
    tags: Mapping[str, str] = metadata.get("labels") or {}
    notes: Mapping[str, Any] = metadata.get("annotations") or {}
    entries = (status.get("conditions") or ())[:CONDITIONS_MAX]
    ready: Mapping[str, Any] = next((entry for entry in entries if entry["type"] == "Ready"), {})
    agent = next((entry for entry in entries if entry["type"] == CONDITION_AGENT), None)
    return HealthNode(
        name=intern(metadata["name"]),
        uid=metadata["uid"],
        resource_version=metadata["resourceVersion"],
        hardware=str((status.get("nodeInfo") or {}).get("systemUUID") or spec.get("providerID") or "")[:253],
        labels=kept(tuple(sorted((k, v) for k, v in tags.items() if k != HEALTH))),
        label=tags.get(HEALTH, ""),
        annotation=notes.get(HEALTH) or "",
        repair_owner=str(notes.get(REPAIR_OWNER) or ""),
        claimed=other_owner(notes, spec.get("taints") or ()),
        taints=tuple(dict(taint) for taint in spec.get("taints") or ()),
        conditions=kept(tuple(_condition(entry) for entry in entries if entry["type"] != CONDITION_AGENT)),
        left_out=max(0, len(status.get("conditions") or ()) - CONDITIONS_MAX),
        agent=None if agent is None else str(agent.get("status")),
        beat=None if agent is None else str(agent.get("lastHeartbeatTime") or ""),
        not_ready_since_s=None
        if ready.get("status") == "True"
        else parse_time_or(ready.get("lastTransitionTime"), 0.0),
    )


def _condition(entry: Mapping[str, Any]) -> ConditionView:
    status = intern(str(entry.get("status") or "Unknown"))
    # Of conditions that are as usual the time is left out: equal ones of many nodes are kept once.
    usual = (status == "True") == (entry["type"] == "Ready")
    return ConditionView(
        type=intern(entry["type"]),
        status=status,
        since_s=0.0 if usual else parse_time_or(entry.get("lastTransitionTime"), 0.0),
        reason=intern(str(entry.get("reason") or "")[:128]),
        # The kubelet's own messages are of no interest, and differ.
        # One character more than is read, so that reading reports a message that is too long.
        message=str(entry.get("message") or "")[: MESSAGE_CHARACTERS_MAX + 1] if "/" in entry["type"] else "",
    )


def _risk(text: str | None) -> float:
    """Parse a failure probability; an invalid one counts as 0, since other controllers write it."""
    try:
        return min(1.0, max(0.0, float(text or 0.0)))
    except ValueError:
        return 0.0


@functools.lru_cache(maxsize=4096)
def kept(value: Any) -> Any:
    """Return a shared instance of an equal value, to save memory."""
    return value


def _taint(key: str, value: str, effect: str) -> Taint:
    """Return a taint; a node with one that is no text is refused here, or it would stop the placement of every job.

    Raises:
        TypeError: If a part is no text.
    """
    return Taint(key=intern(key), value=intern(value), effect=intern(effect))
