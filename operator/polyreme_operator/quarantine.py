"""Puts jobs into quarantine, so that other jobs are not affected, and retries each later.

``reconcile/quarantine.py`` defines what quarantine means for a job. A job comes here if a decision about it raised an
error, or if the API server refuses its status. The intent of a refused job is settled here too.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable

from polyreme_api.clock import Clock
from polyreme_cluster.port import InvalidObjectError
from polyreme_operator.cluster_cache import ClusterCache
from polyreme_operator.reconcile.quarantine import fault_message
from polyreme_operator.types.actions import EmitEvent, WriteStatus
from polyreme_operator.types.changes import Changes
from polyreme_operator.types.observer import Observer
from polyreme_operator.types.reasons import Reason

WAIT_LEAST_S = 0.001
"""The clock's resolution."""
RETRY_FIRST_S = 1.0
RETRY_LONGEST_S = 600.0
RETRIES_MAX = 20
"""About two hours. After that a job stays in quarantine until its spec changes or the operator restarts."""
FORGIVEN_AFTER_S = 3_600.0
"""Time without an error after which a job's retries are reset."""
IN_FLIGHT_S = 60.0
"""Longest time that an API server spends on a request (``--request-timeout``): by then the requests of an earlier
leader have been applied or dropped."""

_log = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class _Entry:
    generation: int
    failures: int
    failed_at_s: float
    retries_max: float = RETRIES_MAX


class Quarantine:
    """Puts jobs into quarantine and takes them out.

    Args:
        cache: Holds the quarantine of each job.
        clock: Time of retries.
        emit: Emits an event.
        observer: Receives errors.
        note: Called with the effects of each change.
        wake_at: Queues a job at a time.
    """

    def __init__(
        self,
        cache: ClusterCache,
        clock: Clock,
        emit: Callable[[EmitEvent], None],
        observer: Observer,
        *,
        note: Callable[[Changes], None],
        wake_at: Callable[[str, float], None],
    ) -> None:
        self._cache, self._clock, self._emit, self._observer = cache, clock, emit, observer
        self._note, self._wake_at = note, wake_at
        self._retries = Retries(clock.steady_s)
        self._cancel_refused_s: dict[str, float] = {}
        """By job, since when the cancellation of its intent has been refused."""

    def isolate(self, uid: str, error: Exception, *, in_cycle: bool) -> None:
        """Quarantine a job and retry it later, since a decision about it raised an error.

        Args:
            uid: UID of the job.
            error: The error.
            in_cycle: Whether the scheduler's decision raised it, so that the job is still reconciled.
        """
        self._observer.on_job_failed(uid, error)
        _log.error("job %s raised an error and is quarantined", self._name(uid), exc_info=error)
        self._leave(uid, fault_message(error), in_cycle=in_cycle, reason=Reason.INTERNAL_ERROR)

    def refuse(self, uid: str, error: InvalidObjectError) -> None:
        """Quarantine a job and retry it later, since the API server refuses its status; it is still reconciled."""
        _log.warning("job %s is quarantined, its status is refused: %s", self._name(uid), error)
        self._leave(uid, str(error), in_cycle=True, reason=Reason.STATUS_REFUSED)
        job = self._cache.job(uid)
        if job is not None:
            # The status can't be written, so only an event reports it.
            reason = Reason.STATUS_REFUSED.value
            key = f"{job.generation}-{reason}".lower()
            self._emit(EmitEvent(ref=job.ref, uid=uid, reason=reason, message=str(error), warning=True, key=key))

    def settles(self, write: WriteStatus) -> bool:
        """Tell whether a job's intended write can't be applied any more, after this write was refused.

        A refused admission is settled, since it is sent once. After a refused cancellation the admission of an earlier
        leader may still be in flight, but only for a while. (A leader that was suspended may send it later; it is
        applied only if the refusal ends at that very time.)
        """
        before, after = write.before.attempt, write.after.attempt
        begins = after is not None and (before is None or after.number > before.number)
        if not begins and self._cache.intents.is_intended(write.uid):
            now_s = self._clock.steady_s()
            if now_s < self._cancel_refused_s.setdefault(write.uid, now_s) + IN_FLIGHT_S:
                return False
        self._cancel_refused_s.pop(write.uid, None)
        self._cache.intents.settle(write.uid)
        return True

    def retry(self, uid: str) -> None:
        """End the quarantine of a job if its retry is due."""
        job, wait_s = self._cache.job(uid), self._retries.wait_s(uid)
        if job is None or not job.fault or wait_s is None:
            return
        if wait_s > 0:
            self._wake_at(uid, self._clock.now_s() + max(wait_s, WAIT_LEAST_S))
        else:
            self._note(self._cache.quarantine(uid, "", in_cycle=False))

    def forget(self, uid: str) -> None:
        """Forget a job."""
        self._retries.forget(uid)
        self._cancel_refused_s.pop(uid, None)

    def _leave(self, uid: str, why: str, *, in_cycle: bool, reason: Reason) -> None:
        job = self._cache.job(uid)
        if job is None:
            return
        # A refusal may end at any time, for example by a policy change, so it is retried without a limit.
        retries_max = math.inf if reason is Reason.STATUS_REFUSED else RETRIES_MAX
        delay_s = self._retries.add(uid, generation=job.generation, retries_max=retries_max)
        when = "after a change of its spec" if delay_s is None else f"in {delay_s:.0f} s"
        _log.info("job %s is retried %s", job.ref, when)
        if job.fault != why:
            self._note(self._cache.quarantine(uid, why, in_cycle=in_cycle, reason=reason))
        if delay_s is not None:
            self._wake_at(uid, self._clock.now_s() + delay_s)

    def _name(self, uid: str) -> str:
        job = self._cache.job(uid)
        return uid if job is None else str(job.ref)


class Retries:
    """Retry times of jobs in quarantine.

    Args:
        now_s: A steady clock.
    """

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._entries: dict[str, _Entry] = {}

    def add(self, uid: str, *, generation: int, retries_max: float = RETRIES_MAX) -> float | None:
        """Note an error; return the delay until the next retry, or None if there is none."""
        now_s = self._now_s()
        entry = self._entries.get(uid)
        if entry is None or entry.generation != generation or now_s - entry.failed_at_s > FORGIVEN_AFTER_S:
            entry = self._entries[uid] = _Entry(generation=generation, failures=0, failed_at_s=now_s)
        entry.failures += 1
        entry.failed_at_s, entry.retries_max = now_s, retries_max
        return self.wait_s(uid)

    def wait_s(self, uid: str) -> float | None:
        """Return the time until the next retry; None for a job that is not retried."""
        entry = self._entries.get(uid)
        if entry is None or entry.failures > entry.retries_max:
            return None
        delay_s = min(RETRY_LONGEST_S, RETRY_FIRST_S * 2.0 ** min(entry.failures - 1, 30))
        return max(0.0, entry.failed_at_s + delay_s - self._now_s())

    def forget(self, uid: str) -> None:
        """Forget a job."""
        self._entries.pop(uid, None)
