"""One run on one machine: an embedded cluster with its operator and kubelet, the data pipeline, and what a person sees.

The whole operator is the one that a cluster runs; only the port's adapter and the kubelet are of this machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import os
import shutil
import signal
import sys
import uuid
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from polyreme.job_files import read_job
from polyreme.local_run import preflight
from polyreme.local_run.cluster import NODE, LocalCluster, open_cluster
from polyreme.local_run.fault_injection import inject
from polyreme.local_run.fault_options import NODE_FAULTS, Injection, check_injection
from polyreme.local_run.outcome import RunOutcome, outcome_of
from polyreme.local_run.progress_view import Watcher
from polyreme.local_run.recovery import newest_attempt, rebuilt
from polyreme.local_run.signals import cancel_on_signals, let_go, stop_signals
from polyreme.report.publisher import publish
from polyreme.run_files.data import release_run, steps_of
from polyreme.run_files.identity import check_same_run, read_identity, remember_uid, serving, write_identity
from polyreme.run_files.paths import PREVIOUS_SUFFIX, Home, RunDirectory
from polyreme.run_files.processes import started_at_s
from polyreme.run_files.records import checkpoint_url, last_error, read_records_at
from polyreme.run_files.timeline import Moment, Timeline
from polyreme.tracking.live import following
from polyreme.tracking.registry import Target
from polyreme.views.output import note
from polyreme_api.errors import (
    DataDamagedError,
    EnvironmentFailedError,
    InvalidConfigError,
    NotFoundError,
    PolyremeError,
    RetryableError,
)
from polyreme_api.exit_codes import ExitCode
from polyreme_api.fields import STEPS_MAX
from polyreme_api.job import TrainingJob
from polyreme_api.pod_template import unknown_fields
from polyreme_datahub.objects import open_store
from polyreme_datahub_service.keeper import DataKeeper, is_quick
from polyreme_datahub_service.preparation import pin_prepared
from polyreme_datahub_service.stored_job import write_job
from polyreme_datahub_service.worker_process import DataWork
from polyreme_launcher.urls import checkpoint_folder
from polyreme_local.api_server.journal_file import JournalContent
from polyreme_system.clock import SystemClock
from polyreme_system.files import read_json

STOP_TIMEOUT_EXTRA_S = 30
"""Longest wait for a clean stop, beyond the job's own grace."""
FILE_POLL_S = 1.0
"""Time between two looks at the job's file."""
INTERRUPTS_MAX = 2
"""Signals after which the process no longer waits for anything."""
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """How the command was called."""

    fresh: bool = False
    injections: tuple[Injection, ...] = ()
    devices: int | None = None
    nodes: int = 1
    trackers: tuple[Target, ...] = ()

    @property
    def step_injections(self) -> tuple[Injection, ...]:
        """Faults that strike after a step."""
        return tuple(injection for injection in self.injections if not injection.of_node)

    @property
    def node_faults(self) -> dict[int, str]:
        """Faults that checks find, by the node's number."""
        return {each.target: NODE_FAULTS[each.fault] for each in self.injections if each.of_node}


def serve(home: Home, job: TrainingJob, settings: SessionSettings) -> RunOutcome:
    """Run a job to its end, or until a signal to stop.

    Raises:
        RefusedError: If another process serves the run, or the spec is not the run's.
        InvalidConfigError: If the job can't run here; nothing was started.
        EnvironmentFailedError: If the machine refuses after bounded retries.
    """
    run = home.run(job.metadata.namespace, job.metadata.name)
    try:
        with serving(run):
            return _serve(home, run, job, settings)
    except (OSError, RetryableError, EnvironmentFailedError) as error:
        cause = f"{error.strerror}: {error.filename or run.path}" if isinstance(error, OSError) else str(error)
        kind = DataDamagedError if isinstance(error, DataDamagedError) else EnvironmentFailedError
        raise kind(
            f"run {run.name!r} can't start: {cause}; fix this, then run the same command again to continue"
        ) from error


