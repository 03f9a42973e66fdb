"""Rules of a job's status: attempts, restarts, placements, its end."""

from __future__ import annotations

import dataclasses
from typing import Any

from polyreme_api.job.placement import Placement
from polyreme_api.job.policy import FailurePolicy
from polyreme_api.job.status import replacements_by_index
from polyreme_cluster.port import Manifest
from polyreme_simulator.cluster_view import ClusterView
from polyreme_simulator.observed_state import AttemptFact, ObservedState
from polyreme_simulator.rules import Rules

LATENCY_S = 0.004
"""Longest time that the answer to a read is on its way."""


@dataclasses.dataclass(slots=True, eq=False)
class JobFacts:
    """What became of jobs."""

    observed: ObservedState
    rules: Rules
    succeeded: int = 0
    restarts: dict[str, int] = dataclasses.field(default_factory=dict)
    """Restarts after failures, by UID of the job."""

    def changed(self, manifest: Manifest, deleted: bool, world: ClusterView) -> None:
        """Take a change of a job."""
        uid, name = manifest["metadata"]["uid"], manifest["metadata"]["name"]
        if deleted:
            self.observed.jobs.pop(uid, None)
            self.observed.conditions.pop(uid, None)
            return
        known = self.observed.jobs.get(uid) or {}
        before, status = known.get("status") or {}, manifest.get("status") or {}
        self.observed.jobs[uid] = manifest
        self.observed.conditions[uid] = frozenset(
            entry["type"] for entry in status.get("conditions") or () if entry["status"] == "True"
        )
        self.restarts[uid] = status.get("restarts", 0)
        self.rules.preemptions.changed(uid, known, manifest, world)
        self.rules.accounts.changed(known, manifest, world)
        old, new = before.get("attempt"), status.get("attempt")
        ended = [kind for kind in ("Succeeded", "Failed") if is_true(status, kind)]
        if len(ended) > 1:
            self.observed.broke("one terminal condition", f"{name} is {ended}", world)
        for kind in ("Succeeded", "Failed"):
            if is_true(before, kind) and not is_true(status, kind):
                self.observed.broke("a finished job stays finished", f"{name} is no longer {kind}", world)
        if is_true(status, "Succeeded") and not is_true(before, "Succeeded"):
            self.succeeded += 1
            self.check_history(uid, name, world)
        if ended and is_true(status, "Admitted"):
            self.observed.broke("a finished job gives its devices back", name, world)
        if old is not None and (new is None or new["number"] < old["number"]):
            self.observed.broke("attempts rise", f"{name} from {old['number']} to {new and new['number']}", world)
        if new is not None and (old is None or new["number"] != old["number"]):
            self._attempt_begun(uid, name, before, status, world)
        elif new is not None and old is not None and new["placement"] != old["placement"]:
            self.observed.broke("an attempt keeps its placement", name, world)

    def _attempt_begun(
        self, uid: str, name: str, before: dict[str, Any], status: dict[str, Any], world: ClusterView
    ) -> None:
        old, new = before.get("attempt"), status["attempt"]
        number = new["number"]
        if number != (0 if old is None else old["number"]) + 1:
            self.observed.broke("attempts count by one", f"{name} to {number}", world)
        records = status.get("restartRecords") or [{}]
        self.rules.anomalies.begun(uid, records, number, world)
        if old is not None and records[-1].get("attempt") == number - 1:
            self.rules.starts.begun(uid, name, records[-1], replacements_by_index(old["replacements"]), world)
        # A move is written as an intent first, which may take any time.
        moved = records[-1].get("attempt") == number - 1 and records[-1].get("cause") in {"NodeLost", "NodeFault"}
        # No write spans Lease and job. A success that comes while the restart is under way comes too late: the next
        # attempt begins after the last step, and reports it again.
        known_s = float("inf") if old is None else self.rules.gangs.successes.get((uid, old["number"]), float("inf"))
        if old is not None and known_s < self.observed.sent_s - LATENCY_S and not moved:
            self.observed.broke(
                "a success counts", f"{name} began attempt {number} after attempt {old['number']} succeeded", world
            )
        blamed = (uid, records[-1].get("attempt", 0))
        if records[-1].get("cause") in {"RankExited", "RankKilled"} and blamed not in self.rules.gangs.failed_ranks:
            self.observed.broke(
                "a restart has a cause of its own", f"{name} ended attempt {blamed[1]}, whose ranks live", world
            )
        if records[-1].get("cause") == "Hung" and blamed[1] == number - 1:
            self._check_hang(blamed, world)
        replacements = replacements_by_index(new["replacements"])
        for index, replacement in replacements_by_index([] if old is None else old["replacements"]).items():
            if replacements.get(index, 0) < replacement:
                self.observed.broke("replacement numbers rise", f"{name} worker {index}", world)
        nodes = Placement.model_validate(new["placement"]).node_by_index()
        self.observed.attempts[uid, number] = AttemptFact(
            replicas=new["replicas"], devices=new["devices"], replacements=replacements, nodes=nodes
        )
        kept = (
            self.observed.attempts[uid, old["number"]].nodes if old is not None and is_true(before, "Admitted") else []
        )
        taken = sorted({node for at, node in enumerate(nodes) if kept[at : at + 1] != [node]})
        self.rules.capacity.begun(uid, world, taken=taken)
        if not is_true(before, "Admitted"):
            self.rules.preemptions.admitted(uid, nodes, world)
            self.rules.places.admitted(uid, world)
            self.rules.data.admitted(uid, before, world)
        spec = self.observed.jobs[uid]["spec"]
        policy = FailurePolicy.model_validate(spec.get("failurePolicy") or {})
        most = policy.restarts_allowed(new["replicas"] * new["devices"])
        counted = sum(record.get("counts", True) for record in status.get("restartRecords") or ())
        if counted > most:
            self.observed.broke(
                "restarts stay in budget", f"{name} restarted {counted} times, at most {most} are allowed", world
            )

    def _check_hang(self, blamed: tuple[str, int], world: ClusterView) -> None:
        job, gang = self.observed.jobs[blamed[0]], world.gangs.get(blamed)
        name = f"{job['metadata']['name']} attempt {blamed[1]}"
        # A rank that gives up waiting ends its attempt itself: then the operator only names the cause.
        if job["spec"]["health"]["hang"]["action"] != "Restart" and blamed not in self.rules.gangs.gave_up:
            self.observed.broke("a hang is only reported unless asked otherwise", name, world)
        if gang is None or not any(rank.was_stopped for rank in gang.ranks.values()):
            self.observed.broke("who is restarted for a hang has hung", name, world)

    def check_history(self, uid: str, name: str, world: ClusterView) -> None:
        """Check that a job that succeeded has trained every step once."""
        history = world.root(uid).history()
        if history != list(range(1, world.steps[uid] + 1)):
            shown = f"{len(history)} steps, {history[:3]}..{history[-3:]}"
            self.observed.broke("history holds each step once", f"{name}: {shown}", world)


def condition(status: dict[str, Any], kind: str) -> dict[str, Any] | None:
    """Return a condition of a status."""
    return next((entry for entry in status.get("conditions") or () if entry["type"] == kind), None)


def is_true(status: dict[str, Any], kind: str) -> bool:
    """Tell whether a condition of a status holds."""
    found = condition(status, kind)
    return found is not None and found["status"] == "True"
