"""The operator's shell: it watches the cluster, calls the pure core, and applies the core's decisions.

One dispatcher wakes on every event and every deadline. Jobs are reconciled concurrently, each by one pass at a time.
One task decides admission, placement and resizes; it writes each batch as intents to one object before it changes any
job. Nothing here decides, and nothing here holds state that a restart of the process would need.
"""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Callable

from polyreme_api.clock import Clock, MonotonicWallClock
from polyreme_cluster.port import ClusterPort
from polyreme_operator.cache.kinds import watched_kinds
from polyreme_operator.cached_cluster import CachedCluster
from polyreme_operator.cluster_cache import ClusterCache
from polyreme_operator.health_controller import HealthController
from polyreme_operator.installation_key import InstallationKey
from polyreme_operator.job_objects import JobObjects
from polyreme_operator.node_marks import NodeMarks
from polyreme_operator.passes.cluster import ClusterPasses
from polyreme_operator.passes.context import PassContext
from polyreme_operator.passes.dispatcher import Dispatcher
from polyreme_operator.passes.job import JobPasses
from polyreme_operator.passes.job_decider import JobDecider
from polyreme_operator.passes.job_locks import JobLocks
from polyreme_operator.passes.keys import PUBLISH, REFRESH_REASONS, SCHEDULE
from polyreme_operator.passes.status_updates import StatusUpdates
from polyreme_operator.plan_worker import InlinePlanner, Planner, Planning
from polyreme_operator.publishing.event_recorder import EventRecorder
from polyreme_operator.quarantine import Quarantine
from polyreme_operator.reconcile.events import warnings_of
from polyreme_operator.settings import Settings
from polyreme_operator.types.changes import Changes
from polyreme_operator.types.job_keys import JobKeys
from polyreme_operator.types.observer import Observer
from polyreme_operator.watcher import Watcher
from polyreme_operator.work_queue import WorkQueue
from polyreme_operator.writer import Writer

_REFRESH_REASONS_S = 2.0
"""How long a message that names free capacity may be outdated: everything that is taken meanwhile costs one look."""


async def run_operator(
    port: ClusterPort,
    clock: Clock,
    *,
    settings: Settings | None = None,
    rng: random.Random,
    entropy: Callable[[int], bytes],
    observer: Observer | None = None,
    planner: Planner | None = None,
) -> None:
    """Run until cancelled.

    Args:
        port: The cluster.
        clock: Time of decisions and waits. Wall time is read once; recorded times follow it until the next run.
        settings: Settings of the installation.
        rng: Jitter of retries.
        entropy: Random bytes of a new installation's key; ``secrets.token_bytes``.
        observer: Receives reports of what was done.
        planner: Plans jobs; None plans them in this process.

    Raises:
        PolyremeError: If the installation's key can't be read or created.
    """
    steady = MonotonicWallClock(clock)  # decisions subtract times, and wall time may be stepped
    settings = settings or Settings()
    key = InstallationKey(port, clock, settings, entropy=entropy)
    operator = _Controller(
        port,
        steady,
        settings,
        rng=rng,
        keys=await key.read(),
        observer=observer or Observer(),
        planner=planner or InlinePlanner(),
    )
    await operator.run(key)


class _Controller:
    def __init__(
        self,
        port: ClusterPort,
        clock: MonotonicWallClock,
        settings: Settings,
        *,
        rng: random.Random,
        keys: JobKeys,
        observer: Observer,
        planner: Planner,
    ) -> None:
        self._clock, self._settings, self._observer = clock, settings, observer
        self._backoff_s = functools.partial(settings.jittered_backoff_s, rng=rng)
        self._cache = ClusterCache(settings, keys=keys)
        self._cluster = CachedCluster(port, clock, self._cache, self._note)
        self._events = EventRecorder(
            port,
            clock,
            per_s=settings.events_per_s,
            burst=settings.events_burst,
            dropped=lambda event: observer.on_event_dropped(event.reason),
        )
        emit = self._events.put
        self._planning = Planning(self._cache, planner, note=self._note)
        self._queue = WorkQueue(
            clock.now_s,
            first=(SCHEDULE, PUBLISH),
            processing_max=settings.reconciles_max,
            backoff_s=self._backoff_s,
        )
        self._watcher = Watcher(port, clock, self._cache, settings, rng, note=self._note)
        self._marks = NodeMarks(port, clock, self._cache, self._note)
        self._health = HealthController(
            self._cluster, settings, emit=emit, observer=observer, synced=lambda: self._watcher.synced
        )
        self._build_passes(keys)

    def _build_passes(self, keys: JobKeys) -> None:
        settings, emit = self._settings, self._events.put
        objects = JobObjects(self._cluster, keys)
        context = PassContext(
            cluster=self._cluster,
            clock=self._clock,
            settings=settings,
            queue=self._queue,
            writer=Writer(self._cluster, objects, settings.writes_max, emit=emit, observer=self._observer),
            quarantine=Quarantine(
                self._cache, self._clock, emit, self._observer, note=self._note, wake_at=self._queue.add_at
            ),
            locks=JobLocks(),
            observer=self._observer,
        )
        decider = JobDecider(context, self._marks)
        self._updates = StatusUpdates(context, decider, self._backoff_s)
        self._dispatcher = Dispatcher(
            context,
            JobPasses(context, decider, self._updates, self._watcher),
            ClusterPasses(context, self._updates),
            self._watcher,
        )

    async def run(self, key: InstallationKey) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(key.keep(), name="installation-key")
            for kind in watched_kinds(health=self._settings.node_health):
                tasks.create_task(self._watcher.follow(kind), name=f"watch-{kind}")
            tasks.create_task(self._events.run(), name="events")
            tasks.create_task(self._updates.run(), name="status-updates")
            tasks.create_task(self._planning.run(), name="planning")
            tasks.create_task(self._marks.run(), name="node-marks")
            if self._settings.node_health:
                tasks.create_task(self._health.run(), name="node-health")
            await self._dispatcher.run(tasks)

    def _note(self, changes: Changes) -> None:
        for left_out in changes.unreadable:
            self._observer.on_object_unreadable(left_out.ref.kind)
        for record in changes.refused:
            self._observer.on_record_refused(record.fault)
        for event in warnings_of(changes):
            self._events.put(event)
        if changes.jobs:
            self._queue.add(*sorted(changes.jobs))
            self._planning.look()
        if changes.health or changes.asks:
            self._health.look()
        if changes.capacity or changes.asks:
            self._queue.add(SCHEDULE)
        if changes.taken and self._watcher.synced:
            self._queue.add_at(REFRESH_REASONS, self._clock.now_s() + _REFRESH_REASONS_S)
        if changes.jobs or changes.capacity or changes.asks or changes.taken:
            self._dispatcher.wake()
