"""Rule for the order of a queue: a job keeps its place, also after it was preempted."""

from __future__ import annotations

import dataclasses
from typing import Any

from polyreme_api import labels
from polyreme_api.times import parse_rfc3339
from polyreme_cluster.port import Manifest
from polyreme_local.api_server.record import Change
from polyreme_simulator.anomaly_facts import AnomalyFacts
from polyreme_simulator.batches import BatchFacts
from polyreme_simulator.cluster_history import ENDED, ClusterHistory
from polyreme_simulator.cluster_view import ClusterView
from polyreme_simulator.data_facts import DataFacts
from polyreme_simulator.observed_state import ObservedState

ASKED = (
    "queueName",
    "priority",
    "priorityClassName",
    "preemptionPolicy",
    "workers",
    "topology",
    "minRuntimeSeconds",
    "acceptProbation",
)
"""Jobs that are equal in these fit in the same places: only their age is between them."""
OVER = ("Admitted", "Succeeded", "Failed", "Suspended")


@dataclasses.dataclass(slots=True, eq=False)
class PlaceFacts:
    """Jobs of one queue that ask for the same, and since when they have waited only for their turn."""

    observed: ObservedState
    history: ClusterHistory
    batches: BatchFacts
    anomalies: AnomalyFacts
    data: DataFacts
    _seen: dict[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    _changed_s: dict[str, float] = dataclasses.field(default_factory=dict)

    def changed(self, change: Change, world: ClusterView) -> None:
        """Note when a job, or a pod of it, was last otherwise."""
        record, manifest = change.record, change.record.manifest
        uid = (manifest["metadata"].get("labels") or {}).get(labels.LABEL_JOB_UID)
        reported = self.data.reported(manifest) if record.kind == "TrainingJob" and self.data.gated else None
        if record.kind == "TrainingJob" and self._seen.get(record.uid) != (weight := (*_weight(manifest), reported)):
            self._seen[record.uid] = weight
            self._changed_s[record.uid] = world.time_s()
        elif record.kind == "Pod" and uid is not None:
            self._changed_s[uid] = world.time_s()

    def admitted(self, uid: str, world: ClusterView) -> None:
        """Check an admission: no earlier job that asks for the same has been waiting only for its turn for a while."""
        job = self.observed.jobs[uid]
        since_s = self.history.known_since_s(world)
        if any(_made_way_for(victim) == uid for victim in self.observed.jobs.values()):
            # What its victims left is reserved for it, also where a job that came first has lost its node meanwhile.
            return
        for other, first in self.observed.jobs.items():
            came_first = first["metadata"]["creationTimestamp"] < job["metadata"]["creationTimestamp"]
            if not came_first or _asked(first) != _asked(job):
                continue
            if max(self._changed_s[other], _retried_s(first, world)) > since_s:
                continue
            if self._waits_its_turn(other, first):
                what = f"{job['metadata']['name']} goes before {first['metadata']['name']}, which came first"
                self.observed.broke("a job keeps its place", what, world)

    def _waits_its_turn(self, uid: str, job: Manifest) -> bool:
        """Tell whether nothing of its own keeps a job back: its pods have ended, and its preemptor has begun."""
        if job["spec"].get("suspend") or self.observed.true(uid, *OVER):
            return False
        if self.data.awaits(job):
            return False
        if uid in self.anomalies.quarantined:
            # An admission is a write of its status: while these are refused, and until they are retried, others pass.
            return False
        by = _made_way_for(job)
        pods = (pod for pod in self.observed.pods.values() if pod["metadata"]["labels"][labels.LABEL_JOB_UID] == uid)
        lingers = any((pod.get("status") or {}).get("phase") not in ENDED for pod in pods)
        yields = by in self.observed.jobs and not self.observed.true(by, *OVER)
        return not (lingers or yields or self.batches.intended(uid, job))


def _retried_s(job: Manifest, world: ClusterView) -> float:
    """Return the time until which a job waits for its retry since its pods were refused: others pass it meanwhile."""
    status = job.get("status") or {}
    if aside := status.get("setAside"):
        return world.time_s() + parse_rfc3339(aside["until"]) - world.clock.now_s()
    last = (status.get("restartRecords") or [{}])[-1]
    if not status.get("retryAt") or last.get("cause") != "CreateRefused":
        return float("-inf")
    return world.time_s() + parse_rfc3339(status["retryAt"]) - world.clock.now_s()


def _made_way_for(job: Manifest) -> str | None:
    """Return the UID of the job that this one was preempted for."""
    by: str | None = ((job.get("status") or {}).get("preemption") or {}).get("by")
    return by


def _asked(job: Manifest) -> tuple[Any, ...]:
    return tuple(job["spec"].get(field) for field in ASKED)


def _weight(job: Manifest) -> tuple[Any, ...]:
    status = job.get("status") or {}
    return (
        job["metadata"].get("generation"),
        (status.get("attempt") or {}).get("number"),
        status.get("cancelledAdmissions"),
        bool(status.get("preemption")),
        tuple((entry["type"], entry["status"]) for entry in status.get("conditions") or () if entry["type"] in OVER),
    )
