"""One seed, one simulation: a cluster, some jobs, a period of faults, a calm period, and the result."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import random
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from polyreme_operator.reconcile.worker_pods import PodDefaults
from polyreme_operator.settings import Settings
from polyreme_simulator.anomalies import Anomalies, class_of
from polyreme_simulator.changes import Changes
from polyreme_simulator.chaos import Chaos
from polyreme_simulator.cluster_history import SETTLED_S
from polyreme_simulator.datahub import DataHub, is_gated
from polyreme_simulator.event_loop import VirtualLoop
from polyreme_simulator.faults import NO_FAULTS, PortFaults
from polyreme_simulator.health_agents import HealthAgents, has_evacuations, has_hooks
from polyreme_simulator.incident_facts import OF_ALL_MAX, OF_NODE_MAX
from polyreme_simulator.invariants import Facts
from polyreme_simulator.kubelet_faults import KubeletFaults, has_kubelet_faults
from polyreme_simulator.ownership import is_set_apart
from polyreme_simulator.profiles import BEGINS, Profile, profile_of
from polyreme_simulator.repair_hooks import NAMESPACE
from polyreme_simulator.replicas import Replica
from polyreme_simulator.scenario import (
    BINDS,
    DELETES_JOBS,
    MAKES_ROLES,
    MAKES_WAY,
    RACK,
    TELLS_LEVELS,
    draw_job,
    draw_scenario,
    with_large_rack,
)
from polyreme_simulator.waiting import LOOK_S
from polyreme_simulator.world import World

FAULTS_S = 90.0
"""Virtual time for which faults last."""
PEACE_S = 1500.0
"""Longest time after the faults until every job has finished."""
SETTLE_S = 120.0
"""Time to clean up after the last job."""
EXAMINED_S = 900.0
"""Time until every node has been examined again: examinations are at most twice as far apart as faults last."""
LATE_S = 10.0
LONGEST_CHANGE_S = 62.0
REPLICA_NAMES = ("a", "b")
AIMS = {
    "": 4,
    MAKES_WAY: 8,
    DELETES_JOBS: 5,
    "watch PriorityClass": 2,
    BINDS: 1,
    "create ConfigMap": 2,
    "create Lease of leadership": 1,
    **dict.fromkeys(MAKES_ROLES, 1),
    "delete Pod": 1,
    TELLS_LEVELS: 2,
    "patch ConfigMap": 1,
    BEGINS: 1,
}
"""Weight by rare point: the faults of a seed prefer one of them, or none, and its scenario comes to that point."""
AIMED, AIMED_SELDOM = 0.1, 0.25
"""Chance of each fault at that point, and at one that a seed comes to once or twice at most."""
SELDOM = (MAKES_WAY, "watch PriorityClass")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one seed showed."""

    seed: int
    violations: tuple[str, ...]
    trace: str
    changes: int
    attempts: int
    succeeded: int
    restarts: int
    """Attempts that a failure called for."""
    reached: dict[tuple[str, str], int]
    """How often each fault came about at each point."""


def simulate(seed: int, *, faults: bool = True, anomaly: str | None = None, health: bool = False) -> Result:
    """Run one seed; the same seed gives the same trace.

    Args:
        seed: Which.
        faults: Whether anything goes wrong.
        anomaly: The class of anomalies, in place of the seed's own.
        health: Whether nodes have agents and the operator a NodeFaultPolicy.
    """
    with _without_collector():
        loop = VirtualLoop()
        asyncio.set_event_loop(loop)
        anomaly = class_of(seed) if anomaly is None else anomaly
        simulation = _Simulation(loop, seed, faults=faults, anomaly=anomaly, health=health)
        try:
            return loop.run_until_complete(simulation.run())
        except Exception as error:  # noqa: BLE001 - an actor's error is a violation of its seed, and ends no campaign
            return simulation.stopped(error)
        finally:
            asyncio.set_event_loop(None)
            loop.close()


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Collect garbage once, after the seed, instead of a hundred times within it: one seed leaves little."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.collect()
        if enabled:
            gc.enable()


