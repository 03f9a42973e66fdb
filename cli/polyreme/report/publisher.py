"""Writes a run's report, with the pictures of its held-out pages and of what spikes trained on."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from polyreme.report.data import StepPacks
from polyreme.report.run_report import gather
from polyreme.report.write import write_report
from polyreme.run_files.data import open_run_data, run_uid, visits_of
from polyreme.run_files.packs import read_packs
from polyreme.run_files.paths import Home, RunDirectory
from polyreme.run_files.records import RunRecords
from polyreme.run_files.timeline import Moment
from polyreme.views.output import note
from polyreme_api.errors import PolyremeError
from polyreme_api.job import TrainingJob
from polyreme_datahub.hub import read_image
from polyreme_datahub.loader.order.outlook import SegmentOutlook

PACKS_SHOWN_MAX = 16
"""Packs of a spike in the report."""
_log = logging.getLogger(__name__)


def publish(
    home: Home, run: RunDirectory, job: TrainingJob, records: RunRecords, moments: Sequence[Moment], *, now: Moment
) -> Path | None:
    """Write the report of a run as it is now; return its path.

    A report shows a run and decides nothing of it: where it can't be written, a note says so, and None is returned.
    """
    try:
        data = gather(
            run,
            job,
            records,
            moments,
            picture=partial(_picture, home),
            outlook=partial(_outlook, home, run, job, records),
            packs=partial(_packs, home=home, run=run, job=job, records=records),
            now=now,
        )
        path = write_report(run.report, data)
    except Exception as error:  # noqa: BLE001 (whatever it is, the run has ended as it has)
        _log.warning("report not written", exc_info=True)
        note(
            f"polyreme: no report: {str(error) or type(error).__name__}; the run itself is not affected; the same "
            f"command writes the report again, details are in {run.host_log}"
        )
        return None
    _log.info("report written: %s", path)
    return path


def _outlook(
    home: Home, run: RunDirectory, job: TrainingJob, records: RunRecords, steps: int
) -> Sequence[SegmentOutlook]:
    return visits_of(home, run, job.spec, records.mixture, steps=steps)


def _packs(
    attempt: int, step: int, *, home: Home, run: RunDirectory, job: TrainingJob, records: RunRecords
) -> StepPacks | None:
    """Read the first packs of a step in the mixture that its attempt trained by; None if they can't be read."""
    mixture = next((point.mixture for point in records.points if point.attempt == attempt), None)
    try:
        with contextlib.closing(open_run_data(home, run, job.spec, mixture)) as source:
            packs = read_packs(home, job.spec, run_uid(run), source, step, count=PACKS_SHOWN_MAX)
            return StepPacks(attempt=attempt, step=step, packs=packs, of_packs=source.packs_in(step))
    except (PolyremeError, OSError) as error:
        _log.warning("report without the samples of a spike: %s", error)
        return None


def _picture(home: Home, digest: str) -> bytes:
    """Return the PNG of a held-out page; empty if the sample has no image, or its image can't be read any more."""
    if not digest:
        return b""
    try:
        return read_image(home.registry_url, home.objects_url, digest)
    except (PolyremeError, OSError) as error:
        _log.warning("report without the picture of a held-out page: %s", error)
        return b""
