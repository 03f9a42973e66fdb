"""Pins: versions that a job or a checkpoint needs, as rows that outlive every lease."""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import Connection, delete, select

from polyreme_datahub.errors import DatasetNotFoundError
from polyreme_datahub.registry import schema
from polyreme_datahub.registry.bulk import insert_new
from polyreme_datahub.registry.engine import Database

_PINS = schema.pins.c


def pin(database: Database, holder: str, version_ids: Collection[int], *, now_s: float) -> None:
    """Keep versions from removal until the holder releases them; pinning again changes nothing.

    Args:
        database: The registry.
        holder: Uid of a job, or name of a checkpoint.
        version_ids: The versions.
        now_s: Now [s since the epoch].

    Raises:
        DatasetNotFoundError: If one of the versions was removed meanwhile; then none is pinned.
    """
    rows = [{"holder": holder, "version_id": one, "created_s": now_s} for one in sorted(set(version_ids))]

    def work(connection: Connection) -> None:
        # Removal locks the same rows: a version is either pinned before it goes, or gone before it is pinned.
        query = select(schema.versions.c.id).where(schema.versions.c.id.in_(version_ids)).with_for_update(read=True)
        there = set(connection.execute(query).scalars())
        if gone := sorted(set(version_ids) - there):
            raise DatasetNotFoundError(f"dataset version {gone[0]} of the registry was removed before {holder} began")
        insert_new(connection, schema.pins, rows)

    database.write(work)


def release(database: Database, holder: str) -> int:
    """Release all that a holder pins; return the number of versions."""
    query = delete(schema.pins).where(_PINS.holder == holder)
    return database.write(lambda connection: connection.execute(query).rowcount)


def holders_after(database: Database, after: str, *, count_max: int) -> list[str]:
    """Return the holders whose names come after ``after``, so that their owner can release those that are gone."""
    query = select(_PINS.holder).where(_PINS.holder > after).distinct().order_by(_PINS.holder).limit(count_max)
    return database.read(lambda connection: list(connection.execute(query).scalars()))