class _Simulation:
    def __init__(self, loop: VirtualLoop, seed: int, *, faults: bool, anomaly: str, health: bool) -> None:
        self._loop, self._seed = loop, seed
        self._rng = random.Random(seed)
        profile = profile_of(seed)
        self._world = World(loop, random.Random(self._rng.random()), Facts(), profile=profile)
        self._enabled = faults
        self._faults = _draw_faults(self._rng, profile) if faults else NO_FAULTS
        self._scenario = draw_scenario(self._rng, profile, aim=self._faults.aim)
        if health and has_evacuations(seed):
            self._scenario = with_large_rack(self._scenario)
        self._world.launcher_rbac = self._scenario.launcher_rbac
        self._replicas = [
            Replica(
                self._world,
                name,
                random.Random(self._rng.random()),
                settings=Settings(
                    relist_s=60.0,
                    data_gate=is_gated(seed),
                    node_health=health,
                    repairs=health and has_hooks(seed),
                    repairs_namespace=NAMESPACE,
                    incidents_per_node=OF_NODE_MAX,
                    incidents_max=OF_ALL_MAX,
                    defaults=PodDefaults(
                        binding=self._scenario.binding,
                        launcher_rbac=self._scenario.launcher_rbac,
                    ),
                ),
                faults=lambda: self._faults,
            )
            for name in REPLICA_NAMES
        ]
        self._changes = Changes(self._world, self._scenario, random.Random(self._rng.random()))
        self._chaos = Chaos(
            self._world, self._changes, self._replicas, random.Random(self._rng.random()), self._world.reached
        )
        self._anomalies = Anomalies(
            self._world,
            anomaly if faults else "",
            [replica.clock for replica in self._replicas],
            random.Random(f"anomalies of seed {seed}"),
            self._world.reached,
        )
        kubelets = faults and has_kubelet_faults(seed)
        rng_of_kubelets = random.Random(f"kubelets of seed {seed}")
        self._kubelets = KubeletFaults(self._world, rng_of_kubelets, self._world.reached) if kubelets else None
        self._datahub = DataHub(self._world, random.Random(f"datahub of seed {seed}")) if is_gated(seed) else None
        self._agents = (
            HealthAgents(
                self._world,
                random.Random(f"agents of seed {seed}"),
                hooks=has_hooks(seed),
                evacuations=has_evacuations(seed),
            )
            if health
            else None
        )
        self._submitted: list[dict[str, Any]] = []
        """Specifications of all jobs."""

    async def run(self) -> Result:
        world, scenario = self._world, self._scenario
        for name, devices, rack in scenario.nodes:
            world.add_node(name, devices, tags={RACK: rack}, owned=scenario.owned)
        self._changes.repair()
        for number in range(scenario.jobs):
            from_s = scenario.profile.at_s[number] if scenario.profile.at_s else 0.0
            within_s = world.rng.random() * scenario.within_s
            world.after(from_s + within_s, lambda number=number: self._submit(f"j{number}"))  # type: ignore[misc]
        if self._datahub is not None:
            self._datahub.begin(FAULTS_S, faults=self._enabled)
        if self._agents is not None:
            self._agents.begin(FAULTS_S, faults=self._enabled)
        replicas = [self._loop.create_task(replica.keep()) for replica in self._replicas]
        if self._enabled:
            await self._disturb()
        for number in range(scenario.late_jobs):
            world.soon(LATE_S, lambda number=number: self._submit(f"late{number}"))  # type: ignore[misc]
        if self._agents is not None:
            self._agents.end()
        await asyncio.sleep(LATE_S)
        if self._enabled and (scenario.profile.calm_jobs or not self._finished()):
            await self._change_in_calm()
        await self._wait_for_the_end()
        for replica in replicas:
            replica.cancel()
        await asyncio.gather(*replicas, return_exceptions=True)
        self._world.facts.check_end(world)
        return self._result()

    def stopped(self, error: Exception) -> Result:
        """Return what it showed until an error ended it."""
        at = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{type(error).__name__}: {error} ({Path(at.filename).name}:{at.lineno})"
        self._world.facts.violations.append(f"t={self._loop.time():.3f} the world continues: {what}")
        return self._result()

    async def _disturb(self) -> None:
        """A time of faults."""
        self._chaos.begin(FAULTS_S)
        self._anomalies.begin(FAULTS_S)
        if self._kubelets is not None:
            self._kubelets.begin(FAULTS_S)
        await asyncio.sleep(FAULTS_S)
        self._faults = NO_FAULTS
        self._chaos.end()
        if self._kubelets is not None:
            self._kubelets.end()

    async def _change_in_calm(self) -> None:
        """Change the cluster after the faults: the pending reasons of waiting jobs must follow."""
        await self._watch(SETTLED_S)
        self._anomalies.calm(LONGEST_CHANGE_S)
        if self._kubelets is not None:
            self._kubelets.calm(LONGEST_CHANGE_S)
        profile = self._scenario.profile
        for number in range(self._rng.choice(profile.calm_changes)):
            name, act = self._changes.draw()
            if act():
                self._world.reached[name, ""] += 1
            if profile.calm_jobs:
                self._world.soon(LATE_S, lambda number=number: self._submit(f"calm{number}"))  # type: ignore[misc]
            await self._watch(self._rng.choice((2.0, 8.0, 15.0)))
        if profile.calm_jobs:
            # All may be finished before the last is submitted.
            await asyncio.sleep(LATE_S)
        await self._watch(LONGEST_CHANGE_S)
        self._changes.repair()

    async def _watch(self, for_s: float) -> None:
        """Let time pass, and check what waiting jobs report."""
        until_s = self._loop.time() + for_s
        while self._loop.time() < until_s and not self._finished():
            await asyncio.sleep(LOOK_S)
            self._world.facts.look(self._world)

    async def _wait_for_the_end(self) -> None:
        await self._watch(PEACE_S)
        await asyncio.sleep(SETTLE_S if self._agents is None else EXAMINED_S)

    def _submit(self, name: str) -> None:
        job = draw_job(name, self._scenario, self._rng, before=self._submitted)
        if self._agents is not None:
            self._agents.ask(job)
        self._submitted.append(job["spec"])
        uid = self._world.store.create(job)["metadata"]["uid"]
        self._world.steps[uid] = job["spec"]["training"]["steps"]
        self._world.training.checkpoint_every[uid] = self._rng.choice((3, 4, 6))

    def _finished(self) -> bool:
        conditions = [
            {
                entry["type"]
                for entry in (record.manifest.get("status") or {}).get("conditions") or ()
                if entry["status"] == "True"
            }
            for record in self._world.store.records("TrainingJob")
            if not is_set_apart(record.manifest)
        ]
        return all(kinds & {"Succeeded", "Failed"} for kinds in conditions)

    def _result(self) -> Result:
        return Result(
            seed=self._seed,
            violations=tuple(dict.fromkeys(self._world.facts.violations)),
            trace=self._world.facts.trace,
            changes=self._world.facts.changes,
            attempts=len(self._world.facts.attempts),
            succeeded=self._world.facts.job_facts.succeeded,
            restarts=sum(self._world.facts.job_facts.restarts.values()),
            reached=dict(self._world.reached),
        )


def _draw_faults(rng: random.Random, profile: Profile) -> PortFaults:
    """Each seed has its own mixture: some faults often, some not at all."""

    def chance(most: float) -> float:
        return most * profile.api_faults * rng.random() if rng.random() < 0.6 else 0.0

    aims = profile.aims or AIMS
    aim = rng.choices(list(aims), list(aims.values()))[0]
    return PortFaults(
        conflict=chance(0.1),
        too_many=chance(0.1),
        error_before=chance(0.1),
        error_after=chance(0.1),
        timeout_before=chance(0.1),
        timeout_after=chance(0.1),
        timeout_late=chance(0.2),
        slow=chance(0.1),
        crash_before=chance(0.05),
        crash_after=chance(0.05),
        stopped=chance(0.05),
        watch_drop=chance(0.1),
        watch_gone=chance(0.2),
        watch_lag=chance(0.3),
        aim=aim,
        aimed=AIMED_SELDOM if aim in SELDOM else AIMED,
    )
