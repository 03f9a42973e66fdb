"""The simulator's rules, checked on every change of the store and every act of a launcher as it happens."""

from __future__ import annotations

import hashlib
from typing import Any

from polyreme_api import labels
from polyreme_api.exit_codes import ExitCode
from polyreme_api.job.placement import Placement
from polyreme_api.job.status import replacements_by_index
from polyreme_cluster.election import LEASE_NAME
from polyreme_cluster.port import Manifest, WatchEventType
from polyreme_launcher.protocol.messages import Joined, Release
from polyreme_local.api_server.record import Change
from polyreme_simulator.anomaly_facts import AnomalyFacts
from polyreme_simulator.batches import BatchFacts
from polyreme_simulator.capacity import CapacityFacts
from polyreme_simulator.cluster_view import ClusterView, LauncherView
from polyreme_simulator.data_facts import DataFacts
from polyreme_simulator.foreign_queue_facts import ForeignQueueFacts
from polyreme_simulator.forgery_facts import ForgeryFacts
from polyreme_simulator.health_facts import HealthFacts
from polyreme_simulator.incident_facts import IncidentFacts
from polyreme_simulator.leaders import LeaderFacts
from polyreme_simulator.observed_state import AttemptFact, ObservedState
from polyreme_simulator.ownership import is_set_apart, owner_uid
from polyreme_simulator.places import PlaceFacts
from polyreme_simulator.preemptions import PreemptionFacts
from polyreme_simulator.repair_facts import RepairFacts
from polyreme_simulator.start_facts import StartFacts
from polyreme_simulator.successors import SuccessorFacts
from polyreme_simulator.waiting import WaitingFacts

