"""Rules for repairs: one Job a node at a time, one that its record asks for, none while the breaker is latched."""

from __future__ import annotations

import dataclasses

from polyreme_api import labels
from polyreme_cluster.port import Manifest, WatchEventType
from polyreme_local.api_server.record import Change
from polyreme_operator.health.owners import OURS, REPAIR_OWNER
from polyreme_operator.health.record import HEALTH, parse
from polyreme_operator.health.repair import LATE_S, NODE
from polyreme_simulator.cluster_history import ClusterHistory
from polyreme_simulator.cluster_view import ClusterView
from polyreme_simulator.observed_state import ObservedState


@dataclasses.dataclass(slots=True, eq=False)
class RepairFacts:
    """Jobs of repairs, and whether each is as it should be."""

    observed: ObservedState
    history: ClusterHistory
    _asked_s: dict[tuple[str, str], float] = dataclasses.field(default_factory=dict)
    """When a node's record asked last for a Job."""
    _asks: dict[str, str] = dataclasses.field(default_factory=dict)
    """Job that each node's record asks for now."""
    _running: dict[str, set[str]] = dataclasses.field(default_factory=dict)
    """UIDs of Jobs that have not ended, by node."""
    _latched_s: float | None = None
    _claimed_s: dict[str, float] = dataclasses.field(default_factory=dict)
    """Since when another tool holds a node."""

    def changed(self, change: Change, world: ClusterView) -> None:
        """Take a change of a node, a policy or a Job."""
        manifest, gone = change.record.manifest, change.type is WatchEventType.DELETED
        match change.record.kind:
            case "Node":
                self._node(change.record.name, manifest, world, gone=gone)
            case labels.KIND_FAULT_POLICY:
                latched = not gone and ((manifest.get("status") or {}).get("breaker") or {}).get("latched")
                self._latched_s = (world.time_s() if self._latched_s is None else self._latched_s) if latched else None
            case "Job":
                self._job(manifest, change.type, world)

    def _node(self, name: str, node: Manifest, world: ClusterView, *, gone: bool) -> None:
        notes = {} if gone else node["metadata"].get("annotations") or {}
        record = parse(notes.get(HEALTH))[0]
        if (before := self._asks.pop(name, "")) != "":
            self._asked_s[name, before] = world.time_s()
        if record is not None and record.repair is not None and record.repair.job:
            self._asks[name] = record.repair.job
        if notes.get(REPAIR_OWNER) in {None, OURS}:
            self._claimed_s.pop(name, None)
        else:
            self._claimed_s.setdefault(name, world.time_s())

    def _job(self, job: Manifest, kind: WatchEventType, world: ClusterView) -> None:
        name, uid = job["metadata"]["annotations"][NODE], job["metadata"]["uid"]
        running = self._running.setdefault(name, set())
        if kind is WatchEventType.DELETED or (job.get("status") or {}).get("conditions"):
            running.discard(uid)
            return
        if kind is not WatchEventType.ADDED:
            return
        world.reached["repair begun", ""] += 1
        now_s, job_name = world.time_s(), job["metadata"]["name"]
        if running:
            self.observed.broke("one repair a node at a time", f"{name}: {job_name}", world)
        running.add(uid)
        asked_s = now_s if self._asks.get(name) == job_name else self._asked_s.get((name, job_name), float("-inf"))
        if now_s - asked_s > LATE_S:
            self.observed.broke("a repair is on record before its Job exists", f"{name}: {job_name}", world)
        late_s = now_s - self.history.known_since_s(world)
        if self._latched_s is not None and now_s - self._latched_s > late_s:
            self.observed.broke("nothing is repaired while the breaker is latched", f"{name}: {job_name}", world)
        if name in self._claimed_s and now_s - self._claimed_s[name] > late_s:
            self.observed.broke("a node that another tool repairs is left to it", f"{name}: {job_name}", world)

    def check_end(self, world: ClusterView) -> None:
        """Check that no repair is left."""
        for name, asked in self._asks.items():
            self.observed.broke("every repair ends", f"{name}: {asked}", world)
