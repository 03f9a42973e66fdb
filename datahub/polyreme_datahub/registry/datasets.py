"""Names and versions of datasets in the registry."""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, delete, func, insert, select, update

from polyreme_datahub.digests import canonical_json
from polyreme_datahub.errors import DatasetNotFoundError, VersionPinnedError
from polyreme_datahub.registry import schema
from polyreme_datahub.registry.engine import Database

NAMES_SHOWN_MAX = 8
VERSIONS_MAX = 1000
NUMBER = re.compile(r"[1-9][0-9]{0,8}")
TAG = re.compile(r"[a-z][-a-z0-9.]{0,62}")
KEPT = frozenset({"chunks"})
"""Fields of a source's description that never change, wherever its files lie."""
DRAFT = ".draft/"
"""Begins the name of a version that is still being written; no dataset may have such a name."""
_MADE_OF_A_VERSION = (
    schema.samples,
    schema.dead_letters,
    schema.drops,
    schema.indexes,
    schema.statistics,
    schema.work,
    schema.tags,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DatasetVersion:
    """An immutable version of a dataset."""

    id: int
    """Row of the registry."""
    name: str
    number: int
    digest: str
    """Digest of its source: what it is made from."""
    records: int
    """Records of the source, bad ones included."""
    source: Mapping[str, Any]
    """Description of the source, JSON-able."""

    @property
    def reference(self) -> str:
        """``name@version``."""
        return f"{self.name}@{self.number}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class VersionDocument:
    """All that a version's row says; stored beside the lakehouse too, so that the registry can be rebuilt."""

    name: str
    number: int
    source: Mapping[str, Any]
    digest: str
    records: int
    created_s: float


def add_version(
    database: Database,
    *,
    name: str,
    source: Mapping[str, Any],
    digest: str,
    records: int,
    now_s: float,
    store_first: Callable[[VersionDocument], None] | None = None,
) -> DatasetVersion:
    """Register a version; the same digest again is the version that there is, read from the newer place.

    Args:
        database: The registry.
        name: Name of the dataset.
        source: Description of the source.
        digest: Digest of the source.
        records: Records of the source, bad ones included.
        now_s: Now [s since the epoch].
        store_first: Stores the version's document before its row is committed (``rebuild.store_document``). It runs
            while the name is locked, perhaps more than once.
    """

    def work(connection: Connection) -> DatasetVersion:
        table = schema.versions
        lock_name(connection, name)
        found = connection.execute(select(table).where(table.c.name == name, table.c.digest == digest)).first()
        if found is None:
            document = VersionDocument(
                name=name,
                number=next_number(connection, name),
                source=source,
                digest=digest,
                records=records,
                created_s=now_s,
            )
            if store_first is not None:
                store_first(document)
            connection.execute(insert(table).values(**row_of(document)))
        else:
            # The same content from another place, where it is read from now on. Work items keep their borders.
            kept = {name: value for name, value in json.loads(found.source).items() if name in KEPT}
            newer = canonical_json({**source, **kept}).decode()
            if newer != found.source:
                connection.execute(update(table).where(table.c.id == found.id).values(source=newer))
        found = connection.execute(select(table).where(table.c.name == name, table.c.digest == digest)).one()
        return _version(found)

    return database.write(work)


def lock_name(connection: Connection, name: str) -> None:
    """Keep others from adding versions of a dataset until the transaction ends; SQLite's write lock does it there."""
    if connection.dialect.name == "postgresql":
        connection.execute(select(func.pg_advisory_xact_lock(func.hashtext(name))))


def next_number(connection: Connection, name: str) -> int:
    """Return the number of the next version of a dataset whose name is locked."""
    table = schema.versions
    last = connection.execute(select(func.max(table.c.number)).where(table.c.name == name)).scalar()
    return int(last or 0) + 1


def row_of(document: VersionDocument) -> dict[str, Any]:
    """Return a version as a row, without its id."""
    return {**dataclasses.asdict(document), "source": canonical_json(document.source).decode()}


def find_version(database: Database, reference: str) -> DatasetVersion:
    """Return the version that ``name`` (its newest), ``name@number`` or ``name@tag`` names.

    Raises:
        DatasetNotFoundError: Naming the nearest names there are.
    """
    name, at, number = reference.partition("@")
    is_tag = TAG.fullmatch(number) is not None
    if at and not is_tag and not NUMBER.fullmatch(number):
        raise DatasetNotFoundError(f"no dataset version {reference}: expected a number from 1 on, or a tag, after '@'")

    def work(connection: Connection) -> Row[Any] | None:
        table, tags = schema.versions, schema.tags
        query = select(table).where(table.c.name == name, ~_is_draft())
        if is_tag:
            query = query.join(tags, (tags.c.version_id == table.c.id) & (tags.c.name == name) & (tags.c.tag == number))
        elif number:
            query = query.where(table.c.number == int(number))
        return connection.execute(query.order_by(table.c.number.desc()).limit(1)).first()

    row = database.read(work)
    if row is None:
        numbers = numbers_of(database, name)
        if numbers:
            shown = ", ".join(map(str, numbers[-NAMES_SHOWN_MAX:]))
            raise DatasetNotFoundError(f"no dataset version {reference}: {name} has the versions {shown}")
        raise not_found(reference, names(database))
    return _version(row)


def version_of(database: Database, version_id: int) -> DatasetVersion:
    """Return a version by the id of its row.

    Raises:
        DatasetNotFoundError: If it was deleted.
    """
    query = select(schema.versions).where(schema.versions.c.id == version_id)
    row = database.read(lambda connection: connection.execute(query).first())
    if row is None:
        raise DatasetNotFoundError(f"no dataset version with id {version_id}: it was deleted while work on it was due")
    return _version(row)


def newest_versions(database: Database, *, after: str, count_max: int) -> list[DatasetVersion]:
    """Return the newest version of each dataset whose name comes after ``after``, by name."""
    table = schema.versions

    def work(connection: Connection) -> list[DatasetVersion]:
        newest = (
            select(table.c.name, func.max(table.c.number).label("number"))
            .where(table.c.name > after, ~_is_draft())
            .group_by(table.c.name)
            .order_by(table.c.name)
            .limit(count_max)
            .subquery()
        )
        same = (table.c.name == newest.c.name) & (table.c.number == newest.c.number)
        return [_version(row) for row in connection.execute(select(table).join(newest, same).order_by(table.c.name))]

    return database.read(work)


def remove_versions(
    database: Database,
    name: str,
    number: int | None,
    *,
    mark_first: Callable[[str, int], None] = lambda _name, _number: None,
) -> list[int]:
    """Delete versions of a dataset, all or one, and what was made of them; return their numbers.

    Blobs of the lakehouse stay until garbage collection: other datasets may hold the same bytes.

    Args:
        database: The registry.
        name: Name of the dataset.
        number: The version; None: all.
        mark_first: Marks a version's document before its row goes (``rebuild.mark_removed``); perhaps more than once.

    Raises:
        VersionPinnedError: If a job or a checkpoint needs one of them.
    """
    table = schema.versions
    chosen = (table.c.name == name) if number is None else (table.c.name == name) & (table.c.number == number)

    def work(connection: Connection) -> list[int]:
        rows = connection.execute(select(table.c.id, table.c.number).where(chosen).with_for_update()).all()
        _refuse_pinned(connection, name, [(row.id, row.number) for row in rows])
        for row in rows:
            mark_first(name, row.number)
            for made in _MADE_OF_A_VERSION:
                connection.execute(delete(made).where(made.c.version_id == row.id))
            for sent in (schema.messages, schema.tries):
                # A message's key is pipeline/topic/version/first record: another version must not meet it as done.
                connection.execute(delete(sent).where(sent.c.key.like(f"%/%/{row.id}/%")))
            connection.execute(delete(table).where(table.c.id == row.id))
        return sorted(row.number for row in rows)

    return database.write(work)


def numbers_of(database: Database, name: str) -> list[int]:
    """Return the numbers of a dataset's versions, ascending; of very many only the newest."""
    table = schema.versions

    def work(connection: Connection) -> list[int]:
        query = select(table.c.number).where(table.c.name == name).order_by(table.c.number.desc()).limit(VERSIONS_MAX)
        return sorted(connection.execute(query).scalars())

    return database.read(work)


def exists(database: Database, name: str) -> bool:
    """Tell whether a dataset has that name."""
    table = schema.versions
    query = select(table.c.id).where(table.c.name == name).limit(1)
    return database.read(lambda connection: connection.execute(query).first()) is not None


def names(database: Database) -> list[str]:
    """Return the names of all datasets, sorted."""
    table = schema.versions
    return database.read(
        lambda connection: list(
            connection.execute(select(table.c.name).where(~_is_draft()).distinct().order_by(table.c.name)).scalars()
        )
    )


def not_found(reference: str, known: list[str]) -> DatasetNotFoundError:
    """Make the error for an unknown name: it says the nearest names there are."""
    name = reference.partition("@")[0]
    near = difflib.get_close_matches(name, known, n=3)
    if near:
        hint = f"did you mean {' or '.join(repr(n) for n in near)}?"
    elif not known:
        hint = "none is registered"
    else:
        more = f" and {len(known) - NAMES_SHOWN_MAX} more" if len(known) > NAMES_SHOWN_MAX else ""
        hint = f"there are {', '.join(known[:NAMES_SHOWN_MAX])}{more}"
    return DatasetNotFoundError(f"no dataset {reference}: {hint}")


def _refuse_pinned(connection: Connection, name: str, rows: list[tuple[int, int]]) -> None:
    pins = schema.pins.c
    numbers = dict(rows)
    query = select(pins.version_id, pins.holder).where(pins.version_id.in_(numbers)).order_by(pins.version_id)
    pin = connection.execute(query.limit(1)).first()
    if pin is not None:
        raise VersionPinnedError(
            f"{name}@{numbers[pin.version_id]} is needed by {pin.holder}: it can be removed when that is gone"
        )


def _is_draft() -> ColumnElement[bool]:
    return schema.versions.c.name.like(f"{DRAFT}%")


def _version(row: Row[Any]) -> DatasetVersion:
    return DatasetVersion(
        id=row.id,
        name=row.name,
        number=row.number,
        digest=row.digest,
        records=row.records,
        source=json.loads(row.source),
    )
