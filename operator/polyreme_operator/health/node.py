"""A node as the health of nodes sees it: conditions, taints and the record that is kept on it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from polyreme_operator.health.owners import OURS, REPAIR_OWNER
from polyreme_operator.health.record import HEALTH, Record, render
from polyreme_operator.health.signs import ConditionView
from polyreme_operator.health.states import taint_value


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HealthNode:
    """A node."""

    name: str
    uid: str = ""
    resource_version: str = ""
    hardware: str = ""
    """The machine: its systemUUID, else the providerID; empty: neither is known."""
    labels: tuple[tuple[str, str], ...] = ()
    """Without the label of its health."""
    label: str = ""
    """Value of the label of its health."""
    annotation: str = ""
    """Text of its record; empty: it has none."""
    taints: tuple[Mapping[str, Any], ...] = ()
    """As stored, since a patch replaces all of them."""
    repair_owner: str = ""
    """Its annotation of that name."""
    claimed: str = ""
    """Another tool that repairs it or takes it away; empty: none."""
    conditions: tuple[ConditionView, ...] = ()
    """All but the agent's heartbeat."""
    left_out: int = 0
    """Number of conditions that are not read, since the node has too many."""
    agent: str | None = None
    """Status of the agent's heartbeat; None: no agent has reported."""
    beat: str | None = None
    """Time of that heartbeat, as the agent wrote it."""
    not_ready_since_s: float | None = None
    """By the clock that wrote it."""

    @property
    def tainted(self) -> bool:
        """Whether it has our taint."""
        return any(taint.get("key") == HEALTH for taint in self.taints)

    @property
    def problems(self) -> tuple[str, ...]:
        """What of it could not be read."""
        if not self.left_out:
            return ()
        read = len(self.conditions) + (self.agent is not None)
        return (f"it has {read + self.left_out} conditions, of these the first {read} are read",)

    @property
    def judged(self) -> tuple[object, ...]:
        """What its state depends on: all but versions and heartbeats."""
        return (
            self.uid,
            self.labels,
            self.label,
            self.annotation,
            self.taints,
            self.conditions,
            self.left_out,
            self.agent,
            self.claimed,
        )


def patch_of(node: HealthNode, record: Record | None) -> dict[str, Any]:
    """Return the one patch of taint, label and annotation; taints of others stay as they are."""
    others = [dict(taint) for taint in node.taints if taint.get("key") != HEALTH]
    out = record is not None and record.state.is_out
    label = None if record is None or record.state.value == "healthy" else record.state.value
    patch: dict[str, Any] = {
        "metadata": {
            "labels": {HEALTH: label},
            "annotations": {HEALTH: None if record is None else render(record)},
        }
    }
    owner = OURS if record is not None and record.repair is not None else ""
    if node.repair_owner in {"", OURS} and node.repair_owner != owner:
        patch["metadata"]["annotations"][REPAIR_OWNER] = owner or None
    if record is not None and out:
        patch["spec"] = {"taints": [*others, {"key": HEALTH, "value": taint_value(record), "effect": "NoSchedule"}]}
    elif node.tainted:
        patch["spec"] = {"taints": others}
    return patch
