"""Rules for rare events in a cluster: one job's trouble affects no other job, and what a job owns is recreated."""

from __future__ import annotations

import dataclasses
from typing import Any

from polyreme_api import labels
from polyreme_cluster.port import Manifest, ObjectRef
from polyreme_simulator.batches import BatchFacts
from polyreme_simulator.cluster_history import BLIND_S, ClusterHistory
from polyreme_simulator.cluster_view import ClusterView
from polyreme_simulator.observed_state import ObservedState
from polyreme_simulator.ownership import MALFORMED, is_set_apart, owner_uid
from polyreme_simulator.refused_children import RefusedChildFacts, exists_child

OWNED_KINDS = ("Service", "Secret", "Lease", "ServiceAccount", "Role", "RoleBinding")
BACK_S = {"Lease": 15.0, "Service": 330.0, "Secret": 330.0}
"""Time within which what a job owns is recreated: a Lease is watched, the others are checked from time to time."""
EXPLAINED_S = 15.0
"""Time within which a job reports why its pods are refused."""
TIMED = frozenset({"LeaderSilent", "StartTimedOut", "Hung"})
"""Restart causes that are timeouts."""


@dataclasses.dataclass(slots=True, eq=False)
class AnomalyFacts:
    """Which anomalies are in force, and the rules that follow from them."""

    observed: ObservedState
    history: ClusterHistory
    batches: BatchFacts
    refusals: dict[tuple[str, str], tuple[str, float]] = dataclasses.field(default_factory=dict)
    """Sentence and since when, by UID of the job and write point."""
    refused: bool = False
    """Whether writes of some job were ever refused: what jobs say may be old, for as long as retries take."""
    quarantined: set[str] = dataclasses.field(default_factory=set)
    """Jobs whose status was refused at some time: nothing is held for them."""
    children: RefusedChildFacts = dataclasses.field(init=False)
    _missing_s: dict[tuple[str, str], float] = dataclasses.field(default_factory=dict)
    _refused_s: dict[tuple[str, str, int], float] = dataclasses.field(default_factory=dict)
    """When the first create of a job's pods was refused since the job last said why, by UID, sentence and attempt.
    The pods of a later attempt are created, and refused, again."""

    def __post_init__(self) -> None:
        self.children = RefusedChildFacts(self.observed, self.history)

    # --------------------------------------------------------------------------------------------------------- writes

    def refuse(self, uid: str, point: str, sentence: str, world: ClusterView) -> None:
        """Some writes of a job are refused from now on."""
        self.refusals[uid, point] = sentence, world.time_s()
        self.refused = True

    def allow(self, uid: str, point: str) -> None:
        """They are taken again."""
        self.refusals.pop((uid, point), None)

    def refusal(self, verb: str, ref: ObjectRef, owner: str, world: ClusterView) -> str:
        """Return the sentence by which the API server refuses a write; empty: it takes it."""
        if ref.kind == "Pod" and ref.name.startswith(MALFORMED):
            return "422 Invalid: the pod breaks its schema"
        if verb == "create" and (sentence := self.children.refusal(ref, owner, world)):
            return sentence
        if not self.refusals:
            return ""
        uid = owner
        if ref.kind == labels.KIND_JOB:
            uid = next((uid for uid, job in self.observed.jobs.items() if ObjectRef.of(job) == ref), "")
        found = self.refusals.get((uid, f"{verb} {ref.kind}"))
        if found is None:
            return ""
        if ref.kind == labels.KIND_JOB:
            self.batches.refused(uid)
            self.quarantined.add(uid)
        if ref.kind == "Pod":
            attempt = _attempt(self.observed.jobs.get(uid))
            self._refused_s.setdefault((uid, found[0], attempt), world.time_s())
        return found[0]

    def is_refused(self, uid: str, point: str = "patch TrainingJob") -> bool:
        """Tell whether writes of a job are refused now."""
        return (uid, point) in self.refusals

    # ---------------------------------------------------------------------------------------------------- what is seen

    def look(self, world: ClusterView) -> None:
        """Check what must hold once nothing else goes wrong."""
        if self.history.blind(world):
            return
        self._look_for_children(world)
        self.children.look(world)
        self._look_for_words(world)

    def _look_for_children(self, world: ClusterView) -> None:
        there = {(owner_uid(record.manifest), kind) for kind in BACK_S for record in world.store.records(kind)}
        for uid, job in self.observed.jobs.items():
            active = self.observed.true(uid, "Admitted") and not job["metadata"].get("deletionTimestamp")
            for kind, within_s in BACK_S.items():
                refused = self.is_refused(uid, f"create {kind}") or self.is_refused(uid)
                refused = refused or (job["metadata"]["namespace"], kind) in self.children.quotas
                # A Lease whose owner another account removed is its job's; the next leader puts it back.
                exists = exists_child(world, job["metadata"], kind) if kind == "Lease" else (uid, kind) in there
                if not active or refused or exists:
                    self._missing_s.pop((uid, kind), None)
                    continue
                since_s = self._missing_s.setdefault((uid, kind), world.time_s())
                if world.time_s() - since_s > within_s:
                    what = f"{job['metadata']['name']} has no {kind} since t={since_s:.0f}"
                    self.observed.broke("what a job owns comes back", what, world)

    def _look_for_words(self, world: ClusterView) -> None:
        for key, since_s in list(self._refused_s.items()):
            uid, sentence, attempt = key
            job, refusal = self.observed.jobs.get(uid), self.refusals.get((uid, "create Pod"))
            waits = job is None or not self.observed.true(uid, "Admitted") or _attempt(job) != attempt
            over = refusal is None or refusal[0] != sentence
            if waits or over or self.is_refused(uid) or sentence in _messages(job or {}):
                del self._refused_s[key]
            elif world.time_s() - since_s > EXPLAINED_S:
                what = f"{self.observed.jobs[uid]['metadata']['name']} does not say that {sentence}"
                self.observed.broke("a refused pod is explained", what, world)

    def forcing(self, uid: str, world: ClusterView) -> None:
        """Check that a pod that is deleted by force is on a node that has been away, or was reported to be."""
        launcher = world.launchers.get(uid)
        if launcher is None or not launcher.alive or not world.nodes[launcher.node].up:
            return
        if world.time_s() - world.lost_s.get(launcher.node, float("-inf")) > BLIND_S:
            what = f"{launcher.pod.pod} lives, and {launcher.node} was never lost"
            self.observed.broke("only pods of lost nodes are deleted by force", what, world)

    def begun(self, uid: str, records: list[dict[str, Any]], number: int, world: ClusterView) -> None:
        """Check that an attempt that begins in the calm period was not called for by a timeout."""
        if self.history.blind(world) or not records or records[-1].get("attempt") != number - 1:
            return
        cause = records[-1].get("cause")
        gang = world.gangs.get((uid, number - 1))
        if cause in TIMED and gang is not None and gang.whole:
            what = f"{self.observed.jobs[uid]['metadata']['name']} attempt {number - 1} was restarted for {cause}"
            self.observed.broke("a gang that works is not restarted for its silence", what, world)

    # ---------------------------------------------------------------------------------------------------------- the end

    def excuses(self, uid: str) -> bool:
        """Tell whether a job need not finish: its writes are refused to the end, also that which would say so."""
        return self.children.excuses(uid) or any(refused == uid for refused, _ in self.refusals)

    def check_end(self, world: ClusterView) -> None:
        """Check that each malformed job has a condition that reports it."""
        for record in world.store.records(labels.KIND_JOB):
            if not is_set_apart(record.manifest):
                continue
            status = record.manifest.get("status")
            entries = status.get("conditions") if isinstance(status, dict) else None
            reported = (
                {entry["type"] for entry in entries if entry["status"] == "True"}
                if isinstance(entries, list)
                else set()
            )
            if not reported:
                what = f"{record.name} says nothing, its spec is {record.manifest.get('spec')}"
                self.observed.broke("a malformed job says so", what, world)


def _attempt(job: Manifest | None) -> int:
    """Return the number of a job's attempt; 0 before the first."""
    attempt = ((job or {}).get("status") or {}).get("attempt") or {}
    return int(attempt.get("number", 0))


def _messages(job: Manifest) -> str:
    """Return what a job reports now and reported of earlier attempts: between two tries it reports nothing new."""
    status = job.get("status") or {}
    entries = [*(status.get("conditions") or ()), *(status.get("restartRecords") or ())]
    return " ".join(entry.get("message", "") for entry in entries)
