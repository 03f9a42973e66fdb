"""Rows of the work in progress: samples, actions, artifacts, dead letters, messages, tries.

A worker reads what is known of its chunk, works, and commits everything that follows from it in one transaction.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from sqlalchemy import Connection, Select, case, func, select, update

from polyreme_datahub.lakehouse import Artifact
from polyreme_datahub.registry import schema
from polyreme_datahub.registry.bulk import insert_new
from polyreme_datahub.registry.engine import Database, pages
from polyreme_datahub.registry.results import insert_actions
from polyreme_datahub.registry.rows import (
    ERROR_CHARACTERS_MAX,
    ID_CHARACTERS_MAX,
    Action,
    IndexRow,
    SampleRow,
    StageCount,
    columns,
    storable,
)
from polyreme_datahub.topics.types import Message

__all__ = ["IndexRow", "SampleRow", "StageCount", "storable"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ActionRow:
    """What an operation made of an input."""

    key: str
    operation: str
    input: str
    output: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """A record that broke a rule, and what came of it."""

    key: str
    """Of the action that failed and the ordinal: the same bytes fail the same way, and each record has its letter."""
    stage: str
    ordinal: int
    sample_id: str
    rule: str
    error: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Everything that follows from one message; committed in one transaction."""

    version_id: int
    count: StageCount
    samples: Sequence[SampleRow] = ()
    artifacts: Sequence[Artifact] = ()
    actions: Sequence[ActionRow] = ()
    dead_letters: Sequence[DeadLetter] = ()
    children: Sequence[Message] = ()
    index: IndexRow | None = None


def commit(database: Database, message: Message, outcome: Outcome, *, now_s: float) -> bool:
    """Write results, children and the message's end at once, unless another did: the first commit wins whole.

    A late twin that wrote its rows again could bring back what a barrier has removed since (doubled ids).

    Returns:
        Whether this commit was the first.
    """

    def work(connection: Connection) -> bool:
        table = schema.messages
        ended = connection.execute(update(table).where(table.c.key == message.key, table.c.done == 0).values(done=1))
        connection.execute(schema.tries.delete().where(schema.tries.c.key == message.key))
        if ended.rowcount == 0:
            return False
        insert_new(connection, schema.artifacts, [columns(row) for row in outcome.artifacts])
        _insert_actions(connection, outcome.actions)
        if outcome.samples:
            rows = [{"version_id": outcome.version_id, **columns(row)} for row in outcome.samples]
            insert_new(connection, schema.samples, rows)
        if outcome.dead_letters:
            insert_new(connection, schema.dead_letters, _letter_rows(outcome, now_s))
        insert_new(connection, table, [message_row(child) for child in outcome.children])
        if outcome.index is not None:
            insert_new(connection, schema.indexes, [{**columns(outcome.index), "created_s": now_s}])
        return True

    return database.write(work)


def add_messages(database: Database, messages: Sequence[Message]) -> None:
    """Put messages into the outbox; one that is there already changes nothing."""
    database.write(lambda connection: insert_new(connection, schema.messages, [message_row(m) for m in messages]))


def reopen(database: Database, message: Message) -> None:
    """Make a message due again: what it made is damaged, and making it again gives the same bytes."""
    table = schema.messages
    database.write(
        lambda connection: connection.execute(update(table).where(table.c.key == message.key).values(done=0))
    )


def due_messages(database: Database, pipeline: str, *, count_max: int) -> list[Message]:
    """Return messages of a pipeline whose results are not committed."""
    table = schema.messages

    def work(connection: Connection) -> list[Message]:
        query = select(table).where(table.c.pipeline == pipeline, table.c.done == 0).order_by(table.c.key)
        return [
            Message(key=row.key, pipeline=row.pipeline, topic=row.topic, body=row.body)
            for row in connection.execute(query.limit(count_max))
        ]

    return database.read(work)


def dues_of(database: Database, keys: Collection[str]) -> dict[str, float]:
    """Return when each message is due that failed before [seconds since the epoch]."""
    table = schema.tries

    def work(connection: Connection) -> dict[str, float]:
        found: dict[str, float] = {}
        for some in pages(keys):
            rows = connection.execute(select(table.c.key, table.c.due_s).where(table.c.key.in_(some)))
            found.update((key, due_s) for key, due_s in rows)
        return found

    return database.read(work)


def samples_between(database: Database, version_id: int, *, first: int, count: int) -> list[SampleRow]:
    """Return the samples of some ordinals, in order."""
    table = schema.samples

    def work(connection: Connection) -> list[SampleRow]:
        query = (
            select(table.c.ordinal, table.c.sample_id, table.c.record)
            .where(table.c.version_id == version_id, table.c.ordinal >= first, table.c.ordinal < first + count)
            .order_by(table.c.ordinal)
        )
        rows = connection.execute(query)
        return [SampleRow(ordinal=ordinal, sample_id=sample_id, record=record) for ordinal, sample_id, record in rows]

    return database.read(work)


def letters_between(database: Database, version_id: int, *, first: int, count: int) -> dict[str, DeadLetter]:
    """Return the dead letters of some ordinals, by key."""
    table = schema.dead_letters
    query = select(table).where(
        table.c.version_id == version_id, table.c.ordinal >= first, table.c.ordinal < first + count
    )
    return {letter.key: letter for letter in _letters(database, query)}


def first_letters(database: Database, version_id: int, *, count_max: int) -> list[DeadLetter]:
    """Return the first dead letters of a version, by ordinal."""
    table = schema.dead_letters
    return _letters(database, select(table).where(table.c.version_id == version_id).limit(count_max))


