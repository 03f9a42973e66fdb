"""Rules for preemption: victims are asked first, get their time, and are preempted once per preemptor, not forever."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from polyreme_api import labels
from polyreme_api.times import parse_rfc3339
from polyreme_cluster.port import Manifest
from polyreme_simulator.anomaly_facts import AnomalyFacts
from polyreme_simulator.batches import BatchFacts
from polyreme_simulator.capacity import CapacityFacts
from polyreme_simulator.cluster_history import ClusterHistory
from polyreme_simulator.cluster_view import ClusterView
from polyreme_simulator.data_facts import DataFacts
from polyreme_simulator.observed_state import ObservedState

PREEMPTIONS_MAX = 12
"""More than this within one simulation is no progress any more."""
ROUNDING_S = 1.0
"""Times in the status are whole seconds."""
MADE_WAY = frozenset({"Preempted", "Reclaimed"})


@dataclasses.dataclass(slots=True, eq=False)
class PreemptionFacts:
    """What victims were asked, and when."""

    observed: ObservedState
    history: ClusterHistory
    capacity: CapacityFacts
    batches: BatchFacts
    anomalies: AnomalyFacts
    data: DataFacts
    _asked: dict[tuple[str, int], float] = dataclasses.field(default_factory=dict)
    """When the gang of an attempt was asked to checkpoint and stop, by job and attempt."""
    _requested_s: dict[str, float] = dataclasses.field(default_factory=dict)
    """When the newest preemption of each job was requested, by UID."""
    _pairs: Counter[tuple[str, str]] = dataclasses.field(default_factory=Counter)
    _used: set[tuple[str, str, str]] = dataclasses.field(default_factory=set)
    """Preemptions whose preemptor was admitted since: victim, preemptor, when it was asked."""
    _heard: set[tuple[str, int]] = dataclasses.field(default_factory=set)
    """Attempts that reported an outcome."""
    _classes: dict[str, int] = dataclasses.field(default_factory=dict)
    _past: list[tuple[float, dict[str, int]]] = dataclasses.field(default_factory=list)
    """Values of the priority classes that stood until when."""
    _resumed_s: dict[str, float] = dataclasses.field(default_factory=dict)
    """When each job was last suspended no longer, by UID."""

    def class_changed(self, name: str, manifest: Manifest, *, deleted: bool, world: ClusterView) -> None:
        """Take a change of a PriorityClass."""
        self._past.append((world.time_s(), self._classes))
        others = {known: value for known, value in self._classes.items() if known != name}
        self._classes = others if deleted else {**others, name: manifest["value"]}

    def heard(self, uid: str, attempt: int) -> None:
        """A gang reported how its attempt ended."""
        self._heard.add((uid, attempt))

    def changed(self, uid: str, before: Manifest, job: Manifest, world: ClusterView) -> None:
        """Take a change of a job's status."""
        if (before.get("spec") or {}).get("suspend") and not job["spec"].get("suspend"):
            self._resumed_s[uid] = world.time_s()
        old, new = before.get("status") or {}, job.get("status") or {}
        attempt = new.get("attempt") or {}
        key = (uid, attempt.get("number", 0))
        name = job["metadata"]["name"]
        stops = attempt.get("desired") == "Stop" and attempt.get("checkpointRequested")
        if stops and _admitted(new):
            self._asked.setdefault(key, world.time_s())
        asked, known = new.get("preemption"), old.get("preemption")
        if asked and asked.get("by") and (known is None or known.get("requestedAt") != asked["requestedAt"]):
            self._ask(uid, asked, world)
            if not stops:
                self.observed.broke("a preempted job is asked to checkpoint", name, world)
        gone = (attempt.get("number"), _reason(new)) if _admitted(old) and not _admitted(new) else None
        if gone is not None and gone[1] in MADE_WAY:
            world.reached["preempted", ""] += 1
            self._taken_off(uid, job, known or asked or {}, world)

    def admitted(self, uid: str, nodes: list[str], world: ClusterView) -> None:
        """Check an admission: it takes nothing that others free for a job that goes before it.

        What is made free is held for one start. It is held no longer when it is of no use: when the one for whom it was
        made free could not start there in any case, since nodes are gone, or taken by a job that goes before it.
        And a job that takes from the same nodes what the other does not need takes nothing from it.
        """
        capacity = self.capacity
        self._used |= {entry for entry in self._open_preemptions() if entry[1] == uid}
        for victim, by, asked_at in self._open_preemptions():
            waits = by in self.observed.jobs and by != uid and self._waits(by, self.observed.jobs[by], world)
            if victim == uid or not waits or (victim, by, asked_at) in self._used:
                continue
            shared = set(nodes) & set(capacity.nodes_of(victim))
            lesser = self._lesser(self.observed.jobs[uid], self.observed.jobs[by], world)
            if shared and lesser and self._blocks(uid, by, world):
                name, other = (self.observed.jobs[each]["metadata"]["name"] for each in (uid, by))
                what = f"{name} takes {sorted(shared)}, held for {other}"
                self.observed.broke("what is made free for one goes to no lesser one", what, world)

    def _open_preemptions(self) -> list[tuple[str, str, str]]:
        """Return victim, preemptor and time of each preemption; it lasts until the victim is admitted again."""
        requests = ((uid, (job.get("status") or {}).get("preemption")) for uid, job in self.observed.jobs.items())
        return [(uid, asked["by"], asked["requestedAt"]) for uid, asked in requests if asked and asked.get("by")]

    def _blocks(self, uid: str, other: str, world: ClusterView) -> bool:
        """Tell whether a job could start but for one that was admitted, once its victims are gone."""
        return self._could_start(other, without={uid}, views=all, world=world) and not self._could_start(
            other, without=set(), views=any, world=world
        )

    def _could_start(
        self, uid: str, *, without: set[str], views: Callable[[Iterable[bool]], bool], world: ClusterView
    ) -> bool:
        """Tell whether a job could start now, were some not admitted, and its victims gone.

        Args:
            uid: The job.
            without: Those that are not admitted.
            views: Whether there must be quota and room by all of what may be known of them, or by any.
            world: The cluster.
        """
        capacity, job = self.capacity, self.observed.jobs[uid]
        workers, queue = job["spec"]["workers"], job["spec"].get("queueName", "default")
        gone = {*without, *(victim for victim, by, _ in self._open_preemptions() if by == uid)}
        wanted = (workers.get("minReplicas") or workers["replicas"]) * workers.get("devices", 1)
        used = capacity.held_by_queue(without=gone)
        known = [queues for queues, _ in self.history.possible(world)]
        return capacity.has_room(uid, without=gone, views=views, world=world) and views(
            queues.admits(used, queue, labels.RESOURCE_DEVICE, wanted) for queues in known
        )

    def _waits(self, uid: str, job: Manifest, world: ClusterView) -> bool:
        """Tell whether a job still wants what others make free, and may have it by all that may be known of queues."""
        queue = job["spec"].get("queueName", "default")
        over = self.observed.true(uid, "Admitted", "Succeeded", "Failed")
        if over or job["spec"].get("suspend") or self.batches.intended(uid, job):
            return False
        if self._resumed_s.get(uid, float("-inf")) > self.history.known_since_s(world):
            # Nothing is held for a suspended job, and the admission that lands now may have been decided before.
            return False
        if (job.get("status") or {}).get("setAside"):
            return False
        if uid in self.anomalies.quarantined or self.data.may_have_awaited(uid, job, world):
            return False
        known = [queues for queues, _ in self.history.possible(world)]
        return all(queues.in_order(queue) and not queues.held(queue) for queues in known)

    def _ask(self, uid: str, asked: dict[str, Any], world: ClusterView) -> None:
        world.reached["asked to stop for another job", ""] += 1
        self._requested_s[uid] = self.observed.sent_s
        self._pairs[uid, asked["by"]] += 1
        name = self.observed.jobs[uid]["metadata"]["name"]
        if self._pairs[uid, asked["by"]] > 1:
            self.observed.broke(
                "no job is preempted twice for the same job", f"{name} for {asked.get('byName')}", world
            )
        if sum(count for (victim, _), count in self._pairs.items() if victim == uid) > PREEMPTIONS_MAX:
            self.observed.broke("preemptions have an end", name, world)
        victim, by = self.observed.jobs[uid], self.observed.jobs.get(asked["by"])
        if by is None or asked.get("reclaim"):
            return
        if (by.get("status") or {}).get("setAside"):
            self.observed.broke("a job that was set aside preempts none", f"{name} for {asked.get('byName')}", world)
        least, most = min(self._priorities(victim, world)), max(self._priorities(by, world))
        if most <= least:
            what = f"{name} ({least}) for {asked.get('byName')} ({most})"
            self.observed.broke("a preempted job has the lower priority", what, world)

    def _lesser(self, job: Manifest, other: Manifest, world: ClusterView) -> bool:
        return max(self._priorities(job, world)) < min(self._priorities(other, world))

    def _priorities(self, job: Manifest, world: ClusterView) -> set[int]:
        """Return the priorities that the operator may take a job to have: those of now and of a moment ago."""
        own, name = job["spec"].get("priority", 0), job["spec"].get("priorityClassName")
        since_s = self.history.known_since_s(world)
        known = [self._classes, *(classes for until_s, classes in self._past if until_s >= since_s)]
        return {classes.get(name, own) for classes in known}

    def _taken_off(self, uid: str, job: Manifest, asked: dict[str, Any], world: ClusterView) -> None:
        """A job lost its admission to a preemption: its gang was asked, and answered or had its time."""
        key = (uid, job["status"]["attempt"]["number"])
        name = job["metadata"]["name"]
        if key not in self._asked:
            self.observed.broke("a preempted job is asked to checkpoint first", name, world)
            return
        left_s = self._left_s(uid, asked, world)
        lives = any(
            (pod.get("status") or {}).get("phase") not in {"Succeeded", "Failed"}
            and not pod["metadata"].get("deletionTimestamp")
            for pod in self._gang(key)
        )
        if lives and key not in self._heard and left_s > ROUNDING_S:
            what = f"{name} {left_s:.1f} s before its deadline"
            self.observed.broke("a preempted job has its grace period", what, world)

    def _left_s(self, uid: str, asked: dict[str, Any], world: ClusterView) -> float:
        """Return how long a preempted job still has.

        Deadlines are by the clock of the operator's machine, which may have been stepped: then only the time from
        request to deadline counts.
        """
        if not asked.get("deadline"):
            return float("inf")
        deadline_s = parse_rfc3339(asked["deadline"])
        grace_s = deadline_s - parse_rfc3339(asked["requestedAt"])
        return min(deadline_s - world.clock.now_s(), self._requested_s[uid] + grace_s - world.time_s())

    def _gang(self, key: tuple[str, int]) -> list[Manifest]:
        """Return the pods of an attempt, without those of the past that still run: these have nothing of it to save."""
        fact, gang = self.observed.attempts[key], []
        for pod in self.observed.pods.values():
            tags = pod["metadata"]["labels"]
            index, replacement = int(tags[labels.LABEL_INDEX]), int(tags[labels.LABEL_REPLACEMENT])
            current = index < fact.replicas and replacement == fact.replacements.get(index, 0)
            if tags[labels.LABEL_JOB_UID] == key[0] and current:
                gang.append(pod)
        return gang


def _admitted(status: dict[str, Any]) -> bool:
    return any(entry["type"] == "Admitted" and entry["status"] == "True" for entry in status.get("conditions") or ())


def _reason(status: dict[str, Any]) -> str:
    found = (entry["reason"] for entry in status.get("conditions") or () if entry["type"] == "Admitted")
    return str(next(found, ""))
