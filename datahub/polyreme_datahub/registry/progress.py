"""Rows that close a phase: doubled ids rejected after ingest, finished indexes, tombstones, statistics."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

from sqlalchemy import Connection, Row, delete, func, select, update

from polyreme_datahub.digests import digest_value
from polyreme_datahub.errors import IndexDamagedError
from polyreme_datahub.registry import schema
from polyreme_datahub.registry.bulk import insert_new
from polyreme_datahub.registry.engine import Database, pages
from polyreme_datahub.registry.rows import IndexRow, OperationCount, columns, value_of

INDEXES_MAX = 100


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tombstone:
    """A sample whose stored bytes no longer fit their checksum."""

    index_digest: str
    ordinal: int
    sample_id: str
    error: str


def reject_duplicates(
    database: Database, version_id: int, *, first: int = 0, count: int | None = None, now_s: float
) -> int:
    """Make a dead letter of each record whose id an earlier record has; return their count.

    It runs when every record up to these ordinals is ingested, so that the smallest survives in any order of work.

    Args:
        database: The registry.
        version_id: The version.
        first: First ordinal that is looked at.
        count: Count of ordinals; None: to the end.
        now_s: Now [s since the epoch].
    """
    samples, earlier = schema.samples, schema.samples.alias("earlier")
    same = (earlier.c.version_id == version_id, earlier.c.sample_id == samples.c.sample_id)
    query = select(samples).where(
        samples.c.version_id == version_id,
        samples.c.ordinal >= first,
        select(earlier.c.ordinal).where(*same, earlier.c.ordinal < samples.c.ordinal).exists(),
    )
    if count is not None:
        query = query.where(samples.c.ordinal < first + count)

    def work(connection: Connection) -> int:
        rejected = connection.execute(query).all()
        insert_new(connection, schema.dead_letters, [_double(row, version_id, now_s) for row in rejected])
        for some in pages([row.ordinal for row in rejected]):
            mine = (samples.c.version_id == version_id, samples.c.ordinal.in_(some))
            connection.execute(delete(samples).where(*mine))
        _recount(connection, version_id, len(rejected))
        return len(rejected)

    return database.write(work)


def _recount(connection: Connection, version_id: int, rejected: int) -> None:
    """Count records as dead that were counted as made, so that the outcomes add up to the records."""
    table = schema.statistics
    mine = (table.c.version_id == version_id, table.c.stage == "ingest")
    changed = {"misses": table.c.misses - rejected, "dead": table.c.dead + rejected}
    if rejected:
        connection.execute(update(table).where(*mine).values(**changed))


def put_index(database: Database, index: IndexRow, *, now_s: float) -> None:
    """Enter a finished index; one that was rebuilt replaces the one before."""
    table = schema.indexes

    def work(connection: Connection) -> None:
        connection.execute(delete(table).where(table.c.key == index.key, table.c.manifest != index.manifest))
        insert_new(connection, table, [{**columns(index), "created_s": now_s}])

    database.write(work)


def remove_indexes(database: Database, version_id: int) -> int:
    """Forget the finished indexes of a version, so that they are sealed again; return their number."""
    query = delete(schema.indexes).where(schema.indexes.c.version_id == version_id)
    return database.write(lambda connection: connection.execute(query).rowcount)


def add_hits(database: Database, version_id: int, counts: Collection[OperationCount]) -> None:
    """Add the results that one run reused to a version's statistics; what it made was added by its commits."""
    table = schema.statistics
    zero = {"hits": 0, "misses": 0, "dead": 0, "dropped": 0}

    def work(connection: Connection) -> None:
        insert_new(connection, table, [{"version_id": version_id, "stage": c.operation, **zero} for c in counts])
        for count in counts:
            mine = (table.c.version_id == version_id, table.c.stage == count.operation)
            connection.execute(update(table).where(*mine).values(hits=table.c.hits + count.hits))

    database.write(work)


def count_samples(database: Database, version_id: int) -> int:
    """Count the ingested samples of a version."""
    table = schema.samples
    query = select(func.count()).select_from(table).where(table.c.version_id == version_id)
    return database.read(lambda connection: int(connection.execute(query).scalar_one()))


def find_index(database: Database, key: str) -> IndexRow:
    """Return a finished index.

    Raises:
        IndexDamagedError: If there is none.
    """
    table = schema.indexes
    row = database.read(lambda connection: connection.execute(select(table).where(table.c.key == key)).first())
    if row is None:
        raise IndexDamagedError(f"no index {key}: its message was handled without writing one")
    return value_of(IndexRow, row)


def manifests_of(database: Database, key: str) -> list[str]:
    """Return the manifest of an index, or nothing where it is not finished."""
    table = schema.indexes
    return database.read(
        lambda connection: list(connection.execute(select(table.c.manifest).where(table.c.key == key)).scalars())
    )


def indexes_of(database: Database, version_id: int) -> list[IndexRow]:
    """Return the finished indexes of a version, oldest first; of very many only the newest."""
    table = schema.indexes
    newest = (
        select(table)
        .where(table.c.version_id == version_id)
        .order_by(table.c.created_s.desc(), table.c.key.desc())
        .limit(INDEXES_MAX)
    )
    return database.read(lambda connection: [value_of(IndexRow, row) for row in connection.execute(newest)][::-1])


def statistics_of(database: Database, version_id: int) -> dict[str, OperationCount]:
    """Return the outcomes of each operation over all runs."""
    table = schema.statistics
    return database.read(
        lambda connection: {
            row.stage: OperationCount(
                operation=row.stage, hits=row.hits, misses=row.misses, dead=row.dead, dropped=row.dropped
            )
            for row in connection.execute(select(table).where(table.c.version_id == version_id))
        }
    )


def add_tombstones(database: Database, tombstones: list[Tombstone]) -> None:
    """Record what loaders found damaged."""
    rows = [dataclasses.asdict(tombstone) for tombstone in tombstones]
    database.write(lambda connection: insert_new(connection, schema.tombstones, rows))


def drop_tombstones(database: Database, index_digest: str) -> None:
    """Remove what loaders found damaged in an index that is whole again."""
    table = schema.tombstones
    database.write(lambda connection: connection.execute(delete(table).where(table.c.index_digest == index_digest)))


def tombstones_of(database: Database, index_digests: Collection[str], *, count_max: int) -> list[Tombstone]:
    """Return the first tombstones of some indexes."""
    table = schema.tombstones
    return database.read(
        lambda connection: [
            value_of(Tombstone, row)
            for row in connection.execute(
                select(table)
                .where(table.c.index_digest.in_(index_digests))
                .order_by(table.c.index_digest, table.c.ordinal)
                .limit(count_max)
            )
        ]
    )


def _double(row: Row[Any], version_id: int, now_s: float) -> dict[str, Any]:
    return {
        "version_id": version_id,
        "key": digest_value(["double", version_id, row.ordinal]),
        "operation": "ingest",
        "ordinal": row.ordinal,
        "sample_id": row.sample_id,
        "rule": "id",
        "error": f"id is used twice: {row.sample_id!r}, an earlier record has it",
        "created_s": now_s,
    }