CHILDREN = ("Service", "Secret", "Lease", "ServiceAccount", "Role", "RoleBinding")
LATENCY_S = 0.004
"""Longest time that the answer to a read is on its way."""
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
        self.succeeded = 0
        self.restarts: dict[str, int] = {}
        """Restarts after failures, by UID of the job."""
        self._digest = hashlib.sha256()
        self.leaders = LeaderFacts(self)
        self.capacity = CapacityFacts(self, leaders=self.leaders)
        self.batches = BatchFacts(self)
        self.successors = SuccessorFacts(self)
        self.anomalies = AnomalyFacts(self, capacity=self.capacity, batches=self.batches)
        self.data = DataFacts(self, capacity=self.capacity, anomalies=self.anomalies)
        self.forgeries = ForgeryFacts(self)
        self.foreign_queues = ForeignQueueFacts(self)
        self.health = HealthFacts(self, capacity=self.capacity)
        self.repairs = RepairFacts(self, capacity=self.capacity)
        self.incidents = IncidentFacts(self, capacity=self.capacity)
        self.starts = StartFacts(self, capacity=self.capacity)
        self.waiting = WaitingFacts(self, capacity=self.capacity, anomalies=self.anomalies, data=self.data)
        self.places = PlaceFacts(
            self, capacity=self.capacity, batches=self.batches, anomalies=self.anomalies, data=self.data
        )
        self.preemptions = PreemptionFacts(
            self, capacity=self.capacity, batches=self.batches, anomalies=self.anomalies, data=self.data
        )
        self._joined: dict[tuple[str, int], dict[int, int]] = {}
        self._forked: set[tuple[str, int, int]] = set()
        self._released: set[tuple[str, int]] = set()
        self._successes: dict[tuple[str, int], float] = {}
        self._failed_ranks: set[tuple[str, int]] = set()
        self._gave_up: set[tuple[str, int]] = set()
        """Attempts with a rank that exited because it had waited too long for another."""

    @property
    def trace(self) -> str:
        """Digest of everything that happened."""
        return self._digest.hexdigest()[:16]

    # -------------------------------------------------------------------------------------------------- the store's log

    def changed(self, change: Change, world: ClusterView) -> None:
        """Take one change of the store."""
        self.changes += 1
        record = change.record
        self._digest.update(f"{world.time_s():.6f} {change.type} {record.kind} {record.name} ".encode())
        self._digest.update(record.blob)
        self.foreign_queues.changed(change, world)
        if is_set_apart(record.manifest):
            self.health.malformed(change, world)
            return
        deleted = change.type is WatchEventType.DELETED
        self.places.changed(change, world)
        match record.kind:
            case "TrainingJob":
                self.data.changed(change, world)
                if not deleted:
                    before = (self.jobs.get(record.uid) or {}).get("status") or {}
                    self.forgeries.changed(record.blob, before, record.manifest, world)
                self._job_changed(record.manifest, deleted, world)
            case "Pod" if owner_uid(record.manifest):
                if deleted:
                    self.pods.pop(record.uid, None)
                else:
                    self.pods[record.uid] = record.manifest
            case "PriorityClass":
                self.preemptions.class_changed(record.name, record.manifest, deleted=deleted, world=world)
            case "ConfigMap":
                self.batches.changed(record.manifest, world)
            case "Lease" if record.name == LEASE_NAME:
                self.leaders.renewed(record.manifest, world)
            case "Lease" if deleted:
                self.overwritten(owner_uid(record.manifest))
            case "Lease" if owner_uid(record.manifest):
                self._lease_changed(record.manifest, world)
            case _:
                pass
        self.capacity.changed(change, world)
        self.waiting.changed(change, world)
        self.health.changed(change, world)
        self.repairs.changed(change, world)
        self.incidents.changed(change, world)

    def landing(self, sent_s: float) -> None:
        """A write of the operator lands now that was sent then."""
        self.sent_s = sent_s

    def _lease_changed(self, manifest: Manifest, world: ClusterView) -> None:
        said = manifest["metadata"].get("annotations") or {}
        text = said.get(labels.ANNOTATION_PROGRESS, "")
        if '"attempt":' not in text or self.forgeries.is_forged(said):
            return
        key = (
            owner_uid(manifest),
            int(text.split('"attempt":', 1)[1].split(",", 1)[0].rstrip("}")),
        )
        if '"outcome":"' in text:
            self.preemptions.heard(*key)
        if '"released":true' not in text:
            return
        self._released.add(key)
        if '"outcome":"Succeeded"' in text:
            self._successes.setdefault(key, world.time_s())

    def overwritten(self, uid: str) -> None:
        """Forget successes that only a Lease reported which says something else now, or is deleted."""
        for key in [key for key in self._successes if key[0] == uid]:
            del self._successes[key]

    def _job_changed(self, manifest: Manifest, deleted: bool, world: ClusterView) -> None:
        uid, name = manifest["metadata"]["uid"], manifest["metadata"]["name"]
        if deleted:
            self.jobs.pop(uid, None)
            self.conditions.pop(uid, None)
            return
        known = self.jobs.get(uid) or {}
        before, status = known.get("status") or {}, manifest.get("status") or {}
        self.jobs[uid] = manifest
        self.conditions[uid] = frozenset(
            entry["type"] for entry in status.get("conditions") or () if entry["status"] == "True"
        )
        self.restarts[uid] = status.get("restarts", 0)
        self.preemptions.changed(uid, known, manifest, world)
        old, new = before.get("attempt"), status.get("attempt")
        ended = [kind for kind in ("Succeeded", "Failed") if _true(status, kind)]
        if len(ended) > 1:
            self.broke("one terminal condition", f"{name} is {ended}", world)
        for kind in ("Succeeded", "Failed"):
            if _true(before, kind) and not _true(status, kind):
                self.broke("a finished job stays finished", f"{name} is no longer {kind}", world)
        if _true(status, "Succeeded") and not _true(before, "Succeeded"):
            self.succeeded += 1
            self._check_history(uid, name, world)
        if ended and _true(status, "Admitted"):
            self.broke("a finished job gives its devices back", name, world)
        if old is not None and (new is None or new["number"] < old["number"]):
            self.broke("attempts rise", f"{name} from {old['number']} to {new and new['number']}", world)
        if new is not None and (old is None or new["number"] != old["number"]):
            self._attempt_begun(uid, name, before, status, world)
        elif new is not None and old is not None and new["placement"] != old["placement"]:
            self.broke("an attempt keeps its placement", name, world)

    def _attempt_begun(
        self, uid: str, name: str, before: dict[str, Any], status: dict[str, Any], world: ClusterView
    ) -> None:
        old, new = before.get("attempt"), status["attempt"]
        number = new["number"]
        if number != (0 if old is None else old["number"]) + 1:
            self.broke("attempts count by one", f"{name} to {number}", world)
        records = status.get("restartRecords") or [{}]
        self.anomalies.begun(uid, records, number, world)
        if old is not None and records[-1].get("attempt") == number - 1:
            self.starts.begun(uid, name, records[-1], replacements_by_index(old["replacements"]), world)
        # A move is written as an intent first, which may take any time.
        moved = records[-1].get("attempt") == number - 1 and records[-1].get("cause") in {"NodeLost", "NodeFault"}
        # No write spans Lease and job. A success that comes while the restart is under way comes too late: the next
        # attempt begins after the last step, and reports it again.
        known_s = float("inf") if old is None else self._successes.get((uid, old["number"]), float("inf"))
        if old is not None and known_s < self.sent_s - LATENCY_S and not moved:
            self.broke(
                "a success counts", f"{name} began attempt {number} after attempt {old['number']} succeeded", world
            )
        blamed = (uid, records[-1].get("attempt", 0))
        if records[-1].get("cause") in {"RankExited", "RankKilled"} and blamed not in self._failed_ranks:
            self.broke("a restart has a cause of its own", f"{name} ended attempt {blamed[1]}, whose ranks live", world)
        if records[-1].get("cause") == "Hung" and blamed[1] == number - 1:
            self._check_hang(blamed, world)
        replacements = replacements_by_index(new["replacements"])
        for index, replacement in replacements_by_index([] if old is None else old["replacements"]).items():
            if replacements.get(index, 0) < replacement:
                self.broke("replacement numbers rise", f"{name} worker {index}", world)
        nodes = Placement.model_validate(new["placement"]).node_by_index()
        self.attempts[uid, number] = AttemptFact(
            replicas=new["replicas"], devices=new["devices"], replacements=replacements, nodes=nodes
        )
        kept = self.attempts[uid, old["number"]].nodes if old is not None and _true(before, "Admitted") else []
        self.capacity.begun(uid, world, takes=any(kept[at : at + 1] != [node] for at, node in enumerate(nodes)))
        if not _true(before, "Admitted"):
            self.preemptions.admitted(uid, nodes, world)
            self.places.admitted(uid, world)
            self.data.admitted(uid, before, world)
        spec = self.jobs[uid]["spec"]
        most = (spec.get("failurePolicy") or {}).get("maxRestarts", 10)
        counted = sum(record.get("counts", True) for record in status.get("restartRecords") or ())
        if counted > most:
            self.broke(
                "restarts stay in budget", f"{name} restarted {counted} times, at most {most} are allowed", world
            )

    def _check_hang(self, blamed: tuple[str, int], world: ClusterView) -> None:
        job, gang = self.jobs[blamed[0]], world.gangs.get(blamed)
        name = f"{job['metadata']['name']} attempt {blamed[1]}"
        # A rank that gives up waiting ends its attempt itself: then the operator only names the cause.
        if job["spec"]["health"]["hang"]["action"] != "Restart" and blamed not in self._gave_up:
            self.broke("a hang is only reported unless asked otherwise", name, world)
        if gang is None or not any(rank.was_stopped for rank in gang.ranks.values()):
            self.broke("who is restarted for a hang has hung", name, world)

    def _check_history(self, uid: str, name: str, world: ClusterView) -> None:
        history = world.root(uid).history()
        if history != list(range(1, world.steps[uid] + 1)):
            self.broke("history holds each step once", f"{name}: {_ranges(history)}", world)

    # --------------------------------------------------------------------------------------------------- what gangs do

    def rank_ended(self, uid: str, attempt: int, *, code: int | None) -> None:
        """Note that a rank ended; ``code`` is None where a signal ended it."""
        if code != ExitCode.OK:
            self._failed_ranks.add((uid, attempt))
        if code == ExitCode.ENVIRONMENT:
            self._gave_up.add((uid, attempt))

    def joined(self, launcher: LauncherView, message: Joined) -> None:
        """An index says that its old ranks are dead."""
        self._joined.setdefault((launcher.pod.job_uid, message.attempt), {})[message.index] = message.replacement

    def released(self, leader: LauncherView, release: Release, world: ClusterView) -> None:
        """A leader releases its gang: everybody must have joined, the resume point must be fixed."""
        uid = leader.pod.job_uid
        fact = self.attempts[uid, release.attempt]
        joined = self._joined.get((uid, release.attempt), {})
        wanted = {index: fact.replacements.get(index, 0) for index in range(fact.replicas)}
        missing = [index for index, number in wanted.items() if joined.get(index) != number]
        if missing:
            self.broke("no gang is half released", f"{leader.pod.job}: workers {missing} have not joined", world)
        if (uid, release.attempt) not in self._released:
            self.broke("a release is on the Lease first", f"{leader.pod.job} attempt {release.attempt}", world)
        point = world.root(uid).points.get(release.attempt)
        if point is None or point.resume_from != release.resume_from:
            self.broke("the resume point is fixed once", f"{leader.pod.job} attempt {release.attempt}", world)

    def forked(self, launcher: LauncherView, attempt: int, release: Release, world: ClusterView) -> None:
        """Ranks were started: no rank of the job's past may live where the cluster still reaches, none twice."""
        uid = launcher.pod.job_uid
        point = world.root(uid).points.get(attempt)
        if point is None or point.resume_from != release.resume_from:
            self.broke("an attempt begins where it was fixed", f"{launcher.pod.job} attempt {attempt}", world)
        elif point.checkpoint is not None and point.checkpoint not in world.root(uid).committed:
            what = f"{launcher.pod.job} attempt {attempt} begins at {point.resume_from}"
            self.broke("what is resumed from is there", what, world)
        for number in launcher.ranks:
            if (uid, attempt, number) in self._forked:
                self.broke("ranks start once an attempt", f"{launcher.pod.pod} rank {number} of {attempt}", world)
            self._forked.add((uid, attempt, number))
        for other in world.launchers.values():
            # A worker that a resize dropped can commit nothing without rank 0; its pod ends on its own time.
            dropped = other.pod.index >= self.attempts[uid, attempt].replicas
            if other.pod.job_uid != uid or dropped or other.zombie or not world.nodes[other.node].up:
                continue
            past = [rank.attempt for rank in other.ranks.values() if rank.alive and rank.attempt < attempt]
            if past:
                what = f"{launcher.pod.pod} starts attempt {attempt}, {other.pod.pod} runs {past[0]}"
                self.broke("never two live gangs", what, world)

    # ---------------------------------------------------------------------------------------------------------- the end

    def check_end(self, world: ClusterView) -> None:
        """Check, long after the faults, that every job has finished or reports why it waits, and nothing is left."""
        for uid, job in self.jobs.items():
            name, status = job["metadata"]["name"], job.get("status") or {}
            if _true(status, "Succeeded"):
                self._check_history(uid, name, world)
            if not (_true(status, "Succeeded") or _true(status, "Failed") or _true(status, "Suspended")):
                queued = _condition(status, "Queued")
                if self.anomalies.excuses(uid):
                    continue
                if queued is None or queued["status"] != "True" or queued["reason"] not in WAITING_REASONS:
                    self.broke("every job finishes or says why", f"{name}: {_words(status)}", world)
                elif self.capacity.fits_alone(job, world) and not self._is_held_up():
                    self.broke("what fits is admitted", f"{name}: {_words(status)}", world)
        for pod in self.pods.values():
            uid = pod["metadata"]["labels"][labels.LABEL_JOB_UID]
            phase = (pod.get("status") or {}).get("phase")
            owner = self.jobs.get(uid)
            if owner is not None and self.anomalies.excuses(uid):
                continue
            if owner is None or phase not in {"Succeeded", "Failed"}:
                self.broke("no orphan at the end", f"pod {pod['metadata']['name']} is {phase}", world)
        self._check_orphans(world)
        self.anomalies.check_end(world)
        self.foreign_queues.check_end(world)
        self.health.check_end(world)
        self.repairs.check_end(world)
        self.incidents.check_end(world)

    def _is_held_up(self) -> bool:
        """Tell whether a job holds devices to the end, since what it needs to start is refused."""
        return any(self.true(uid, "Admitted") and self.anomalies.excuses(uid) for uid in self.jobs)

    def _check_orphans(self, world: ClusterView) -> None:
        for kind in CHILDREN:
            for record in world.store.records(kind):
                owner = (record.manifest["metadata"].get("labels") or {}).get(labels.LABEL_JOB_UID)
                if owner not in {None, *self.jobs} and not is_set_apart(record.manifest):
                    self.broke("no orphan at the end", f"{kind} {record.name}", world)
        for launcher in world.launchers.values():
            if launcher.alive and not self.anomalies.excuses(launcher.pod.job_uid):
                self.broke("no orphan at the end", f"launcher {launcher.pod.pod} lives", world)


def _condition(status: dict[str, Any], kind: str) -> dict[str, Any] | None:
    return next((entry for entry in status.get("conditions") or () if entry["type"] == kind), None)


def _true(status: dict[str, Any], kind: str) -> bool:
    found = _condition(status, kind)
    return found is not None and found["status"] == "True"


def _words(status: dict[str, Any]) -> str:
    return ", ".join(
        f"{entry['type']}={entry['status']}/{entry['reason']}({entry.get('message', '')})"
        for entry in status.get("conditions") or ()
    )


def _ranges(steps: list[int]) -> str:
    return f"{len(steps)} steps, {steps[:3]}..{steps[-3:]}"
