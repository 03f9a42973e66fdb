"""Processes the datasets of a job: ingest, decode, compose, tokenize, index; what is known already is reused.

Phases are barriers: a version is ingested before it is decoded, the tokenizer is trained on whole datasets, an index
is written when every sample is tokenized. A run may be killed at any line and run again, or run twice at once.
"""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from polyreme_api.job.spec import TrainingJobSpec
from polyreme_api.store import ObjectExistsError, ObjectNotFoundError, ObjectStore
from polyreme_datahub.digests import action_key, action_prefix, canonical_json, digest_bytes, digest_value
from polyreme_datahub.errors import IndexDamagedError
from polyreme_datahub.index.check import can_open, is_whole
from polyreme_datahub.index.damage import drop_notes, is_noted
from polyreme_datahub.index.format import parse_plan, plan_key, seal_plan
from polyreme_datahub.job_data import longest_pack, plan_data
from polyreme_datahub.lakehouse import Lakehouse
from polyreme_datahub.operations.compose import Compose
from polyreme_datahub.operations.decode import Decode
from polyreme_datahub.operations.index import Indexer, IndexParameters
from polyreme_datahub.operations.runner import BACKOFF_S, Runner, version_of
from polyreme_datahub.operations.tokenize import Tokenize
from polyreme_datahub.operations.types import (
    CHUNK,
    COMPOSE,
    DECODE,
    INDEX,
    INGEST,
    STAGES,
    TOKENIZE,
    ImageParameters,
    Operation,
)
from polyreme_datahub.operations.worker import Chains, Chunk, Worker, chunk_message
from polyreme_datahub.registry import datasets, progress, work
from polyreme_datahub.registry.datasets import DatasetVersion
from polyreme_datahub.registry.engine import Database
from polyreme_datahub.registry.work import ActionRow, DeadLetter, StageCount
from polyreme_datahub.sources.digits import sample_sources
from polyreme_datahub.sources.open import describe_source
from polyreme_datahub.tokens import OPERATION, VERSION, TextTokenizer, train_tokenizer
from polyreme_datahub.topics.types import Message
from polyreme_planner.plan import shape_of

IMAGE_SHARE = 2
"""An image from files takes at most one part in so many of a pack's tokens."""
LETTERS_MAX = 1000
CORPUS_RECORDS_MAX = 200_000
"""Records of one version that the tokenizer is trained on."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a stage is."""

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
    dead_letters: tuple[DeadLetter, ...]
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
    """Hits, misses and dead letters of each stage, over all datasets."""
    seconds: float


