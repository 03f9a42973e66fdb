"""Rules of gangs: what launchers do, and what leaders say on their Lease."""

from __future__ import annotations

import dataclasses

from polyreme_api import labels
from polyreme_api.exit_codes import ExitCode
from polyreme_cluster.port import Manifest
from polyreme_launcher.protocol.messages import Joined, Release
from polyreme_simulator.cluster_view import ClusterView, LauncherView
from polyreme_simulator.forgery_facts import ForgeryFacts
from polyreme_simulator.observed_state import ObservedState
from polyreme_simulator.ownership import owner_uid
from polyreme_simulator.preemptions import PreemptionFacts


@dataclasses.dataclass(slots=True, eq=False)
class GangFacts:
    """Who has joined, was released and forked, and how it ended; by UID of the job and attempt."""

    observed: ObservedState
    forgeries: ForgeryFacts
    preemptions: PreemptionFacts
    successes: dict[tuple[str, int], float] = dataclasses.field(default_factory=dict)
    """When each success was reported that is still on record."""
    failed_ranks: set[tuple[str, int]] = dataclasses.field(default_factory=set)
    """Attempts with a rank that failed."""
    gave_up: set[tuple[str, int]] = dataclasses.field(default_factory=set)
    """Attempts with a rank that exited because it had waited too long for another."""
    _joined: dict[tuple[str, int], dict[int, int]] = dataclasses.field(default_factory=dict)
    _forked: set[tuple[str, int, int]] = dataclasses.field(default_factory=set)
    _released: set[tuple[str, int]] = dataclasses.field(default_factory=set)

    def lease_changed(self, manifest: Manifest, world: ClusterView) -> None:
        """Take a job's Lease as its leader wrote it."""
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
            self.successes.setdefault(key, world.time_s())

    def overwritten(self, uid: str) -> None:
        """Forget successes that only a Lease reported which says something else now, or is deleted."""
        for key in [key for key in self.successes if key[0] == uid]:
            del self.successes[key]

    def rank_ended(self, uid: str, attempt: int, *, code: int | None) -> None:
        """Note that a rank ended; ``code`` is None where a signal ended it."""
        if code != ExitCode.OK:
            self.failed_ranks.add((uid, attempt))
        if code == ExitCode.ENVIRONMENT:
            self.gave_up.add((uid, attempt))

    def joined(self, launcher: LauncherView, message: Joined) -> None:
        """An index says that its old ranks are dead."""
        self._joined.setdefault((launcher.pod.job_uid, message.attempt), {})[message.index] = message.replacement

    def released(self, leader: LauncherView, release: Release, world: ClusterView) -> None:
        """A leader releases its gang: everybody must have joined, the resume point must be fixed."""
        uid = leader.pod.job_uid
        fact = self.observed.attempts[uid, release.attempt]
        joined = self._joined.get((uid, release.attempt), {})
        wanted = {index: fact.replacements.get(index, 0) for index in range(fact.replicas)}
        missing = [index for index, number in wanted.items() if joined.get(index) != number]
        if missing:
            self.observed.broke(
                "no gang is half released", f"{leader.pod.job}: workers {missing} have not joined", world
            )
        if (uid, release.attempt) not in self._released:
            self.observed.broke("a release is on the Lease first", f"{leader.pod.job} attempt {release.attempt}", world)
        point = world.root(uid).points.get(release.attempt)
        if point is None or point.resume_from != release.resume_from:
            self.observed.broke("the resume point is fixed once", f"{leader.pod.job} attempt {release.attempt}", world)

    def forked(self, launcher: LauncherView, attempt: int, release: Release, world: ClusterView) -> None:
        """Ranks were started: no rank of the job's past may live where the cluster still reaches, none twice."""
        uid = launcher.pod.job_uid
        point = world.root(uid).points.get(attempt)
        if point is None or point.resume_from != release.resume_from:
            self.observed.broke("an attempt begins where it was fixed", f"{launcher.pod.job} attempt {attempt}", world)
        elif point.checkpoint is not None and point.checkpoint not in world.root(uid).committed:
            what = f"{launcher.pod.job} attempt {attempt} begins at {point.resume_from}"
            self.observed.broke("what is resumed from is there", what, world)
        for number in launcher.ranks:
            if (uid, attempt, number) in self._forked:
                self.observed.broke(
                    "ranks start once an attempt", f"{launcher.pod.pod} rank {number} of {attempt}", world
                )
            self._forked.add((uid, attempt, number))
        for other in world.launchers.values():
            # A worker that a resize dropped can commit nothing without rank 0; its pod ends on its own time.
            dropped = other.pod.index >= self.observed.attempts[uid, attempt].replicas
            if other.pod.job_uid != uid or dropped or other.zombie or not world.nodes[other.node].up:
                continue
            past = [rank.attempt for rank in other.ranks.values() if rank.alive and rank.attempt < attempt]
            if past:
                what = f"{launcher.pod.pod} starts attempt {attempt}, {other.pod.pod} runs {past[0]}"
                self.observed.broke("never two live gangs", what, world)