def _serve(home: Home, run: RunDirectory, job: TrainingJob, settings: SessionSettings) -> RunOutcome:
    home.prepare_data()
    known = claim(run, job, fresh=settings.fresh)
    preflight.check(home, run, job, resumes=known, fresh=settings.fresh)
    workers = job.spec.workers
    for injection in settings.injections:
        ranks = workers.replicas * workers.devices
        check_injection(
            injection,
            ranks=ranks,
            workers=workers.replicas,
            steps=steps_of(run, job.spec) or STEPS_MAX,
            nodes=settings.nodes,
            checks=job.spec.pre_checks.enabled,
        )
    if settings.step_injections and checkpoint_folder(checkpoint_url(run, job)) is None:
        raise InvalidConfigError(
            "faults can't be injected with checkpoints in a bucket, expected a local folder",
            field="--inject or spec.checkpoint.location",
        )
    unknown = unknown_fields(job.spec.workers.template)
    for words in [unknown, *preflight.warnings(job), *(preflight.continued(home, run, job) if known else ())]:
        if words:
            note(words)
    if settings.fresh:
        release_run(home, run)
        _set_aside(run.path)
        _set_aside(run.checkpoints)
    token = _begin(run, job)
    return asyncio.run(_Session(home, run, job, settings, token).run(resumed=known))


def claim(run: RunDirectory, job: TrainingJob, *, fresh: bool) -> bool:
    """Decide whether the command continues a run that exists.

    Raises:
        RefusedError: If the run has another spec.
    """
    if fresh or not run.exists:
        return False
    try:
        known = read_job(run.job_file)
    except (InvalidConfigError, NotFoundError) as error:
        note(f"run {run.name}: its stored spec can't be read, assuming that it has not changed: {error.message}")
    else:
        check_same_run(known, job)
    return True


def _begin(run: RunDirectory, job: TrainingJob) -> str:
    """Write down who serves the run; return the run token."""
    run.path.mkdir(parents=True, exist_ok=True)
    pid = os.getpid()
    token = write_identity(run, created_s=SystemClock().now_s(), pid=pid, process_started_s=started_at_s(pid) or 0.0)
    write_job(run.job_file, job)
    _log_to(run.host_log)
    return token


