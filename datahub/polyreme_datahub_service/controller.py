"""The datahub's controller: prepares the data of jobs, the oldest first, and reports how far it is.

Level-triggered: what has to be done follows from the jobs as they are, so a controller that was killed, or was replaced
by another one, continues where the first one was. Done is done: two of them at once do the same work twice at worst.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from polyreme_api import labels
from polyreme_api.clock import Clock
from polyreme_api.data_report import DataState
from polyreme_api.errors import (
    DataDamagedError,
    EnvironmentFailedError,
    InvalidConfigError,
    NotFoundError,
    PolyremeError,
    RefusedError,
)
from polyreme_api.job import TrainingJob
from polyreme_cluster.port import ClusterPort, PortError
from polyreme_cluster.watcher import follow
from polyreme_datahub_service.candidates import Candidate, WatchedJobs
from polyreme_datahub_service.reporter import OutdatedError, Reporter

RELIST_S = 300.0
WATCH_RETRY_S = 1.0
RETRY_S = 5.0
"""Wait before a failed preparation is tried again; doubled each time."""
RETRY_MAX_S = 300.0
REFUSED_RETRY_S = 60.0
"""The same for refused data: its dataset may be repaired or registered."""
CHECK_EVERY_S = 60.0
"""Time between checks of processed data; each looks at ``CHECKED_MAX`` jobs, those that were not looked at longest."""
CHECKED_MAX = 32
JOBS_MAX = 2
"""Default number of jobs whose data is prepared at once."""

_log = logging.getLogger(__name__)
Progress = Callable[[Mapping[str, Any]], None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What came of a job's data."""

    plan: str
    """Key of the plan object."""
    message: str
    """Samples and dead letters, for people."""


class Preparation(Protocol):
    """Prepares data. Every call may be cancelled at any time, and repeated."""

    async def prepare(self, job: TrainingJob, progress: Progress) -> Prepared:
        """Process the data of a job.

        Raises:
            PolyremeError: If that fails; an InvalidConfigError, NotFoundError or RefusedError is a verdict on the data.
        """
        ...

    async def is_whole(self, job: TrainingJob) -> bool:
        """Tell whether the processed data of a job is still there.

        Raises:
            PolyremeError: If the store can't tell.
        """
        ...

    async def kept(self) -> set[str]:
        """Return the UIDs of jobs that something is kept for.

        Raises:
            PolyremeError: If the store can't tell.
        """
        ...

    async def forget(self, uid: str) -> None:
        """Release what is kept for a job that has finished or was deleted."""
        ...


@dataclasses.dataclass(slots=True)
class _Retry:
    about: str
    tries: int
    due_s: float


