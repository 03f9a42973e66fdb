"""Passes of the cluster: scheduling cycles, and the statuses of queues and topology.

Only one task runs them. It writes each batch as intents to one object before it changes any job.
"""

from __future__ import annotations

import asyncio

from polyreme_api import labels
from polyreme_cluster.port import ConflictError, InvalidObjectError, NotFoundError, ObjectRef, PortError
from polyreme_operator.passes.context import PassContext
from polyreme_operator.passes.keys import PUBLISH, RETRY_UNSCHEDULABLE, SCHEDULE
from polyreme_operator.passes.status_updates import StatusUpdates
from polyreme_operator.reconcile.events import events_of
from polyreme_operator.reconcile.quarantine import JobFaultError
from polyreme_operator.reconcile.rebase import rebased
from polyreme_operator.scheduler import Batch, Stopwatch, schedule
from polyreme_operator.snapshots import cluster_snapshot, cycle_report, queue_status_writes
from polyreme_operator.types.actions import WriteStatus
from polyreme_operator.types.changes import Changes

CYCLE_FAULTS_MAX = 16
"""Jobs that one scheduling cycle quarantines at most; the next cycle continues."""


class ClusterPasses:
    """Passes of the cluster.

    Args:
        context: What passes share.
        updates: Writes informational statuses.
    """

    def __init__(self, context: PassContext, updates: StatusUpdates) -> None:
        self._cluster, self._cache, self._writer = context.cluster, context.cluster.cache, context.writer
        self._clock, self._settings, self._queue = context.clock, context.settings, context.queue
        self._quarantine, self._locks, self._observer = context.quarantine, context.locks, context.observer
        self._updates = updates

    async def schedule(self) -> None:
        """Decide about the cluster, and write the decisions: first the intents.

        Raises:
            PortError: If something could not be written.
        """
        batch = self._run_cycle(frozenset())
        if batch.reads:
            refs = [self._cache.leases.ref_of(uid) for uid in sorted(batch.reads)]
            await asyncio.gather(*(self._cluster.refresh(ref) for ref in refs if ref is not None))
            read, batch = batch.reads, self._run_cycle(batch.reads)
            # More Leases became relevant in the second run.
            self._cluster.note(Changes(asks=bool(batch.reads - read)))
        now_s = self._clock.now_s()
        self._queue.rest_until(SCHEDULE, now_s + self._settings.cycle_every_s)
        if batch.wake_at_s is not None:
            self._queue.add_at(RETRY_UNSCHEDULABLE, batch.wake_at_s)
        self._updates.request(sorted(self._cache.decided(batch, now_s=now_s)))
        self._cluster.note(Changes(asks=batch.again))
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
        cluster = cluster_snapshot(self._cache, now_s=now_s, leases_read=leases_read)
        spent_s: list[float] = []
        stopwatch = Stopwatch(self._clock.steady_s, spent_s)
        batch = schedule(cluster, now_s, limits=self._settings.limits, stopwatch=stopwatch)
        cycle_s = self._clock.steady_s() - began_s
        self._observer.on_cycle_finished(cycle_report(self._cache, cycle_s=cycle_s, placement_s=tuple(spent_s)))
        return batch

    async def _write(self, write: WriteStatus) -> None:
        async with self._locks.wanted(write.uid):
            job = self._cache.job(write.uid)
            if job is not None and job.resource_version != write.resource_version:
                # Mostly its pending reason was written meanwhile, which does not affect the decision.
                write = rebased(write, job)
            self._updates.throttle.wrote(write.uid)
            try:
                await self._writer.apply((write, *events_of(write)), write.uid)
                self._updates.throttle.wrote(write.uid)
                self._cache.intents.settle(write.uid)
            except (ConflictError, NotFoundError):
                # The job has changed, so the next cycle decides about it. Jobs that this cycle refused on its account
                # may fit now.
                self._cache.pending_reasons.forget_unschedulable()
                self._cluster.note(Changes(asks=True))
            except InvalidObjectError as error:
                self._quarantine.refuse(write.uid, error)
                if not self._quarantine.settles(write):
                    raise
                self._cache.pending_reasons.forget_unschedulable()
                self._cluster.note(Changes(asks=True))
            except PortError:
                raise
            except Exception as error:  # noqa: BLE001 - one job must not stop the others
                self._quarantine.isolate(write.uid, error, in_cycle=True)
                self._cluster.note(Changes(asks=True))

    async def publish(self) -> None:
        """Release delayed pending reasons, and write the statuses of queues and topology.

        Raises:
            PortError: If something could not be written.
        """
        now_s = self._clock.now_s()
        self._updates.request(sorted(self._cache.refresh(now_s=now_s)))
        if self._cache.pending_reasons.next_update_s is not None:
            self._queue.add_at(PUBLISH, self._cache.pending_reasons.next_update_s)
        writes = queue_status_writes(self._cache, now_s=now_s)
        began_s = self._clock.steady_s()
        try:
            await self._writer.write_queue_statuses(writes)
        finally:
            rest_s = self._settings.queue_status_rest_s(len(writes), took_s=self._clock.steady_s() - began_s)
            self._queue.rest_until(PUBLISH, now_s + rest_s)

    @property
    def _intents_ref(self) -> ObjectRef:
        return ObjectRef(kind="ConfigMap", namespace=self._settings.namespace, name=labels.INTENTS_NAME)
