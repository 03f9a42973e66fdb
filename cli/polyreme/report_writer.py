"""Writes a run's report, with the pictures of its held-out pages from the lakehouse."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from polyreme.paths import Home, RunDirectory
from polyreme.records import RunRecords
from polyreme.report_data import gather
from polyreme.timeline import Moment
from polyreme_api.job import TrainingJob

_log = logging.getLogger(__name__)


def publish(
    home: Home, run: RunDirectory, job: TrainingJob, records: RunRecords, moments: Sequence[Moment], *, now: Moment
) -> Path:
    """Write the report of a run as it stands; return its path."""
    from polyreme.report.write import write_report
    from polyreme_datahub.hub import read_image

    data = gather(
        run,
        job,
        records,
        moments,
        picture=lambda digest: read_image(home.registry_url, home.objects_url, digest),
        now=now,
    )
    path = write_report(run.report, data)
    _log.info("report written: %s", path)
    return path
