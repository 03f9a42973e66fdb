"""Prepares data on this machine: the pipeline of each job as a child process, and the report that it leaves."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from polyreme.data.controller import Prepared
from polyreme.data.worker_process import DataWork
from polyreme.job_files import write_job
from polyreme.paths import Home
from polyreme_api.errors import EnvironmentFailedError
from polyreme_api.job import TrainingJob
from polyreme_datahub.stored_data import look
from polyreme_system.files import read_json

REPORT_NAME = "data.json"

_log = logging.getLogger(__name__)


class LocalPreparation:
    """Prepares data with this machine's processes, in the registry and the object store of a home.

    Args:
        home: Where the registry and the objects are.
    """

    def __init__(self, home: Home) -> None:
        self._home = home

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
        )
        try:
            await work.run()
        finally:
            await work.close()
        return prepared(folder / REPORT_NAME)

    async def is_whole(self, job: TrainingJob) -> bool:
        """Tell whether the processed data of a job is still there."""
        seen = await asyncio.to_thread(look, self._home.objects_url, job.spec, job=job.metadata.uid)
        return seen.whole

    async def forget(self, uid: str) -> None:
        """Remove the job's folder. The plan object keeps the versions that the job was trained on."""
        await asyncio.to_thread(shutil.rmtree, self._folder(uid), ignore_errors=True)

    def _folder(self, uid: str) -> Path:
        return self._home.path / "data" / "jobs" / uid


def prepared(report_file: Path) -> Prepared:
    """Read what the pipeline's process left about a job: its plan, samples and dead letters."""
    report = read_json(report_file) or {}
    samples = sum(int(row.get("samples", 0)) for row in report.get("datasets", ()))
    dead = sum(int(row.get("deadLetters", 0)) for row in report.get("stages", ()))
    words = f"{samples:,} samples" + (f"; {dead:,} records are dead letters" if dead else "")
    return Prepared(plan=str(report.get("plan", "")), message=words)