def count_dead(database: Database, version_id: int) -> dict[str, int]:
    """Count the records of a version that ended at each stage."""
    table = schema.dead_letters
    query = (
        select(table.c.operation, func.count(table.c.ordinal.distinct()))
        .where(table.c.version_id == version_id)
        .group_by(table.c.operation)
    )
    return database.read(lambda connection: {stage: int(count) for stage, count in connection.execute(query)})


def _letters(database: Database, query: Select[Any]) -> list[DeadLetter]:
    table = schema.dead_letters
    ordered = query.order_by(table.c.ordinal, table.c.key)

    def work(connection: Connection) -> list[DeadLetter]:
        return [
            DeadLetter(
                key=row.key,
                stage=row.operation,
                ordinal=row.ordinal,
                sample_id=row.sample_id,
                rule=row.rule,
                error=row.error,
            )
            for row in connection.execute(ordered)
        ]

    return database.read(work)


def outputs_of(database: Database, keys: Collection[str]) -> dict[str, str]:
    """Return the output digest of each action key that is known."""
    table = schema.actions

    def work(connection: Connection) -> dict[str, str]:
        found: dict[str, str] = {}
        for some in pages(keys):
            found.update(
                (key, output)
                for key, output in connection.execute(select(table.c.key, table.c.output).where(table.c.key.in_(some)))
            )
        return found

    return database.read(work)


def places_of(database: Database, digests: Collection[str]) -> dict[str, Artifact]:
    """Return where the bytes of each known digest lie."""
    table = schema.artifacts

    def work(connection: Connection) -> dict[str, Artifact]:
        found: dict[str, Artifact] = {}
        for some in pages(digests):
            rows = connection.execute(
                select(table.c.digest, table.c.blob, table.c.start, table.c.length).where(table.c.digest.in_(some))
            )
            for digest, blob, start, length in rows:
                found[digest] = Artifact(digest=digest, blob=blob, start=start, length=length)
        return found

    return database.read(work)


def put_action(database: Database, action: ActionRow, artifacts: Sequence[Artifact]) -> str:
    """Commit one action; return the output that counts, which is the first committer's."""

    def work(connection: Connection) -> str:
        insert_new(connection, schema.artifacts, [columns(row) for row in artifacts])
        _insert_actions(connection, [action])
        table = schema.actions
        return str(connection.execute(select(table.c.output).where(table.c.key == action.key)).scalar_one())

    return database.write(work)


def begin_try(database: Database, key: str, *, now_s: float) -> int:
    """Count a try before its work; return its number, from 1."""

    def work(connection: Connection) -> int:
        table = schema.tries
        insert_new(connection, table, [{"key": key, "count": 0, "due_s": now_s, "error": ""}])
        connection.execute(update(table).where(table.c.key == key).values(count=table.c.count + 1))
        return int(connection.execute(select(table.c.count).where(table.c.key == key)).scalar_one())

    return database.write(work)


def end_try(database: Database, key: str, *, counts: bool, due_s: float, error: str) -> None:
    """Note why a try failed and when the next is due; one that the environment failed does not count."""
    table = schema.tries
    change = table.c.count if counts else case((table.c.count > 0, table.c.count - 1), else_=0)
    database.write(
        lambda connection: connection.execute(
            update(table)
            .where(table.c.key == key)
            .values(count=change, due_s=due_s, error=storable(error)[:ERROR_CHARACTERS_MAX])
        )
    )


def add_counts(database: Database, version_id: int, counts: Iterable[StageCount]) -> None:
    """Add outcomes to a version's statistics."""
    table = schema.statistics
    totals = list(counts)

    def work(connection: Connection) -> None:
        fresh = [{"version_id": version_id, "stage": c.stage, "hits": 0, "misses": 0, "dead": 0} for c in totals]
        insert_new(connection, table, fresh)
        for count in totals:
            connection.execute(
                update(table)
                .where(table.c.version_id == version_id, table.c.stage == count.stage)
                .values(hits=table.c.hits + count.hits, misses=table.c.misses + count.misses, dead=count.dead)
            )

    database.write(work)


def count_samples(database: Database, version_id: int) -> int:
    """Count the ingested samples of a version."""
    table = schema.samples
    return database.read(
        lambda connection: int(
            connection.execute(
                select(func.count()).select_from(table).where(table.c.version_id == version_id)
            ).scalar_one()
        )
    )


def forget_try(database: Database, key: str) -> None:
    """Drop the tries of what came to its end."""
    database.write(lambda connection: connection.execute(schema.tries.delete().where(schema.tries.c.key == key)))


def message_row(message: Message) -> dict[str, Any]:
    """Return a message as a row that is still due."""
    return {**columns(message), "done": 0}


def _insert_actions(connection: Connection, actions: Sequence[ActionRow]) -> None:
    made = [Action(key=row.key, operation=row.operation, inputs=(row.input,), output=row.output) for row in actions]
    insert_actions(connection, made)


def _letter_rows(outcome: Outcome, now_s: float) -> list[dict[str, Any]]:
    return [
        {
            "key": letter.key,
            "operation": letter.stage,
            "ordinal": letter.ordinal,
            "rule": letter.rule,
            "version_id": outcome.version_id,
            "sample_id": storable(letter.sample_id)[:ID_CHARACTERS_MAX],
            "error": storable(letter.error)[:ERROR_CHARACTERS_MAX],
            "created_s": now_s,
        }
        for letter in outcome.dead_letters
    ]
