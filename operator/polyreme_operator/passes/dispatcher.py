"""Starts passes: wakes on every event and every deadline, and retries passes that fail."""

from __future__ import annotations

import asyncio
import logging

from polyreme_api.errors import RetryableError
from polyreme_cluster.port import PortError
from polyreme_operator.passes.cluster import ClusterPasses
from polyreme_operator.passes.context import PassContext
from polyreme_operator.passes.job import JobPasses
from polyreme_operator.passes.keys import PUBLISH, REFRESH_REASONS, RETRY_UNSCHEDULABLE, SCHEDULE
from polyreme_operator.watcher import Watcher

_log = logging.getLogger(__name__)


class Dispatcher:
    """Runs the pass of each key that the work queue hands out.

    Args:
        context: What passes share.
        jobs: Passes of jobs.
        cluster: Passes of the cluster.
        watcher: Tells whether every kind has been listed: nothing is decided before.
    """

    def __init__(self, context: PassContext, jobs: JobPasses, cluster: ClusterPasses, watcher: Watcher) -> None:
        self._pending_reasons, self._clock = context.cluster.cache.pending_reasons, context.clock
        self._queue, self._settings, self._quarantine = context.queue, context.settings, context.quarantine
        self._observer, self._jobs, self._cluster, self._watcher = context.observer, jobs, cluster, watcher
        self._wake = asyncio.Event()

    def wake(self) -> None:
        """Look at the queue, to which keys were added."""
        self._wake.set()

    async def run(self, tasks: asyncio.TaskGroup) -> None:
        """Start the passes that are due, each as a task, until cancelled."""
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
                self._pending_reasons.forget_unschedulable()
            elif key == REFRESH_REASONS and not self._pending_reasons.forget_free_capacity():
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

    async def _work(self, key: str) -> None:
        if key == SCHEDULE:
            await self._cluster.schedule()
        elif key == PUBLISH:
            await self._cluster.publish()
        else:
            await self._jobs.run(key)

    def _retry(self, key: str, delay_s: float) -> None:
        # A cycle whose writes failed may have refused jobs on account of those that it could not admit.
        self._queue.add_at(RETRY_UNSCHEDULABLE if key == SCHEDULE else key, self._clock.now_s() + delay_s)
