"""Prepares data on this machine: the pipeline of each job as a child process, and the report that it leaves."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from polyreme_api.errors import EnvironmentFailedError, PolyremeError
from polyreme_api.job import TrainingJob
from polyreme_datahub.stored_data import look
from polyreme_datahub_service.controller import Prepared
from polyreme_datahub_service.home import DataHome
from polyreme_datahub_service.pinning import holders, pin_versions, release_versions
from polyreme_datahub_service.stored_job import write_job
from polyreme_datahub_service.worker_process import DataWork
from polyreme_system.files import read_json

REPORT_NAME = "data.json"

_log = logging.getLogger(__name__)


class LocalPreparation:
    """Prepares data with this machine's processes, in the registry and the object store of a home.

    Args:
        home: Where the registry and the objects are.
        only_seals: Whether the work of flows is left to workers of other processes; this one plans, waits and seals.
        scope: Names the jobs that a controller sees, among all whose data lie in this registry: what is pinned under
            it for a job that is gone is released.
    """

    def __init__(self, home: DataHome, *, scope: str, only_seals: bool = False) -> None:
        self._home, self._only_seals, self._prefix = home, only_seals, f"{scope}/"

    async def prepare(self, job: TrainingJob, progress: Callable[[Mapping[str, Any]], None]) -> Prepared:
        """Process the data of a job."""
        uid = job.metadata.uid
        folder = self._folder(uid)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_job(folder / "job.yaml", job)
        except OSError as error:
            raise EnvironmentFailedError(f"no folder for the data of a job: {error.strerror}: {folder}") from error
        work = DataWork(
            self._home,
            job_file=folder / "job.yaml",
            log_file=folder / "data.log",
            uid=uid,
            progress=progress,
            say=lambda words: _log.info("data of %s: %s", uid, words),
            only_seals=self._only_seals,
        )
        try:
            await work.run()
        finally:
            await work.close()
        report, registry_url, holder = folder / REPORT_NAME, self._home.registry_url, self._prefix + uid
        return await asyncio.to_thread(pin_prepared, report, registry_url=registry_url, holder=holder)

    async def kept(self) -> set[str]:
        """Return the UIDs of jobs that something is kept for."""
        pinned = await asyncio.to_thread(holders, self._home.registry_url, self._prefix)
        return {holder.removeprefix(self._prefix) for holder in pinned}

    async def is_whole(self, job: TrainingJob) -> bool:
        """Tell whether the processed data of a job is still there."""
        seen = await asyncio.to_thread(look, self._home.objects_url, job.spec, job=job.metadata.uid)
        return seen.whole

    async def forget(self, uid: str) -> None:
        """Release the job's versions, and remove its folder."""
        try:
            # Without its prefix: pinned by an older release.
            await asyncio.to_thread(release_versions, self._home.registry_url, self._prefix + uid, uid)
        except PolyremeError as error:
            _log.warning("versions that job %s has pinned are not released: %s", uid, error)
        await asyncio.to_thread(shutil.rmtree, self._folder(uid), ignore_errors=True)

    def _folder(self, uid: str) -> Path:
        return self._home.path / "data" / "jobs" / uid


def pin_prepared(report_file: Path, *, registry_url: str, holder: str) -> Prepared:
    """Pin the dataset versions that the pipeline's process used for a job; return its plan, samples and dead letters.

    Args:
        report_file: What that process left about the job.
        registry_url: The registry.
        holder: In whose name they are pinned.

    Raises:
        DatasetNotFoundError: If one of the versions was removed meanwhile.
        EnvironmentFailedError: If the registry stays away.
    """
    report = read_json(report_file) or {}
    pin_versions(registry_url, holder, [row["dataset"] for row in report.get("datasets", ())])
    samples = sum(int(row.get("samples", 0)) for row in report.get("datasets", ()))
    dead = sum(int(row.get("deadLetters", 0)) for row in report.get("stages", ()))
    words = counted(samples, "sample") + (f"; {counted(dead, 'dead letter')}" if dead else "")
    if "steps" in report:
        words += f"; {counted(int(report['epochs']), 'epoch')} = {counted(int(report['steps']), 'step')}"
    return Prepared(plan=str(report.get("plan", "")), message=words)


def counted(number: int, noun: str) -> str:
    """Write ``1 sample``, ``2,000 samples``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
