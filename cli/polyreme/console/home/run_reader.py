"""Runs as pages show them: what was read is kept while the files of a run stay as they are.

Of many steps the columns of closed segments are read. What would take long, since it is in lines alone, or much memory,
is refused.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import threading
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from polyreme.console.run_source import Curve, RunCurves, RunName
from polyreme.report.comparison import compared, end_of_run, with_status
from polyreme.report.page import sections
from polyreme.report.run_report import gather
from polyreme.report.run_summary import STOPPED
from polyreme.run_files.paths import RunDirectory
from polyreme.run_files.records import RunRecords, checkpoint_url, read_records_at, step_bytes
from polyreme.run_files.timeline import FILE as TIMELINE
from polyreme.run_files.timeline import read_timeline
from polyreme_api.clock import Clock
from polyreme_api.errors import RefusedError
from polyreme_api.progress import StepRecord
from polyreme_api.step_columns import held_out_losses, table_of
from polyreme_datahub_service.stored_job import read_stored_job
from polyreme_launcher.urls import checkpoint_folder

T = TypeVar("T")

KEPT = 128
"""Runs of comparisons that are kept."""
PAGES_KEPT = 32
"""Runs whose pages are kept."""
CURVE_POINTS = 600
"""Points of one curve of a comparison, and held-out losses beside them."""
LINES_BYTES_MAX = 64 * 2**20
"""Step records that no segment covers, at 10 microseconds a record of 400 bytes."""
COLUMNS_BYTES_MAX = 256 * 2**20
"""Segments: of 2.5 million steps."""


class RunReader:
    """Reads runs; each thread may ask."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._pages = _Kept[str](PAGES_KEPT)
        self._curves = _Kept[RunCurves](KEPT)

    def sections(self, run: RunDirectory, *, stopped: str | None) -> str:
        """Return the report of a run as HTML, without pictures.

        Args:
            run: The run.
            stopped: What to say where its process is gone: the status is what that wrote last. None: it is not.

        Raises:
            PolyremeError: If the run's job can't be read, its store stays away, or it has too many steps.
        """
        stamp = stopped, run_stamp(run)
        found = self._pages.get(run, stamp)
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
            self._pages.put(run, stamp, found)
        return found

    def curves(self, run: RunDirectory) -> RunCurves:
        """Return what a comparison shows of a run.

        Raises:
            PolyremeError: As ``sections``.
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
    table, last = table_of(history), len(history) - 1
    held_out = dict(held_out_losses(table))
    tokens = list(itertools.accumulate(table.column("tokens")))
    seconds = list(itertools.accumulate(table.column("step_s")))
    kept = sorted({*_thin(range(len(history))), *_thin(sorted(table.sparse("held_out"))), *([last] if history else [])})
    chosen = table.take(kept)
    return Curve(
        step=[float(step) for step in chosen.column("step")],
        tokens=[float(tokens[at]) for at in kept],
        hours=[seconds[at] / 3600 for at in kept],
        values={
            "loss": chosen.column("loss"),
            "learning rate": chosen.column("learning_rate"),
            "gradient norm": chosen.column("gradient_norm"),
            "held-out loss": [held_out.get(step, float("nan")) for step in chosen.column("step")],
        },
    )


def _thin(places: Sequence[int]) -> Sequence[int]:
    return places[:: max(1, -(-len(places) // CURVE_POINTS))]


def _read(run: RunDirectory) -> tuple[Any, RunRecords]:
    job = with_status(run, read_stored_job(run.job_file))
    url = checkpoint_url(run, job)
    folder = checkpoint_folder(url)
    if folder is not None and folder.is_dir():
        sizes = step_bytes(folder)
        for size, most, what in zip(sizes, (LINES_BYTES_MAX, COLUMNS_BYTES_MAX), ("lines", "columns"), strict=True):
            if size > most:
                raise RefusedError(
                    f"run {run.name!r} has {size // 2**20} MiB of step records in {what}, expected at most "
                    f"{most // 2**20} for a page; see its report, or polyreme runs export"
                )
    return job, read_records_at(url)


def _stat(path: Any) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size
