"""The only effects of the operator: it watches, lets the core decide, and applies what the core asked for.

One dispatcher wakes on every event and every deadline. Jobs are reconciled side by side, one pass at a time each;
admission, placement and resizes are decided by one task, whose batches stand as intents on one object before any job
is touched. Nothing here decides; nothing here remembers what a restart of the process would miss.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import random
from collections import defaultdict
from collections.abc import Callable

from polyreme_api import labels
from polyreme_api.clock import Clock
from polyreme_api.errors import RetryableError
from polyreme_operator.apply import Applier
from polyreme_operator.core.best_fit import Placer, place_best_fit
from polyreme_operator.core.events import events_of
from polyreme_operator.core.reconcile import reconcile
from polyreme_operator.core.schedule import schedule
from polyreme_operator.model import WATCHED_KINDS, Changes, ClusterModel
from polyreme_operator.port import ClusterPort, GoneError, Manifest, NotFoundError, ObjectRef, PortError
from polyreme_operator.settings import Settings
from polyreme_operator.types.actions import Decision, ReadLease

_log = logging.getLogger(__name__)

SCHEDULE = "schedule"
"""Key of the one task that decides admission; every other key is a job's UID."""


async def run_operator(
    port: ClusterPort,
    clock: Clock,
    *,
    settings: Settings | None = None,
    rng: random.Random,
    entropy: Callable[[int], bytes],
    placer: Placer = place_best_fit,
) -> None:
    """Run until cancelled.

    Args:
        port: The cluster.
        clock: Time of decisions and waits.
        settings: What the installation says.
        rng: Jitter of retries.
        entropy: Secret bytes; ``secrets.token_bytes``.
        placer: Which node for which worker.
    """
    operator = _Operator(port, clock, settings or Settings(), rng=rng, entropy=entropy, placer=placer)
    await operator.run()


