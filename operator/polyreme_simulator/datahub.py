"""The datahub's controller as jobs see it: late, killed, restarted; its reports lost, malformed, about other data."""

from __future__ import annotations

import random
from collections.abc import Callable

from polyreme_api.data_report import (
    ANNOTATION_DATA,
    DataReport,
    DataState,
    OperationProgress,
    data_digest,
)
from polyreme_api.job import parse_job
from polyreme_cluster.port import Manifest, ObjectRef, PortError
from polyreme_simulator.malformed import REPORTS
from polyreme_simulator.ownership import is_set_apart
from polyreme_simulator.world import World

LOOK_S = 1.0
TAKES_S = (0.5, 5.0, 20.0)
"""How long a job's data takes."""
LATE_S = 8.0
"""Longest time by which a report is late while faults last."""
AWAY_S = (5.0, 20.0, 40.0)
"""How long a killed controller stays away."""
EVENTS = (3, 6, 9)
"""How often something goes wrong while faults last."""
GATED_SEEDS, GATED = 8, 5
"""Of so many seeds, one after the other, the one with this number has a datahub controller, and the data gate on."""
FAULTS = ("data late", "report lost", "report malformed", "report about other data", "data gone", "datahub restarted")


def is_gated(seed: int) -> bool:
    """Tell whether a seed has a datahub controller."""
    return seed % GATED_SEEDS == GATED


class DataHub:
    """Prepares data and reports on it; what goes wrong is drawn from a generator of its own.

    Args:
        world: The cluster.
        rng: Every draw.
    """

    def __init__(self, world: World, rng: random.Random) -> None:
        self._world, self._rng = world, rng
        self._faults = False
        self._life = 0
        self._away = False
        self._work: dict[str, int] = {}
        """UIDs of the jobs whose data is being prepared, with the life of the controller that does it."""
        self._there: set[str] = set()
        acts: tuple[tuple[str, Callable[[], bool]], ...] = (
            ("report lost", lambda: self._spoil(None)),
            ("report malformed", lambda: self._spoil(self._rng.choice(REPORTS))),
            ("report about other data", self._report_on_others),
            ("data gone", self._lose_data),
            ("datahub restarted", self._restart),
        )
        self._acts = acts

    def begin(self, lasts_s: float, *, faults: bool) -> None:
        """Start the controller, and plan its faults."""
        self._world.facts.rules.data.gated = True
        self._faults = faults
        self._look()
        if not faults:
            return
        for _ in range(self._rng.choice(EVENTS)):
            self._world.after(1.0 + self._rng.random() * (lasts_s - 2.0), self._disturb)

    def _disturb(self) -> None:
        name, act = self._rng.choice(self._acts)
        if self._world.faulty and act():
            self._world.reached[name, ""] += 1

    # -------------------------------------------------------------------------------------------------- what it does

    def _look(self) -> None:
        """Start what is missing, again and again."""
        self._world.after(LOOK_S, self._look)
        if self._away:
            return
        for job in self._jobs():
            uid = job["metadata"]["uid"]
            if self._work.get(uid) == self._life or self._finished(job):
                continue
            state = self._world.facts.rules.data.reported(job)
            if state is DataState.PROCESSED and uid in self._there:
                continue
            self._work[uid] = life = self._life
            gone = state is DataState.PROCESSED
            self._report(uid, DataState.MISSING if gone else DataState.PROCESSING)
            self._world.after(self._rng.choice(TAKES_S), lambda uid=uid, life=life: self._made(uid, life))  # type: ignore[misc]

    def _made(self, uid: str, life: int) -> None:
        if life != self._life:
            return
        self._there.add(uid)
        late = self._faults and self._world.faulty and self._rng.random() < 0.5
        if late:
            self._world.reached["data late", ""] += 1
        self._world.after(LATE_S * self._rng.random() if late else 0.0, lambda: self._tell(uid, life))

    def _tell(self, uid: str, life: int) -> None:
        if life == self._life:
            del self._work[uid]
            if uid in self._there:
                self._report(uid, DataState.PROCESSED)

    def _report(self, uid: str, state: DataState) -> None:
        job = self._world.job(uid)
        if job is None:
            return
        done = self._rng.randrange(1000)
        report = DataReport(
            state=state,
            about=data_digest(parse_job({**job, "status": {}}).spec),
            progress=(OperationProgress(operation="decode", done=done, total=1000),),
        )
        self._annotate(job, report.to_annotation())

    def _annotate(self, job: Manifest, text: str | None) -> bool:
        try:
            self._world.store.change(ObjectRef.of(job), {"metadata": {"annotations": {ANNOTATION_DATA: text}}})
        except PortError:
            return False
        return True

    # ------------------------------------------------------------------------------------------ what happens to it

    def _spoil(self, text: str | None) -> bool:
        job = self._some_job()
        return job is not None and self._annotate(job, text)

    def _report_on_others(self) -> bool:
        job = self._some_job()
        other = DataReport(state=DataState.PROCESSED, about=f"{self._rng.getrandbits(64):016x}")
        return job is not None and self._annotate(job, other.to_annotation())

    def _lose_data(self) -> bool:
        if not self._there:
            return False
        uid = self._rng.choice(sorted(self._there))
        self._there.discard(uid)
        return True

    def _restart(self) -> bool:
        """Kill the controller: what it was preparing is begun again by the next one."""
        self._life += 1
        self._work.clear()
        self._away = True

        def back() -> None:
            self._away = False

        self._world.after(self._rng.choice(AWAY_S), back)
        return True

    def _jobs(self) -> list[Manifest]:
        found = [record.manifest for record in self._world.store.records("TrainingJob")]
        return [job for job in found if not is_set_apart(job)]

    def _some_job(self) -> Manifest | None:
        """Draw a job, one that has not been admitted yet where there is one: those wait for their data."""
        jobs = self._jobs()
        waiting = [job for job in jobs if not (job.get("status") or {}).get("attempt")]
        return self._rng.choice(waiting or jobs) if jobs else None

    @staticmethod
    def _finished(job: Manifest) -> bool:
        entries = (job.get("status") or {}).get("conditions") or ()
        return any(entry["type"] in {"Succeeded", "Failed"} and entry["status"] == "True" for entry in entries)
