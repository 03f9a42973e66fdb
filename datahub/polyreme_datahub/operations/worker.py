"""A worker: takes a message, does its chunk, commits results, children and the message's end at once, acknowledges.

Killed at any line it loses nothing (the message is still due) and doubles nothing (bytes lie under their digest, rows
under their key; the first commit wins and the others adopt it).
"""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from polyreme_api.errors import PolyremeError
from polyreme_datahub.digests import action_key, canonical_json, digest_bytes, digest_value
from polyreme_datahub.errors import BadRecordError
from polyreme_datahub.lakehouse import Lakehouse
from polyreme_datahub.operations.types import COMPOSE, DECODE, INGEST, TOKENIZE, Operation, Work
from polyreme_datahub.registry import work
from polyreme_datahub.registry.datasets import DatasetVersion
from polyreme_datahub.registry.engine import Database
from polyreme_datahub.registry.work import ActionRow, DeadLetter, Outcome, SampleRow, StageCount
from polyreme_datahub.sources.open import open_source
from polyreme_datahub.sources.types import RawRecord, Source
from polyreme_datahub.topics.types import Message

TRIES_MAX = 3
"""Tries of a chunk; from then on its samples are tried one by one, and one that fails again is a dead letter."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Some ordinals of a version: all that a message says."""

    version_id: int
    first: int
    count: int

    @classmethod
    def of(cls, message: Message) -> Chunk:
        """Read a message's body."""
        return cls(**json.loads(message.body))


def chunk_message(topic: str, pipeline: str, chunk: Chunk) -> Message:
    """Make the message for a chunk; the same chunk of the same work has the same key."""
    key = f"{pipeline}/{topic}/{chunk.version_id}/{chunk.first:012d}"
    return Message(key=key, pipeline=pipeline, topic=topic, body=canonical_json(dataclasses.asdict(chunk)).decode())


class Chains:
    """Follows samples through the operations: from a record to what each operation made of it."""

    def __init__(self, database: Database, operations: Mapping[str, Operation]) -> None:
        self._database = database
        self.operations = operations

    def works(self, stage: str, rows: Sequence[SampleRow]) -> list[Work]:
        """Return the work of a stage for each sample that came so far."""
        inputs: dict[int, tuple[str, ...]] = {row.ordinal: (row.record,) for row in rows}
        for name in (DECODE, COMPOSE, TOKENIZE):
            works = [self._work(name, row, inputs[row.ordinal]) for row in rows if row.ordinal in inputs]
            if name == stage:
                return works
            outputs = work.outputs_of(self._database, [item.key for item in works])
            made = {item.row.ordinal: outputs[item.key] for item in works if item.key in outputs}
            records = {row.ordinal: row.record for row in rows}
            pairs = name == COMPOSE
            inputs = {at: (records[at], output) if pairs else (output,) for at, output in made.items()}
        raise AssertionError(f"no stage {stage}")

    def outputs(self, stage: str, rows: Sequence[SampleRow]) -> dict[int, str]:
        """Return the digest that a stage made, by ordinal."""
        works = self.works(stage, rows)
        outputs = work.outputs_of(self._database, [item.key for item in works])
        return {item.row.ordinal: outputs[item.key] for item in works if item.key in outputs}

    def _work(self, name: str, row: SampleRow, inputs: tuple[str, ...]) -> Work:
        return Work(row=row, key=action_key(self.operations[name].prefix, ":".join(inputs)), inputs=inputs)


