"""The data plane's public functions. Ranks open their packs by ``loader.job_packs``, which loads no database."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from polyreme_api.job.spec import TrainingJobSpec
from polyreme_api.store import ObjectNotFoundError
from polyreme_datahub.dataset_views import DatasetDetails, DatasetSummary, details, summaries
from polyreme_datahub.digests import blob_key
from polyreme_datahub.index.format import plan_key, steps_in
from polyreme_datahub.ingest_estimate import IngestEstimate, estimate
from polyreme_datahub.job_data import plan_data
from polyreme_datahub.job_plan import put_steps, read_plan
from polyreme_datahub.lakehouse import Lakehouse
from polyreme_datahub.lakehouse_admin import presigned_link
from polyreme_datahub.loader.open import count_steps
from polyreme_datahub.loader.sample.page_references import digest_of, draw_png, place_of
from polyreme_datahub.named_versions import check_spec
from polyreme_datahub.objects import WORK, open_store
from polyreme_datahub.operations.values import Blob
from polyreme_datahub.processing import Processing, ProcessReport
from polyreme_datahub.registration import add_dataset
from polyreme_datahub.registry import datasets, rebuild
from polyreme_datahub.registry.datasets import DatasetVersion, find_version
from polyreme_datahub.registry.opening import opened_database
from polyreme_datahub.registry.results import places_of
from polyreme_datahub.registry.rows import OperationCount
from polyreme_datahub.registry.work_items import WorkItem
from polyreme_datahub.runner.context import RunContext
from polyreme_datahub.runner.flow_meter import OperationProgress
from polyreme_datahub.runner.flow_run import serve
from polyreme_datahub.runner.replay import ReplayReport
from polyreme_datahub.runner.replay import replay as replay_letters
from polyreme_datahub.sample_masks import masks_of
from polyreme_datahub.source_ingestion import IngestReport, ingest_source
from polyreme_datahub.sources.found import Found
from polyreme_datahub.topics.open import open_topics


def register(
    registry_url: str,
    objects_url: str,
    name: str,
    source: str | Path | Mapping[str, Any],
    *,
    progress: Callable[[Found], None] | None = None,
) -> DatasetVersion:
    """Register a dataset, or a new version of it; the same content again is the version that there is.

    Every file is read once and listed with its digest. The path that was named last is where its files are read from.

    Args:
        registry_url: ``sqlite:////absolute/path`` or ``postgresql+psycopg2://...``.
        objects_url: ``file:///absolute/directory`` or ``s3://bucket/prefix``.
        name: Name of the dataset, as jobs write it; ``sample/`` is polyreme's own.
        source: A ``.jsonl`` file, or a folder of images, shards or tables (docs/reference/dataset-format.md), also as
            ``s3://bucket/...``, or a description of generated pages.
        progress: Called now and then with what was found so far.

    Raises:
        InvalidConfigError: If the name or the source breaks a rule.
        EnvironmentFailedError: If the registry stays away.
    """
    lakehouse = Lakehouse(open_store(objects_url))
    with opened_database(registry_url) as database:
        return add_dataset(database, lakehouse, name, source, now_s=_now_s, progress=progress or (lambda _found: None))


def list_datasets(registry_url: str) -> list[DatasetSummary]:
    """List all datasets by name, including the samples that ship with polyreme."""
    found: list[DatasetSummary] = []
    with opened_database(registry_url) as database:
        while page := summaries(database, after=found[-1].name if found else ""):
            found += page
    return found


def show_dataset(registry_url: str, objects_url: str, reference: str) -> DatasetDetails:
    """Show a dataset version: counts, operations with their hits, indexes, dead letters, tombstones.

    Raises:
        DatasetNotFoundError: Naming the nearest names there are.
    """
    with opened_database(registry_url) as database:
        return details(database, open_store(objects_url), reference, now_s=_now_s())


def remove_dataset(registry_url: str, objects_url: str, reference: str) -> list[str]:
    """Delete a dataset, or one version of it, from the registry; return the versions that are gone.

    Args:
        registry_url: As in ``register``.
        objects_url: As in ``register``.
        reference: ``name`` or ``name@number``.

    Raises:
        DatasetNotFoundError: Naming the nearest names there are.
        VersionPinnedError: If a job needs one of them.
    """
    store = open_store(objects_url)
    with opened_database(registry_url) as database:
        found = datasets.find_version(database, reference)
        number = found.number if "@" in reference else None
        removed = datasets.remove_versions(database, found.name, number, mark_first=rebuild.mark_removed(store))
    for gone in removed:
        rebuild.delete_samples(store, found.name, gone)
    return [f"{found.name}@{gone}" for gone in removed]


def check_datasets(registry_url: str, spec: TrainingJobSpec) -> None:
    """Refuse a job whose datasets do not exist, before anything starts.

    Raises:
        DatasetNotFoundError: Naming the nearest names there are.
    """
    with opened_database(registry_url) as database:
        check_spec(database, spec)


def process(
    spec: TrainingJobSpec,
    *,
    registry_url: str,
    objects_url: str,
    topics_url: str = "",
    job: str = "",
    recipe: Mapping[str, Any] | None = None,
    progress: Callable[[OperationProgress], None] | None = None,
    workers: int = 2,
    only_seals: bool = False,
) -> ProcessReport:
    """Process a job's datasets, and write the plan object that its ranks wait for.

    May be killed and run again, or run twice at once: what is known is reused, and nothing is lost or doubled.

    Args:
        spec: The job's spec.
        registry_url: As in ``register``.
        objects_url: As in ``register``.
        topics_url: ``pulsar://...`` where workers of other processes help; empty: this process works alone.
        job: Identity of the job (its uid). Versions are pinned by the first call for a job; an empty one pins nothing.
        recipe: Content of the recipe that the data are processed by; None: ``recipes/job.json``.
        progress: Called from worker threads after each commit, with the progress of an operation.
        workers: Threads.
        only_seals: Leave the flows to workers of other processes, which need topics; plan, wait and seal here.

    Raises:
        DatasetNotFoundError: Naming the nearest names there are.
        InvalidConfigError: If a source changed since it was registered, or the recipe breaks a rule.
        EnvironmentFailedError: If store or registry stay away; the next call continues from there.
    """
    with _context(registry_url, objects_url, topics_url, workers=workers, only_seals=only_seals) as context:
        report = Processing(context, recipe=recipe, on_progress=progress).process(spec, job=job)
        if spec.training.epochs is None:
            return report
        return dataclasses.replace(report, steps=_counted(context.lakehouse, objects_url, spec, report.plan, job=job))


def count_epochs(spec: TrainingJobSpec, *, registry_url: str, objects_url: str, job: str) -> int:
    """Count the steps of a job's epochs, whose data are processed, once for all who ask.

    Raises:
        InvalidConfigError: If the warm-up would be longer than the run.
        EnvironmentFailedError: If the data are not processed, or store or registry stay away.
    """
    with _context(registry_url, objects_url, "", workers=1) as context:
        return _counted(context.lakehouse, objects_url, spec, plan_key(job, plan_data(spec)), job=job)


def _counted(lakehouse: Lakehouse, objects_url: str, spec: TrainingJobSpec, plan: str, *, job: str) -> int:
    """Count once: ranks of all attempts read the number."""
    epochs = spec.training.epochs or 1
    steps = steps_in(read_plan(lakehouse, plan), epochs)
    if steps is None:
        steps = count_steps(objects_url, spec, job=job)
        put_steps(lakehouse, plan, epochs, steps)
    return steps


def ingest(
    source: str | Path | Mapping[str, Any],
    *,
    name: str,
    recipe: Mapping[str, Any],
    registry_url: str,
    objects_url: str,
    topics_url: str = "",
    progress: Callable[[OperationProgress], None] | None = None,
    workers: int = 2,
) -> IngestReport:
    """Run a recipe over a source, and seal what comes through into a new version of a dataset.

    May be killed, cancelled and run again: what is committed is reused, and the same outcome is the same version.

    Args:
        source: What ``register`` takes; or a dataset, as ``name`` or ``name@number``.
        name: Dataset that gets the version. The records of a file or a folder become a version of ``<name>/source``.
        recipe: Content of the recipe's YAML file.
        registry_url: As in ``register``.
        objects_url: As in ``register``.
        topics_url: As in ``process``.
        progress: Called from worker threads after each commit, with the progress of an operation.
        workers: Threads, each with one sandboxed child.

    Raises:
        DatasetNotFoundError: If the source is neither a path nor a dataset.
        InvalidConfigError: If the recipe, the name or the source breaks a rule, or no sample comes through.
        EnvironmentFailedError: If store or registry stay away; the next call continues from there.
    """
    with _context(registry_url, objects_url, topics_url, workers=workers) as context:
        return ingest_source(context, source, name, recipe, progress)


def estimate_ingest(
    source: str | Path | Mapping[str, Any],
    *,
    name: str,
    recipe: Mapping[str, Any],
    registry_url: str,
    objects_url: str,
    workers: int = 2,
) -> IngestEstimate:
    """Estimate what ``ingest`` would do: counts, bytes, and time measured on a few records; nothing is stored.

    Arguments and errors as ``ingest``.
    """
    with opened_database(registry_url) as database:
        return estimate(
            database,
            Lakehouse(open_store(objects_url)),
            source,
            name,
            recipe,
            workers=workers,
            steady_s=time.monotonic,  # noqa: TID251 - the shell
        )


def replay(registry_url: str, reference: str, operation: str | None = None) -> ReplayReport:
    """Delete dead letters of a dataset version: the next ingest, or the next job, tries their records again.

    Args:
        registry_url: As in ``register``.
        reference: ``name`` or ``name@number``; of a version that a recipe made, the records that it was made from.
        operation: Only dead letters of this operation; None: of all.

    Raises:
        DatasetNotFoundError: Naming the nearest names there are.
    """
    with opened_database(registry_url) as database:
        return replay_letters(database, find_version(database, reference), operation)


def work(
    operations: Sequence[str],
    *,
    registry_url: str,
    objects_url: str,
    topics_url: str,
    stopped: Callable[[], bool],
    on_counts: Callable[[Sequence[OperationCount]], None] | None = None,
    on_item: Callable[[WorkItem, float, bool], None] | None = None,
    workers: int = 2,
) -> None:
    """Do work items of any flow until stopped: a worker beside those that wait for their data.

    Args:
        operations: Chains, each named after its last operation.
        registry_url: As in ``register``.
        objects_url: As in ``register``.
        topics_url: As in ``process``.
        stopped: Asked several times a second.
        on_counts: Called after each commit with what it brought, from worker threads.
        on_item: Called after each try of an item, with its time [s] and whether it is done, from worker threads.
        workers: Threads, each with one sandboxed child.

    Raises:
        EnvironmentFailedError: If store or registry stay away; what was not done is still due.
    """

    def counted(_: WorkItem, counts: Sequence[OperationCount]) -> None:
        if on_counts is not None:
            on_counts(counts)

    with _context(registry_url, objects_url, topics_url, workers=workers, on_item=on_item) as context:
        serve(context, operations, stopped=stopped, on_counts=counted)


def read_image(registry_url: str, objects_url: str, reference: str) -> bytes:
    """Return the PNG of a page by its reference (``EvaluationSample.image_digest``).

    Raises:
        ObjectNotFoundError: If no such page was made.
    """
    return read_images(registry_url, objects_url, [reference])[reference]


def read_images(registry_url: str, objects_url: str, references: list[str]) -> dict[str, bytes]:
    """Return the PNGs of many pages by their references.

    Raises:
        ObjectNotFoundError: If one of them was never made.
    """
    digests = {digest_of(reference) for reference in references}
    places = {place.digest: place for reference in references if (place := place_of(reference)) is not None}
    if older := digests - places.keys():
        with opened_database(registry_url) as database:
            places |= places_of(database, older)
    if missing := sorted(digests - set(places)):
        raise ObjectNotFoundError(f"no artifact {missing[0]} in the registry")
    parts = Lakehouse(open_store(objects_url)).get_parts(places)
    return {reference: draw_png(reference, parts[digest_of(reference)]) for reference in references}


def read_masks(
    registry_url: str, objects_url: str, samples: Collection[tuple[str, str]]
) -> dict[tuple[str, str], list[Blob | None]]:
    """Return the masks of samples, one or None for each image; those whose images have none are left out.

    Args:
        registry_url: As in ``register``.
        objects_url: As in ``register``.
        samples: Each by the version of its dataset, as ``NAME@NUMBER``, and its id.

    Raises:
        DatasetNotFoundError: If a version is unknown.
        ObjectNotFoundError: If what the registry names is not stored.
    """
    if not samples:
        return {}
    with opened_database(registry_url) as database:
        return masks_of(database, Lakehouse(open_store(objects_url)), samples)


def link(objects_url: str, digest: str, *, seconds: int) -> str:
    """Return a link by which anyone reads one blob of the lakehouse for a while, without credentials.

    Args:
        objects_url: ``s3://bucket/prefix``; a directory has no server that gives links.
        digest: Of the blob: a manifest, a shard, a tokenizer.
        seconds: Life of the link, at most a week.

    Raises:
        InvalidConfigError: If the objects are in no bucket, or the life is out of range.
        ObjectNotFoundError: If there is no such blob.
        StoreFailedError: If the server can't be reached or refuses.
    """
    return presigned_link(objects_url, blob_key(digest), seconds=seconds)


@contextmanager
def _context(registry_url: str, objects_url: str, topics_url: str, **settings: Any) -> Iterator[RunContext]:
    with (
        opened_database(registry_url) as database,
        closing(open_topics(topics_url)) if topics_url else nullcontext() as topics,
    ):
        lakehouse = Lakehouse(open_store(objects_url, patience=WORK))
        yield RunContext(database=database, lakehouse=lakehouse, topics=topics, **settings)


def _now_s() -> float:
    return time.time()  # noqa: TID251 - the shell
