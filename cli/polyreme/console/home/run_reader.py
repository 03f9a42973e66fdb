"""Runs as pages show them: what was read is kept while the files of a run stay as they are.

Of many steps the columns of closed segments are read. What would take long, since it is in lines alone, or much memory,
is refused.
"""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

from polyreme.console.kept import Kept
from polyreme.console.run_source import RunCurves, RunName
from polyreme.console.step_curves import CURVES_KEPT, STEPS_MAX, curve_of
from polyreme.report.comparison import compared, end_of_run, with_status
from polyreme.report.page import sections
from polyreme.report.run_report import gather
from polyreme.report.run_summary import STOPPED
from polyreme.run_files.paths import RunDirectory
from polyreme.run_files.records import RunRecords, checkpoint_url, read_records_at
from polyreme.run_files.timeline import FILE as TIMELINE
from polyreme.run_files.timeline import read_timeline
from polyreme_api.clock import Clock
from polyreme_datahub_service.stored_job import read_stored_job

PAGES_KEPT = 32
"""Runs whose pages are kept."""


class RunReader:
    """Reads runs; each thread may ask."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._pages = Kept[str](PAGES_KEPT)
        self._curves = Kept[RunCurves](CURVES_KEPT)

    def sections(self, run: RunDirectory, *, stopped: str | None) -> str:
        """Return the report of a run as HTML, without pictures.

        Args:
            run: The run.
            stopped: What to say where its process is gone: the status is what that wrote last. None: it is not.

        Raises:
            PolyremeError: If the run's job can't be read, its store stays away, or it has too many steps.
        """
        stamp = stopped, run_stamp(run)
        found = self._pages.get(_key(run), stamp)
        if found is None:
            with self._lock:
                job, records = _read(run)
                now = end_of_run(run, records, self._clock)
                data = gather(
                    run,
                    job,
                    records,
                    read_timeline(run.path),
                    picture=lambda _: b"",
                    outlook=lambda _: (),
                    packs=lambda *_: None,
                    now=now,
                )
                if stopped is not None:
                    data = dataclasses.replace(data, outcome=STOPPED, reason=stopped)
                found = sections(dataclasses.replace(data, pages=()))
            self._pages.put(_key(run), stamp, found)
        return found

    def curves(self, run: RunDirectory) -> RunCurves:
        """Return what a comparison shows of a run.

        Raises:
            PolyremeError: As ``sections``.
        """
        stamp = run_stamp(run)
        found = self._curves.get(_key(run), stamp)
        if found is None:
            with self._lock:
                job, records = _read(run)
                history = records.history
                name = RunName(namespace=run.namespace, name=run.name)
                found = RunCurves(run=name, compared=compared(run, job, records, self._clock), curve=curve_of(history))
            self._curves.put(_key(run), stamp, found)
        return found


def _key(run: RunDirectory) -> tuple[str, str]:
    return run.namespace, run.name


def run_stamp(run: RunDirectory) -> tuple[Any, ...]:
    """Return what changes when a run's files do, for a run whose checkpoints are in a folder of this machine."""
    files = [run.state_file, run.job_file, run.identity_file, run.path / TIMELINE]
    folder = run.checkpoints
    steps = sorted((folder / "steps").glob("*.jsonl")) if folder.is_dir() else []
    return tuple((path.name, *_stat(path)) for path in (*files, *steps, folder))


def _read(run: RunDirectory) -> tuple[Any, RunRecords]:
    job = with_status(run, read_stored_job(run.job_file))
    return job, read_records_at(checkpoint_url(run, job), most=STEPS_MAX)


def _stat(path: Any) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size