class Worker:
    """Does messages of every stage but the index."""

    def __init__(
        self,
        database: Database,
        lakehouse: Lakehouse,
        versions: Mapping[int, DatasetVersion],
        operations: Mapping[str, Operation],
        *,
        now_s: Callable[[], float],
    ) -> None:
        self._database = database
        self._lakehouse = lakehouse
        self._versions = versions
        self._chains = Chains(database, operations)
        self._now_s = now_s
        self._sources: dict[int, Source] = {}
        self._lock = threading.Lock()

    def do(self, message: Message) -> tuple[StageCount, Sequence[Message]]:
        """Do a message; return its outcomes and the messages that follow.

        From its third try on a message is done carefully: each sample has tries of its own.

        Raises:
            EnvironmentFailedError: If store or registry stay away; the message is still due.
        """
        tried = work.begin_try(self._database, message.key, now_s=self._now_s())
        careful = tried >= TRIES_MAX
        chunk = Chunk.of(message)
        outcome = self._ingest(chunk, careful) if message.topic == INGEST else self._operate(message, chunk, careful)
        work.commit(self._database, message, outcome, now_s=self._now_s())
        return outcome.count, outcome.children

    def _ingest(self, chunk: Chunk, careful: bool) -> Outcome:
        rows = work.samples_between(self._database, chunk.version_id, first=chunk.first, count=chunk.count)
        letters = work.letters_between(self._database, chunk.version_id, first=chunk.first, count=chunk.count)
        ended = {row.ordinal for row in rows} | {
            letter.ordinal for letter in letters.values() if letter.stage == INGEST
        }
        todo = [at for at in range(chunk.first, chunk.first + chunk.count) if at not in ended]
        samples: list[SampleRow] = []
        dead: list[DeadLetter] = []
        artifacts = self._lakehouse.put_parts(self._raw_parts(chunk, todo, samples, dead, careful)) if todo else []
        return Outcome(
            version_id=chunk.version_id,
            count=StageCount(stage=INGEST, misses=len(samples), hits=len(rows), dead=len(dead)),
            samples=samples,
            artifacts=artifacts,
            dead_letters=dead,
        )

    def _raw_parts(
        self, chunk: Chunk, ordinals: Sequence[int], samples: list[SampleRow], dead: list[DeadLetter], careful: bool
    ) -> Iterator[bytes]:
        version = self._versions[chunk.version_id]
        source = self._source(version)
        for ordinal in ordinals:
            key = digest_value([INGEST, version.digest, ordinal])
            try:
                with self._trying(INGEST, key, careful):
                    record: RawRecord = source.read(ordinal)
                    content = canonical_json(record.content)
            except BadRecordError as error:
                sample_id = error.sample_id or source.record_id(ordinal)
                dead.append(_letter(key, INGEST, ordinal, sample_id, rule=error.rule, error=error.message))
                continue
            samples.append(SampleRow(ordinal=ordinal, sample_id=record.sample_id, record=digest_bytes(content)))
            yield content
            yield from record.blobs

    def _operate(self, message: Message, chunk: Chunk, careful: bool) -> Outcome:
        stage = message.topic
        rows = work.samples_between(self._database, chunk.version_id, first=chunk.first, count=chunk.count)
        works = self._chains.works(stage, rows)
        letters = work.letters_between(self._database, chunk.version_id, first=chunk.first, count=chunk.count)
        known = work.outputs_of(self._database, [item.key for item in works])
        todo = [item for item in works if item.key not in known and _letter_key(item) not in letters]
        actions: list[ActionRow] = []
        dead: list[DeadLetter] = []
        artifacts = self._lakehouse.put_parts(self._made_parts(stage, todo, actions, dead, careful)) if todo else []
        follow = [chunk_message(COMPOSE, message.pipeline, chunk)] if stage == DECODE else []
        old = sum(1 for item in works if _letter_key(item) in letters)
        return Outcome(
            version_id=chunk.version_id,
            count=StageCount(stage=stage, misses=len(actions), hits=len(known), dead=len(dead) + old),
            artifacts=artifacts,
            actions=actions,
            dead_letters=dead,
            children=follow,
        )

    def _made_parts(
        self, stage: str, todo: Sequence[Work], actions: list[ActionRow], dead: list[DeadLetter], careful: bool
    ) -> Iterator[bytes]:
        operation = self._chains.operations[stage]
        inputs = self._read({digest for item in todo for digest in item.inputs})
        for item in todo:
            try:
                with self._trying(stage, _letter_key(item), careful):
                    further = self._read(set(operation.needs([inputs[digest] for digest in item.inputs])))
                    result = operation.compute(item, {**inputs, **further})
            except BadRecordError as error:
                row = item.row
                dead.append(
                    _letter(_letter_key(item), stage, row.ordinal, row.sample_id, rule=error.rule, error=error.message)
                )
                continue
            yield result.output
            yield from result.parts
            actions.append(
                ActionRow(
                    key=item.key, operation=stage, input=":".join(item.inputs)[:64], output=digest_bytes(result.output)
                )
            )

    @contextmanager
    def _trying(self, stage: str, key: str, careful: bool) -> Iterator[None]:
        """Surround the work on one sample: a careful try is counted before it, and ends with a verdict.

        Raises:
            BadRecordError: If the sample broke a rule; or, in a careful try, ended its worker or failed unforeseen.
            EnvironmentFailedError: If store, registry or source are away; that is no try of the sample.
        """
        if careful and work.begin_try(self._database, key, now_s=self._now_s()) > TRIES_MAX:
            raise BadRecordError(f"sample crashed its worker {TRIES_MAX} times", rule="crash")
        try:
            yield
        except BadRecordError:
            if careful:
                work.forget_try(self._database, key)
            raise
        except PolyremeError as error:
            if careful:
                work.end_try(self._database, key, counts=False, due_s=0.0, error=error.message)
            raise
        except Exception as error:
            if not careful:
                raise
            raise BadRecordError(f"{stage} failed: {type(error).__name__}: {error}", rule="operation") from error
        if careful:
            work.forget_try(self._database, key)

    def _read(self, digests: set[str]) -> dict[str, bytes]:
        return self._lakehouse.get_parts(work.places_of(self._database, digests)) if digests else {}

    def _source(self, version: DatasetVersion) -> Source:
        with self._lock:
            if version.id not in self._sources:
                self._sources[version.id] = open_source(version.source)
            return self._sources[version.id]


def _letter_key(item: Work) -> str:
    """Two records may share an input; each has its own letter."""
    return digest_value([item.key, item.row.ordinal])


def _letter(key: str, stage: str, ordinal: int, sample_id: str, *, rule: str, error: str) -> DeadLetter:
    return DeadLetter(key=key, stage=stage, ordinal=ordinal, sample_id=sample_id, rule=rule, error=error)
