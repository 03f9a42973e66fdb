"""Makes the data of a cluster's jobs on this machine: what ``polyreme run`` does for its one job, for every job here.

Jobs wait in phase WaitingForData until their index exists. Done is done, so a server that was killed goes on, and two
of them do the same work twice at worst. One job's data are made at a time, the oldest job's first.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyreme.data.worker_process import DataWork
from polyreme.job_files import write_job
from polyreme.paths import Home
from polyreme_api import labels
from polyreme_api.clock import Clock
from polyreme_api.errors import EnvironmentFailedError, InvalidConfigError, PolyremeError
from polyreme_api.job import TrainingJob, parse_job
from polyreme_api.times import rfc3339
from polyreme_operator.port import AlreadyExistsError, ClusterPort, Manifest, NotFoundError, PortError

POLL_S = 1.0
RETRY_S = 5.0
RETRY_MAX_S = 300.0

_log = logging.getLogger(__name__)


class DataServer:
    """Serves until cancelled.

    Args:
        cluster: Where the jobs are.
        home: Registry and object store.
        clock: Clock.
        namespace: Whose jobs; None: all.
    """

    def __init__(self, cluster: ClusterPort, home: Home, clock: Clock, *, namespace: str | None = None) -> None:
        self._cluster, self._home, self._clock, self._namespace = cluster, home, clock, namespace
        self._done: set[str] = set()
        self._failures: dict[str, tuple[int, float]] = {}
        """By UID: tries so far, and when the next one is due."""

    async def run(self) -> None:
        """Make what is missing, until cancelled."""
        while True:
            try:
                for job in await self._waiting():
                    await self._serve(job)
            except PortError as error:
                _log.info("can't list jobs, retrying: %s", error)
            await self._clock.sleep(POLL_S)

    async def _waiting(self) -> list[TrainingJob]:
        """List the jobs whose data may be missing."""
        found: list[TrainingJob] = []
        live: set[str] = set()
        token: str | None = None
        while True:
            try:
                page = await self._cluster.list(labels.KIND_JOB, namespace=self._namespace, continue_=token)
            except NotFoundError:
                return []
            for manifest in page.items:
                live.add(manifest["metadata"]["uid"])
                job = self._job(manifest)
                if job is not None:
                    found.append(job)
            token = page.continue_
            if token is None:
                break
        self._done &= live
        self._failures = {uid: entry for uid, entry in self._failures.items() if uid in live}
        return sorted(found, key=lambda job: (job.metadata.creation_timestamp or "", job.metadata.name))

    def _job(self, manifest: Manifest) -> TrainingJob | None:
        uid = manifest["metadata"]["uid"]
        _, due_s = self._failures.get(uid, (0, 0.0))
        if uid in self._done or self._clock.steady_s() < due_s or manifest["metadata"].get("deletionTimestamp"):
            return None
        try:
            job = parse_job(manifest)
        except InvalidConfigError:
            # The operator says so in the job's status.
            return None
        ours = job.spec.managed_by == labels.MANAGER and job.spec.workers.runtime.mode == "Launcher"
        return job if ours and not job.status.finished else None

    async def _serve(self, job: TrainingJob) -> None:
        uid = job.metadata.uid
        folder = self._home.path / "data" / "jobs" / uid
        folder.mkdir(parents=True, exist_ok=True)
        write_job(folder / "job.yaml", job)
        work = self._work(folder, uid)
        try:
            await work.run()
        except PolyremeError as error:
            tries = self._failures.get(uid, (0, 0.0))[0] + 1
            delay_s = min(RETRY_MAX_S, RETRY_S * 2.0 ** min(tries - 1, 10))
            self._failures[uid] = (tries, self._clock.steady_s() + delay_s)
            final = not isinstance(error, EnvironmentFailedError)
            if final:
                self._done.add(uid)
            _log.warning("data of %s/%s: %s", job.metadata.namespace, job.metadata.name, error)
            await self._tell(job, str(error), final=final)
            return
        finally:
            await work.close()
        self._done.add(uid)
        self._failures.pop(uid, None)

    def _work(self, folder: Path, uid: str) -> DataWork:
        def progress(line: Mapping[str, Any]) -> None:
            _log.debug("data of %s: %s", uid, line)

        return DataWork(
            self._home,
            job_file=folder / "job.yaml",
            log_file=folder / "data.log",
            uid=uid,
            progress=progress,
            say=lambda words: _log.info("data of %s: %s", uid, words),
        )

    async def _tell(self, job: TrainingJob, message: str, *, final: bool) -> None:
        """Tell the job's owner by an event; best effort."""
        metadata = job.metadata
        now = rfc3339(self._clock.now_s())
        name = f"{labels.job_object_name(metadata.name, metadata.uid)}.data-{'refused' if final else 'failed'}"
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": metadata.namespace},
            "involvedObject": {
                "apiVersion": labels.API_VERSION,
                "kind": labels.KIND_JOB,
                "namespace": metadata.namespace,
                "name": metadata.name,
                "uid": metadata.uid,
            },
            "reason": "DataRefused" if final else "DataFailed",
            "message": message[:1024],
            "type": "Warning",
            "source": {"component": "polyreme-data"},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        try:
            await self._cluster.create(event)
        except AlreadyExistsError:
            return
        except PortError as error:
            _log.info("can't write the event of %s/%s: %s", metadata.namespace, metadata.name, error)
