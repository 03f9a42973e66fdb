"""Changes that a command hands to a run that another process serves: mixture entries, and another end of the run."""

from __future__ import annotations

from polyreme.job_files import read_job
from polyreme.local_run.preflight import check_changed, counting, end_words
from polyreme.run_files.identity import APPEND_ONLY_FIELDS, changes, is_served
from polyreme.run_files.paths import Home, RunDirectory
from polyreme.run_files.records import checkpoint_url, read_records_at
from polyreme_api.checkpoint_inventory import survey
from polyreme_api.job import TrainingJob
from polyreme_api.job.data import MixtureChange
from polyreme_api.step_columns import column_of
from polyreme_datahub.objects import open_store
from polyreme_datahub_service.stored_job import write_job


def change_running(home: Home, run: RunDirectory, job: TrainingJob) -> tuple[list[MixtureChange], list[str]] | None:
    """Change a run that another process serves, which looks at its file now and then.

    A run that ends meanwhile finds the changes when it continues.

    Returns:
        Entries appended to the schedule, and sentences on what changes; None if no process serves the run, or the job
        differs from it in something else, or in nothing.

    Raises:
        InvalidConfigError: If a change would alter a step that the run has trained already.
    """
    if not is_served(run):
        return None
    known = read_job(run.job_file)
    found = changes(known, job)
    live = [change.field in APPEND_ONLY_FIELDS or change.moves_end for change in found]
    if not found or not all(live) or not all(change.allowed for change in found):
        return None
    url = checkpoint_url(run, known)
    trained = max(column_of(read_records_at(url).history, "step"), default=0)
    seen = survey(open_store(url))
    count = counting(home, run, job)
    check_changed(seen, job, trained=trained, count=count)
    words = end_words(seen, job, trained=trained, count=count)
    write_job(run.job_file, job)
    return list(job.spec.data.schedule[len(known.spec.data.schedule) :]), words
