"""Runs as pages show them: what was read is kept while the files of a run stay as they are.

A run whose step records are larger than ``STEPS_BYTES_MAX`` is not read whole: its report says more.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from polyreme.console.run_source import Curve, RunCurves, RunName
from polyreme.report.comparison import compared, end_of_run, with_status
from polyreme.report.data import ReportData
from polyreme.report.run_report import gather
from polyreme.run_files.paths import RunDirectory
from polyreme.run_files.records import RunRecords, checkpoint_url, read_records_at
from polyreme.run_files.timeline import FILE as TIMELINE
from polyreme.run_files.timeline import read_timeline
from polyreme_api.clock import Clock
from polyreme_api.errors import RefusedError
from polyreme_api.progress import ALL_SETS, StepRecord
from polyreme_datahub_service.stored_job import read_stored_job
from polyreme_launcher.urls import checkpoint_folder

T = TypeVar("T")

KEPT = 128
"""Runs of comparisons that are kept."""
REPORTS_KEPT = 4
"""Runs whose steps are kept whole."""
CURVE_POINTS = 600
"""Points of one curve of a comparison."""
STEPS_BYTES_MAX = 64 * 2**20


class RunReader:
    """Reads runs; each thread may ask."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._reports = _Kept[ReportData](REPORTS_KEPT)
        self._curves = _Kept[RunCurves](KEPT)

    def report(self, run: RunDirectory) -> ReportData:
        """Return everything on a run's page but pictures.

        Raises:
            PolyremeError: If the run's job can't be read, its store stays away, or it has too many steps.
        """
        stamp = run_stamp(run)
        found = self._reports.get(run, stamp)
        if found is None:
            with self._lock:
                job, records = _read(run)
                now = end_of_run(run, records, self._clock)
                found = gather(
                    run,
                    job,
                    records,
                    read_timeline(run.path),
                    picture=lambda _: b"",
                    outlook=lambda _: (),
                    packs=lambda *_: None,
                    now=now,
                )
            self._reports.put(run, stamp, found)
        return found

    def curves(self, run: RunDirectory) -> RunCurves:
        """Return what a comparison shows of a run.

        Raises:
            PolyremeError: As ``report``.
        """
        stamp = run_stamp(run)
        found = self._curves.get(run, stamp)
        if found is None:
            with self._lock:
                job, records = _read(run)
                history = records.history
                name = RunName(namespace=run.namespace, name=run.name)
                found = RunCurves(run=name, compared=compared(run, job, records, self._clock), curve=curve_of(history))
            self._curves.put(run, stamp, found)
        return found


class _Kept(Generic[T]):
    """What was read of runs, the last ones that were asked for, while their stamp is the same."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._items: collections.OrderedDict[tuple[str, str], tuple[object, T]] = collections.OrderedDict()

    def get(self, run: RunDirectory, stamp: object) -> T | None:
        with self._lock:
            found = self._items.get((run.namespace, run.name))
            if found is None or found[0] != stamp:
                return None
            self._items.move_to_end((run.namespace, run.name))
            return found[1]

    def put(self, run: RunDirectory, stamp: object, item: T) -> None:
        with self._lock:
            self._items[run.namespace, run.name] = stamp, item
            while len(self._items) > self._most:
                self._items.popitem(last=False)


def run_stamp(run: RunDirectory) -> tuple[Any, ...]:
    """Return what changes when a run's files do, for a run whose checkpoints are in a folder of this machine."""
    files = [run.state_file, run.job_file, run.identity_file, run.path / TIMELINE]
    folder = run.checkpoints
    steps = sorted((folder / "steps").glob("*.jsonl")) if folder.is_dir() else []
    return tuple((path.name, *_stat(path)) for path in (*files, *steps, folder))


def curve_of(history: Sequence[StepRecord]) -> Curve:
    """Return the curves of the steps that count."""
    stride = max(1, -(-len(history) // CURVE_POINTS))
    tokens, seconds, sums = 0, 0.0, []
    for record in history:
        tokens, seconds = tokens + record.tokens, seconds + record.step_s
        sums.append((float(tokens), seconds / 3600))
    kept = [*range(0, len(history), stride), *([len(history) - 1] if (len(history) - 1) % stride else [])]
    chosen = [history[at] for at in kept]
    held_out = [record.held_out.get(ALL_SETS, float("nan")) for record in chosen]
    return Curve(
        step=[float(record.step) for record in chosen],
        tokens=[sums[at][0] for at in kept],
        hours=[sums[at][1] for at in kept],
        values={
            "loss": [record.loss for record in chosen],
            "learning rate": [record.learning_rate for record in chosen],
            "gradient norm": [record.gradient_norm for record in chosen],
            "held-out loss": held_out,
        },
    )


def _read(run: RunDirectory) -> tuple[Any, RunRecords]:
    job = with_status(run, read_stored_job(run.job_file))
    url = checkpoint_url(run, job)
    folder = checkpoint_folder(url)
    if folder is not None and folder.is_dir():
        size = sum(path.stat().st_size for path in (folder / "steps").glob("*.jsonl"))
        if size > STEPS_BYTES_MAX:
            raise RefusedError(
                f"run {run.name!r} has {size // 2**20} MiB of step records, expected at most "
                f"{STEPS_BYTES_MAX // 2**20} for a page; see its report, or polyreme runs export"
            )
    return job, read_records_at(url)


def _stat(path: Any) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size
