"""Rule for pending reasons, computed from the cluster as it is: a reason must follow its cause within seconds.

The oracle names the reasons that a waiting job may give. Where it can't tell one from another without knowing the
operator's order of decisions, it allows both; it looks only when nothing has changed for a while.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

from polyreme_api import labels
from polyreme_api.times import parse_rfc3339
from polyreme_cluster.port import Manifest
from polyreme_local.api_server.record import Change
from polyreme_simulator.anomaly_facts import AnomalyFacts
from polyreme_simulator.capacity import CapacityFacts
from polyreme_simulator.cluster_history import ENDED, ClusterHistory
from polyreme_simulator.cluster_view import ClusterView
from polyreme_simulator.data_facts import DataFacts
from polyreme_simulator.domains import HOST
from polyreme_simulator.observed_state import ObservedState

FOLLOWS_S = 5.0
"""Time within which a reason follows its cause."""
LOOK_S = 1.0
SPACE = frozenset({"WaitingForCapacity", "WaitingForNodes"})
NEAR = frozenset({"WaitingForTopology"})
TURN = frozenset({"BehindOthers", "WaitingForPreemption"})
"""Reasons that speak of other jobs."""
LEAVING = frozenset({"WaitingForPreemption"})
"""Said while others stop, or their pods outlive their admission: what they hold comes free."""
SET_ASIDE = frozenset({"SetAside"})
LEVELS = ("required", "preferred", "exclusive", "sliceLevel")


@dataclasses.dataclass(slots=True, eq=False)
class WaitingFacts:
    """What waiting jobs report."""

    observed: ObservedState
    history: ClusterHistory
    capacity: CapacityFacts
    anomalies: AnomalyFacts
    data: DataFacts
    _looked_s: float = -1.0
    _seen: dict[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)

    def changed(self, change: Change, world: ClusterView) -> None:
        """Note when something changes that decides who waits, and why."""
        record = change.record
        if record.kind in {"TrainingJob", "Pod"}:
            weight = _job_weight(record.manifest) if record.kind == "TrainingJob" else _pod_weight(record.manifest)
            if record.kind == "TrainingJob" and self.data.gated:
                weight = (*weight, self.data.reported(record.manifest))
            weight = (change.type, *weight)
            if self._seen.get(record.uid) != weight:
                self._seen[record.uid] = weight
                self.history.changed_s = world.time_s()

    def look(self, world: ClusterView) -> None:
        """Compare what waiting jobs report with the cluster, once per period in which nothing changes."""
        history = self.history
        quiet = world.time_s() - history.changed_s >= FOLLOWS_S + LOOK_S
        if history.blind(world) or not quiet or self._looked_s >= history.changed_s:
            return
        self._looked_s = world.time_s()
        if any((job.get("status") or {}).get("preemption") for job in self.observed.jobs.values()):
            return
        if self.anomalies.refused:
            # Intents of a refused job are settled only when no write of it can land any more; everyone waits for that.
            return
        for uid, job in self.observed.jobs.items():
            if not self._waits(uid, job):
                continue
            queued = next((entry for entry in _conditions(job) if entry["type"] == "Queued"), None)
            said = "nothing" if queued is None or queued["status"] != "True" else queued["reason"]
            world.reached[f"waits: {said}", ""] += 1
            allowed = self._reasons(uid, job, world)
            if allowed and self._others_leave(uid):
                allowed |= LEAVING
            if allowed and said not in allowed:
                message = "" if queued is None else queued.get("message", "")
                what = f"{job['metadata']['name']} says {said} ({message}), expected {' or '.join(sorted(allowed))}"
                self.observed.broke("a pending reason follows its cause", what, world)

    def _waits(self, uid: str, job: Manifest) -> bool:
        over = ("Admitted", "Succeeded", "Failed", "Suspended")
        return not job["spec"].get("suspend") and not self.observed.true(uid, *over)

    def _reasons(self, uid: str, job: Manifest, world: ClusterView) -> frozenset[str]:
        """Return the reasons that would be true; none where the oracle does not know."""
        capacity, history, spec = self.capacity, self.history, job["spec"]
        if set_aside_for_s(job, world) > -FOLLOWS_S:
            return SET_ASIDE | self._closed(job) if set_aside_for_s(job, world) > FOLLOWS_S else frozenset()
        if self.data.awaits(job):
            return frozenset() if (job.get("status") or {}).get("attempt") else frozenset({"WaitingForData"})
        if closed := self._closed(job):
            return closed
        queue = spec.get("queueName", "default")
        if any(pod["metadata"]["labels"][labels.LABEL_JOB_UID] == uid for pod in self.observed.pods.values()):
            return frozenset()
        topology = spec.get("topology") or {}
        known = {HOST, *(name for name, _ in history.domains.levels)}
        if any(topology.get(field) not in {None, *known} for field in LEVELS):
            return frozenset({"Misconfigured", "ExceedsQuota"})
        workers = spec["workers"]
        devices, most = workers.get("devices", 1), _size_in_force(job)
        least = min(most, workers.get("minReplicas") or most)
        empty = self._empty_slots(devices, world)
        if empty and all(node.devices < devices for node in world.nodes.values() if node.present):
            return frozenset({"Misconfigured"})
        if empty and not history.domains.holds(topology, empty, least):
            # Not even an empty cluster holds it: that is reported before quota and capacity.
            return SPACE | NEAR
        used = capacity.held_by_queue()
        within = [
            count
            for count in range(least, most + 1)
            if history.queues.admits(used, queue, labels.RESOURCE_DEVICE, count * devices)
        ]
        slots = self._slots(uid, devices, world)
        if not within:
            # Both are true of a job that fits neither its quota nor the nodes.
            fits = history.domains.holds(topology, slots, least)
            return frozenset({"ExceedsQuota"}) if fits else SPACE | NEAR | {"ExceedsQuota"}
        allowed = self._space(job, slots, (least, most), world)
        return allowed | {"ExceedsQuota"} if len(within) <= most - least else allowed

    def _closed(self, job: Manifest) -> frozenset[str]:
        """Return why the job's queue admits nothing; none if it does."""
        queues, queue = self.history.queues, job["spec"].get("queueName", "default")
        if not queues.in_order(queue):
            return frozenset({"QueueMissing"})
        return frozenset({"QueueStopped"}) if queues.held(queue) else frozenset()

    def _space(self, job: Manifest, slots: dict[str, int], size: tuple[int, int], world: ClusterView) -> frozenset[str]:
        """Return what the free places say about a job whose quota allows it."""
        history, topology = self.history, job["spec"].get("topology") or {}
        devices = job["spec"]["workers"].get("devices", 1)
        empty = self._empty_slots(devices, world)
        if not empty:
            return SPACE
        if topology.get("exclusive"):
            # Which domains are free of others depends on pods that are about to end; both words are true.
            return SPACE | NEAR | TURN
        if history.domains.holds(topology, slots, size[0]):
            # It fits: only others that go before it may keep it waiting.
            return TURN | SPACE if self._others_wait(job) else frozenset()
        total = sum(max(0, room) for room in slots.values())
        if total < size[0]:
            # Of sizes for which there is no plan the oracle does not know.
            return SPACE if history.domains.holds(topology, empty, size[1]) else SPACE | NEAR
        return NEAR if total >= size[1] else SPACE | NEAR

    def _others_wait(self, job: Manifest) -> bool:
        return any(other is not job and self._waits(uid, other) for uid, other in self.observed.jobs.items())

    def _others_leave(self, uid: str) -> bool:
        for pod in self.observed.pods.values():
            other, phase = pod["metadata"]["labels"][labels.LABEL_JOB_UID], (pod.get("status") or {}).get("phase")
            if other != uid and phase not in ENDED and not self._stays(other):
                return True
        # One whose pods are gone has its grace period left if nothing tells how it ended.
        admitted = (other for other in self.observed.jobs if self.observed.true(other, "Admitted"))
        return any(other != uid and not self._stays(other) for other in admitted)

    def _stays(self, uid: str) -> bool:
        """Tell whether a job is admitted and has not been asked to stop, be it for a suspension that was revoked."""
        job = self.observed.jobs.get(uid)
        if job is None or not self.observed.true(uid, "Admitted"):
            return False
        return bool(job["status"]["attempt"]["desired"] != "Stop")

    def _slots(self, uid: str, devices: int, world: ClusterView) -> dict[str, int]:
        """Return how many workers each node has room for."""
        capacity, history = self.capacity, self.history
        taken = Counter(capacity.held_by_node())
        for node, count, _ in history.foreign.values():
            taken[node] += count
        blocked, spec = self._domains_of_others(uid), self.observed.jobs[uid]["spec"]
        closed = frozenset() if spec.get("acceptProbation") else history.opted_in_only
        level = (spec.get("topology") or {}).get("exclusive")
        if level is not None:
            busy = (node for node, count in capacity.held_by_node(without={uid}).items() if count)
            blocked |= {(level, domain) for node in busy if (domain := history.domains.domain(level, node))}
        return {
            node.name: (node.devices - taken[node.name]) // devices
            for node in world.nodes.values()
            if node.present
            and world.usable(node.name)
            and node.name not in closed
            and history.domains.labelled(node.name)
            and not any(history.domains.domain(level, node.name) == domain for level, domain in blocked)
        }

    def _empty_slots(self, devices: int, world: ClusterView) -> dict[str, int]:
        """Return how many workers each node could hold if nothing ran there and all were in service."""
        domains = self.history.domains
        nodes = [node for node in world.nodes.values() if node.present]
        return {node.name: node.devices // devices if domains.labelled(node.name) else 0 for node in nodes}

    def _domains_of_others(self, uid: str) -> set[tuple[str, str]]:
        """Return the domains that running jobs have for themselves."""
        capacity, history = self.capacity, self.history
        found = set()
        for other, job in self.observed.jobs.items():
            level = (job["spec"].get("topology") or {}).get("exclusive")
            if other == uid or level is None or not self.observed.true(other, "Admitted"):
                continue
            for node in capacity.nodes_of(other):
                domain = history.domains.domain(level, node)
                if domain is not None:
                    found.add((level, domain))
        return found


def set_aside_for_s(job: Manifest, world: ClusterView) -> float:
    """Return for how long a job stays set aside; negative for one whose time is over, or that is not."""
    aside = (job.get("status") or {}).get("setAside")
    return float("-inf") if not aside else parse_rfc3339(aside["until"]) - world.clock.now_s()


def _conditions(job: Manifest) -> list[dict[str, Any]]:
    return (job.get("status") or {}).get("conditions") or []


def _job_weight(job: Manifest) -> tuple[Any, ...]:
    status = job.get("status") or {}
    attempt = status.get("attempt") or {}
    states = tuple(
        (entry["type"], entry["status"])
        for entry in _conditions(job)
        if entry["type"] in {"Admitted", "Suspended", "Succeeded", "Failed", "Preempted"}
    )
    return (
        job["metadata"].get("generation"),
        attempt.get("number"),
        attempt.get("desired"),
        states,
        bool(status.get("preemption")),
    )


def _pod_weight(pod: Manifest) -> tuple[Any, ...]:
    return (
        pod["spec"].get("nodeName"),
        (pod.get("status") or {}).get("phase"),
        pod["metadata"].get("deletionTimestamp"),
    )


def _size_in_force(job: Manifest) -> int:
    """Return how many workers a job asks for: the old number where a new one was refused."""
    status, wanted = job.get("status") or {}, int(job["spec"]["workers"]["replicas"])
    kinds = {each["type"] for each in status.get("conditions") or () if each["status"] == "True"}
    return int(status.get("replicasInForce") or wanted) if "ResizeRefused" in kinds else wanted