class _Operator:
    def __init__(
        self,
        port: ClusterPort,
        clock: Clock,
        settings: Settings,
        *,
        rng: random.Random,
        entropy: Callable[[int], bytes],
        placer: Placer,
    ) -> None:
        self._port, self._clock, self._settings, self._rng, self._placer = port, clock, settings, rng, placer
        self._model = ClusterModel()
        self._applier = Applier(port, clock, self._model, settings, entropy=entropy, note=self._note)
        self._wake = asyncio.Event()
        self._dirty: set[str] = set()
        self._busy: set[str] = set()
        self._timers: list[tuple[float, str]] = []
        self._due: dict[str, float] = {}
        self._failures: dict[str, int] = defaultdict(int)
        self._locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._unsynced = set(WATCHED_KINDS)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for kind in WATCHED_KINDS:
                tasks.create_task(self._follow(kind), name=f"watch-{kind}")
            await self._dispatch(tasks)

    # ------------------------------------------------------------------------------------------------------- observe

    async def _follow(self, kind: str) -> None:
        """List and watch one kind for good."""
        failures = 0
        version: str | None = None
        relist_at_s = 0.0
        while True:
            try:
                if version is None or self._clock.steady_s() >= relist_at_s:
                    version = await self._list(kind)
                    relist_at_s = self._clock.steady_s() + self._settings.relist_s * (0.75 + self._rng.random() / 2)
                    failures = 0
                async with asyncio.timeout(max(0.0, relist_at_s - self._clock.steady_s())):
                    async for event in self._port.watch(kind, resource_version=version):
                        version = event.resource_version
                        failures = 0
                        self._note(self._model.apply(event, now_s=self._clock.now_s()))
                failures += 1
            except TimeoutError:
                continue
            except GoneError:
                version = None
                failures += 1
            except NotFoundError:
                # Not served: its CRD is not installed yet, or no longer. Then there is none of it; it may come.
                version = None
                failures += 1
                self._note(self._synced(kind))
            except RetryableError as error:
                failures += 1
                _log.info("watch of %s broke: %s", kind, error)
            await self._clock.sleep(self._backoff_s(failures))

    async def _list(self, kind: str) -> str:
        items: list[Manifest] = []
        token: str | None = None
        while True:
            page = await self._port.list(kind, continue_=token)
            items += page.items
            token = page.continue_
            if token is None:
                break
        changes = self._model.replace(kind, items, version=int(page.resource_version), now_s=self._clock.now_s())
        self._note(changes | self._synced(kind))
        return page.resource_version

    def _synced(self, kind: str) -> Changes:
        """Note that a kind is known now: nothing is decided before all of them are."""
        first = kind in self._unsynced
        self._unsynced.discard(kind)
        return Changes(capacity=first)

    def _note(self, changes: Changes) -> None:
        self._dirty |= changes.jobs
        if changes.capacity:
            self._dirty.add(SCHEDULE)
        if changes.jobs or changes.capacity:
            self._wake.set()

    # ------------------------------------------------------------------------------------------------------ dispatch

    async def _dispatch(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            self._wake.clear()
            if not self._unsynced:
                self._ring()
                self._start(tasks)
            try:
                async with asyncio.timeout(self._idle_s()):
                    await self._wake.wait()
            except TimeoutError:
                continue

    def _ring(self) -> None:
        """Make dirty what time has made due."""
        now_s = self._clock.now_s()
        while self._timers and self._timers[0][0] <= now_s:
            at_s, key = heapq.heappop(self._timers)
            if self._due.get(key) == at_s:
                del self._due[key]
                self._dirty.add(key)

    def _start(self, tasks: asyncio.TaskGroup) -> None:
        """Start a pass for each dirty key that has none; admission first."""
        ready = sorted(self._dirty - self._busy, key=lambda key: (key != SCHEDULE, key))
        for key in ready:
            if len(self._busy) > self._settings.reconciles_max:
                return
            self._dirty.discard(key)
            self._busy.add(key)
            tasks.create_task(self._pass(key), name=f"pass-{key}")

    def _idle_s(self) -> float:
        if not self._timers:
            return self._settings.idle_s
        return min(self._settings.idle_s, max(0.0, self._timers[0][0] - self._clock.now_s()))

    def _wake_at(self, key: str, at_s: float) -> None:
        if key in self._due and self._due[key] <= at_s:
            return
        self._due[key] = at_s
        heapq.heappush(self._timers, (at_s, key))

    async def _pass(self, key: str) -> None:
        """Run one pass; what failed is tried again, later each time."""
        try:
            await (self._schedule() if key == SCHEDULE else self._reconcile(key))
            self._failures.pop(key, None)
        except PortError as error:
            self._failures[key] += 1
            delay_s = self._backoff_s(self._failures[key])
            if isinstance(error, RetryableError):
                delay_s = max(delay_s, min(error.delay_s, self._settings.retry_max_s) if error.delay_s > 1.0 else 0.0)
            _log.info("pass of %s is tried again in %.2f s: %s", key, delay_s, error)
            self._wake_at(key, self._clock.now_s() + delay_s)
        finally:
            self._busy.discard(key)
            self._wake.set()

    def _backoff_s(self, failures: int) -> float:
        full_s = min(self._settings.retry_max_s, self._settings.retry_initial_s * 2.0 ** min(failures - 1, 30))
        return full_s * (0.5 + self._rng.random() / 2)

    # -------------------------------------------------------------------------------------------------------- decide

    async def _reconcile(self, uid: str) -> None:
        async with self._locks[uid]:
            decision = self._decide(uid, lease_read=False)
            reads = [action for action in decision.actions if isinstance(action, ReadLease)]
            if reads:
                await self._applier.refresh(reads[0].ref)
                decision = self._decide(uid, lease_read=True)
            if decision.reschedule:
                self._note(Changes(capacity=True))
            if decision.wake_at_s is not None:
                self._wake_at(uid, decision.wake_at_s)
            await self._applier.apply(decision.actions)
        if self._model.job(uid) is None:
            self._locks.pop(uid, None)

    def _decide(self, uid: str, *, lease_read: bool) -> Decision:
        scene = self._model.scene(uid, lease_read=lease_read)
        if scene is None:
            return Decision()
        return reconcile(scene, self._clock.now_s(), defaults=self._settings.defaults)

    async def _schedule(self) -> None:
        batch = schedule(self._model.cluster(), self._clock.now_s(), placer=self._placer)
        if batch.reads:
            for uid in sorted(batch.reads):
                ref = self._model.lease_ref(uid)
                if ref is not None:
                    await self._applier.refresh(ref)
            cluster = self._model.cluster(leases_read=batch.reads)
            batch = schedule(cluster, self._clock.now_s(), placer=self._placer)
        if batch.reads:
            # Another job's Lease became of interest meanwhile.
            self._note(Changes(capacity=True))
        self._note(self._model.decided(batch.pending, batch.refused))
        if batch.intents is not None:
            await self._applier.write_intents(batch.intents, self._intents_ref)
        for write in batch.writes:
            async with self._locks[write.uid]:
                await self._applier.apply((write, *events_of(write)))

    @property
    def _intents_ref(self) -> ObjectRef:
        return ObjectRef(kind="ConfigMap", namespace=self._settings.namespace, name=labels.INTENTS_NAME)
