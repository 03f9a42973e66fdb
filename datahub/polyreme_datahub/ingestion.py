"""Ingests a source by a recipe: runs its flow, seals what came through into the sample store, registers the version.

The records lie in a version of ``<name>/source``; the outcome is a version of ``<name>``, whose digest is that of its
manifest. A run may be killed at any line and run again: what is committed is reused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from polyreme_api.errors import InvalidConfigError
from polyreme_api.urls import is_bucket
from polyreme_datahub.dataset_views import DeadLetterView, check_name
from polyreme_datahub.index.join_manifests import JoinedManifest
from polyreme_datahub.processing import resolve
from polyreme_datahub.recipes.recipe import Recipe, parse_recipe, recipe_content
from polyreme_datahub.registration import add_dataset
from polyreme_datahub.registry import datasets, progress, work_items
from polyreme_datahub.registry.datasets import DatasetVersion
from polyreme_datahub.registry.rebuild import store_document
from polyreme_datahub.registry.rows import StageCount
from polyreme_datahub.runner.flow import INGEST, Flow
from polyreme_datahub.runner.flow_meter import FlowMeter, OperationProgress
from polyreme_datahub.runner.flow_run import Sources, Surroundings, remake, run_flow, run_seal
from polyreme_datahub.runner.outcomes import Outcomes, outcomes_of
from polyreme_datahub.runner.sample_seal import SEAL, SealWork
from polyreme_datahub.runner.sealed_version import put_rows
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


class Ingestion:
    """One run of a recipe over a source.

    Args:
        around: What work needs of its process.
        progress: Called from worker threads after each commit.
    """

    def __init__(self, around: Surroundings, *, progress: Callable[[OperationProgress], None] | None = None) -> None:
        self._around, self._report = around, progress
        self._database, self._store = around.database, around.lakehouse.store
        self._now_s, self._sources = around.now_s, Sources()

    def ingest(self, source: str | Path | Mapping[str, Any], name: str, recipe: Mapping[str, Any]) -> IngestReport:
        """Ingest a source; see ``polyreme_datahub.hub.ingest``."""
        started_s = self._now_s()
        check_name(name)
        parsed = parse_recipe(recipe)
        version = self._source_version(source, name)
        flow = Flow(recipe=parsed, versions={version.id: version})
        meter = self._meter(flow, version)
        run_flow(
            self._around, flow, shared={}, sources=self._sources, on_counts=lambda _item, counts: meter.add(counts)
        )
        progress.reject_doubles(self._database, version.id, now_s=self._now_s())
        outcomes = outcomes_of(self._database, version, parsed)
        operations = _reports(outcomes, meter)
        meter.finish([_count(one) for one in operations])
        manifest = self._seal(flow, version, meter)
        meter.finish([StageCount(stage=SEAL, misses=manifest.samples)], total=manifest.samples)
        sealed = self._register(name, version, parsed, manifest)
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
            operations=operations,
            dead_letters=tuple(map(DeadLetterView.of, outcomes.letters)),
            seconds=self._now_s() - started_s,
        )

    def _source_version(self, source: str | Path | Mapping[str, Any], name: str) -> DatasetVersion:
        """Return the version that holds the records: a dataset's, or that of ``<name>/source``, registered where new.

        Raises:
            DatasetNotFoundError: If there is neither a file or folder nor a dataset of that name.
            SourceInvalidError: If the file or folder is no source.
        """
        if not is_path(source):
            return resolve(self._database, str(source), now_s=self._now_s())
        return add_dataset(
            self._database,
            self._around.lakehouse,
            f"{name}/{SOURCE}",
            source,
            now_s=self._now_s,
            progress=lambda _found: None,
        )

    def _meter(self, flow: Flow, version: DatasetVersion) -> FlowMeter:
        """Begin to count, from what an earlier run has done."""
        done = work_items.done_records(self._database, flow.id)
        before: dict[str, int] = {}
        for stage in flow.stages:
            names = [step.name for step in stage.chain.steps] if stage.chain is not None else []
            before |= dict.fromkeys([*([INGEST] if stage.reads_source else []), *names], done.get(stage.name, 0))
        return FlowMeter(
            [INGEST, *(step.name for step in flow.recipe.steps), SEAL],
            total=version.records,
            before=before,
            steady_s=self._around.steady_s,
            report=self._report,
        )

    def _seal(self, flow: Flow, version: DatasetVersion, meter: FlowMeter) -> JoinedManifest:
        work = SealWork(
            self._database,
            self._around.lakehouse,
            flow,
            remake=lambda *ordinals: remake(self._around, flow, ordinals, shared={}, sources=self._sources),
            owner=self._around.owner,
            now_s=self._now_s,
            on_counts=lambda _item, counts: meter.add(counts),
        )
        run_seal(self._around, work, work.unwritten(version), again=True)
        return work.finish(version)

    def _register(self, name: str, version: DatasetVersion, recipe: Recipe, manifest: JoinedManifest) -> DatasetVersion:
        if not manifest.samples:
            raise InvalidConfigError(
                f"no sample passed: all {version.records} records of {version.reference} were dropped or are dead "
                f"letters; see polyreme data show {version.reference}",
                field="the recipe's operations",
            )
        sealed = datasets.add_version(
            self._database,
            name=name,
            source={
                "kind": KIND,
                "form": 1,
                "manifest": manifest.digest,
                "of": version.digest,
                "from": version.reference,
                "recipe": recipe_content(recipe),
            },
            digest=manifest.digest,
            records=manifest.samples,
            now_s=self._now_s(),
            store_first=store_document(self._store),
        )
        put_rows(self._database, self._around.lakehouse, sealed, now_s=self._now_s)
        return sealed


def is_path(source: str | Path | Mapping[str, Any]) -> bool:
    """Tell whether a source is files or a description, and not the name of a dataset."""
    if isinstance(source, Mapping) or is_bucket(str(source)):
        return True
    path = Path(str(source))
    return path.exists() or (is_pattern(str(source)) and path.parent.is_dir())


def _reports(outcomes: Outcomes, meter: FlowMeter) -> tuple[OperationReport, ...]:
    reports = []
    for step in outcomes.steps:
        made = min(meter.made(step.name), step.through)
        reports.append(
            OperationReport(
                operation=step.name,
                records=step.records,
                made=made,
                reused=step.through - made,
                dead=step.dead,
                dropped=step.dropped,
            )
        )
    return tuple(reports)


def _count(report: OperationReport) -> StageCount:
    return StageCount(
        stage=report.operation, hits=report.reused, misses=report.made, dead=report.dead, dropped=report.dropped
    )