class _Session:
    def __init__(self, home: Home, run: RunDirectory, job: TrainingJob, settings: SessionSettings, token: str) -> None:
        self._home = home
        self._run = run
        self._job = job
        self._settings = settings
        self._token = token
        self._checkpoints = checkpoint_url(run, job)
        self._clock = SystemClock()
        self._timeline = Timeline(run.path, self._clock)
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()
        self._interrupts = 0
        self._pressed = False
        """Whether a person pressed Ctrl-C, and did not ask by another command or close the terminal."""

    async def run(self, *, resumed: bool) -> RunOutcome:
        """Serve until the job has finished or stopped."""
        # Trackers end after the outcome is written, since they read the last state there.
        with self._interruptible(), contextlib.ExitStack() as tracking:
            async with open_cluster(
                self._home,
                self._run,
                self._job,
                token=self._token,
                devices=self._settings.devices,
                clock=self._clock,
                recover=self._recover if resumed else None,
                data_gate=not is_quick(self._home, self._job),
                nodes=self._settings.nodes,
                node_faults=self._settings.node_faults,
            ) as cluster:
                count = preflight.counting(self._home, self._run, self._job)
                longer = resumed and preflight.is_extended(self._checkpoints, self._job, count)
                await cluster.apply(self._job, longer=longer)
                remember_uid(self._run, (await cluster.job()).metadata.uid)
                tracking.enter_context(following(self._settings.trackers, self._run, self._job, warn=note))
                await self._serve(cluster, resumed=resumed)
                job = await cluster.job()
            return self._conclude(job)

    async def _serve(self, cluster: LocalCluster, *, resumed: bool) -> None:
        watcher = Watcher(self._run, self._job, cluster, self._timeline, self._clock)
        if (await cluster.job()).status.finished:
            note(f"run {self._run.name} is finished; use --fresh to start over")
            return
        if resumed:
            note(f"run {self._run.name} continues")
        known, run = await cluster.job(), self._run

        def report(words: str) -> None:
            watcher.say(words)
            self._timeline.add(Moment(at_s=self._clock.now_s(), kind="damage", attempt=watcher.attempt, text=words))

        reporter = cluster.data_reporter(known)

        def progress(line: Mapping[str, Any]) -> None:
            watcher.data_progress(line)
            reporter.note(line)

        work = DataWork(
            self._home,
            job_file=run.job_file,
            log_file=run.data_log,
            uid=known.metadata.uid,
            progress=progress,
            say=watcher.say,
        )
        data = DataKeeper(
            work,
            objects_url=self._home.objects_url,
            job=known,
            clock=self._clock,
            report=report,
            reporter=reporter,
            made=functools.partial(
                pin_prepared, run.data_report, registry_url=self._home.registry_url, holder=known.metadata.uid
            ),
        )
        restored = False
        try:
            restored = await self._unless_stopped(data.restore())
        finally:
            if not restored:
                await work.close()
                watcher.close()
        if not restored:
            return
        async with _background(
            cluster.serve(),
            self._follow_file(cluster),
            *(self._fault(injection, cluster, watcher) for injection in self._settings.step_injections),
        ) as failed:
            tasks = {
                asyncio.create_task(watcher.until_finished(), name="watch"),
                asyncio.create_task(self._stop.wait(), name="stop"),
                asyncio.create_task(data.run(), name="data"),
                failed,
            }
            try:
                await self._first_end(tasks, cluster, watcher)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                await work.close()
                await data.last_look()
                watcher.close()

    async def _first_end(self, tasks: set[asyncio.Task[Any]], cluster: LocalCluster, watcher: Watcher) -> None:
        """Wait for the job's end; a stop, or data that can't be processed, first stops the job cleanly."""
        waiting = set(tasks)
        while True:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            names = {task.get_name() for task in done}
            if "watch" in names:
                next(task for task in done if task.get_name() == "watch").result()
                return
            broken = next((error for task in done if (error := task.exception())), None)
            if broken is not None or "stop" in names:
                await self._stop_cleanly(cluster, watcher)
                if broken is not None:
                    raise broken
                return

    async def _stop_cleanly(self, cluster: LocalCluster, watcher: Watcher) -> None:
        again = "; press Ctrl-C again to kill them at once" if self._pressed else ""
        watcher.say(f"stopping: the ranks save a checkpoint and exit{again}")
        limit_s = self._job.spec.checkpoint.preemption_grace_seconds + STOP_TIMEOUT_EXTRA_S
        stopping = asyncio.create_task(self._suspend(cluster, watcher))
        at_once = asyncio.create_task(self._stop_now.wait())
        await asyncio.wait({stopping, at_once}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        if at_once.done():
            watcher.say("stopped at once, without a new checkpoint; the same command continues from the newest one")
            cluster.kill_pods()
            watcher.stopped()
        for task in (stopping, at_once):
            task.cancel()
        await asyncio.gather(stopping, at_once, return_exceptions=True)

    @staticmethod
    async def _suspend(cluster: LocalCluster, watcher: Watcher) -> None:
        # A store that is away can't take the request; the processes then end with this one.
        with contextlib.suppress(RetryableError):
            await cluster.suspend()
            await watcher.until_suspended()
            watcher.stopped()

    async def _unless_stopped(self, work: Coroutine[Any, Any, None]) -> bool:
        """Do something, unless a signal comes first; return whether it was done."""
        doing, stop = asyncio.ensure_future(work), asyncio.create_task(self._stop.wait())
        await asyncio.wait({doing, stop}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if doing.done():
            doing.result()
            return True
        doing.cancel()
        await asyncio.gather(doing, return_exceptions=True)
        return False

    async def _fault(self, injection: Injection, cluster: LocalCluster, watcher: Watcher) -> None:
        await inject(
            injection,
            cluster.checkpoints,
            self._timeline,
            self._clock,
            attempt=lambda: watcher.attempt,
            find=cluster.find,
        )

    async def _follow_file(self, cluster: LocalCluster) -> None:
        """Take what another command has changed in the job's file and may change while ranks train."""
        seen, text = self._job.spec, b""
        while True:
            await self._clock.sleep(FILE_POLL_S)
            try:
                if (written := self._run.job_file.read_bytes()) != text:
                    if (job := read_job(self._run.job_file)).spec != seen:
                        await cluster.change(job)
                    seen, text = job.spec, written
            except (PolyremeError, OSError) as error:
                _log.warning("changes of the job's file are ignored: %s", error)

    def _recover(self, content: JournalContent) -> list[dict[str, Any]]:
        """Rebuild the job where the journal lost it."""
        run, job = self._run, self._job
        uid = (read_identity(run) or {}).get("uid") or (read_json(run.data_report) or {}).get("job")
        attempt = newest_attempt(open_store(checkpoint_url(run, job)))
        if not content.damaged and not uid and not attempt:
            return []
        words = f"damaged ({content.damaged_lines} bad lines)" if content.damaged else "missing"
        words = (
            f"the journal of run {run.name} is {words}; the job is rebuilt from its checkpoints and continues after "
            f"attempt {attempt}"
        )
        note(words)
        _log.warning("%s", words)
        return rebuilt(
            content.manifests,
            job,
            uid=uid or str(uuid.uuid4()),
            attempt=attempt,
            node=NODE,
            now_s=self._clock.now_s(),
        )

    def _conclude(self, job: TrainingJob) -> RunOutcome:
        if job.status.finished:
            release_run(self._home, self._run)
        records = read_records_at(checkpoint_url(self._run, job))
        moments, now = self._timeline.moments, self._timeline.now()
        publish(self._home, self._run, job, records, moments, now=now)
        outcome = outcome_of(self._run, job, records, moments, now=now)
        Watcher.write_state(self._run, outcome.row, job)
        if outcome.exit_code is ExitCode.ENVIRONMENT:
            attempt = job.status.attempt.number if job.status.attempt else 0
            said = last_error(self._run, attempt) or f"see polyreme runs logs {self._run.name}"
            note(f"polyreme: {outcome.row['message']}: {said}; fix this, then run the same command again to continue")
        if outcome.exit_code is ExitCode.DATA_DAMAGED:
            note(
                "polyreme: stored data is damaged; run the same command again to check it, recreate it from its source "
                "and continue from the newest checkpoint"
            )
        return outcome

    @contextlib.contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Take signals: the first stops the run with a checkpoint, the second at once, the third ends this process."""
        loop, numbers = asyncio.get_running_loop(), stop_signals()
        terminals = [stream.fileno() for stream in (sys.stdout, sys.stderr) if stream.isatty()]
        for number in numbers:
            loop.add_signal_handler(number, self._interrupt, number, terminals)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)
            cancel_on_signals()

    def _interrupt(self, number: signal.Signals, terminals: Sequence[int]) -> None:
        if number is signal.SIGHUP:
            let_go(terminals)
        self._interrupts += 1
        self._pressed |= number is signal.SIGINT
        self._stop.set()
        if self._interrupts > 1:
            self._stop_now.set()
        if self._interrupts > INTERRUPTS_MAX:
            # Everything below dies with this process by the parent-death signal; the journal keeps the run resumable.
            os._exit(int(ExitCode.CANCELLED))


@contextlib.asynccontextmanager
async def _background(*coroutines: Coroutine[Any, Any, None]) -> AsyncIterator[asyncio.Task[None]]:
    """Run servants beside the caller; the task handed out fails when one of them fails."""

    async def gathered() -> None:
        await asyncio.gather(*coroutines)
        await asyncio.Event().wait()

    task = asyncio.create_task(gathered(), name="servants")
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task


def _set_aside(path: Path) -> None:
    """Keep the old folder beside its successor; the one kept before goes."""
    previous = path.with_name(path.name + PREVIOUS_SUFFIX)
    if path.exists():
        shutil.rmtree(previous, ignore_errors=True)
        path.rename(previous)


def _log_to(path: Path) -> None:
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter(LOG_FORMAT))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    # A log that can't be written is no reason for a traceback on the person's screen.
    logging.raiseExceptions = False
