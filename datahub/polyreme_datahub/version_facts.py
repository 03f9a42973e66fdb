"""Facts about the samples of a version: columns of a sealed one, statistics, and how a sample was made."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from polyreme_api.errors import NotFoundError, RefusedError
from polyreme_datahub.index.join_manifests import read_manifest
from polyreme_datahub.lakehouse import Lakehouse
from polyreme_datahub.operations.dataset_statistics import DatasetStatistics
from polyreme_datahub.operations.declare import find_operation
from polyreme_datahub.recipes.files import job_operations
from polyreme_datahub.recipes.recipe import INGEST, Step
from polyreme_datahub.registry import lineage, progress, results
from polyreme_datahub.registry.datasets import DatasetVersion
from polyreme_datahub.registry.engine import Database
from polyreme_datahub.registry.rows import SampleRow
from polyreme_datahub.runner.resolution import Keys, resolve
from polyreme_datahub.runner.sealed_version import find_source, recipe_of
from polyreme_datahub.runner.walk import Walk, known_outputs, read_samples
from polyreme_datahub.sources.samples import KIND

PLACES = frozenset({"key", "shard", "offset", "length", "sha256"})
PAGE = 256


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MadeStep:
    """What one step made of a sample."""

    step: str
    operation: str
    inputs: tuple[str, ...]
    """Digests."""
    output: str
    """Digest."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SampleLineage:
    """How a sample of a sealed version was made."""

    reference: str
    sample_id: str
    source: str
    ordinal: int
    """In the source."""
    record: str
    """Digest of the record in the source."""
    steps: tuple[MadeStep, ...]


def sealed_columns(lakehouse: Lakehouse, version: DatasetVersion) -> tuple[str, ...]:
    """Return the columns that a sealed version's manifest has; none for another version."""
    if version.source["kind"] != KIND:
        return ()
    table, _ = read_manifest(lakehouse.get_blob(str(version.source["manifest"])))
    return tuple(name for name in table.column_names if name not in PLACES)


def sealed_rows(
    database: Database, lakehouse: Lakehouse, version: DatasetVersion
) -> Iterator[tuple[SampleRow, Mapping[str, Any]]]:
    """Yield the samples of a sealed version with the columns of its manifest."""
    table, _ = read_manifest(lakehouse.get_blob(str(version.source["manifest"])))
    columns = table.select([name for name in table.column_names if name not in PLACES])
    ordinal = -1
    while page := lineage.samples_after(database, version.id, ordinal):
        first = page[0].ordinal
        values = columns.slice(first, page[-1].ordinal - first + 1).to_pylist()
        for sample in page:
            yield sample, values[sample.ordinal - first]
        ordinal = page[-1].ordinal


def statistics_of(database: Database, lakehouse: Lakehouse, version: DatasetVersion) -> dict[str, Any]:
    """Return counts and quantiles of a version's samples.

    Raises:
        RefusedError: If no sample of it was decoded yet.
    """
    found = DatasetStatistics()
    recipe, source = recipe_of(version), version
    if recipe is not None:
        source = find_source(database, version)
    steps = recipe.steps if recipe is not None else ()
    facts = next((step for step in steps if step.operation.gives == "images"), None) or _facts_of_jobs()
    kept = None
    if recipe is not None:
        table, _ = read_manifest(lakehouse.get_blob(str(version.source["manifest"])))
        kept = set(table.column("ordinal").to_pylist())
    walked = Walk(database, lakehouse, constants={}).samples(source, _upto(facts, steps), values_of=(facts.name,))
    rows = (row for row in walked if kept is None or row.ordinal in kept)
    while page := list(itertools.islice(rows, PAGE)):
        records = lakehouse.get_parts(results.places_of(database, {row.record for row in page}))
        for row in page:
            found.add(json.loads(records[row.record]), row.values[facts.name].data)
    if not found.samples:
        raise RefusedError(f"no sample of {version.reference} is decoded yet: ingest it, or run a job on it, first")
    return found.summary()


def check_is_read(database: Database, version: DatasetVersion) -> None:
    """Refuse a version with records that were neither read nor refused yet: its samples are not known.

    Raises:
        RefusedError: With both counts.
    """
    dead, _ = results.ended_counts(database, version.id).get(INGEST, (0, 0))
    known = progress.count_samples(database, version.id) + dead
    if known < version.records:
        raise RefusedError(
            f"{known:,} of {version.records:,} records of {version.reference} are read yet: ingest it, or run a job on "
            "it, first"
        )


def lineage_of_sample(
    database: Database, lakehouse: Lakehouse, version: DatasetVersion, sample_id: str
) -> SampleLineage:
    """Return how a sample of a sealed version was made.

    Raises:
        NotFoundError: If the version has no such sample.
        RefusedError: If no recipe made the version.
    """
    recipe = recipe_of(version)
    if recipe is None:
        raise RefusedError(f"{version.reference} was not made by a recipe: its samples are those of its source")
    table, _ = read_manifest(lakehouse.get_blob(str(version.source["manifest"])))
    ids = table.column("sample_id").to_pylist()
    if sample_id not in ids:
        raise NotFoundError(f"no sample {sample_id!r} in {version.reference}")
    ordinal = table.column("ordinal")[ids.index(sample_id)].as_py()
    source = find_source(database, version)
    [sample] = read_samples(database, source.id, first=ordinal, count=1)
    keys = Keys(source.digest, recipe.constants)
    resolve([sample], recipe.steps, keys, outputs_of=lambda wanted: known_outputs(database, wanted), ends=())
    return SampleLineage(
        reference=version.reference,
        sample_id=sample_id,
        source=source.reference,
        ordinal=ordinal,
        record=sample.record,
        steps=tuple(
            MadeStep(
                step=step.name,
                operation=f"{step.operation.name} {step.operation.version}",
                inputs=keys.inputs_of(sample, step) or (),
                output=sample.outputs[step.name].digest,
            )
            for step in recipe.steps
            if step.name in sample.outputs
        ),
    )


def _upto(step: Step, steps: Sequence[Step]) -> list[Step]:
    """Return a step after those whose outputs it reads, directly or not."""
    needed = {step.name}
    for one in reversed(steps):
        if one.name in needed:
            needed |= set(one.inputs)
    return [*(one for one in steps if one.name in needed and one.name != step.name), step]


def _facts_of_jobs() -> Step:
    """Return the step of a job's recipe that gives facts of images."""
    found = next(one for one in map(find_operation, job_operations()) if one.gives == "images")
    return Step(name=found.name, operation=found, parameters=found.parameters(), inputs=found.inputs)
