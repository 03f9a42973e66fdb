"""Changes that a command hands to a run that another process serves: mixture entries, appended to its file."""

from __future__ import annotations

from polyreme.job_files import read_job
from polyreme.local_run.preflight import check_appended
from polyreme.run_files.identity import APPEND_ONLY_FIELDS, changes, is_served
from polyreme.run_files.paths import RunDirectory
from polyreme.run_files.records import checkpoint_url, read_records_at
from polyreme_api.checkpoint_inventory import survey
from polyreme_api.job import TrainingJob
from polyreme_api.job.data import MixtureChange
from polyreme_datahub.objects import open_store
from polyreme_datahub_service.stored_job import write_job


def append_schedule(run: RunDirectory, job: TrainingJob) -> list[MixtureChange] | None:
    """Append entries to the schedule of a run that another process serves, which looks at the file now and then.

    A run that ends meanwhile finds them when it continues.

    Returns:
        The new entries; None if no process serves the run, or the job differs from it in something else, or in nothing.

    Raises:
        InvalidConfigError: If the run has trained the step of an entry already.
    """
    if not is_served(run):
        return None
    known = read_job(run.job_file)
    found = changes(known, job)
    if not found or not all(change.allowed and change.field in APPEND_ONLY_FIELDS for change in found):
        return None
    url = checkpoint_url(run, known)
    trained = max((record.step for record in read_records_at(url).history), default=0)
    check_appended(survey(open_store(url)), job, trained=trained)
    write_job(run.job_file, job)
    return list(job.spec.data.schedule[len(known.spec.data.schedule) :])
