"""The simulator's rules, checked on every change of the store and every act of a launcher as it happens."""

from __future__ import annotations

import hashlib
from typing import Any

from polyreme_api import labels
from polyreme_cluster.election import LEASE_NAME
from polyreme_cluster.port import WatchEventType
from polyreme_local.api_server.record import Change
from polyreme_simulator.cluster_view import ClusterView
from polyreme_simulator.job_facts import JobFacts, condition, is_true
from polyreme_simulator.observed_state import ObservedState
from polyreme_simulator.ownership import is_set_apart, owner_uid
from polyreme_simulator.rules import rules_of

CHILDREN = ("Service", "Secret", "Lease", "ServiceAccount", "Role", "RoleBinding")
WAITING_REASONS = frozenset(
    {
        "Misconfigured",
        "ExceedsQuota",
        "WaitingForCapacity",
        "WaitingForTopology",
        "WaitingForNodes",
        "Evicted",
        "SetAside",
    }
)


class Facts(ObservedState):
    """The log of one simulation, and every rule."""

    def __init__(self) -> None:
        super().__init__()
        self.changes = 0
        self._digest = hashlib.sha256()
        self.rules = rules_of(self)
        self.job_facts = JobFacts(self, self.rules)

    @property
    def trace(self) -> str:
        """Digest of everything that happened."""
        return self._digest.hexdigest()[:16]

    def changed(self, change: Change, world: ClusterView) -> None:
        """Take one change of the store."""
        self.changes += 1
        record = change.record
        self._digest.update(f"{world.time_s():.6f} {change.type} {record.kind} {record.name} ".encode())
        self._digest.update(record.blob)
        rules = self.rules
        rules.foreign_queues.changed(change, world)
        if is_set_apart(record.manifest):
            rules.health.malformed(change, world)
            return
        deleted = change.type is WatchEventType.DELETED
        rules.places.changed(change, world)
        match record.kind:
            case "TrainingJob":
                rules.data.changed(change, world)
                if not deleted:
                    before = (self.jobs.get(record.uid) or {}).get("status") or {}
                    rules.forgeries.changed(record.blob, before, record.manifest, world)
                self.job_facts.changed(record.manifest, deleted, world)
            case "Pod" if owner_uid(record.manifest):
                if deleted:
                    self.pods.pop(record.uid, None)
                else:
                    self.pods[record.uid] = record.manifest
            case "PriorityClass":
                rules.preemptions.class_changed(record.name, record.manifest, deleted=deleted, world=world)
            case "ConfigMap":
                rules.batches.changed(record.manifest, world)
            case "Lease" if record.name == LEASE_NAME:
                rules.leaders.renewed(record.manifest, world)
            case "Lease" if deleted:
                rules.gangs.overwritten(owner_uid(record.manifest))
            case "Lease" if owner_uid(record.manifest):
                rules.gangs.lease_changed(record.manifest, world)
            case _:
                pass
        rules.history.note(change, world)
        rules.capacity.changed(change, world)
        rules.waiting.changed(change, world)
        rules.health.changed(change, world)
        rules.repairs.changed(change, world)
        rules.incidents.changed(change, world)

    def landing(self, sent_s: float) -> None:
        """A write of the operator lands now that was sent then."""
        self.sent_s = sent_s

    def look(self, world: ClusterView) -> None:
        """Check what jobs and nodes report now."""
        self.rules.waiting.look(world)
        self.rules.data.look(world)
        self.rules.starts.look(world)
        self.rules.anomalies.look(world)
        self.rules.health.look(world)

    def check_end(self, world: ClusterView) -> None:
        """Check, long after the faults, that every job has finished or reports why it waits, and nothing is left."""
        for uid, job in self.jobs.items():
            name, status = job["metadata"]["name"], job.get("status") or {}
            if is_true(status, "Succeeded"):
                self.job_facts.check_history(uid, name, world)
            if not (is_true(status, "Succeeded") or is_true(status, "Failed") or is_true(status, "Suspended")):
                queued = condition(status, "Queued")
                if self.rules.anomalies.excuses(uid):
                    continue
                if queued is None or queued["status"] != "True" or queued["reason"] not in WAITING_REASONS:
                    self.broke("every job finishes or says why", f"{name}: {_words(status)}", world)
                elif self.rules.capacity.fits_alone(job, world) and not self._is_held_up():
                    self.broke("what fits is admitted", f"{name}: {_words(status)}", world)
        for pod in self.pods.values():
            uid = pod["metadata"]["labels"][labels.LABEL_JOB_UID]
            phase = (pod.get("status") or {}).get("phase")
            owner = self.jobs.get(uid)
            if owner is not None and self.rules.anomalies.excuses(uid):
                continue
            if owner is None or phase not in {"Succeeded", "Failed"}:
                self.broke("no orphan at the end", f"pod {pod['metadata']['name']} is {phase}", world)
        self._check_orphans(world)
        self.rules.anomalies.check_end(world)
        self.rules.foreign_queues.check_end(world)
        self.rules.health.check_end(world)
        self.rules.repairs.check_end(world)
        self.rules.incidents.check_end(world)

    def _is_held_up(self) -> bool:
        """Tell whether a job holds devices to the end, since what it needs to start is refused."""
        return any(self.true(uid, "Admitted") and self.rules.anomalies.excuses(uid) for uid in self.jobs)

    def _check_orphans(self, world: ClusterView) -> None:
        for kind in CHILDREN:
            for record in world.store.records(kind):
                owner = (record.manifest["metadata"].get("labels") or {}).get(labels.LABEL_JOB_UID)
                if owner not in {None, *self.jobs} and not is_set_apart(record.manifest):
                    self.broke("no orphan at the end", f"{kind} {record.name}", world)
        for launcher in world.launchers.values():
            if launcher.alive and not self.rules.anomalies.excuses(launcher.pod.job_uid):
                self.broke("no orphan at the end", f"launcher {launcher.pod.pod} lives", world)


def _words(status: dict[str, Any]) -> str:
    return ", ".join(
        f"{entry['type']}={entry['status']}/{entry['reason']}({entry.get('message', '')})"
        for entry in status.get("conditions") or ()
    )
