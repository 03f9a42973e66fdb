"""Writes a run's report, with the pictures of its held-out pages from the lakehouse."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from polyreme.report.run_report import gather
from polyreme.report.write import write_report
from polyreme.run_files.data import visits_of
from polyreme.run_files.paths import Home, RunDirectory
from polyreme.run_files.records import RunRecords
from polyreme.run_files.timeline import Moment
from polyreme.views.output import note
from polyreme_api.errors import PolyremeError
from polyreme_api.job import TrainingJob
from polyreme_datahub.hub import read_image
from polyreme_datahub.loader.order.outlook import SegmentOutlook

_log = logging.getLogger(__name__)


def publish(
    home: Home, run: RunDirectory, job: TrainingJob, records: RunRecords, moments: Sequence[Moment], *, now: Moment
) -> Path | None:
    """Write the report of a run as it is now; return its path.

    A report shows a run and decides nothing of it: where it can't be written, a note says so, and None is returned.
    """
    outlook = partial(_outlook, home, run, job, records)
    try:
        data = gather(
            run, job, records, moments, picture=lambda digest: _picture(home, digest), outlook=outlook, now=now
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


def _picture(home: Home, digest: str) -> bytes:
    """Return the PNG of a held-out page; empty if the sample has no image, or its image can't be read any more."""
    if not digest:
        return b""
    try:
        return read_image(home.registry_url, home.objects_url, digest)
    except (PolyremeError, OSError) as error:
        _log.warning("report without the picture of a held-out page: %s", error)
        return b""
