"""One seed, one simulation: a cluster, some jobs, a time of faults, a time of peace, and what came of it."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections import Counter

from polyreme_api import labels
from polyreme_operator.loop import run_operator
from polyreme_operator.settings import Settings
from polyreme_operator.sim.chaos import Chaos
from polyreme_operator.sim.eventloop import SimStalledError, VirtualLoop
from polyreme_operator.sim.faults import NO_FAULTS, FaultyPort, PortFaults
from polyreme_operator.sim.invariants import Facts
from polyreme_operator.sim.world import World

FAULTS_S = 90.0
"""Virtual time for which faults last."""
PEACE_S = 1500.0
"""Longest time until every job is finished behind them."""
SETTLE_S = 200.0
RESTART_S = 3.0
REPLICAS = (1, 2, 2, 3, 4)
PACKS = 12
"""Divisible by every worker count that the simulation uses."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one seed showed."""

    seed: int
    violations: tuple[str, ...]
    trace: str
    changes: int
    attempts: int
    succeeded: int
    reached: dict[tuple[str, str], int]
    """How often each fault came about at each point."""


def simulate(seed: int, *, faults: bool = True) -> Result:
    """Run one seed; the same seed gives the same trace."""
    loop = VirtualLoop()
    asyncio.set_event_loop(loop)
    try:
        return loop.run_until_complete(_Simulation(loop, seed, faults=faults).run())
    finally:
        asyncio.set_event_loop(None)
        loop.close()


