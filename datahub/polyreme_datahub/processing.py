"""Processes the datasets of a job by a recipe, up to the indexes and the plan that its ranks read.

The recipe that ships is ``recipes/job.json``. What a step needs and the recipe leaves out is the job's: parameters by
their names, and the tokenizer, which may be trained on what the steps before it read. A run may be killed at any line
and run again, or run twice at once: what is known is reused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from polyreme_api.job.spec import TrainingJobSpec
from polyreme_api.mixture import MixtureRecord
from polyreme_datahub.block_sealing import BLOCK_LOOKS_MAX, BlockSealing
from polyreme_datahub.errors import IndexDamagedError
from polyreme_datahub.index.blocks import Journal, Opening
from polyreme_datahub.index.check import can_open, is_whole
from polyreme_datahub.index.damage import drop_notes, is_noted
from polyreme_datahub.index.format import plan_key
from polyreme_datahub.ingestion import Ingestion
from polyreme_datahub.job_data import ImageSizes, datasets_of, longest_pack, plan_data
from polyreme_datahub.job_plan import JobPlan, put_plan, read_plan
from polyreme_datahub.job_tokenizer import is_stored, released_tokenizer, trained_tokenizer
from polyreme_datahub.named_versions import check_spec, resolve
from polyreme_datahub.operations.values import Blob, Value
from polyreme_datahub.recipes.files import job_recipe
from polyreme_datahub.recipes.recipe import INGEST, Recipe, parse_recipe
from polyreme_datahub.registry import progress, results
from polyreme_datahub.registry.datasets import DatasetVersion
from polyreme_datahub.registry.rows import Letter, OperationCount
from polyreme_datahub.runner.context import RunContext
from polyreme_datahub.runner.flow import Flow
from polyreme_datahub.runner.flow_meter import OnProgress
from polyreme_datahub.runner.index_writer import INDEX, IndexParameters, IndexWriter
from polyreme_datahub.runner.outcomes import SHOWN_MAX
from polyreme_datahub.runner.stored import digests_of
from polyreme_datahub.sources.open import holds_preferences
from polyreme_datahub.tokens import TextTokenizer
from polyreme_planner.mixture import segments_of
from polyreme_planner.plan import shape_of
from polyreme_planner.stage_sources import check_sources

TOKENIZER = "tokenizer"
"""The constant of a recipe that is the job's tokenizer: ``{"tokenizer": digest of its file}``, with that blob."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DatasetReport:
    """What came of one dataset version."""

    reference: str
    samples: int
    """Samples in the index."""
    tokens: int
    manifest: str
    operations: tuple[OperationCount, ...]
    dead_letters: tuple[Letter, ...]
    """At most ``SHOWN_MAX``, by ordinal; ``operations`` has their counts."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProcessReport:
    """What came of a job's data."""

    plan: str
    """Key of the plan object that ranks read."""
    tokenizer: str
    """Digest of tokenizer.json in the lakehouse."""
    datasets: tuple[DatasetReport, ...]
    operations: tuple[OperationCount, ...]
    """Hits, misses and dead letters of each operation, over all datasets."""
    seconds: float
    steps: int | None = None
    """Steps that were counted for the job's epochs; None: its steps are given."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobVersions:
    """The versions that a job reads, by dataset reference."""

    trained: Mapping[str, DatasetVersion]
    heldout: Mapping[str, DatasetVersion]

    @property
    def both(self) -> dict[str, DatasetVersion]:
        """All of them."""
        return {**self.trained, **self.heldout}


def check_kinds(spec: TrainingJobSpec, versions: JobVersions) -> None:
    """Refuse stages that draw from records of another kind than they train on.

    Entries of the schedule are looked at when the data are opened: those that were appended since must end no run.

    Raises:
        InvalidConfigError: Naming the stage and the source.
    """
    if spec.data.sources:
        holds = [holds_preferences(versions.trained[source.dataset].source) for source in spec.data.sources]
        check_sources(spec, segments_of(spec, MixtureRecord()), preferences=holds)


class Processing:
    """One run over a job's data.

    Args:
        context: What work needs of its process.
        recipe: Content of the recipe; None: the one that ships.
        on_progress: Called from worker threads after each commit.
    """

    def __init__(self, context: RunContext, *, recipe: Any = None, on_progress: OnProgress | None = None) -> None:
        self._context, self._content, self._on_progress = context, recipe or job_recipe(), on_progress
        self._database, self._lakehouse = context.database, context.lakehouse

    def process(self, spec: TrainingJobSpec, *, job: str) -> ProcessReport:
        """Process the data of a spec; see ``polyreme_datahub.hub.process``."""
        started_s = self._context.now_s()
        check_spec(self._database, spec)
        key = plan_key(job, plan_data(spec))
        # Without a job nothing is pinned, and no rank trains meanwhile.
        journal = Journal(self._lakehouse.store, key) if job and spec.data.start_while_processing else None
        opening = journal.opening() if journal is not None else None
        before = read_plan(self._lakehouse, key) if job else {}
        versions = self._versions(spec, opening.references if opening is not None else before.get("references", {}))
        check_kinds(spec, versions)
        images = ImageSizes.of(spec)
        recipe = self._recipe(images, {TOKENIZER: ""})
        operations = (INGEST, *(step.name for step in recipe.steps), INDEX)
        run = Ingestion(self._context, _by_id(versions.both).values(), operations, self._on_progress)
        plan = JobPlan(
            references={reference: version.reference for reference, version in versions.both.items()},
            tokenizer=self._tokenizer(spec, run, recipe, versions, _kept(opening, before)),
        )
        parameters = IndexParameters(
            images=images,
            tokenizer=plan.tokenizer,
            sequence_tokens=longest_pack(spec),
            recipe=self._other_recipe(images, plan.tokenizer),
        )
        of_trained = dataclasses.replace(parameters, long_samples=spec.data.long_samples)
        heldout = {version.id for version in versions.heldout.values()}
        mine = {id_: parameters if id_ in heldout else of_trained for id_ in _by_id(versions.both)}
        self._index(run, versions.heldout if spec.data.start_while_processing else versions.both, mine, plan)
        if spec.data.start_while_processing:
            self._index_by_blocks(run, versions.trained, of_trained, plan, journal)
        put_plan(self._lakehouse, key, plan, pinned=bool(job))
        reports = tuple(
            self._report(run, version, mine[id_], operations) for id_, version in _by_id(versions.both).items()
        )
        return ProcessReport(
            plan=key,
            tokenizer=plan.tokenizer,
            datasets=reports,
            operations=tuple(
                sum(more, first) for first, *more in zip(*(report.operations for report in reports), strict=True)
            ),
            seconds=self._context.now_s() - started_s,
        )

    def _versions(self, spec: TrainingJobSpec, pinned: Mapping[str, str]) -> JobVersions:
        trained, heldout = (
            {name: resolve(self._database, pinned.get(name, name), now_s=self._context.now_s()) for name in references}
            for references in datasets_of(spec)
        )
        return JobVersions(trained=trained, heldout=heldout)

    def _recipe(self, images: ImageSizes, constants: Mapping[str, str]) -> Recipe:
        return parse_recipe(self._content, given=images.given(), constants=constants)

    def _other_recipe(self, images: ImageSizes, tokenizer: str) -> str:
        """Return the digest of a recipe that is not the one that ships; empty where it is."""
        constants = {TOKENIZER: tokenizer}
        shipped = parse_recipe(job_recipe(), given=images.given(), constants=constants).digest
        mine = self._recipe(images, constants).digest
        return "" if mine == shipped else mine

    def _tokenizer(
        self, spec: TrainingJobSpec, run: Ingestion, recipe: Recipe, versions: JobVersions, kept: tuple[str, bool]
    ) -> str:
        """Return the digest of the job's tokenizer: released, or trained on what the steps before it read."""
        location, (known, must_stay) = spec.data.tokenizer.location, kept
        if location is None:
            flow = Flow(recipe=recipe.without(TOKENIZER), versions=_by_id(versions.both))
            run.run(flow)
            trained = list(versions.trained.values())
            return trained_tokenizer(self._context, flow, trained, spec.data.tokenizer.vocabulary)
        if known and is_stored(self._lakehouse, known):
            return known
        found = released_tokenizer(self._lakehouse, location, embedded=shape_of(spec).decoder.vocabulary)
        if must_stay and found != known:
            raise IndexDamagedError(
                f"tokenizer {known} is lost, and {location} has another one now: restore it, or start the job again "
                "under another name"
            )
        return found

    def _flow(self, versions: Mapping[str, DatasetVersion], parameters: IndexParameters) -> tuple[Flow, TextTokenizer]:
        """Return the flow of all steps over some versions, and the tokenizer that they share."""
        digest = parameters.tokenizer
        data = self._lakehouse.get_blob(digest)
        shared = {TOKENIZER: Value(data={"tokenizer": digest}, blobs={digest: Blob(data, digest=digest)})}
        recipe = self._recipe(parameters.images, digests_of(shared))
        return Flow(recipe=recipe, versions=_by_id(versions), shared=shared), TextTokenizer(data)

    def _index(
        self,
        run: Ingestion,
        versions: Mapping[str, DatasetVersion],
        parameters: Mapping[int, IndexParameters],
        plan: JobPlan,
    ) -> None:
        """Run the recipe over some versions, and seal each as a whole."""
        if not versions:
            return
        flow, tokenizer = self._flow(versions, next(iter(parameters.values())))
        writers = {id_: IndexWriter(self._context, flow, parameters[id_], tokenizer) for id_ in flow.versions}
        run.run(flow)
        for id_, version in flow.versions.items():
            writer = writers[id_]
            known = progress.manifests_of(self._database, writer.name(version))
            if not known or not all(map(self._can_be_used, known)):
                groups = run.sealing(flow, writer).seal(version, every_byte=bool(known))
                progress.put_index(self._database, writer.join(version, groups), now_s=self._context.now_s())
        for reference, version in versions.items():
            key = parameters[version.id].key(version)
            plan.manifests[reference] = progress.find_index(self._database, key).manifest
            self._check_noted(plan.manifests[reference])

    def _index_by_blocks(
        self,
        run: Ingestion,
        versions: Mapping[str, DatasetVersion],
        parameters: IndexParameters,
        plan: JobPlan,
        journal: Journal | None,
    ) -> None:
        """Run the recipe over some versions, and seal each block as soon as its records are done."""
        flow, tokenizer = self._flow(versions, parameters)
        writer = IndexWriter(self._context, flow, parameters, tokenizer)
        blocks = BlockSealing(run, flow, writer, versions, journal)
        blocks.open(plan)
        run.run(flow, on_look=blocks.seal, looks_max=BLOCK_LOOKS_MAX)
        blocks.seal()
        blocks.finish(plan)

    def _can_be_used(self, manifest: str) -> bool:
        """Check an index: every byte of it where damage was found, else what opening it needs."""
        store = self._lakehouse.store
        return (is_whole if is_noted(store, manifest) else can_open)(store, manifest)

    def _check_noted(self, manifest: str) -> None:
        """Drop the notes about an index that was rebuilt.

        Raises:
            IndexDamagedError: If it is not whole: its source, or an intermediate of it, is no longer what it was.
        """
        store = self._lakehouse.store
        if not is_noted(store, manifest):
            return
        if not is_whole(store, manifest):
            raise IndexDamagedError(f"stored data is damaged: index {manifest} could not be recreated")
        drop_notes(store, manifest)
        progress.drop_tombstones(self._database, manifest)

    def _report(
        self, run: Ingestion, version: DatasetVersion, parameters: IndexParameters, operations: Sequence[str]
    ) -> DatasetReport:
        index = progress.find_index(self._database, parameters.key(version))
        ended = results.ended_counts(self._database, version.id)
        # Other jobs have other packs, for which other samples are too long.
        letters = results.first_letters(self._database, version.id, count_max=SHOWN_MAX, except_operation=INDEX)
        own = 0
        for letter in results.iterate_letters(self._database, version.id, operation=INDEX):
            if parameters.is_own(version, letter):
                own += 1
                letters += [letter] if own <= SHOWN_MAX else []
        ended[INDEX] = (own, 0)
        counts, alive = [], version.records
        for name in operations:
            dead, dropped = ended.get(name, (0, 0))
            alive = max(0, alive - dead - dropped)
            made = min(run.meter.made(version.id, name), alive)
            counts.append(OperationCount(operation=name, misses=made, dead=dead, dropped=dropped, hits=alive - made))
        progress.add_hits(self._database, version.id, counts)
        return DatasetReport(
            reference=version.reference,
            samples=index.samples,
            tokens=index.tokens,
            manifest=index.manifest,
            operations=tuple(counts),
            dead_letters=tuple(sorted(letters, key=lambda each: (each.ordinal, each.key))[:SHOWN_MAX]),
        )


def _by_id(versions: Mapping[str, DatasetVersion]) -> dict[int, DatasetVersion]:
    return {version.id: version for version in versions.values()}


def _kept(opening: Opening | None, before: Mapping[str, Any]) -> tuple[str, bool]:
    """Return the digest of the tokenizer that an earlier run took, and whether ranks may have read data with it."""
    return (str(before.get("tokenizer", "")), False) if opening is None else (opening.tokenizer, True)
