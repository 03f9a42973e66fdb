"""Rules for the health of nodes: taints have owners, the breaker holds, and what is well comes back."""

from __future__ import annotations

import dataclasses
from typing import Any

from polyreme_cluster.port import Manifest, WatchEventType
from polyreme_local.api_server.record import Change
from polyreme_operator.health.breaker import limit_of
from polyreme_operator.health.record import HEALTH, NodeState, Record, parse
from polyreme_operator.health.signs import DOMAIN_FAULT
from polyreme_simulator.cluster_history import ClusterHistory
from polyreme_simulator.cluster_view import ClusterView
from polyreme_simulator.observed_state import ObservedState
from polyreme_simulator.scenario import RACK

LOST = "GPUMissing"
GRAVE = frozenset({"Xid48", LOST})
TOGETHER_MIN = 3
"""Nodes that fail together before their rack is taken out."""
BY_HAND = "by-hand"
"""Value of a taint that a person sets."""
KERNEL = "KernelDeadlock"
GPU = "polyreme.dev/GPU"
SLACK_S = 5.0
"""How long ago a node may have shown its fault for the last time when others of its rack are taken out for it."""
OWNED_WITHIN_S = 20.0
"""Time within which a taint that a person added has an owner on record."""


@dataclasses.dataclass(slots=True)
class _Seen:
    """What was last seen of one node."""

    tainted: bool = False
    by_hand: bool = False
    """Whether the taint is a person's, as it was set."""
    since_s: float = 0.0
    record: Record | None = None
    others: tuple[Any, ...] = ()
    rack: str = ""
    lost_since_s: float = float("-inf")
    """When it last began to show what takes a whole rack out."""
    shown: tuple[tuple[str, str, str], ...] = ()
    released: tuple[tuple[str, str, str], ...] | None = None
    """What it showed when a person removed the taint; None once it shows something else."""
    released_s: float = float("-inf")
    """When that was."""
    released_for: str = ""
    """For which reason it was out then."""