class _Simulation:
    def __init__(self, loop: VirtualLoop, seed: int, *, faults: bool) -> None:
        self._loop, self._seed = loop, seed
        self._rng = random.Random(seed)
        quota = {"small": 4} if self._rng.random() < 0.5 else {}
        self._facts = Facts(quota=quota)
        self._world = World(loop, random.Random(self._rng.random()), self._facts)
        self._reached: Counter[tuple[str, str]] = Counter()
        self._faults = _draw_faults(self._rng) if faults else NO_FAULTS
        self._chaos = Chaos(self._world, random.Random(self._rng.random()), self._reached, enabled=faults)
        self._crashed = asyncio.Event()
        self._over = False
        for name, devices in quota.items():
            self._world.store.create(
                {
                    "apiVersion": labels.API_VERSION,
                    "kind": "TrainingQueue",
                    "metadata": {"name": name},
                    "spec": {"quota": {labels.RESOURCE_DEVICE: devices}},
                }
            )

    async def run(self) -> Result:
        world, rng = self._world, self._rng
        for number in range(rng.choice((2, 3, 3))):
            world.add_node(f"n{number}", rng.choice((2, 4)))
        largest = sum(node.devices for node in world.nodes.values())
        for number in range(rng.choice((1, 2, 3))):
            world.soon(20.0, lambda number=number: self._submit(f"j{number}", largest))  # type: ignore[misc]
        operator = self._loop.create_task(self._keep_operator())
        self._chaos.begin(FAULTS_S, self._crashed.set)
        await asyncio.sleep(FAULTS_S)
        self._faults = NO_FAULTS
        self._chaos.end()
        until_s = self._loop.time() + PEACE_S
        try:
            while self._loop.time() < until_s and not self._finished():  # noqa: ASYNC110 - virtual time costs nothing
                await asyncio.sleep(5.0)
            await asyncio.sleep(SETTLE_S)
        except SimStalledError as error:
            self._facts.violations.append(str(error))
        self._over = True
        operator.cancel()
        await asyncio.gather(operator, return_exceptions=True)
        self._facts.check_end(world)
        return self._result()

    def _submit(self, name: str, largest: int) -> None:
        rng = self._rng
        replicas, devices = rng.choice(REPLICAS), rng.choice((1, 1, 2))
        queue = "small" if rng.random() < 0.5 else "default"
        most = min(largest, 4)
        while replicas * devices > most:
            replicas, devices = max(1, replicas - 1), 1
        world = self._world
        steps = rng.randrange(10, 150)
        uid = world.store.create(_job(name, (replicas, devices), queue, steps, rng))["metadata"]["uid"]
        world.steps[uid] = steps
        world.checkpoint_every[uid] = rng.choice((3, 4, 6))

    def _finished(self) -> bool:
        conditions = [
            {
                entry["type"]
                for entry in (record.manifest.get("status") or {}).get("conditions") or ()
                if entry["status"] == "True"
            }
            for record in self._world.store.records("TrainingJob")
        ]
        return all(kinds & {"Succeeded", "Failed"} for kinds in conditions)

    async def _keep_operator(self) -> None:
        """Run the operator; when it crashes, a new one begins with nothing but the store."""
        life = 0
        while not self._over:
            life += 1
            rng = random.Random(self._rng.random())
            self._crashed.clear()
            port = FaultyPort(
                self._world.cluster,
                self._loop,
                random.Random(rng.random()),
                faults=lambda: self._faults,
                reached=self._reached,
                crash=self._crashed.set,
                broke=lambda rule, what: self._facts.broke(rule, what, self._world),
                landing=self._facts.landing,
            )
            task = self._loop.create_task(
                run_operator(
                    port,
                    self._world.clock,
                    settings=Settings(relist_s=60.0),
                    rng=random.Random(rng.random()),
                    entropy=rng.randbytes,
                )
            )
            crash = self._loop.create_task(self._crashed.wait())
            try:
                await asyncio.wait({task, crash}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                crash.cancel()
                task.cancel()
                outcome = (await asyncio.gather(task, return_exceptions=True))[0]
            if isinstance(outcome, Exception):
                self._facts.violations.append(
                    f"t={self._loop.time():.3f} the operator does not fail: {_deepest(outcome)!r}"
                )
            await asyncio.sleep(self._rng.random() * RESTART_S)

    def _result(self) -> Result:
        return Result(
            seed=self._seed,
            violations=tuple(dict.fromkeys(self._facts.violations)),
            trace=self._facts.trace,
            changes=self._facts.changes,
            attempts=len(self._facts.attempts),
            succeeded=self._facts.succeeded,
            reached=dict(self._reached),
        )


def _draw_faults(rng: random.Random) -> PortFaults:
    """Each seed has its own mixture: some faults often, some not at all."""

    def chance(most: float) -> float:
        return most * rng.random() if rng.random() < 0.6 else 0.0

    return PortFaults(
        too_many=chance(0.1),
        error_before=chance(0.1),
        error_after=chance(0.1),
        timeout_before=chance(0.1),
        timeout_after=chance(0.1),
        timeout_late=chance(0.2),
        slow=chance(0.1),
        crash_before=chance(0.05),
        crash_after=chance(0.05),
        watch_drop=chance(0.1),
        watch_gone=chance(0.2),
        watch_lag=chance(0.3),
    )


def _job(name: str, size: tuple[int, int], queue: str, steps: int, rng: random.Random) -> dict[str, object]:
    strict = rng.random() < 0.25
    kept = {} if rng.random() < 0.75 else {"ttlSecondsAfterFinished": 20}
    policy = {
        "maxRestarts": 4 if strict else 200,
        "noProgressMax": 3 if strict else 100,
        "inPlaceMax": rng.choice((0, 1, 2)),
        "backoff": {"initialSeconds": 1, "maxSeconds": 8},
    }
    return {
        "apiVersion": labels.API_VERSION,
        "kind": "TrainingJob",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "model": {"preset": "kimi-vl-nano"},
            "data": {"sources": [{"name": "a", "dataset": "sample/digits"}], "sequenceTokens": 128},
            "training": {"steps": steps, "packsPerStep": PACKS},
            "workers": {"replicas": size[0], "devices": size[1]},
            "queueName": queue,
            "priority": rng.choice((0, 0, 1)),
            "failurePolicy": policy,
            **kept,
            "checkpoint": {"preemptionGraceSeconds": 10},
            "health": {
                "heartbeatTimeoutSeconds": 10,
                "nodeLostSeconds": 8,
                "startTimeoutSeconds": 40,
                "hang": {"action": rng.choice(("Notify", "Restart", "Restart")), "stallSeconds": rng.choice((5, 8))},
            },
        },
    }


def _deepest(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