class DataController:
    """Serves until cancelled.

    Args:
        cluster: Where the jobs are.
        preparation: Prepares data.
        clock: Clock.
        namespace: Whose jobs; None: all.
        jobs_max: Jobs whose data is prepared at once.
    """

    def __init__(
        self,
        cluster: ClusterPort,
        preparation: Preparation,
        clock: Clock,
        *,
        namespace: str | None = None,
        jobs_max: int = JOBS_MAX,
    ) -> None:
        self._cluster, self._preparation, self._clock = cluster, preparation, clock
        self._namespace, self._jobs_max = namespace, jobs_max
        self._wake = asyncio.Event()
        self._seen = WatchedJobs(changed=self._wake.set)
        self._work: dict[str, tuple[str, asyncio.Task[None]]] = {}
        """By UID: digest of the data that is being prepared, and who does it."""
        self._retries: dict[str, _Retry] = {}
        self._checked_s: dict[str, float] = {}

    def jobs_by_state(self) -> dict[str, int]:
        """Count the jobs by the state of their data: ``Waiting`` for those that nothing is reported about."""
        return Counter("Waiting" if job.state is None else str(job.state) for job in self._seen.jobs.values())

    def retry_now(self) -> None:
        """Try what failed again at once: its servers answer again. Refused data keeps its time."""
        failed = {uid for uid, job in self._seen.jobs.items() if job.state is DataState.FAILED}
        self._retries = {uid: retry for uid, retry in self._retries.items() if uid not in failed}
        self._wake.set()

    async def run(self) -> None:
        """Prepare what is missing, until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                following = follow(
                    self._cluster,
                    labels.KIND_JOB,
                    self._seen,
                    self._clock,
                    namespace=self._namespace,
                    relist_s=lambda: RELIST_S,
                    backoff_s=lambda _: WATCH_RETRY_S,
                )
                tasks.create_task(following, name="watch")
                tasks.create_task(self._check(), name="check")
                tasks.create_task(self._find_left(), name="left")
                tasks.create_task(self._dispatch(), name="dispatch")
        finally:
            await self._cancel(list(self._work))

    async def _find_left(self) -> None:
        """Find, once, the jobs that finished or were deleted while no controller ran, and forget them."""
        await self._seen.listed.wait()
        while True:
            try:
                # Read after the list: something is kept for a job only after it was listed.
                self._seen.gone |= await self._preparation.kept() - self._seen.jobs.keys()
                self._wake.set()
                return
            except Exception as error:  # noqa: BLE001 - the registry may be away for long
                _log.info("can't tell what is kept for jobs that are gone, retrying: %s", error)
                await self._clock.sleep(CHECK_EVERY_S)

    # ------------------------------------------------------------------------------------------------------ dispatch

    async def _dispatch(self) -> None:
        while True:
            self._wake.clear()
            await self._forget_gone()
            now_s = self._clock.steady_s()
            due = [job for job in self._seen.jobs.values() if self._due_s(job) <= now_s]
            for candidate in sorted(due, key=lambda job: job.age)[: max(0, self._jobs_max - len(self._work))]:
                task = asyncio.create_task(self._serve(candidate), name=f"data-{candidate.uid}")
                self._work[candidate.uid] = (candidate.about, task)
            due_s = map(self._due_s, self._seen.jobs.values())
            waits_s = [at_s - now_s for at_s in due_s if now_s < at_s < float("inf")]
            await self._sleep(min(waits_s, default=RELIST_S))

    async def _sleep(self, delay_s: float) -> None:
        """Sleep until something changes, at most so long."""
        nap = asyncio.ensure_future(self._clock.sleep(delay_s))
        wake = asyncio.ensure_future(self._wake.wait())
        try:
            await asyncio.wait({nap, wake}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (nap, wake):
                task.cancel()

    def _due_s(self, job: Candidate) -> float:
        """Return when the data of a job has to be prepared; infinity if it has not to be."""
        if job.uid in self._work or not job.asks:
            return float("inf")
        retry = self._retries.get(job.uid)
        return 0.0 if retry is None or retry.about != job.about else retry.due_s

    async def _forget_gone(self) -> None:
        """Stop work that no job asks for any more, and forget jobs that are gone."""
        stale = [uid for uid, (about, _) in self._work.items() if not self._is_asked(uid, about)]
        await self._cancel(stale)
        for uid in sorted(self._seen.gone - self._seen.jobs.keys()):
            self._retries.pop(uid, None)
            self._checked_s.pop(uid, None)
            try:
                await self._preparation.forget(uid)
            except Exception:  # noqa: BLE001 - one job must not stop the others
                _log.exception("what is kept for job %s is not released", uid)
        self._seen.gone.clear()

    def _is_asked(self, uid: str, about: str) -> bool:
        job = self._seen.jobs.get(uid)
        return job is not None and job.about == about and not job.job.spec.suspend

    async def _cancel(self, uids: list[str]) -> None:
        tasks = [self._work.pop(uid)[1] for uid in uids]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ------------------------------------------------------------------------------------------------------- prepare

    async def _serve(self, job: Candidate) -> None:
        """Prepare the data of one job, and report the end; every error is reported and tried again."""
        reporter = Reporter(self._cluster, self._clock, ref=job.ref, uid=job.uid, about=job.about)
        try:
            state, wait_s = await self._prepare(job, reporter)
            if state is DataState.PROCESSED:
                self._retries.pop(job.uid, None)
            else:
                self._retry(job, wait_s)
        except OutdatedError as error:
            _log.info("%s: %s", job.ref, error)
            self._retry(job, RETRY_S)
        except PortError as error:
            _log.info("the data of %s is not reported, retrying: %s", job.ref, error)
            self._retry(job, RETRY_S)
        except Exception:  # noqa: BLE001 - one job must not stop the others
            _log.exception("preparing the data of %s raised an error, retrying", job.ref)
            self._retry(job, RETRY_S)
        finally:
            if self._work.get(job.uid, ("", None))[1] is asyncio.current_task():
                del self._work[job.uid]
            self._wake.set()

    async def _prepare(self, job: Candidate, reporter: Reporter) -> tuple[DataState, float]:
        if job.state not in {DataState.REFUSED, DataState.FAILED, DataState.READABLE}:
            # An error stays visible until another try gets on; what ranks could read they still can.
            await reporter.report(DataState.PROCESSING)
        following = asyncio.create_task(reporter.follow())
        try:
            made = await self._preparation.prepare(job.job, reporter.note)
            state, message, plan, wait_s = DataState.PROCESSED, made.message, made.plan, 0.0
        except PolyremeError as error:
            final = isinstance(error, InvalidConfigError | NotFoundError | RefusedError)
            state, plan = DataState.REFUSED if final else DataState.FAILED, ""
            message, wait_s = str(error), REFUSED_RETRY_S if final or isinstance(error, DataDamagedError) else RETRY_S
            _log.warning("data of %s: %s: %s", job.ref, state, error)
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        written = self._seen.read(await reporter.report(state, message, plan=plan))
        if written is not None and job.uid in self._seen.jobs:
            # The watch shows it later; until then nothing is prepared twice.
            self._seen.jobs[job.uid] = written
        return state, wait_s

    def _retry(self, job: Candidate, least_s: float) -> None:
        known = self._retries.get(job.uid)
        tries = known.tries + 1 if known is not None and known.about == job.about else 1
        delay_s = min(max(RETRY_MAX_S, least_s), least_s * 2.0 ** min(tries - 1, 10))
        self._retries[job.uid] = _Retry(about=job.about, tries=tries, due_s=self._clock.steady_s() + delay_s)

    # --------------------------------------------------------------------------------------------------------- check

    async def _check(self) -> None:
        """Look from time to time whether processed data is still there, and report what is gone."""
        while True:
            await self._clock.sleep(CHECK_EVERY_S)
            processed = [job for job in self._seen.jobs.values() if job.state is DataState.PROCESSED]
            for job in sorted(processed, key=lambda each: self._checked_s.get(each.uid, 0.0))[:CHECKED_MAX]:
                self._checked_s[job.uid] = self._clock.steady_s()
                try:
                    if not await self._preparation.is_whole(job.job):
                        reporter = Reporter(self._cluster, self._clock, ref=job.ref, uid=job.uid, about=job.about)
                        await reporter.report(DataState.MISSING, "processed data is gone or damaged")
                except EnvironmentFailedError as error:
                    # The others would wait for the same server.
                    _log.info("can't look at the data of %s and of others: %s", job.ref, error)
                    break
                except Exception as error:  # noqa: BLE001 - one job must not stop the others
                    _log.info("can't look at the data of %s: %s: %s", job.ref, type(error).__name__, error)
