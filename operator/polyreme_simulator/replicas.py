"""The replicas of the operator: processes that crash, are stopped and continue, and lead or wait to."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from polyreme_cluster.election import LEASE_NAME, lead
from polyreme_cluster.leader_port import LeaderPort
from polyreme_cluster.port import ObjectRef
from polyreme_operator.controller import run_operator
from polyreme_operator.settings import Settings
from polyreme_operator.types.observer import Observer
from polyreme_simulator.event_loop import Process, SimClock, VirtualLoop
from polyreme_simulator.faults import FaultyPort, PortFaults
from polyreme_simulator.ownership import is_set_apart
from polyreme_simulator.world import World

RESTART_S = 3.0
"""Longest time until a crashed replica restarts."""


class _Watchful(Observer):
    """Reports an error in a pass as a violation, although the operator itself continues."""

    def __init__(self, world: World) -> None:
        self._world = world

    def on_job_failed(self, uid: str, error: Exception) -> None:
        if self._is_malformed(uid):
            return
        self._world.facts.violations.append(
            f"t={self._world.time_s():.3f} no pass meets a bug: {uid}: {type(error).__name__}: {error}"
        )

    def _is_malformed(self, uid: str) -> bool:
        return any(
            record.uid == uid and is_set_apart(record.manifest) for record in self._world.store.records("TrainingJob")
        )


class Replica:
    """One replica; while it is alive, one life of it.

    Args:
        world: The cluster.
        name: Its identity.
        rng: Every draw.
        settings: What the installation says.
        faults: Returns the chances that hold now.
    """

    def __init__(
        self,
        world: World,
        name: str,
        rng: random.Random,
        *,
        settings: Settings,
        faults: Callable[[], PortFaults],
    ) -> None:
        self._world, self.name, self._rng, self._settings = world, name, rng, settings
        self._faults, self._reached = faults, world.reached
        self._loop: VirtualLoop = world.loop
        self._ended = asyncio.Event()
        self._over = False
        self._process = Process()
        self._port: FaultyPort | None = None
        self._identity = ""
        self.clock = SimClock(world.loop)
        """The clock of its machine: it outlives the process."""

    # ------------------------------------------------------------------------------------------- what happens to it

    def crash(self) -> None:
        """End this life, as by SIGKILL: nothing more is sent."""
        if self._port is not None:
            self._port.cut()
        self._ended.set()

    def leave(self) -> None:
        """End this life, as by SIGTERM: what is done on the way out is done."""
        self._ended.set()

    def stop(self, for_s: float) -> None:
        """SIGSTOP for a while."""
        if self._process.stopped or not self._world.faulty:
            return
        process = self._process
        process.stop()
        self._reached["replica stopped", ""] += 1
        self._world.after(for_s, lambda: self._go_on(process))

    def thaw(self) -> None:
        """SIGCONT, if it is stopped."""
        self._go_on(self._process)

    def _go_on(self, process: Process) -> None:
        if process.stopped:
            process.go_on(self._loop)
            self._world.facts.rules.leaders.went_on(self._identity, self._world)

    # ------------------------------------------------------------------------------------------------ what it does

    def broke(self, rule: str, what: str) -> None:
        """Note a broken rule."""
        self._world.facts.broke(rule, what, self._world)

    def sending(self, verb: str, ref: ObjectRef, *, uid: str) -> None:
        """Note a write."""
        facts = self._world.facts
        if ref.name != LEASE_NAME:
            facts.rules.leaders.sending(self._identity, f"{verb} {ref.kind} {ref.name}", self._world)
        facts.rules.successors.sending(self._identity, verb, ref, uid=uid, world=self._world)

    def landing(self, sent_s: float) -> None:
        """Note that a write lands."""
        self._world.facts.landing(sent_s)

    def forcing(self, uid: str) -> None:
        """Note that a pod is deleted by force."""
        self._world.facts.rules.anomalies.forcing(uid, self._world)

    def refusal(self, verb: str, ref: ObjectRef, *, uid: str) -> str:
        """Return why the API server refuses a write; empty: it takes it."""
        sentence = self._world.facts.rules.anomalies.refusal(verb, ref, uid, self._world)
        if sentence:
            self._reached["refused", f"{verb} {ref.kind}"] += 1
        return sentence

    # -------------------------------------------------------------------------------------------------------- lives

    async def keep(self) -> None:
        """Live again and again, each time with nothing but the store, until cancelled."""
        try:
            while not self._over:
                await self._live()
                await asyncio.sleep(self._rng.random() * RESTART_S)
        finally:
            self._over = True

    async def _live(self) -> None:
        rng = random.Random(self._rng.random())
        self._ended.clear()
        process = self._process = Process()
        self._identity = f"{self.name}-{rng.getrandbits(32):08x}"
        port = self._port = FaultyPort(
            self._world.cluster,
            self._loop,
            random.Random(rng.random()),
            faults=self._faults,
            reached=self._reached,
            life=self,
        )
        task = self._loop.create_task(self._run(port, rng), context=process.context())
        ended = self._loop.create_task(self._ended.wait())
        try:
            await asyncio.wait({task, ended}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
            self._go_on(process)
            task.cancel()
            outcome = (await asyncio.gather(task, return_exceptions=True))[0]
        if isinstance(outcome, Exception):
            self.broke("the operator does not fail", repr(_deepest(outcome)))

    async def _run(self, port: FaultyPort, rng: random.Random) -> None:
        """One process: it waits for the Lease, and works while it has it."""

        async def work(leads: Callable[[], bool]) -> None:
            self._reached["leads", ""] += 1
            await run_operator(
                LeaderPort(port, leads),
                self.clock,
                settings=self._settings,
                rng=random.Random(rng.random()),
                entropy=rng.randbytes,
                observer=_Watchful(self._world),
            )

        await lead(
            port,
            self.clock,
            identity=self._identity,
            namespace=self._settings.namespace,
            rng=random.Random(rng.random()),
            run=work,
        )


def _deepest(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