class Processing:
    """One run over a job's data."""

    def __init__(
        self,
        database: Database,
        store: ObjectStore,
        *,
        now_s: Callable[[], float] = time.time,  # noqa: TID251 - the shell's default
        progress: Callable[[Progress], None] | None = None,
        workers: int = 2,
        backoff_s: float = BACKOFF_S,
    ) -> None:
        self._database = database
        self._store = store
        self._lakehouse = Lakehouse(store)
        self._now_s = now_s
        self._progress = progress
        self._workers = workers
        self._backoff_s = backoff_s
        self._counts: dict[tuple[int, str], StageCount] = {}
        self._lock = threading.Lock()
        self._versions: dict[int, DatasetVersion] = {}

    def process(self, spec: TrainingJobSpec, *, job: str) -> ProcessReport:
        """Process the data of a spec; see ``polyreme_datahub.hub.process``."""
        started_s = self._now_s()
        check_spec(self._database, spec)
        shape = shape_of(spec).vision
        images = ImageParameters(
            patch_px=shape.patch_px,
            merge=shape.merge,
            image_tokens_max=max(1, spec.data.sequence_tokens // IMAGE_SHARE),
        )
        key = plan_key(job, plan_data(spec))
        pinned = self._pinned(key) if job else {}
        trained = self._resolve([source.dataset for source in spec.data.sources], pinned)
        heldout = self._resolve([part.dataset for part in spec.evaluation.sets] if spec.evaluation else [], pinned)
        both = {**trained, **heldout}
        self._versions = {version.id: version for version in both.values()}
        self._ingest()
        operations: dict[str, Operation] = {DECODE: Decode(), COMPOSE: Compose(images)}
        self._compose(operations)
        digest, tokenizer = self._tokenizer(list(trained.values()), spec.data.tokenizer.vocabulary)
        operations[TOKENIZE] = Tokenize(tokenizer, digest=digest, parameters=images)
        self._tokenize(operations)
        parameters = IndexParameters(images=images, tokenizer=digest, sequence_tokens=longest_pack(spec))
        self._index(operations, parameters, tokenizer)
        reports = {version.id: self._report(version, parameters) for version in self._versions.values()}
        manifests = {reference: reports[version.id].manifest for reference, version in both.items()}
        self._put_plan(key, job, both, manifests, digest)
        return ProcessReport(
            plan=key,
            tokenizer=digest,
            datasets=tuple(reports.values()),
            stages=tuple(
                sum(
                    (count for report in reports.values() for count in report.stages if count.stage == stage),
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
        try:
            plan = parse_plan(self._store.get(key), key)
        except (ObjectNotFoundError, IndexDamagedError):
            return {}
        return dict(plan["references"])

    def _ingest(self) -> None:
        messages = []
        for version in self._versions.values():
            messages += _chunks(INGEST, digest_value([INGEST, version.id, version.digest]), version)
        self._run(messages, self._worker({}))
        for version in self._versions.values():
            progress.bury_doubles(self._database, version.id, now_s=self._now_s())

    def _compose(self, operations: Mapping[str, Operation]) -> None:
        prefixes = [operations[name].prefix for name in (DECODE, COMPOSE)]
        messages = []
        for version in self._versions.values():
            messages += _chunks(DECODE, digest_value([version.id, version.digest, *prefixes]), version)
        self._run(messages, self._worker(operations))

    def _tokenize(self, operations: Mapping[str, Operation]) -> None:
        prefixes = [operations[name].prefix for name in (DECODE, COMPOSE, TOKENIZE)]
        messages = []
        for version in self._versions.values():
            messages += _chunks(TOKENIZE, digest_value([version.id, version.digest, *prefixes]), version)
        self._run(messages, self._worker(operations))

    def _index(
        self, operations: Mapping[str, Operation], parameters: IndexParameters, tokenizer: TextTokenizer
    ) -> None:
        indexer = Indexer(
            self._database,
            self._lakehouse,
            self._versions,
            Chains(self._database, operations),
            parameters=parameters,
            tokenizer=tokenizer,
            now_s=self._now_s,
        )
        messages = [
            chunk_message(INDEX, parameters.key(version), Chunk(version_id=version.id, first=0, count=version.records))
            for version in self._versions.values()
        ]
        for version, message in zip(self._versions.values(), messages, strict=True):
            manifests = progress.manifests_of(self._database, parameters.key(version))
            if not all(self._can_be_used(manifest) for manifest in manifests):
                work.reopen(self._database, message)
        self._run(messages, indexer)
        for version in self._versions.values():
            self._check_noted(progress.find_index(self._database, parameters.key(version)).manifest)

    def _can_be_used(self, manifest: str) -> bool:
        """Check an index: every byte of it where somebody found damage, else what opening it needs."""
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

    def _worker(self, operations: Mapping[str, Operation]) -> Worker:
        return Worker(self._database, self._lakehouse, self._versions, operations, now_s=self._now_s)

    def _run(self, messages: Sequence[Message], worker: Worker | Indexer) -> None:
        totals = Counter(message.topic for message in messages)
        ended: Counter[str] = Counter()

        def counted(message: Message, count: StageCount) -> None:
            with self._lock:
                at = (version_of(message), count.stage)
                self._counts[at] = self._counts.get(at, StageCount(stage=count.stage)) + count
                ended[count.stage] += 1
                done, total = ended[count.stage], max(totals[count.stage], totals[DECODE])
            if self._progress is not None:
                self._progress(Progress(stage=count.stage, done=done, total=total))

        Runner(
            self._database,
            worker.do,
            counted=counted,
            workers=self._workers,
            now_s=self._now_s,
            backoff_s=self._backoff_s,
        ).run(messages)

    def _tokenizer(self, trained: Sequence[DatasetVersion], vocabulary: int) -> tuple[str, TextTokenizer]:
        prefix = action_prefix(OPERATION, VERSION, {"vocabulary": vocabulary, "records_max": CORPUS_RECORDS_MAX})
        source = digest_value(sorted({version.digest for version in trained}))
        key = action_key(prefix, source)
        digest = work.outputs_of(self._database, [key]).get(key)
        if digest is None or not self._is_stored(digest):
            data = train_tokenizer(self._corpus(trained), vocabulary=vocabulary)
            self._lakehouse.put_blob(data)
            action = ActionRow(key=key, operation=OPERATION, input=source, output=digest_bytes(data))
            digest = work.put_action(self._database, action, [])
            drop_notes(self._store, digest)
        return digest, TextTokenizer(self._lakehouse.get_blob(digest))

    def _is_stored(self, digest: str) -> bool:
        try:
            self._lakehouse.get_blob(digest)
        except (ObjectNotFoundError, IndexDamagedError):
            return False
        return True

    def _corpus(self, trained: Sequence[DatasetVersion]) -> Counter[str]:
        counts: Counter[str] = Counter()
        for version in {version.id: version for version in trained}.values():
            for first in range(0, min(version.records, CORPUS_RECORDS_MAX), CHUNK):
                rows = work.samples_between(self._database, version.id, first=first, count=CHUNK)
                places = work.places_of(self._database, {row.record for row in rows})
                for record in self._lakehouse.get_parts(places).values():
                    counts.update(turn["content"] for turn in json.loads(record)["conversations"])
        return counts

    def _report(self, version: DatasetVersion, parameters: IndexParameters) -> DatasetReport:
        index = progress.find_index(self._database, parameters.key(version))
        letters = work.count_dead(self._database, version.id)
        stages, alive = [], version.records
        for stage in STAGES:
            seen = self._counts.get((version.id, stage), StageCount(stage=stage))
            dead = letters.get(stage, 0)
            stages.append(
                StageCount(stage=stage, misses=seen.misses, dead=dead, hits=max(0, alive - dead - seen.misses))
            )
            alive -= dead
        work.add_counts(self._database, version.id, stages)
        return DatasetReport(
            reference=version.reference,
            samples=index.samples,
            tokens=index.tokens,
            manifest=index.manifest,
            stages=tuple(stages),
            dead_letters=tuple(work.first_letters(self._database, version.id, count_max=LETTERS_MAX)),
        )

    def _put_plan(
        self, key: str, job: str, versions: Mapping[str, DatasetVersion], manifests: Mapping[str, str], tokenizer: str
    ) -> None:
        plan = {
            "references": {reference: version.reference for reference, version in versions.items()},
            "manifests": dict(manifests),
            "tokenizer": tokenizer,
        }
        data = canonical_json(seal_plan(plan))
        if not job:
            self._store.put(key, data)
            return
        try:
            self._store.put_if_absent(key, data)
        except ObjectExistsError:
            try:
                parse_plan(self._store.get(key), key)
            except IndexDamagedError:
                self._store.put(key, data)


def resolve(database: Database, reference: str, *, now_s: float) -> DatasetVersion:
    """Find a dataset version; datasets under ``sample/`` register themselves.

    Raises:
        DatasetNotFoundError: Naming the nearest names there are.
    """
    name = reference.partition("@")[0]
    samples = sample_sources()
    known = datasets.exists(database, name)
    if name in samples and not known:
        description, records = describe_source(samples[name])
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


def _chunks(topic: str, pipeline: str, version: DatasetVersion) -> list[Message]:
    return [
        chunk_message(
            topic, pipeline, Chunk(version_id=version.id, first=first, count=min(CHUNK, version.records - first))
        )
        for first in range(0, version.records, CHUNK)
    ]
