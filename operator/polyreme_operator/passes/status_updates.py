"""Writes informational statuses one after another, so that they never crowd out other writes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from polyreme_cluster.port import ConflictError, InvalidObjectError, NotFoundError, PortError
from polyreme_operator.passes.context import PassContext
from polyreme_operator.passes.job_decider import JobDecider
from polyreme_operator.publishing.status_throttle import StatusThrottle
from polyreme_operator.quarantine import WAIT_LEAST_S
from polyreme_operator.reconcile.events import events_of
from polyreme_operator.types.actions import Action, EmitEvent, WriteStatus

_log = logging.getLogger(__name__)


class StatusUpdates:
    """Task of the operator that writes the statuses on which no controller acts.

    Args:
        context: What passes share.
        decider: Computes a status when its turn comes.
        backoff_s: Delay of a retry, by the number of failures in a row.
    """

    def __init__(self, context: PassContext, decider: JobDecider, backoff_s: Callable[[int], float]) -> None:
        self._cache, self._clock, settings = context.cluster.cache, context.clock, context.settings
        self._writer, self._quarantine, self._locks = context.writer, context.quarantine, context.locks
        self._decider, self._backoff_s = decider, backoff_s
        self._wanted = asyncio.Event()
        self.throttle = StatusThrottle(
            context.clock.steady_s,
            rest_s=settings.informational_after_s,
            per_s=settings.informational_per_s,
            burst=settings.informational_burst,
        )

    def request(self, uids: Iterable[str]) -> None:
        """Request an update of each of these jobs."""
        for uid in uids:
            job = self._cache.job(uid)
            if job is not None:
                self.throttle.wants(uid, runs=job.admitted)
                self._wanted.set()

    def defer(self, uid: str, actions: tuple[Action, ...]) -> tuple[Action, ...]:
        """Return the actions to take now; an informational status waits for its turn and is recomputed then."""
        write = next((action for action in actions if isinstance(action, WriteStatus)), None)
        if write is None:
            return actions
        if not write.informational:
            self.throttle.wrote(uid)
            return actions
        self.request([uid])
        return tuple(action for action in actions if not isinstance(action, WriteStatus | EmitEvent))

    async def run(self) -> None:
        """Write requested updates until cancelled."""
        failures = 0
        while True:
            wait_s = self.throttle.wait_s()
            if wait_s is None:
                self._wanted.clear()
                await self._wanted.wait()
                continue
            # Sleep at least the clock's resolution; yield to others when there is no wait.
            await self._clock.sleep(max(wait_s, WAIT_LEAST_S) if wait_s > 0 else 0.0)
            if wait_s > 0:
                continue
            uid = self.throttle.take()
            if uid is None:
                # It was written or deleted meanwhile.
                continue
            try:
                await self._write(uid)
                failures = 0
            except (ConflictError, NotFoundError):
                # The job has changed: its own pass follows.
                continue
            except InvalidObjectError as error:
                self._quarantine.refuse(uid, error)
            except PortError as error:
                failures += 1
                _log.info("the status of job %s will be written later: %s", uid, error)
                self.request([uid])
                await self._clock.sleep(self._backoff_s(failures))
            except Exception as error:  # noqa: BLE001 - one job must not stop the others
                self._quarantine.isolate(uid, error, in_cycle=False)

    async def _write(self, uid: str) -> None:
        if self._cache.job(uid) is None:
            return
        async with self._locks.of(uid):
            decision = self._decider.decide(uid)
            write = next((action for action in decision.actions if isinstance(action, WriteStatus)), None)
            if write is None or not write.informational:
                # Every other write belongs to the job's own pass.
                return
            self.throttle.spend()
            self.throttle.wrote(uid)
            await self._writer.apply((write, *events_of(write)), uid)
            self.throttle.wrote(uid)
