"""Processes the datasets of a job: ingest, decode, compose, tokenize, index; what is known already is reused.

Two flows and a seal: records are read and their pages made in one go; the tokenizer is trained on whole datasets; text
is encoded; shards are written by groups of ordinals. A run may be killed at any line and run again, or run twice at
once.
"""

from __future__ import annotations

import dataclasses
import json
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from polyreme_api.job.spec import TrainingJobSpec
from polyreme_api.store import ObjectExistsError, ObjectNotFoundError
from polyreme_datahub.digests import action_key, action_prefix, canonical_json, digest_bytes, digest_value
from polyreme_datahub.errors import IndexDamagedError
from polyreme_datahub.index.blocks import BLOCKS, Sizes
from polyreme_datahub.index.check import can_open, is_whole
from polyreme_datahub.index.damage import drop_notes, is_noted
from polyreme_datahub.index.format import (
    NEWEST,
    OLDEST,
    ORDER,
    PIXELS,
    order_of,
    parse_plan,
    pixels_of,
    plan_key,
    seal_plan,
)
from polyreme_datahub.index.succession import IDENTITIES, identities_after
from polyreme_datahub.job_data import longest_pack, plan_data
from polyreme_datahub.operations.declare import find_operation
from polyreme_datahub.operations.encode_text import TokenizeParameters
from polyreme_datahub.operations.fit_pages import ComposeParameters
from polyreme_datahub.operations.values import Blob, Value
from polyreme_datahub.recipes.recipe import Recipe, Step, build_recipe
from polyreme_datahub.registry import datasets, progress, results, work_items
from polyreme_datahub.registry.datasets import DatasetVersion
from polyreme_datahub.registry.engine import Database
from polyreme_datahub.registry.rows import Action, Letter, StageCount
from polyreme_datahub.registry.work_items import WorkItem
from polyreme_datahub.released_tokenizer import read_released
from polyreme_datahub.runner.flow import INGEST, Flow
from polyreme_datahub.runner.flow_run import Sources, Surroundings, do_nothing, remake, run_flow, run_seal
from polyreme_datahub.runner.index_work import INDEX, IndexParameters, IndexWork
from polyreme_datahub.runner.pool import LOOKS_MAX
from polyreme_datahub.runner.stored import Stored
from polyreme_datahub.sources.digits import sample_sources
from polyreme_datahub.sources.open import describe_generated
from polyreme_datahub.tokens import OPERATION, VERSION, TextTokenizer, train_tokenizer
from polyreme_planner.plan import shape_of

IMAGE_SHARE = 2
"""An image from files takes at most one part in so many of a pack's tokens."""
LETTERS_MAX = 1000
CORPUS_RECORDS_MAX = 200_000
"""Records of one version that the tokenizer is trained on."""
CORPUS_PAGE = 256
SHOW_EVERY_S = 1.0
"""Time between two reports of what workers of other processes have done."""
STAGES = (INGEST, "decode", "compose", "tokenize", INDEX)
"""What a job's data goes through, in order."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far an operation is, in samples."""

    stage: str
    done: int
    total: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DatasetReport:
    """What came of one dataset version."""

    reference: str
    samples: int
    """Samples in the index."""
    tokens: int
    manifest: str
    stages: tuple[StageCount, ...]
    dead_letters: tuple[Letter, ...]
    """At most ``LETTERS_MAX``, by ordinal; ``stages`` has their counts."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProcessReport:
    """What came of a job's data."""

    plan: str
    """Key of the plan object that ranks read."""
    tokenizer: str
    """Digest of tokenizer.json in the lakehouse."""
    datasets: tuple[DatasetReport, ...]
    stages: tuple[StageCount, ...]
    """Hits, misses and dead letters of each operation, over all datasets."""
    seconds: float


