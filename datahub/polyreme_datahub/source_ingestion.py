"""Ingests a source by a recipe: runs its flow, seals what came through into the sample store, registers the version.

The records lie in a version of ``<name>/source``; the outcome is a version of ``<name>``, whose digest is that of its
manifest. A run may be killed at any line and run again: what is committed is reused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyreme_api.errors import InvalidConfigError
from polyreme_api.urls import is_bucket
from polyreme_datahub.dataset_views import DeadLetterView, check_name
from polyreme_datahub.index.join_manifests import JoinedManifest, join_manifests
from polyreme_datahub.ingestion import Ingestion
from polyreme_datahub.named_versions import resolve
from polyreme_datahub.recipes.recipe import INGEST, Recipe, parse_recipe, recipe_content
from polyreme_datahub.registration import add_dataset
from polyreme_datahub.registry import datasets
from polyreme_datahub.registry.datasets import DatasetVersion
from polyreme_datahub.registry.rebuild import store_document
from polyreme_datahub.registry.rows import OperationCount
from polyreme_datahub.runner.context import RunContext
from polyreme_datahub.runner.flow import Flow
from polyreme_datahub.runner.flow_meter import OnProgress
from polyreme_datahub.runner.outcomes import outcomes_of
from polyreme_datahub.runner.sealed_version import put_rows
from polyreme_datahub.runner.tar_writer import SEAL, TarWriter
from polyreme_datahub.sources.open import inherited
from polyreme_datahub.sources.samples import KIND
from polyreme_datahub.sources.source_forms import is_pattern

SOURCE = "source"
"""Last part of the name of the dataset that holds the records."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OperationReport:
    """What one operation did with the records that reached it: made + reused + dead + dropped."""

    operation: str
    records: int
    made: int
    reused: int
    dead: int
    dropped: int

    @classmethod
    def of(cls, count: OperationCount) -> OperationReport:
        """Report one operation's counts."""
        return cls(
            operation=count.operation,
            records=count.hits + count.misses + count.dead + count.dropped,
            made=count.misses,
            reused=count.hits,
            dead=count.dead,
            dropped=count.dropped,
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class IngestReport:
    """What came of a source."""

    reference: str
    """The new version, or the same one as before where nothing changed."""
    source: str
    """The version that holds the records."""
    manifest: str
    records: int
    samples: int
    dead: int
    """Records with a dead letter."""
    dropped: int
    """Records that filters and barriers dropped."""
    shards: int
    size_bytes: int
    operations: tuple[OperationReport, ...]
    dead_letters: tuple[DeadLetterView, ...]
    """The first ones, by ordinal."""
    seconds: float


def ingest_source(
    context: RunContext,
    source: str | Path | Mapping[str, Any],
    name: str,
    recipe: Mapping[str, Any],
    on_progress: OnProgress | None = None,
) -> IngestReport:
    """Ingest a source; see ``polyreme_datahub.hub.ingest``."""
    started_s = context.now_s()
    check_name(name)
    parsed = parse_recipe(recipe)
    version = _source_version(context, source, name)
    flow = Flow(recipe=parsed, versions={version.id: version})
    operations = (INGEST, *(step.name for step in parsed.steps), SEAL)
    run = Ingestion(context, [version], operations, on_progress)
    run.run(flow)
    outcomes = outcomes_of(context.database, version, parsed)
    counts = [step.count(run.meter.made(version.id, step.name)) for step in outcomes.steps]
    run.meter.finish(counts)
    groups = run.sealing(flow, TarWriter(context, flow)).seal(version)
    manifest = join_manifests(context.lakehouse, groups)
    run.meter.finish([OperationCount(operation=SEAL, misses=manifest.samples)], total=manifest.samples)
    sealed = _register(context, name, version, parsed, manifest)
    return IngestReport(
        reference=sealed.reference,
        source=version.reference,
        manifest=manifest.digest,
        records=version.records,
        samples=manifest.samples,
        dead=outcomes.dead,
        dropped=outcomes.dropped,
        shards=len(manifest.shards),
        size_bytes=manifest.size_bytes,
        operations=tuple(map(OperationReport.of, counts)),
        dead_letters=tuple(map(DeadLetterView.of, outcomes.letters)),
        seconds=context.now_s() - started_s,
    )


def _source_version(context: RunContext, source: str | Path | Mapping[str, Any], name: str) -> DatasetVersion:
    """Return the version that holds the records: a dataset's, or that of ``<name>/source``, registered where new.

    Raises:
        DatasetNotFoundError: If there is neither a file or folder nor a dataset of that name.
        SourceInvalidError: If the file or folder is no source.
    """
    if not is_path(source):
        return resolve(context.database, str(source), now_s=context.now_s())
    return add_dataset(context.database, context.lakehouse, f"{name}/{SOURCE}", source, now_s=context.now_s)


def _register(
    context: RunContext, name: str, version: DatasetVersion, recipe: Recipe, manifest: JoinedManifest
) -> DatasetVersion:
    if not manifest.samples:
        raise InvalidConfigError(
            f"no sample passed: all {version.records} records of {version.reference} were dropped or are dead "
            f"letters; see polyreme data show {version.reference}",
            field="the recipe's operations",
        )
    sealed = datasets.add_version(
        context.database,
        name=name,
        source={
            "kind": KIND,
            "form": 1,
            "manifest": manifest.digest,
            "of": version.digest,
            "from": version.reference,
            "recipe": recipe_content(recipe),
            **inherited(version.source),
        },
        digest=manifest.digest,
        records=manifest.samples,
        now_s=context.now_s(),
        store_first=store_document(context.lakehouse.store),
    )
    put_rows(context.database, context.lakehouse, sealed, now_s=context.now_s)
    return sealed


def is_path(source: str | Path | Mapping[str, Any]) -> bool:
    """Tell whether a source is files or a description, and not the name of a dataset."""
    if isinstance(source, Mapping) or is_bucket(str(source)):
        return True
    path = Path(str(source))
    return path.exists() or (is_pattern(str(source)) and path.parent.is_dir())
