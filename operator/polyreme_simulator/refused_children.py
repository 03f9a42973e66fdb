"""Rules for objects of jobs that the API server refuses: a quota of a namespace that is full, for a while or for good.

A quota is checked before existence, so a create of what exists is refused too.
"""

from __future__ import annotations

import dataclasses

from polyreme_api import labels
from polyreme_cluster.port import Manifest, NotFoundError, ObjectRef
from polyreme_simulator.cluster_history import ClusterHistory
from polyreme_simulator.cluster_view import ClusterView
from polyreme_simulator.observed_state import ObservedState

KINDS = ("Service", "Secret", "Role", "RoleBinding")
REPORTED_S = 20.0
"""Time within which a job reports such a refusal, and stops to report it once it is over."""
CREATED_S = 50.0
"""Time within which the object is created once it is accepted, however often it was refused before."""


@dataclasses.dataclass(slots=True, eq=False)
class RefusedChildFacts:
    """Which kinds are refused in which namespaces, and the rules that follow."""

    observed: ObservedState
    history: ClusterHistory
    quotas: dict[tuple[str, str], str] = dataclasses.field(default_factory=dict)
    """Sentence by namespace and kind."""
    _refused: dict[tuple[str, str], tuple[str, int, float]] = dataclasses.field(default_factory=dict)
    """Sentence, attempt and time of the first refusal, by UID of the job and kind."""
    _missing_s: dict[tuple[str, str], float] = dataclasses.field(default_factory=dict)
    _stale_s: dict[tuple[str, str], float] = dataclasses.field(default_factory=dict)

    def refuse(self, namespace: str, kind: str, sentence: str) -> None:
        """New objects of a kind are refused in a namespace from now on."""
        self.quotas[namespace, kind] = sentence

    def allow(self, namespace: str, kind: str, sentence: str) -> None:
        """They are accepted again, unless another sentence refuses them by now."""
        if self.quotas.get((namespace, kind)) == sentence:
            del self.quotas[namespace, kind]

    def refusal(self, ref: ObjectRef, uid: str, world: ClusterView) -> str:
        """Return the sentence by which the creation of an object is refused; empty if it is not."""
        sentence = self.quotas.get((ref.namespace, ref.kind), "") if ref.kind in KINDS else ""
        job = self.observed.jobs.get(uid)
        if sentence and job is not None:
            known, number = self._refused.get((uid, ref.kind)), _attempt(job)
            if known is None or known[:2] != (sentence, number):
                self._refused[uid, ref.kind] = sentence, number, world.time_s()
        return sentence

    def excuses(self, uid: str) -> bool:
        """Tell whether a job need not finish, since what it needs is refused to the end."""
        job = self.observed.jobs.get(uid)
        return job is not None and any(job["metadata"]["namespace"] == namespace for namespace, _ in self.quotas)

    def look(self, world: ClusterView) -> None:
        """Check what jobs report, once nothing else goes wrong."""
        for (uid, kind), (sentence, number, since_s) in list(self._refused.items()):
            job = self.observed.jobs.get(uid)
            if job is None or not self._runs(uid, job):
                self._forget(uid, kind)
                continue
            now = self.quotas.get((job["metadata"]["namespace"], kind))
            exists, reported = exists_child(world, job["metadata"], kind), sentence in _words(job)
            gang, name = world.gangs.get((uid, _attempt(job))), job["metadata"]["name"]
            # Ranks that have trained to the end need nothing more, though the job is not finished yet.
            trains = gang is not None and (gang.whole or gang.done)
            late = _attempt(job) == number and world.time_s() - since_s > REPORTED_S and not trains
            if now == sentence and not exists and late and not reported:
                self.observed.broke("a refused object is reported", f"{name} says nothing of its {kind}", world)
            if self._lasts((uid, kind), self._missing_s, not (now or exists or trains), CREATED_S, world):
                self.observed.broke("a job continues once its object is accepted", f"{name} has no {kind}", world)
            over = exists and (not now or trains)
            if self._lasts((uid, kind), self._stale_s, over and reported, REPORTED_S, world):
                self.observed.broke("a refusal that is over is not reported", f"{name}: {sentence}", world)

    def _runs(self, uid: str, job: Manifest) -> bool:
        """Tell whether a job tries to run, so that its objects are created and its status is written."""
        attempt = (job.get("status") or {}).get("attempt") or {}
        wanted = attempt.get("desired") == "Run" and not job["spec"].get("suspend")
        return wanted and self.observed.true(uid, "Admitted") and not job["metadata"].get("deletionTimestamp")

    def _lasts(
        self, key: tuple[str, str], since: dict[tuple[str, str], float], holds: bool, for_s: float, world: ClusterView
    ) -> bool:
        if not holds:
            since.pop(key, None)
            return False
        return world.time_s() - since.setdefault(key, world.time_s()) > for_s

    def _forget(self, uid: str, kind: str) -> None:
        for known in (self._refused, self._missing_s, self._stale_s):
            known.pop((uid, kind), None)


def exists_child(world: ClusterView, job: Manifest, kind: str) -> bool:
    """Tell whether a job's object of a kind exists; the job is given by its metadata."""
    name = labels.job_object_name(job["name"], job["uid"])
    try:
        world.store.shown(ObjectRef(kind=kind, namespace=job["namespace"], name=name))
    except NotFoundError:
        return False
    return True


def _attempt(job: Manifest) -> int:
    """Return the number of a job's attempt; 0 before the first."""
    return int(((job.get("status") or {}).get("attempt") or {}).get("number", 0))


def _words(job: Manifest) -> str:
    """Return what the condition PodsReady says."""
    conditions = (job.get("status") or {}).get("conditions") or ()
    return " ".join(entry.get("message", "") for entry in conditions if entry["type"] == "PodsReady")