def page_parameters(spec: TrainingJobSpec) -> ComposeParameters:
    """Return how the pages of a job are made."""
    shape = shape_of(spec).vision
    return ComposeParameters(
        patch_px=shape.patch_px,
        merge=shape.merge,
        image_tokens_max=max(1, spec.data.sequence_tokens // IMAGE_SHARE),
    )


def job_steps(images: ComposeParameters) -> list[Step]:
    """Return the steps of a job's data, but the one that needs the tokenizer."""
    decode, compose = find_operation("decode"), find_operation("compose")
    return [
        Step(name="decode", operation=decode, parameters=decode.parameters(), inputs=decode.inputs),
        Step(name="compose", operation=compose, parameters=images, inputs=compose.inputs),
    ]


class Processing:
    """One run over a job's data.

    Args:
        around: What work needs of its process.
        progress: Called from worker threads after each commit.
    """

    def __init__(self, around: Surroundings, *, progress: Callable[[Progress], None] | None = None) -> None:
        self._around, self._progress = around, progress
        self._database, self._lakehouse = around.database, around.lakehouse
        self._store, self._now_s = around.lakehouse.store, around.now_s
        self._counts: dict[tuple[int, str], StageCount] = {}
        self._lock = threading.Lock()
        self._versions: dict[int, DatasetVersion] = {}
        self._sources, self._shown_s = Sources(), float("-inf")

    def process(self, spec: TrainingJobSpec, *, job: str) -> ProcessReport:
        """Process the data of a spec; see ``polyreme_datahub.hub.process``."""
        started_s = self._now_s()
        check_spec(self._database, spec)
        images = page_parameters(spec)
        key = plan_key(job, plan_data(spec))
        pinned = self._pinned(key) if job else {}
        trained = self._resolve([source.dataset for source in spec.data.sources], pinned)
        heldout = self._resolve([part.dataset for part in spec.evaluation.sets] if spec.evaluation else [], pinned)
        both = {**trained, **heldout}
        self._versions = {version.id: version for version in both.values()}
        released = self._released(spec, key if job else "")
        pages = self._run(build_recipe(job_steps(images)), {})
        for version in self._versions.values():
            progress.reject_doubles(self._database, version.id, now_s=self._now_s())
        digest, data = released or self._tokenizer(pages, list(trained.values()), spec.data.tokenizer.vocabulary)
        flow, shared = self._encode(images, digest, data)
        of_all = IndexParameters(images=images, tokenizer=digest, sequence_tokens=longest_pack(spec))
        of_trained = dataclasses.replace(of_all, long_samples=spec.data.long_samples)
        asked = {version.id for version in heldout.values()}
        parameters = {id_: of_all if id_ in asked else of_trained for id_ in self._versions}
        self._index(flow, shared, parameters, TextTokenizer(data))
        reports = {version.id: self._report(version, parameters[version.id]) for version in self._versions.values()}
        manifests = {reference: reports[version.id].manifest for reference, version in both.items()}
        self._put_plan(key, job, both, manifests, digest)
        return self._summary(key, digest, tuple(reports.values()), started_s)

    def _summary(self, key: str, tokenizer: str, reports: tuple[DatasetReport, ...], started_s: float) -> ProcessReport:
        return ProcessReport(
            plan=key,
            tokenizer=tokenizer,
            datasets=reports,
            stages=tuple(
                sum(
                    (count for report in reports for count in report.stages if count.stage == stage),
                    StageCount(stage=stage),
                )
                for stage in STAGES
            ),
            seconds=self._now_s() - started_s,
        )

    def _resolve(self, references: Sequence[str], pinned: Mapping[str, str]) -> dict[str, DatasetVersion]:
        return {
            reference: resolve(self._database, pinned.get(reference, reference), now_s=self._now_s())
            for reference in references
        }

    def _pinned(self, key: str) -> dict[str, str]:
        return dict(self._plan_before(key).get("references", {}))

    def _run(self, recipe: Recipe, shared: Mapping[str, Value]) -> Flow:
        flow = Flow(recipe=recipe, versions=self._versions)
        self._run_flow(flow, shared)
        return flow

    def _run_flow(
        self,
        flow: Flow,
        shared: Mapping[str, Value],
        *,
        looks_max: int = LOOKS_MAX,
        on_look: Callable[[], None] = do_nothing,
    ) -> None:
        shows = self._around.only_seals and self._progress is not None

        def looked() -> None:
            if shows:
                self._show_done(flow)
            on_look()

        run_flow(
            self._around,
            flow,
            shared=shared,
            sources=self._sources,
            on_counts=self._counted,
            on_look=looked,
            looks_max=looks_max,
        )

    def _show_done(self, flow: Flow) -> None:
        """Report what workers of other processes have done, from the registry, now and then."""
        now_s = self._around.steady_s()
        if now_s - self._shown_s < SHOW_EVERY_S or self._progress is None:
            return
        self._shown_s = now_s
        done = work_items.done_records(self._database, flow.id)
        total = sum(version.records for version in self._versions.values())
        for stage in flow.stages:
            chain = () if stage.chain is None else stage.chain.steps
            for name in (*((INGEST,) if stage.reads_source else ()), *(step.name for step in chain)):
                self._progress(Progress(stage=name, done=min(total, done.get(stage.name, 0)), total=total))

    def _encode(self, images: ComposeParameters, digest: str, data: bytes) -> tuple[Flow, dict[str, Value]]:
        """Encode the text of every sample with the tokenizer."""
        flow, shared = self._encoding(images, digest, data, self._versions)
        self._run_flow(flow, shared)
        return flow, shared

    @staticmethod
    def _encoding(
        images: ComposeParameters, digest: str, data: bytes, versions: Mapping[int, DatasetVersion]
    ) -> tuple[Flow, dict[str, Value]]:
        """Return the flow that encodes the text of every sample of some versions, and what its steps share."""
        value = Value(data={"tokenizer": digest}, blobs={digest: Blob(data, digest=digest)})
        tokenize = find_operation("tokenize")
        step = Step(
            name="tokenize",
            operation=tokenize,
            parameters=TokenizeParameters(token_px=images.token_px),
            inputs=tokenize.inputs,
        )
        constant = Stored.of(value.data, value.blobs).digest
        recipe = build_recipe([*job_steps(images), step], constants={"tokenizer": constant})
        return Flow(recipe=recipe, versions=versions), {"tokenizer": value}

    def _index(
        self,
        flow: Flow,
        shared: Mapping[str, Value],
        parameters: Mapping[int, IndexParameters],
        tokenizer: TextTokenizer,
    ) -> None:
        for version in flow.versions.values():
            mine = parameters[version.id]
            manifests = progress.manifests_of(self._database, mine.key(version))
            if not manifests or not all(self._can_be_used(manifest) for manifest in manifests):
                self._seal(flow, shared, mine, tokenizer, version, again=bool(manifests))
            self._check_noted(progress.find_index(self._database, mine.key(version)).manifest)

    def _seal(
        self,
        flow: Flow,
        shared: Mapping[str, Value],
        parameters: IndexParameters,
        tokenizer: TextTokenizer,
        version: DatasetVersion,
        *,
        again: bool,
    ) -> None:
        """Write the index of one version; ``again`` where there is one that can't be used."""
        indexer = self._indexer(flow, shared, parameters, tokenizer)
        run_seal(self._around, indexer, indexer.items(version), again=again)
        progress.put_index(self._database, indexer.finish(version), now_s=self._now_s())

    def _indexer(
        self, flow: Flow, shared: Mapping[str, Value], parameters: IndexParameters, tokenizer: TextTokenizer
    ) -> IndexWork:
        return IndexWork(
            self._database,
            self._lakehouse,
            flow,
            parameters=parameters,
            tokenizer=tokenizer,
            remake=lambda *ordinals: remake(self._around, flow, ordinals, shared=shared, sources=self._sources),
            owner=self._around.owner,
            now_s=self._now_s,
            on_counts=self._counted,
        )

    def _can_be_used(self, manifest: str) -> bool:
        """Check an index: every byte of it where damage was found, else what opening it needs."""
        return (is_whole if is_noted(self._store, manifest) else can_open)(self._store, manifest)

    def _check_noted(self, manifest: str) -> None:
        """Drop the notes about an index that was made again.

        Raises:
            IndexDamagedError: If it is not whole: its source, or an intermediate of it, is no longer what it was.
        """
        if not is_noted(self._store, manifest):
            return
        if not is_whole(self._store, manifest):
            raise IndexDamagedError(f"stored data is damaged: index {manifest} could not be recreated")
        drop_notes(self._store, manifest)
        progress.drop_tombstones(self._database, manifest)

    def _counted(self, item: WorkItem, counts: Sequence[StageCount]) -> None:
        """Add what a commit brought, and report progress; called from worker threads."""
        with self._lock:
            for count in counts:
                at = (item.version_id, count.stage)
                self._counts[at] = self._counts.get(at, StageCount(stage=count.stage)) + count
            total = sum(version.records for version in self._versions.values())
            shown = [
                Progress(stage=count.stage, done=min(total, self._done(count.stage)), total=total) for count in counts
            ]
        if self._progress is not None:
            for one in shown:
                self._progress(one)

    def _done(self, stage: str) -> int:
        """Count the samples that an operation is done with, those included that ended before it."""
        upto = STAGES[: STAGES.index(stage) + 1]
        ended = sum(count.dead + count.dropped for (_, name), count in self._counts.items() if name in upto)
        made = sum(count.hits + count.misses for (_, name), count in self._counts.items() if name == stage)
        return ended + made

    def _released(self, spec: TrainingJobSpec, plan: str) -> tuple[str, bytes] | None:
        """Return the released tokenizer of a job: as it was when its plan was made, else as it is now."""
        location = spec.data.tokenizer.location
        if location is None:
            return None
        before = self._plan_before(plan).get("tokenizer") if plan else None
        if before is not None and (kept := self._stored(str(before))) is not None:
            return str(before), kept
        data = read_released(location, embedded=shape_of(spec).decoder.vocabulary)
        digest = self._lakehouse.put_blob(data)
        drop_notes(self._store, digest)
        return digest, data

    def _tokenizer(self, pages: Flow, trained: Sequence[DatasetVersion], vocabulary: int) -> tuple[str, bytes]:
        prefix = action_prefix(OPERATION, VERSION, {"vocabulary": vocabulary, "records_max": CORPUS_RECORDS_MAX})
        source = digest_value(sorted({version.digest for version in trained}))
        key = action_key(prefix, source)
        known = results.outputs_of(self._database, [key]).get(key)
        if known is not None and (data := self._stored(known.digest)) is not None:
            return known.digest, data
        data = train_tokenizer(self._corpus(pages, trained), vocabulary=vocabulary)
        self._lakehouse.put_blob(data)
        action = Action(key=key, operation=OPERATION, inputs=(source,), output=digest_bytes(data))
        digest = results.put_action(self._database, action).digest
        drop_notes(self._store, digest)
        return digest, self._lakehouse.get_blob(digest)

    def _stored(self, digest: str) -> bytes | None:
        try:
            return self._lakehouse.get_blob(digest)
        except (ObjectNotFoundError, IndexDamagedError):
            return None

    def _corpus(self, pages: Flow, trained: Sequence[DatasetVersion]) -> Counter[str]:
        counts: Counter[str] = Counter()
        for version in {version.id: version for version in trained}.values():
            for first in range(0, min(version.records, CORPUS_RECORDS_MAX), CORPUS_PAGE):
                try:
                    records = self._records(version, first)
                except (ObjectNotFoundError, IndexDamagedError):
                    remake(self._around, pages, (version, first, CORPUS_PAGE), shared={}, sources=self._sources)
                    records = self._records(version, first)
                for record in records:
                    counts.update(turn["content"] for turn in json.loads(record)["conversations"])
        return counts

    def _records(self, version: DatasetVersion, first: int) -> list[bytes]:
        rows = results.samples_between(self._database, version.id, first=first, count=CORPUS_PAGE)
        places = results.places_of(self._database, {row.record for row in rows})
        return list(self._lakehouse.get_parts(places).values())

    def _report(self, version: DatasetVersion, parameters: IndexParameters) -> DatasetReport:
        index = progress.find_index(self._database, parameters.key(version))
        ended = results.ended_counts(self._database, version.id)
        # Other jobs have other packs, for which other samples are too long.
        letters = results.first_letters(self._database, version.id, count_max=LETTERS_MAX, except_operation=INDEX)
        own = 0
        for letter in results.iterate_letters(self._database, version.id, operation=INDEX):
            if parameters.is_own(version, letter):
                own += 1
                letters += [letter] if own <= LETTERS_MAX else []
        ended[INDEX] = (own, 0)
        stages, alive = [], version.records
        for stage in STAGES:
            dead, dropped = ended.get(stage, (0, 0))
            through = max(0, alive - dead - dropped)
            seen = self._counts.get((version.id, stage), StageCount(stage=stage))
            misses = min(seen.misses, through)
            stages.append(StageCount(stage=stage, misses=misses, dead=dead, dropped=dropped, hits=through - misses))
            alive = through
        progress.add_hits(self._database, version.id, stages)
        return DatasetReport(
            reference=version.reference,
            samples=index.samples,
            tokens=index.tokens,
            manifest=index.manifest,
            stages=tuple(stages),
            dead_letters=tuple(sorted(letters, key=lambda each: (each.ordinal, each.key))[:LETTERS_MAX]),
        )

    def _put_plan(
        self,
        key: str,
        job: str,
        versions: Mapping[str, DatasetVersion],
        manifests: Mapping[str, str],
        tokenizer: str,
        *,
        identities: Mapping[str, str] | None = None,
        blocks: Mapping[str, Sizes] | None = None,
        made: Mapping[str, int] = NEWEST,
    ) -> None:
        before = self._plan_before(key)
        plan: dict[str, object] = {
            "references": {reference: version.reference for reference, version in versions.items()},
            "manifests": dict(manifests),
            "tokenizer": tokenizer,
        }
        # A job that has begun keeps its pixels and its order.
        made = {PIXELS: pixels_of(before), ORDER: order_of(before)} if before else made
        plan |= {field: version for field, version in made.items() if version != OLDEST[field]}
        if found := {**identities_after(self._lakehouse, before, manifests), **(identities or {})}:
            plan[IDENTITIES] = found
        if blocks is not None:
            plan[BLOCKS] = {reference: sizes.to_value() for reference, sizes in blocks.items()}
        data = canonical_json(seal_plan(plan))
        if not job or before.get("manifests", manifests) != manifests:
            # Another run over the same job writes the same bytes.
            self._store.put(key, data)
            return
        try:
            self._store.put_if_absent(key, data)
        except ObjectExistsError:
            if not self._plan_before(key):
                self._store.put(key, data)

    def _plan_before(self, key: str) -> Mapping[str, Any]:
        """Return the job's plan, or nothing where there is none yet, or a damaged one."""
        try:
            return parse_plan(self._store.get(key), key)
        except (ObjectNotFoundError, IndexDamagedError):
            return {}


def resolve(database: Database, reference: str, *, now_s: float) -> DatasetVersion:
    """Find a dataset version; datasets under ``sample/`` register themselves.

    Raises:
        DatasetNotFoundError: Naming the nearest names there are.
    """
    name = reference.partition("@")[0]
    samples = sample_sources()
    known = datasets.exists(database, name)
    if name in samples and not known:
        description, records = describe_generated(samples[name])
        datasets.add_version(
            database, name=name, source=description, digest=digest_value(description), records=records, now_s=now_s
        )
    elif not known:
        raise datasets.not_found(reference, sorted({*datasets.names(database), *samples}))
    return datasets.find_version(database, reference)


def check_spec(database: Database, spec: TrainingJobSpec) -> None:
    """Refuse datasets that do not exist.

    Raises:
        DatasetNotFoundError: Naming the nearest names there are.
    """
    samples = sample_sources()
    trained = [source.dataset for source in spec.data.sources]
    heldout = [part.dataset for part in spec.evaluation.sets] if spec.evaluation else []
    for reference in (*trained, *heldout):
        name, _, number = reference.partition("@")
        if name not in samples and not datasets.exists(database, name):
            raise datasets.not_found(reference, sorted({*datasets.names(database), *samples}))
        if number and not (name in samples and number == "1"):
            datasets.find_version(database, reference)
