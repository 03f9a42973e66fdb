"""Passes of one job: look at it, decide, and apply the decision."""

from __future__ import annotations

from polyreme_operator.passes.context import PassContext
from polyreme_operator.passes.job_decider import JobDecider
from polyreme_operator.passes.status_updates import StatusUpdates
from polyreme_operator.types.actions import ReadLease
from polyreme_operator.types.changes import Changes
from polyreme_operator.watcher import Watcher

_SHORT_S = 0.001
"""A decision about a job that takes less than this needs no rest afterwards."""
_OVERDUE_S = 1.0
"""Delay of the next pass of a job whose deadline has passed without an action."""
_LEASES_UNWATCHED_RETRY_S = 0.5
"""Delay of a pass that needs a Lease while the watch of Leases is broken."""


class JobPasses:
    """Passes of jobs, one at a time for each job.

    Args:
        context: What passes share.
        decider: Decides about a job.
        updates: Writes informational statuses.
        watcher: Tells whether Leases are watched.
    """

    def __init__(self, context: PassContext, decider: JobDecider, updates: StatusUpdates, watcher: Watcher) -> None:
        self._context, self._cluster, self._cache = context, context.cluster, context.cluster.cache
        self._clock, self._queue = context.clock, context.queue
        self._decider, self._updates, self._watcher = decider, updates, watcher

    async def run(self, uid: str) -> None:
        """Run one pass; forget a job that is gone.

        Raises:
            PortError: If something could not be written.
        """
        async with self._context.locks.of(uid):
            await self._reconcile(uid)
        if self._cache.job(uid) is None:
            self._context.locks.forget(uid)
            self._queue.remove(uid)
            self._updates.throttle.forget(uid)
            self._context.quarantine.forget(uid)
            self._context.observer.on_job_deleted(uid)

    async def _reconcile(self, uid: str) -> None:
        began_s = self._clock.steady_s()
        self._context.quarantine.retry(uid)
        decision = self._decider.decide(uid)
        reads = [action for action in decision.actions if isinstance(action, ReadLease)]
        if reads and self._watcher.leases_unwatched:
            self._queue.add_at(uid, self._clock.now_s() + _LEASES_UNWATCHED_RETRY_S)
            return
        if reads:
            await self._cluster.refresh(reads[0].ref)
            began_s = self._clock.steady_s()
            decision = self._decider.decide(uid, lease_read=True)
        took_s = self._clock.steady_s() - began_s
        if took_s > _SHORT_S:
            rest_s = took_s * (1.0 / self._context.settings.reconcile_share - 1.0)
            self._queue.rest_until(uid, self._clock.now_s() + rest_s)
        self._cluster.note(self._cache.notes.ask(uid, asks=decision.reschedule))
        if decision.wake_at_s is not None:
            # A deadline in the past without an action must not cause a busy loop.
            now_s = self._clock.now_s()
            self._queue.add_at(uid, decision.wake_at_s if decision.wake_at_s > now_s else now_s + _OVERDUE_S)
        actions = self._updates.defer(uid, decision.actions)
        done = await self._context.writer.apply(actions, uid, wanted=lambda: self._context.locks.is_wanted(uid))
        self._cluster.note(Changes(jobs=set() if done else {uid}))