@dataclasses.dataclass(slots=True, eq=False)
class HealthFacts:
    """Taints of nodes, and whether each is as it should be."""

    observed: ObservedState
    history: ClusterHistory
    percent: int | None = None
    """Share of the nodes that the policy's breaker allows; None: there is no policy in this seed."""
    nodes: int = 0
    """Number of nodes at the beginning."""
    enforced_s: float = float("-inf")
    """When last a policy was enforced."""
    _seen: dict[str, _Seen] = dataclasses.field(default_factory=dict)
    _malformed: dict[str, float] = dataclasses.field(default_factory=dict)
    """Until when malformed nodes were there."""
    _lost_s: dict[tuple[str, str], float] = dataclasses.field(default_factory=dict)
    """When nodes last showed what takes a whole rack out, by rack and name; a node's object may be recreated."""

    def changed(self, change: Change, world: ClusterView) -> None:
        """Take a change of a node."""
        if self.percent is None or change.record.kind != "Node":
            return
        name = change.record.name
        if change.type is WatchEventType.DELETED:
            if (gone := self._seen.pop(name, None)) is not None and _is_lost(gone):
                self._lost_s[gone.rack, name] = world.time_s()
            return
        before, node = self._seen.get(name, _Seen()), change.record.manifest
        after = _seen(node)
        after.since_s = before.since_s if before.tainted == after.tainted else world.time_s()
        # A release is kept in the record: where that was overwritten with text that can't be read, none is known.
        after.released = before.released if before.shown == after.shown and after.record is not None else None
        if _is_lost(before) or _is_lost(after):
            self._lost_s[after.rack, name] = world.time_s()
        after.lost_since_s = world.time_s() if _is_lost(after) and not _is_lost(before) else before.lost_since_s
        after.released_s, after.released_for = before.released_s, before.released_for
        lifted = before.tainted and not after.tainted
        if lifted and after.record == before.record:
            # The operator lifts a taint and changes the record in one write: this was a person. Without a record of the
            # taint, the operator can't know that there was one.
            after.released = after.shown if after.record is not None and after.record.state.is_out else None
            after.released_s = world.time_s()
            after.released_for = after.record.reason if after.record is not None else ""
            world.reached["node released by hand", ""] += 1
        self._seen[name] = after
        if before.record != after.record and before.record is not None and before.others != after.others:
            self.observed.broke("taints of others are left alone", f"{name}: {before.others} {after.others}", world)
        began = after.tainted and not before.tainted and not after.by_hand
        if began and after.record is not None and after.record.state.is_out:
            self._check_taint(name, before, after.record, world)
        if lifted and after.record != before.record:
            world.reached["node returned", ""] += 1
            if before.record is not None and before.record.is_persons:
                self.observed.broke("what a person took out only a person brings back", name, world)
            if _is_faulty(after):
                self.observed.broke("a node returns when its fault is gone", f"{name} shows {after.shown}", world)

    def malformed(self, change: Change, world: ClusterView) -> None:
        """Take a change of an object that breaks its schema."""
        if change.record.kind == "Node":
            gone = change.type is WatchEventType.DELETED
            self._malformed[change.record.name] = world.time_s() if gone else float("inf")

    def _check_taint(self, name: str, before: _Seen, record: Record, world: ClusterView) -> None:
        world.reached[f"node {record.state}", ""] += 1
        if not record.owner or not record.examine_at_s:
            self.observed.broke("every taint has an owner and an examination", f"{name}: {record}", world)
        if not record.owner.startswith("policy/"):
            return
        if record.reason == DOMAIN_FAULT:
            self._check_rack(name, record, world)
        out = sorted(each for each, seen in self._seen.items() if seen.tainted and _is_policys(seen))
        since_s = world.time_s() - self._late_s(world) - SLACK_S
        # A malformed node counts among the nodes that the policy allows a share of.
        more = sum(until_s >= since_s for until_s in self._malformed.values())
        limit = limit_of(self.nodes + more, self.percent or 0)
        if len(out) > limit:
            self.observed.broke("never more out than the breaker allows", f"{out}, limit {limit}", world)
        if world.time_s() - self.enforced_s > self._late_s(world):
            self.observed.broke("nothing is done without a policy that enforces", name, world)
        if before.released is not None and before.released == before.shown:
            # A fault of its rack that began after the release is another fault than the one it was released from.
            anew = record.reason == DOMAIN_FAULT and (
                before.released_for != DOMAIN_FAULT or self._rack_fails_since(before.rack, before.released_s)
            )
            if not anew:
                self.observed.broke("a release holds", f"{name} still shows {before.shown}", world)

    def _check_rack(self, name: str, record: Record, world: ClusterView) -> None:
        """Check that a node that is well is taken out for the sake of its rack alone, and is not repaired."""
        world.reached["node out with its rack", ""] += 1
        since_s, rack = world.time_s() - self._late_s(world) - SLACK_S, self._seen[name].rack
        lost = {each for each, seen in self._seen.items() if seen.rack == rack and _is_lost(seen)}
        lost |= {each for (of, each), lost_s in self._lost_s.items() if of == rack and lost_s >= since_s}
        if len(lost) < TOGETHER_MIN or record.action:
            self.observed.broke(
                "a rack is out when its nodes fail together", f"{name} in {rack}: {sorted(lost)}", world
            )

    def _rack_fails_since(self, rack: str, since_s: float) -> bool:
        """Tell whether a node of a rack began to show a time ago or later what takes the rack out."""
        return any(seen.rack == rack and seen.lost_since_s >= since_s for seen in self._seen.values())

    def look(self, world: ClusterView) -> None:
        """Check what must hold once the faults are over."""
        if self.percent is None or self.history.blind(world):
            return
        for name, seen in self._seen.items():
            if not seen.tainted:
                continue
            since_s = max(seen.since_s, world.calm_since_s)
            owned = seen.record is not None and seen.record.owner and seen.record.examine_at_s
            if not owned and world.time_s() - since_s > OWNED_WITHIN_S:
                self.observed.broke("every taint has an owner and an examination", f"{name} since {since_s}", world)

    def check_end(self, world: ClusterView) -> None:
        """Check that every node is back whose fault is gone."""
        for name, seen in self._seen.items():
            if self.percent is not None and seen.tainted:
                self.observed.broke("no healthy node stays out forever", f"{name}: {seen.record}", world)

    def _late_s(self, world: ClusterView) -> float:
        """Return how long a write may still land that was right when it was sent."""
        return world.time_s() - self.history.known_since_s(world)


def _is_lost(seen: _Seen) -> bool:
    return (GPU, "True", LOST) in seen.shown


def _seen(node: Manifest) -> _Seen:
    taints = (node.get("spec") or {}).get("taints") or ()
    conditions = (node.get("status") or {}).get("conditions") or ()
    return _Seen(
        tainted=any(taint["key"] == HEALTH for taint in taints),
        by_hand=any(taint["key"] == HEALTH and taint.get("value") == BY_HAND for taint in taints),
        record=parse((node["metadata"].get("annotations") or {}).get(HEALTH))[0],
        rack=str((node["metadata"].get("labels") or {}).get(RACK, "")),
        others=tuple(sorted(taint["key"] for taint in taints if taint["key"] != HEALTH)),
        shown=tuple(
            sorted(
                (each["type"], each["status"], each.get("reason", "")) for each in conditions if each["type"] != "Ready"
            )
        ),
    )


def _is_faulty(seen: _Seen) -> bool:
    return any(
        status == "True" and ((kind == GPU and reason in GRAVE) or kind == KERNEL)
        for kind, status, reason in seen.shown
    )


def _is_policys(seen: _Seen) -> bool:
    return (
        seen.record is not None
        and seen.record.owner.startswith("policy/")
        and seen.record.state is not NodeState.HEALTHY
    )
