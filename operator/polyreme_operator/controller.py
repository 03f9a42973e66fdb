"""The operator's shell: it watches the cluster, calls the pure core, and applies the core's decisions.

One dispatcher wakes on every event and every deadline. Jobs are reconciled concurrently, each by one pass at a time.
One task decides admission, placement and resizes; it writes each batch as intents to one object before it changes any
job. Nothing here decides, and nothing here holds state that a restart of the process would need.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable

from polyreme_api import labels
from polyreme_api.clock import Clock, MonotonicWallClock
from polyreme_api.errors import RetryableError
from polyreme_cluster.port import ClusterPort, ConflictError, InvalidObjectError, NotFoundError, ObjectRef, PortError
from polyreme_operator.cache.kinds import watched_kinds
from polyreme_operator.cached_cluster import CachedCluster
from polyreme_operator.cluster_cache import ClusterCache
from polyreme_operator.health_worker import HealthWorker
from polyreme_operator.incident_worker import IncidentWorker
from polyreme_operator.installation_key import InstallationKey
from polyreme_operator.job_objects import JobObjects
from polyreme_operator.node_marks import NodeMarks
from polyreme_operator.plan_worker import InlinePlanner, Planner, Planning
from polyreme_operator.publishing.event_recorder import EventRecorder
from polyreme_operator.publishing.status_throttle import StatusThrottle
from polyreme_operator.quarantine import Quarantine
from polyreme_operator.reconcile.events import events_of, warnings_of
from polyreme_operator.reconcile.job import reconcile
from polyreme_operator.reconcile.quarantine import JobFaultError
from polyreme_operator.reconcile.rebase import rebased
from polyreme_operator.repair_worker import RepairWorker
from polyreme_operator.scheduler import Batch, Stopwatch, schedule
from polyreme_operator.settings import Settings
from polyreme_operator.types.actions import Action, Decision, EmitEvent, ReadLease, WriteStatus
from polyreme_operator.types.changes import Changes
from polyreme_operator.types.job_keys import JobKeys
from polyreme_operator.types.observer import Observer
from polyreme_operator.watcher import Watcher
from polyreme_operator.work_queue import WorkQueue
from polyreme_operator.writer import Writer

_log = logging.getLogger(__name__)

SCHEDULE = "schedule"
"""Key of the one task that decides admission. Every key that is not named here is a job's UID."""
PUBLISH = "publish"
"""Key of the one task that writes the statuses of queues and topology, and releases delayed pending reasons."""
RETRY_UNSCHEDULABLE = "retry-unschedulable"
"""Delay after which the scheduler tries every waiting job again, since time alone may have changed its answer."""
REFRESH_REASONS = "refresh-reasons"
"""Delay after which the scheduler updates the reasons of jobs whose message names capacity that was taken since."""
_REFRESH_REASONS_S = 2.0
"""How long such a message may be outdated: everything that is taken meanwhile costs one look."""
_SHORT_S = 0.001
"""A decision about a job that takes less than this needs no rest afterwards."""
_OVERDUE_S = 1.0
"""Delay of the next pass of a job whose deadline has passed without an action."""
_LEASES_UNWATCHED_RETRY_S = 0.5
"""Delay of a pass that needs a Lease while the watch of Leases is broken."""
CYCLE_FAULTS_MAX = 16
"""Jobs that one scheduling cycle quarantines at most; the next cycle continues."""


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
        self._clock, self._settings, self._rng = clock, settings, rng
        self._observer = observer
        self._cache = ClusterCache(settings, keys=keys)
        self._events = EventRecorder(
            port,
            clock,
            per_s=settings.events_per_s,
            burst=settings.events_burst,
            dropped=lambda event: observer.on_event_dropped(event.reason),
        )
        emit = self._events.put
        self._cluster = cluster = CachedCluster(port, clock, self._cache, self._note)
        self._writer = Writer(cluster, JobObjects(cluster, keys), settings.writes_max, emit=emit, observer=observer)
        self._throttle = StatusThrottle(
            clock.steady_s,
            rest_s=settings.informational_after_s,
            per_s=settings.informational_per_s,
            burst=settings.informational_burst,
        )
        self._planning = Planning(self._cache, planner, note=self._note)
        self._has_updates = asyncio.Event()
        self._wake = asyncio.Event()
        self._queue = WorkQueue(
            clock.now_s,
            first=(SCHEDULE, PUBLISH),
            processing_max=settings.reconciles_max,
            backoff_s=self._backoff_s,
        )
        self._quarantine = Quarantine(
            self._cache, clock, self._events.put, observer, note=self._note, wake_at=self._queue.add_at
        )
        self._locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._wanting: dict[str, int] = defaultdict(int)
        """By job, the number of the scheduler's writes that wait for its lock."""
        self._watcher = Watcher(port, clock, self._cache, settings, rng, note=self._note)
        self._incidents = IncidentWorker(
            port, clock, self._cache, settings, observer=observer, synced=lambda: self._watcher.synced
        )
        self._repairs = RepairWorker(port, clock, self._cache, settings, emit=emit, look=self._look_at_nodes)
        self._marks = NodeMarks(port, clock, self._cache, self._note)
        self._health = HealthWorker(
            port,
            clock,
            self._cache,
            settings,
            refresh=self._cluster.refresh,
            note=self._note,
            emit=emit,
            observer=observer,
            synced=lambda: self._watcher.synced,
            history=self._incidents,
            repairs=self._repairs,
        )

    def _look_at_nodes(self) -> None:
        self._health.look()

    async def run(self, key: InstallationKey) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(key.keep(), name="installation-key")
            for kind in watched_kinds(health=self._settings.node_health):
                tasks.create_task(self._watcher.follow(kind), name=f"watch-{kind}")
            tasks.create_task(self._events.run(), name="events")
            tasks.create_task(self._write_informational(), name="status-updates")
            tasks.create_task(self._planning.run(), name="planning")
            tasks.create_task(self._marks.run(), name="node-marks")
            if self._settings.node_health:
                tasks.create_task(self._health.run(), name="node-health")
                tasks.create_task(self._incidents.run(), name="node-incidents")
                tasks.create_task(self._repairs.run(), name="node-repairs")
            await self._dispatch(tasks)

    # ------------------------------------------------------------------------------------------------------- observe

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
            self._wake.set()

    # ------------------------------------------------------------------------------------------------------ dispatch

    async def _dispatch(self, tasks: asyncio.TaskGroup) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._wake.clear()
            if self._watcher.synced:
                self._queue_due()
                while (key := self._queue.get()) is not None:
                    tasks.create_task(self._pass(key), name=f"pass-{key}")
            due_s = self._queue.next_due_s()
            idle_s = self._settings.idle_s if due_s is None else min(self._settings.idle_s, due_s - self._clock.now_s())
            alarm = loop.call_later(idle_s, self._wake.set) if idle_s > 0 else loop.call_soon(self._wake.set)
            try:
                await self._wake.wait()
            finally:
                alarm.cancel()

    def _queue_due(self) -> None:
        """Queue the keys whose delay is over."""
        for key in self._queue.due():
            if key == RETRY_UNSCHEDULABLE:
                self._cache.pending_reasons.forget_unschedulable()
            elif key == REFRESH_REASONS and not self._cache.pending_reasons.forget_free_capacity():
                continue
            self._queue.add(SCHEDULE if key in {RETRY_UNSCHEDULABLE, REFRESH_REASONS} else key)

    async def _pass(self, key: str) -> None:
        """Run one pass; one that fails is retried with backoff."""
        try:
            await self._work(key)
            self._queue.forget(key)
        except PortError as error:
            delay_s = self._queue.retry_delay_s(key)
            if isinstance(error, RetryableError):
                delay_s = max(delay_s, min(error.delay_s, self._settings.retry_max_s) if error.delay_s > 1.0 else 0.0)
            _log.info("pass of %s is retried in %.2f s: %s", key, delay_s, error)
            self._retry(key, delay_s)
        except Exception as error:  # noqa: BLE001 - no error of a decision may stop the operator
            if key not in {SCHEDULE, PUBLISH}:
                self._quarantine.isolate(key, error, in_cycle=False)
                return
            # No job can be blamed for it. Admitted jobs run on and are repaired while this is retried.
            delay_s = self._queue.retry_delay_s(key)
            _log.exception("%s raised an error, it is retried in %.2f s", key, delay_s)
            self._observer.on_job_failed(key, error)
            self._retry(key, delay_s)
        finally:
            self._queue.done(key)
            self._wake.set()

    def _retry(self, key: str, delay_s: float) -> None:
        # A cycle whose writes failed may have refused jobs on account of those that it could not admit.
        self._queue.add_at(RETRY_UNSCHEDULABLE if key == SCHEDULE else key, self._clock.now_s() + delay_s)

    def _backoff_s(self, failures: int) -> float:
        return self._settings.backoff_s(failures) * (0.5 + self._rng.random() / 2)

    # -------------------------------------------------------------------------------------------------------- decide

    async def _work(self, key: str) -> None:
        match key:
            case "schedule":
                await self._schedule()
            case "publish":
                await self._publish()
            case _:
                await self._reconcile(key)

    async def _reconcile(self, uid: str) -> None:
        async with self._locks[uid]:
            began_s = self._clock.steady_s()
            self._quarantine.retry(uid)
            decision = self._decide(uid, lease_read=False)
            reads = [action for action in decision.actions if isinstance(action, ReadLease)]
            if reads and self._watcher.leases_unwatched:
                self._queue.add_at(uid, self._clock.now_s() + _LEASES_UNWATCHED_RETRY_S)
                return
            if reads:
                await self._cluster.refresh(reads[0].ref)
                began_s = self._clock.steady_s()
                decision = self._decide(uid, lease_read=True)
            took_s = self._clock.steady_s() - began_s
            if took_s > _SHORT_S:
                self._queue.rest_until(uid, self._clock.now_s() + took_s * (1.0 / self._settings.reconcile_share - 1.0))
            self._note(self._cache.ask(uid, asks=decision.reschedule))
            if decision.wake_at_s is not None:
                # A deadline in the past without an action must not cause a busy loop.
                now_s = self._clock.now_s()
                self._queue.add_at(uid, decision.wake_at_s if decision.wake_at_s > now_s else now_s + _OVERDUE_S)
            actions = self._timely(uid, decision.actions)
            done = await self._writer.apply(actions, uid, wanted=lambda: uid in self._wanting)
            self._note(Changes(jobs=set() if done else {uid}))
        if self._cache.job(uid) is None:
            self._locks.pop(uid, None)
            self._queue.remove(uid)
            self._throttle.forget(uid)
            self._quarantine.forget(uid)
            self._observer.on_job_deleted(uid)

    def _timely(self, uid: str, actions: tuple[Action, ...]) -> tuple[Action, ...]:
        """Return the actions to take now; an informational status waits for its turn and is recomputed then."""
        write = next((action for action in actions if isinstance(action, WriteStatus)), None)
        if write is None:
            return actions
        if not write.informational:
            self._throttle.wrote(uid)
            return actions
        self._request_status_updates([uid])
        return tuple(action for action in actions if not isinstance(action, WriteStatus | EmitEvent))

    def _request_status_updates(self, uids: Iterable[str]) -> None:
        for uid in uids:
            job = self._cache.job(uid)
            if job is not None:
                self._throttle.wants(uid, runs=job.admitted)
                self._has_updates.set()

    async def _write_informational(self) -> None:
        """Write informational statuses one after another, so that they never crowd out other writes."""
        failures = 0
        while True:
            wait_s = self._throttle.wait_s()
            if wait_s is None:
                self._has_updates.clear()
                await self._has_updates.wait()
                continue
            # Sleep at least the clock's resolution; yield to others when there is no wait.
            await self._clock.sleep(max(wait_s, _SHORT_S) if wait_s > 0 else 0.0)
            if wait_s > 0:
                continue
            uid = self._throttle.take()
            if uid is None:
                # It was written or deleted meanwhile.
                continue
            try:
                await self._write_one_informational(uid)
                failures = 0
            except (ConflictError, NotFoundError):
                # The job has changed: its own pass follows.
                continue
            except InvalidObjectError as error:
                self._quarantine.refuse(uid, error)
            except PortError as error:
                failures += 1
                _log.info("the status of job %s will be written later: %s", uid, error)
                self._request_status_updates([uid])
                await self._clock.sleep(self._backoff_s(failures))
            except Exception as error:  # noqa: BLE001 - one job must not stop the others
                self._quarantine.isolate(uid, error, in_cycle=False)

    async def _write_one_informational(self, uid: str) -> None:
        if self._cache.job(uid) is None:
            return
        async with self._locks[uid]:
            decision = self._decide(uid, lease_read=False)
            write = next((action for action in decision.actions if isinstance(action, WriteStatus)), None)
            if write is None or not write.informational:
                # Every other write belongs to the job's own pass.
                return
            self._throttle.spend()
            self._throttle.wrote(uid)
            await self._writer.apply((write, *events_of(write)), uid)
            self._throttle.wrote(uid)

    def _decide(self, uid: str, *, lease_read: bool) -> Decision:
        now_s = self._clock.now_s()
        snapshot = self._cache.snapshot(uid, lease_read=lease_read, now_s=now_s, runs=self._settings.pod_runs)
        if snapshot is None:
            return Decision()
        self._marks.look(snapshot)
        self._observer.on_job_observed(snapshot)
        return reconcile(snapshot, now_s, defaults=self._settings.defaults)

    async def _schedule(self) -> None:
        batch = self._run_cycle(frozenset())
        if batch.reads:
            refs = [self._cache.leases.ref_of(uid) for uid in sorted(batch.reads)]
            await asyncio.gather(*(self._cluster.refresh(ref) for ref in refs if ref is not None))
            read, batch = batch.reads, self._run_cycle(batch.reads)
            # More Leases became relevant in the second run.
            self._note(Changes(asks=bool(batch.reads - read)))
        now_s = self._clock.now_s()
        self._queue.rest_until(SCHEDULE, now_s + self._settings.cycle_every_s)
        if batch.wake_at_s is not None:
            self._queue.add_at(RETRY_UNSCHEDULABLE, batch.wake_at_s)
        self._request_status_updates(sorted(self._cache.decided(batch, now_s=now_s)))
        self._note(Changes(asks=batch.again))
        self._queue.add(PUBLISH)
        try:
            if batch.intents is not None:
                await self._writer.write_intents(batch.intents, self._intents_ref)
            await self._writer.side_by_side([self._write(write) for write in batch.writes])
        finally:
            # Once more: the writes above change the counts of the queues, and no further cycle may follow.
            self._queue.add(PUBLISH)

    def _run_cycle(self, leases_read: frozenset[str]) -> Batch:
        """Decide about the cluster, and quarantine jobs whose data raise an error.

        Raises:
            Exception: If no job is to blame.
        """
        for _ in range(CYCLE_FAULTS_MAX):
            try:
                return self._decide_cycle(leases_read)
            except JobFaultError as fault:
                job = self._cache.job(fault.uid)
                if job is None or job.fault:
                    # It takes no part in the cycle, so its data can't be the reason.
                    raise fault.error from None
                self._quarantine.isolate(fault.uid, fault.error, in_cycle=True)
        return Batch(again=True)

    def _decide_cycle(self, leases_read: frozenset[str]) -> Batch:
        began_s = self._clock.steady_s()
        now_s = self._clock.now_s()
        cluster = self._cache.cluster(now_s=now_s, leases_read=leases_read)
        spent_s: list[float] = []
        stopwatch = Stopwatch(self._clock.steady_s, spent_s)
        batch = schedule(cluster, now_s, limits=self._settings.limits, stopwatch=stopwatch)
        cycle_s = self._clock.steady_s() - began_s
        self._observer.on_cycle_finished(self._cache.seen(cycle_s=cycle_s, placement_s=tuple(spent_s)))
        return batch

    async def _write(self, write: WriteStatus) -> None:
        async with self._wanted(write.uid):
            job = self._cache.job(write.uid)
            if job is not None and job.resource_version != write.resource_version:
                # Mostly its pending reason was written meanwhile, which does not affect the decision.
                write = rebased(write, job)
            self._throttle.wrote(write.uid)
            try:
                await self._writer.apply((write, *events_of(write)), write.uid)
                self._throttle.wrote(write.uid)
                self._cache.settle(write.uid)
            except (ConflictError, NotFoundError):
                # The job has changed, so the next cycle decides about it. Jobs that this cycle refused on its account
                # may fit now.
                self._cache.pending_reasons.forget_unschedulable()
                self._note(Changes(asks=True))
            except InvalidObjectError as error:
                self._quarantine.refuse(write.uid, error)
                if not self._quarantine.settles(write):
                    raise
                self._cache.pending_reasons.forget_unschedulable()
                self._note(Changes(asks=True))
            except PortError:
                raise
            except Exception as error:  # noqa: BLE001 - one job must not stop the others
                self._quarantine.isolate(write.uid, error, in_cycle=True)
                self._note(Changes(asks=True))

    @contextlib.asynccontextmanager
    async def _wanted(self, uid: str) -> AsyncIterator[None]:
        """Hold a job's lock. A pass that is creating thousands of pods stops early to release it."""
        self._wanting[uid] += 1
        try:
            lock = self._locks[uid]
            await lock.acquire()
        finally:
            self._wanting[uid] -= 1
            if not self._wanting[uid]:
                del self._wanting[uid]
        try:
            yield
        finally:
            lock.release()

    async def _publish(self) -> None:
        """Release delayed pending reasons, and write the statuses of queues and topology."""
        now_s = self._clock.now_s()
        self._request_status_updates(sorted(self._cache.refresh(now_s=now_s)))
        if self._cache.pending_reasons.next_update_s is not None:
            self._queue.add_at(PUBLISH, self._cache.pending_reasons.next_update_s)
        writes = self._cache.queue_status_writes(now_s=now_s)
        began_s = self._clock.steady_s()
        try:
            await self._writer.write_queue_statuses(writes)
        finally:
            rest_s = self._settings.queue_status_rest_s(len(writes), took_s=self._clock.steady_s() - began_s)
            self._queue.rest_until(PUBLISH, now_s + rest_s)

    @property
    def _intents_ref(self) -> ObjectRef:
        return ObjectRef(kind="ConfigMap", namespace=self._settings.namespace, name=labels.INTENTS_NAME)
