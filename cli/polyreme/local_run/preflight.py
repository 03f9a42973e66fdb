"""Everything that is refused before anything starts: nothing is written, moved or run until all of it holds."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from polyreme.run_files.data import run_uid
from polyreme.run_files.paths import Home, RunDirectory
from polyreme.run_files.records import checkpoint_url
from polyreme_api.checkpoint_inventory import State, Survey, survey
from polyreme_api.errors import EnvironmentFailedError, InvalidConfigError, NotFoundError, RefusedError
from polyreme_api.history import COMMIT_MARKER, attempt_key, checkpoint_at, choose_resume
from polyreme_api.job import TrainingJob
from polyreme_api.job.model import Training
from polyreme_api.mixture import MixtureRecord
from polyreme_api.store import ObjectStore
from polyreme_datahub.hub import check_datasets, count_epochs
from polyreme_datahub.objects import check_access, open_store
from polyreme_datahub.released_tokenizer import read_released
from polyreme_datahub.sources.digits import sample_sources
from polyreme_datahub.tokenizer_file import tokenizer_json
from polyreme_launcher.urls import checkpoint_folder, export_place, weights_place
from polyreme_local.kubelet.container import unhonoured_fields
from polyreme_planner.adapters import Adapters, adapters_of
from polyreme_planner.checkpoint_model import check_adapters, check_model
from polyreme_planner.curriculum import curriculum_stages, shape_at
from polyreme_planner.extension import Count, extended, extension_words, uncounted
from polyreme_planner.hardware import PROCESSOR
from polyreme_planner.mixture import STEPS_AHEAD_MAX, next_mixture
from polyreme_planner.plan import shape_of
from polyreme_planner.plan_inputs import hardware_of
from polyreme_planner.shapes import ModelShape

READ_FIELDS = frozenset({"spec.model.weights.location"})
"""Locations that are only read."""
RANKS_PER_CORE = 4
"""More ranks on each core are worth a warning; the quickstart has two."""
IDLE_FIELDS = ("queueName", "priorityClassName", "preemptionPolicy", "minRuntimeSeconds")
"""Fields of the API that say how jobs share a cluster. Here a job is alone; of ``spec.topology`` the same holds."""


def check(home: Home, run: RunDirectory, job: TrainingJob, *, resumes: bool, fresh: bool) -> None:
    """Refuse a job that can't run here.

    Args:
        home: Registry of the datasets.
        run: The run's folder.
        job: The job.
        resumes: Whether the run exists and continues.
        fresh: Whether what the run left in its own folders is set aside first.

    Raises:
        InvalidConfigError: If a dataset is not known, a location is no local folder, weights or a tokenizer to start
            from do not fit, the checkpoint root holds checkpoints of another model or of a format that this version
            does not read, or a change of the weights was appended for a step that the run has trained.
        NotFoundError: If there are no weights to start from where the job says.
        RefusedError: If the checkpoint root is another run's.
    """
    if job.spec.workers.runtime.mode == "Environment":
        raise InvalidConfigError(
            "this machine can't run the job: workers.runtime.mode is Environment, and there is no container runtime; "
            "apply the job to a cluster, or use mode: Launcher",
            field="spec.workers.runtime.mode",
        )
    if job.spec.suspend:
        raise InvalidConfigError(
            "the job is suspended: spec.suspend is true, and on one machine nothing would resume it; set it to false",
            field="spec.suspend",
        )
    if not resumes:
        check_rates(job)
    check_data(home, job)
    check_objects(home)
    check_folders(run, job)
    if not resumes or job.spec.training.adapters is not None:
        check_weights(job)
    if not resumes:
        check_tokenizer(job)
        check_start(job)
    url = checkpoint_url(run, job)
    folder = checkpoint_folder(url)
    if (fresh and folder == run.checkpoints) or (folder is not None and not folder.is_dir()):
        return
    seen = survey(open_checkpoints(url))
    shape = shape_of(job.spec)
    check_checkpoints(seen, url, shape, adapters_of(job.spec.training, shape))
    if not resumes:
        check_unused(seen, url)
    check_changed(seen, job, count=counting(home, run, job))


def check_folders(run: RunDirectory, job: TrainingJob) -> None:
    """Refuse locations that are no folders of this machine, or into which it can't write.

    Raises:
        InvalidConfigError: Naming the field, if something else lies there.
        EnvironmentFailedError: Naming the field, if the folder can't be written.
    """
    places: dict[str, Path] = {}
    folder = checkpoint_folder(checkpoint_url(run, job))
    # Without a location checkpoints lie in the home, which a run makes; a job that is only validated needs none.
    if folder is not None and job.spec.checkpoint.location is not None:
        places["spec.checkpoint.location"] = folder
    if job.spec.export is not None and job.spec.export.location is not None:
        exported = export_place(job.spec.export.location)
        places |= {"spec.export.location": exported} if isinstance(exported, Path) else {}
    if job.spec.model.weights is not None:
        place = weights_place(job.spec.model.weights.location)
        places |= {"spec.model.weights.location": place} if isinstance(place, Path) else {}
    for field, path in places.items():
        if field not in READ_FIELDS:
            check_writable(path, field=field)
        elif not (existing := _existing(path)).is_dir():
            raise InvalidConfigError(f"not a folder: {existing} is a file", field=field)


def check_writable(folder: Path, *, field: str) -> None:
    """Refuse a folder, which may not exist yet, that this process can't write.

    Raises:
        InvalidConfigError: If a file lies there.
        EnvironmentFailedError: If it can't be written.
    """
    existing = _existing(folder)
    if not existing.is_dir():
        raise InvalidConfigError(f"not a folder: {existing} is a file", field=field)
    if not is_writable(existing):
        raise EnvironmentFailedError(
            f"{folder} can't be created or written: no permission to write to {existing}", field=field
        )


def _existing(path: Path) -> Path:
    return next(place for place in (path, *path.parents) if place.exists())


def is_writable(folder: Path) -> bool:
    """Tell whether this process may write into a folder: by its rights, and by those of the file system."""
    if not os.access(folder, os.W_OK | os.X_OK):
        return False
    # Rights alone say nothing to root, nor of a file system that takes no files at all, as /proc.
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def check_weights(job: TrainingJob) -> None:
    """Refuse weights to start from that are missing, cut short, of another model or of a tokenizer that is not used.

    Only the headers of their files are read.

    Raises:
        NotFoundError: If the folder or a file of it does not exist.
        InvalidConfigError: Naming the first rule that is broken.
    """
    weights = job.spec.model.weights
    if weights is None:
        return
    # Imports torch, which a job without weights does not need here.
    from polyreme.local_run.weights_check import check_files

    shape = shape_at(shape_of(job.spec), curriculum_stages(job.spec), 1)
    check_files(weights.location, shape, own_tokenizer=job.spec.data.tokenizer.location is None)


def check_start(job: TrainingJob) -> None:
    """Refuse a checkpoint to start from that is missing, torn, damaged or of another model.

    Raises:
        InvalidConfigError: Naming the checkpoint.
    """
    if job.spec.start_from is None:
        return
    field = "spec.startFrom.checkpoint"
    root, name = checkpoint_at(job.spec.start_from.checkpoint)
    found = [stored for stored in survey(open_checkpoints(root, field=field)).checkpoints if stored.name == name]
    if not found:
        raise InvalidConfigError(f"no checkpoint {name} in {root}", field=field)
    if (marker := found[0].marker) is None:
        raise InvalidConfigError(f"checkpoint {name} of {root} is {found[0].state.value}: {found[0].why}", field=field)
    try:
        shape = shape_of(job.spec)
        check_model(marker, shape, name=name)
        check_adapters(marker, adapters_of(job.spec.training, shape), name=name)
    except RefusedError as error:
        raise InvalidConfigError(f"{error.message}; root {root}", field=f"{error.field} or {field}") from error


def check_tokenizer(job: TrainingJob, *, with_weights: bool = True) -> None:
    """Refuse a released tokenizer that is missing, or does not fit its template, the model or the weights' own.

    Args:
        job: The job.
        with_weights: Whether the weights can be read.

    Raises:
        InvalidConfigError: Naming the first rule that is broken.
        EnvironmentFailedError: If its bucket can't be reached.
    """
    if job.spec.data.tokenizer.location is None:
        return
    stored = read_released(job.spec.data.tokenizer.location, embedded=shape_of(job.spec).decoder.vocabulary)
    if with_weights and (weights := job.spec.model.weights) is not None:
        from polyreme.local_run.weights_check import check_tokenizer_of

        check_tokenizer_of(weights.location, tokenizer_json(stored))


def check_objects(home: Home) -> None:
    """Refuse an object store that can't be reached.

    Raises:
        InvalidConfigError: If its URL is of no use.
        EnvironmentFailedError: If server, credentials or bucket are wrong.
    """
    check_access(home.objects_url)


def check_data(home: Home, job: TrainingJob) -> None:
    """Refuse datasets that are not registered.

    Raises:
        InvalidConfigError: Naming the dataset and the nearest names.
    """
    try:
        check_datasets(home.registry_url, job.spec)
    except NotFoundError as error:
        raise InvalidConfigError(
            f"{error.message}; polyreme data register NAME SOURCE makes a file or folder a dataset",
            field="spec.data.sources[].dataset or spec.evaluation.sets[].dataset",
        ) from error


def unknown_here(job: TrainingJob) -> list[str]:
    """Name the datasets of a job that a home without any does not have: all but the samples."""
    samples = sample_sources()
    named = [source.dataset for source in job.spec.data.sources]
    named += [part.dataset for part in job.spec.evaluation.sets] if job.spec.evaluation else []
    return [dataset for dataset in dict.fromkeys(named) if dataset.partition("@")[0] not in samples]


def check_rates(job: TrainingJob) -> None:
    """Refuse a learning rate that would never reach its peak.

    Raises:
        InvalidConfigError: Naming the field.
    """
    training = job.spec.training
    of_run = ("spec.training.optimizer.warmupSteps", training.optimizer.warmup_steps, "the run")
    spans = [] if training.steps is None else [(*of_run, training.steps)]
    spans += [
        ("spec.training.stages[].warmupSteps", stage.warmup_steps or 0, f"stage {stage.name!r}", stage.steps)
        for stage in training.stages
    ]
    for field, warmup_steps, of, steps in spans:
        if warmup_steps > steps:
            raise InvalidConfigError(
                f"the warm-up is longer than {of}: {warmup_steps} steps of {steps}, so the learning rate would never "
                f"reach its peak; expected at most {steps}",
                field=field,
            )


def open_checkpoints(url: str, *, field: str = "spec.checkpoint.location") -> ObjectStore:
    """Open a checkpoint root that a field names.

    Raises:
        InvalidConfigError: If the URL names no store.
    """
    try:
        return open_store(url)
    except InvalidConfigError as error:
        raise InvalidConfigError(error.message, field=field) from error


def check_checkpoints(seen: Survey, url: str, shape: ModelShape, adapters: Adapters | None = None) -> None:
    """Refuse a root with a committed checkpoint of another model or of other adapters, or with one that can't be read.

    What is damaged is never loaded, as what is torn, and refuses nothing.

    Raises:
        InvalidConfigError: Naming the first size that differs, or what to do about the format.
    """
    for stored in seen.checkpoints:
        if stored.state is State.FOREIGN:
            raise InvalidConfigError(f"{stored.why}; root {url}", field="spec.checkpoint.location")
        try:
            if stored.marker is not None:
                check_model(stored.marker, shape, name=stored.name)
                check_adapters(stored.marker, adapters, name=stored.name)
        except RefusedError as error:
            raise InvalidConfigError(
                f"{error.message}; root {url}", field=f"{error.field} or spec.checkpoint.location"
            ) from error


def check_unused(seen: Survey, url: str) -> None:
    """Refuse to begin a run where another one left its history: attempts are numbered from 1 in each root.

    Raises:
        RefusedError: Naming the root.
    """
    committed = [stored.name for stored in seen.checkpoints if stored.state is not State.TORN]
    left = [f"{name}/{COMMIT_MARKER}" for name in committed] + [attempt_key(point.attempt) for point in seen.points]
    if left:
        raise RefusedError(
            f"checkpoint root belongs to another run: {url} holds {left[0]}, expected one run per root; start over "
            "with --fresh, move the checkpoints away, or use another folder",
            field="spec.checkpoint.location",
        )


def counting(home: Home, run: RunDirectory, job: TrainingJob) -> Count:
    """Return what gives a training of a run the steps of its epochs; they are counted where they are not yet."""

    def count(training: Training) -> Training:
        if training.epochs is None:
            return training
        spec = job.spec.model_copy(update={"training": training})
        urls = {"registry_url": home.registry_url, "objects_url": home.objects_url}
        return training.with_steps(count_epochs(spec, **urls, job=run_uid(run)))

    return count


def check_changed(seen: Survey, job: TrainingJob, *, trained: int | None = None, count: Count = uncounted) -> list[str]:
    """Refuse a change of the weights that was appended for a step that is past, and an end that alters such a step.

    Args:
        seen: The checkpoint root.
        job: The job.
        trained: Newest step; None: that of the checkpoint from which the run continues.
        count: Counts the steps of epochs.

    Returns:
        What a changed end makes of the run, and a sentence for each change of the weights that takes effect later than
        at its step, at the next window of the order.

    Raises:
        InvalidConfigError: Naming the field and the steps.
    """
    if (known := _known(seen)) is None:
        return []
    step = _trained(seen) if trained is None else trained
    for entry in job.spec.data.schedule[known.read :]:
        if entry.from_step <= step:
            raise InvalidConfigError(
                f"data.schedule: fromStep {entry.from_step} was appended, and the run has trained step {step} already; "
                "name a later step",
                field="spec.data.schedule[].fromStep",
            )
    appended = next_mixture(job.spec, known, after_step=step, count=count).changes[len(known.changes) :]
    return end_words(seen, job, trained=trained, count=count) + [
        f"weights from step {change.from_step} on take effect at step {change.step}, where the next window of the "
        "order begins"
        for change in appended
        if change.step != change.from_step
    ]


def end_words(seen: Survey, job: TrainingJob, *, trained: int | None = None, count: Count = uncounted) -> list[str]:
    """Say what a changed end makes of a run; nothing where it is the same.

    Args:
        seen: The checkpoint root.
        job: The job.
        trained: Newest step of a run that trains; None: the run continues from its newest checkpoint.
        count: Counts the steps of epochs.

    Raises:
        InvalidConfigError: If the change would alter a trained step.
    """
    known = _known(seen)
    if known is None or known.training is None or known.training == job.spec.training:
        return []
    after_step = _trained(seen) if trained is None else trained + STEPS_AHEAD_MAX
    extended(job.spec, known.training, after_step=after_step, count=count)
    return [extension_words(known.training, job.spec.training, after_step=after_step)]


def is_extended(url: str, job: TrainingJob, count: Count) -> bool:
    """Whether a job has more steps than its newest attempt had."""
    known = _known(survey(open_checkpoints(url)))
    if known is None or known.training is None or known.training == job.spec.training:
        return False
    return count(known.training).steps_known < count(job.spec.training).steps_known


def _known(seen: Survey) -> MixtureRecord | None:
    return next((point.mixture for point in reversed(seen.points) if point.mixture is not None), None)


def _trained(seen: Survey) -> int:
    """Return the step from which the run continues."""
    chosen = choose_resume(seen.committed, seen.points)
    return 0 if chosen is None else chosen.step


def warnings(job: TrainingJob) -> list[str]:
    """Name what the job asks for and will not get, a sentence for each reason: no setting is dropped in silence."""
    reasons: dict[str, list[str]] = {
        "pods run as processes, which ignore these fields of the pod template": unhonoured_fields(
            job.spec.workers.template
        ),
        "these fields have no effect on one machine": idle_fields(job),
    }
    found = [f"{words}: {', '.join(fields)}" for words, fields in reasons.items() if fields]
    ranks, cores = job.spec.workers.replicas * job.spec.workers.devices, len(os.sched_getaffinity(0))
    if hardware_of(job.spec).name == PROCESSOR and ranks > RANKS_PER_CORE * cores:
        found.append(
            f"{ranks} ranks share {cores} cores of this machine, and each takes about 0.4 GiB of memory: steps will be "
            "slow; the number of ranks is workers.replicas x workers.devices"
        )
    return found


def continued(home: Home, run: RunDirectory, job: TrainingJob) -> list[str]:
    """Name, a sentence each, what is new for a run that continues: damaged checkpoints, and changes that wait."""
    url = checkpoint_url(run, job)
    folder = checkpoint_folder(url)
    if folder is not None and not folder.is_dir():
        return []
    seen = survey(open_checkpoints(url))
    damaged = [
        f"checkpoint {stored.name} is damaged and is not used: {stored.why}" for stored in seen.of(State.DAMAGED)
    ]
    return [*damaged, *check_changed(seen, job, count=counting(home, run, job))]


def idle_fields(job: TrainingJob) -> list[str]:
    """Name the fields that are set to more than their default and have no effect without other jobs and hosts."""
    given = job.spec.model_dump(by_alias=True, exclude_defaults=True)
    return [
        *(f"spec.topology.{name}" for name in given.get("topology", {})),
        *(f"spec.{name}" for name in IDLE_FIELDS if name in given),
    ]
