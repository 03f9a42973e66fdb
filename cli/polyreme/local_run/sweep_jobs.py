"""Jobs of a sweep: one for each combination of the given values, with a name that depends on these values alone."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import os
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from polyreme.job_overrides import OPTION, Setting, parse_setting, parse_settings, with_setting
from polyreme.local_run import preflight
from polyreme.run_files.identity import CHANGES_SHOWN_MAX, changes, is_served
from polyreme.run_files.paths import Home, RunDirectory
from polyreme_api.errors import InvalidConfigError, RefusedError
from polyreme_api.job import TrainingJob
from polyreme_api.labels import LABEL_SWEEP
from polyreme_api.metadata import JOB_NAME_CHARACTERS_MAX
from polyreme_datahub_service.stored_job import read_stored_job
from polyreme_planner.hardware import PROCESSOR
from polyreme_planner.loading import load_job
from polyreme_planner.plan_inputs import hardware_of
from polyreme_system.files import read_json

JOBS_MAX = 100
_PLAIN = re.compile(r"[a-z0-9]+([.-][a-z0-9]+)*")
"""A value that a name may hold; a point becomes a dash."""
_HASH_CHARACTERS = 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SweepJob:
    """One job of a sweep."""

    values: tuple[Setting, ...]
    """What this job has for the fields that vary."""
    manifest: dict[str, Any]
    job: TrainingJob

    @property
    def name(self) -> str:
        """Name of the job and of its run."""
        return self.job.metadata.name

    def run(self, home: Home) -> RunDirectory:
        """Return the folder of its run, whether it exists or not."""
        return home.run(self.job.metadata.namespace, self.name)


def sweep_jobs(manifest: Any, texts: Sequence[str], *, name: str | None) -> list[SweepJob]:
    """Build the jobs of a sweep.

    Args:
        manifest: The manifest that all have in common.
        texts: Values of ``--set``; those with several values, separated by commas, vary.
        name: Name of the sweep; None: the manifest's.

    Raises:
        InvalidConfigError: If nothing varies, there are too many jobs, or one of them is refused.
    """
    common = parse_setting(f"metadata.name={json.dumps(name)}") if name is not None else None
    base = manifest if common is None else with_setting(manifest, common)
    varied: list[list[Setting]] = []
    for text in texts:
        settings = parse_settings(text)
        if settings[0].path[:2] == ("metadata", "name"):
            raise InvalidConfigError("names of a sweep's jobs are derived from its name; use --name", field=OPTION)
        if len(settings) > 1:
            varied.append(settings)
        else:
            base = with_setting(base, settings[0])
    count = math.prod(len(settings) for settings in varied)
    if not varied:
        raise InvalidConfigError(
            f"nothing varies, expected {OPTION} with several values, such as training.seed=1,2", field=OPTION
        )
    if count > JOBS_MAX:
        sizes = " x ".join(str(len(settings)) for settings in varied)
        raise InvalidConfigError(f"{sizes} values are {count:,} jobs, at most {JOBS_MAX} are allowed", field=OPTION)
    # Checked before names are derived from it.
    title = load_job(base).metadata.name
    jobs = [_job(base, title, values) for values in itertools.product(*varied)]
    _check_apart(jobs)
    return jobs


def _job(base: Any, title: str, values: tuple[Setting, ...]) -> SweepJob:
    manifest = base
    for setting in values:
        manifest = with_setting(manifest, setting)
    metadata = dict(manifest["metadata"])
    metadata |= {
        "name": _name(title, values),
        "labels": {**(metadata.get("labels") or {}), LABEL_SWEEP: title},
    }
    manifest = {**manifest, "metadata": metadata}
    try:
        job = load_job(manifest)
    except InvalidConfigError as error:
        words = ", ".join(f"{setting.field}={setting.text}" for setting in values)
        raise InvalidConfigError(f"job with {words}: {error.message}", field=error.field) from error
    return SweepJob(values=values, manifest=manifest, job=job)


def _name(title: str, values: Sequence[Setting]) -> str:
    """Name a job by its values, or by their hash where they do not fit into a name."""
    ordered = sorted(values, key=lambda setting: setting.field)
    words = [f"{setting.path[-1]}-{setting.text}".lower() for setting in ordered]
    name = "-".join([title, *words]).replace(".", "-")
    if len(name) <= JOB_NAME_CHARACTERS_MAX and all(_PLAIN.fullmatch(word) for word in words):
        return name
    digest = hashlib.sha256(json.dumps([[setting.field, setting.text] for setting in ordered]).encode()).hexdigest()
    return f"{title[: JOB_NAME_CHARACTERS_MAX - _HASH_CHARACTERS - 1]}-{digest[:_HASH_CHARACTERS]}"


def _check_apart(jobs: Sequence[SweepJob]) -> None:
    """Refuse jobs with the same name, and jobs that would write to one place."""
    name, count = Counter(job.name for job in jobs).most_common(1)[0]
    if count > 1:
        raise InvalidConfigError(f"{count} jobs would have the name {name!r}: a value is given twice", field=OPTION)
    for part in ("checkpoint", "export"):
        field = f"spec.{part}.location"
        places = Counter(_location(job, part) for job in jobs)
        del places[None]
        place, count = places.most_common(1)[0] if places else (None, 0)
        if count > 1:
            raise InvalidConfigError(
                f"{field} is refused: {place}, {count} jobs of the sweep would write there; remove the field, and each "
                "has a folder of its own",
                field=field,
            )


def _location(job: SweepJob, part: str) -> str | None:
    settings = getattr(job.job.spec, part)
    return None if settings is None else settings.location


def check_jobs(home: Home, jobs: Sequence[SweepJob]) -> list[SweepJob]:
    """Refuse a sweep if one of its jobs can't run here, before any job starts; return the jobs that are not done.

    Raises:
        RefusedError: If a run of a job's name has another spec, or another process serves it.
        PolyremeError: As ``polyreme run`` ends for such a job.
    """
    home.prepare_data()
    todo = []
    for each in jobs:
        run = each.run(home)
        if run.exists:
            changed = changes(read_stored_job(run.job_file), each.job)
            if fixed := [change for change in changed if not change.allowed]:
                shown = "; ".join(map(str, fixed[:CHANGES_SHOWN_MAX]))
                raise RefusedError(
                    f"run {run.name!r} exists with another spec: {shown}; give the sweep another name with --name"
                )
            if is_served(run):
                raise RefusedError(
                    f"run {run.name!r} of the sweep is already running; wait, or stop it with polyreme runs stop "
                    f"{run.name}"
                )
            if (read_json(run.state_file) or {}).get("state") == "Succeeded" and not changed:
                continue
        preflight.check(home, run, each.job, resumes=run.exists, fresh=False)
        todo.append(each)
    return todo


def at_once(jobs: Sequence[SweepJob]) -> int:
    """Return how many jobs this machine runs at the same time: as many as have a core for each rank, at least one.

    Jobs on accelerators run one after the other: each takes the first devices of the machine.
    """
    if any(hardware_of(each.job.spec).name != PROCESSOR for each in jobs):
        return 1
    ranks = max(each.job.spec.workers.replicas * each.job.spec.workers.devices for each in jobs)
    return max(1, len(os.sched_getaffinity(0)) // ranks)
