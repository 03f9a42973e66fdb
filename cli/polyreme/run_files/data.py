"""Training data of a run on this machine, as its ranks read them: opened by commands, and its visits for people."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from polyreme.run_files.paths import Home, RunDirectory
from polyreme_api.errors import PolyremeError
from polyreme_system.files import read_json

if TYPE_CHECKING:
    from polyreme_api.job.spec import TrainingJobSpec
    from polyreme_api.mixture import MixtureRecord
    from polyreme_datahub.loader.order.outlook import SegmentOutlook
    from polyreme_datahub.loader.source import PackedSource

_log = logging.getLogger(__name__)


def run_uid(run: RunDirectory) -> str:
    """Return the UID under which a run's data were processed; empty before."""
    return str((read_json(run.data_report) or {}).get("job", ""))


def steps_of(run: RunDirectory, spec: TrainingJobSpec) -> int:
    """Return the steps of a run: given, or counted for its epochs; 0 before its data are processed."""
    return spec.training.steps or int((read_json(run.data_report) or {}).get("steps", 0))


def steps_words(run: RunDirectory, spec: TrainingJobSpec) -> str:
    """Write the steps of a run: ``412 steps``, ``3 epochs``, ``3 epochs = 412 steps``."""
    steps, epochs = steps_of(run, spec), spec.training.epochs
    words = [] if epochs is None else [f"{epochs:,} epoch{'' if epochs == 1 else 's'}"]
    return " = ".join([*words, *([f"{steps:,} step{'' if steps == 1 else 's'}"] if steps else [])])


def open_run_data(home: Home, run: RunDirectory, spec: TrainingJobSpec, mixture: MixtureRecord | None) -> PackedSource:
    """Open the training data of a run; waits for no processing.

    Raises:
        EnvironmentFailedError: If its data is not processed.
    """
    from polyreme_datahub.loader.job_packs import open_source

    return open_source(home.objects_url, spec, job=run_uid(run), wait_s=0.0, mixture=mixture)


def visits_of(
    home: Home, run: RunDirectory, spec: TrainingJobSpec, mixture: MixtureRecord | None, *, steps: int
) -> Sequence[SegmentOutlook]:
    """Return what the sources give up to a step, with visits; empty while that is not known.

    It is known once all data of the run are processed, for this very spec.
    """
    if not steps or not run_uid(run):
        return ()
    try:
        with closing(open_run_data(home, run, spec, mixture)) as source:
            return source.outlook(steps)
    except (PolyremeError, OSError):
        return ()


def release_run(home: Home, run: RunDirectory) -> None:
    """Release what a run of this machine pins; a registry that is away is logged, and costs a version its removal."""
    from polyreme_datahub_service.pinning import release_versions

    uid = (read_json(run.identity_file) or {}).get("uid") or (read_json(run.data_report) or {}).get("job")
    if not uid or not home.has_data:
        return
    try:
        release_versions(home.registry_url, str(uid))
    except PolyremeError as error:
        _log.warning("versions that run %s has pinned are not released: %s", run.name, error)
