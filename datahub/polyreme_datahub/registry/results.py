"""Commit of what work made, and the reads that a worker does before: one transaction each.

A commit that ends an item is written whole or not at all, and only the first one is. Actions are content-addressed:
of two that made different bytes of one key the first counts, and ``outputs_of`` returns it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Any

from sqlalchemy import Connection, Select, delete, func, or_, select, tuple_, update

from polyreme_datahub.lakehouse import Artifact
from polyreme_datahub.registry import blobs, schema, work_items
from polyreme_datahub.registry.bulk import insert_new
from polyreme_datahub.registry.engine import ROWS_MAX, Database, pages
from polyreme_datahub.registry.rows import (
    ERROR_CHARACTERS_MAX,
    ID_CHARACTERS_MAX,
    Action,
    Drop,
    Letter,
    OperationCount,
    Output,
    Results,
    SampleRow,
    columns,
    storable,
    value_of,
    without_addresses,
)
from polyreme_datahub.registry.work_items import WorkItem

REPLAY_ORDINALS_MAX = 10_000
"""Most ordinals of one replay that names them."""


def commit(
    database: Database,
    results: Results,
    *,
    finished: WorkItem | None,
    owner: str,
    now_s: float,
    children: Sequence[WorkItem] = (),
    within: WorkItem | None = None,
) -> bool:
    """Write results, and with ``finished`` the item's end and its children, in one transaction.

    Args:
        database: The registry.
        results: What was made.
        finished: The item that this ends. Nothing is written if another commit ended it, or it is gone.
        owner: Who did the work.
        now_s: Now [s since the epoch].
        children: Items that follow from the end of ``finished``.
        within: For a part of an item that continues: nothing is written unless the item is open and this owner's. A
            late twin could otherwise bring back samples that a barrier has removed.

    Returns:
        Whether anything was written: of several commits that end an item, only the first is.

    Raises:
        BlobDeletingError: If garbage collection deletes a blob that the results name; nothing was written.
        ValueError: If samples, letters or drops come without an item, or children without its end.
    """
    if finished is None and within is None and (results.samples or results.letters or results.drops):
        raise ValueError("samples, letters and drops need an item: name it by `finished` or `within`")
    if finished is None and children:
        raise ValueError("children follow from the end of an item: name it by `finished`")

    def work(connection: Connection) -> bool:
        if finished is not None and not work_items.end(connection, finished.key, owner, now_s):
            return False
        if within is not None and not work_items.is_held(connection, within.key, owner):
            return False
        _insert(connection, results, now_s)
        work_items.insert_items(connection, children)
        return True

    return database.write(work)


def put_action(database: Database, action: Action) -> Output:
    """Commit one action outside of any item; return the output that counts, which is the first committer's."""

    def work(connection: Connection) -> Output:
        insert_actions(connection, [action])
        table = schema.actions.c
        row = connection.execute(select(table.output, table.value).where(table.key == action.key)).one()
        return Output(row.output, row.value)

    return database.write(work)


def insert_artifacts(connection: Connection, artifacts: Sequence[Artifact], now_s: float) -> None:
    """Insert where bytes lie, within a transaction, and keep from deletion the blobs that count."""
    insert_new(connection, schema.artifacts, [columns(row) for row in artifacts])
    blobs.hold_places(connection, [row.digest for row in artifacts], now_s)


def insert_actions(connection: Connection, actions: Sequence[Action]) -> None:
    """Insert actions with their inputs, within a transaction."""
    rows = [
        {"key": action.key, "operation": action.operation, "output": action.output, "value": action.value}
        for action in actions
    ]
    insert_new(connection, schema.actions, rows)
    inputs = [
        {"action": action.key, "position": position, "digest": digest}
        for action in actions
        for position, digest in enumerate(action.inputs)
    ]
    insert_new(connection, schema.action_inputs, inputs)


def replace_artifacts(
    database: Database, artifacts: Sequence[Artifact], *, actions: Sequence[Action], now_s: float
) -> None:
    """Write the locations of bytes that were lost and recomputed, and the actions that made them."""
    table = schema.artifacts

    def work(connection: Connection) -> None:
        insert_actions(connection, actions)
        for some in pages([artifact.digest for artifact in artifacts]):
            connection.execute(delete(table).where(table.c.digest.in_(some)))
        insert_artifacts(connection, artifacts, now_s)

    database.write(work)


def outputs_of(database: Database, keys: Collection[str]) -> dict[str, Output]:
    """Return the output of each action key that is known."""
    table = schema.actions.c

    def work(connection: Connection) -> dict[str, Output]:
        found: dict[str, Output] = {}
        for some in pages(keys):
            rows = connection.execute(select(table.key, table.output, table.value).where(table.key.in_(some)))
            found.update((key, Output(output, value)) for key, output, value in rows)
        return found

    return database.read(work)


def places_of(database: Database, digests: Collection[str]) -> dict[str, Artifact]:
    """Return where the bytes of each known digest lie."""
    table = schema.artifacts.c

    def work(connection: Connection) -> dict[str, Artifact]:
        found: dict[str, Artifact] = {}
        for some in pages(digests):
            query = select(table.digest, table.blob, table.start, table.length).where(table.digest.in_(some))
            for digest, blob, start, length in connection.execute(query):
                found[digest] = Artifact(digest=digest, blob=blob, start=start, length=length)
        return found

    return database.read(work)


def samples_between(database: Database, version_id: int, *, first: int, count: int) -> list[SampleRow]:
    """Return the samples of some ordinals, in order."""
    table = schema.samples.c
    query = (
        select(table.ordinal, table.sample_id, table.record)
        .where(table.version_id == version_id, table.ordinal >= first, table.ordinal < first + count)
        .order_by(table.ordinal)
    )

    def work(connection: Connection) -> list[SampleRow]:
        return [
            SampleRow(ordinal=ordinal, sample_id=sample_id, record=record)
            for ordinal, sample_id, record in connection.execute(query)
        ]

    return database.read(work)


def records_of(database: Database, version_id: int, sample_ids: Collection[str]) -> dict[str, str]:
    """Return the digests of the records of samples; one that is unknown is left out."""
    table = schema.samples.c

    def work(connection: Connection) -> dict[str, str]:
        found: dict[str, str] = {}
        for some in pages(sample_ids):
            query = select(table.sample_id, table.record).where(
                table.version_id == version_id, table.sample_id.in_(some)
            )
            found |= {row.sample_id: row.record for row in connection.execute(query)}
        return found

    return database.read(work)


def letters_between(database: Database, version_id: int, *, first: int, count: int) -> list[Letter]:
    """Return the dead letters of some ordinals, by ordinal and key."""
    table = schema.dead_letters
    query = _between(table, version_id, first, count)
    return database.read(partial(_letters, query=query))


def first_letters(database: Database, version_id: int, *, count_max: int, except_operation: str = "") -> list[Letter]:
    """Return the first dead letters of a version, by ordinal; none of ``except_operation``."""
    table = schema.dead_letters
    query = select(table).where(table.c.version_id == version_id, table.c.operation != except_operation)
    query = query.order_by(table.c.ordinal, table.c.key).limit(count_max)
    return database.read(partial(_letters, query=query))


def iterate_letters(database: Database, version_id: int, *, operation: str) -> Iterator[Letter]:
    """Yield all dead letters of an operation, by ordinal and key."""
    table = schema.dead_letters
    query = select(table).where(table.c.version_id == version_id, table.c.operation == operation)
    query = query.order_by(table.c.ordinal, table.c.key).limit(ROWS_MAX)
    after: Letter | None = None
    while True:
        later = query
        if after is not None:
            later = query.where(tuple_(table.c.ordinal, table.c.key) > (after.ordinal, after.key))
        page = database.read(partial(_letters, query=later))
        yield from page
        if len(page) < ROWS_MAX:
            return
        after = page[-1]


def drops_between(database: Database, version_id: int, *, first: int, count: int) -> list[Drop]:
    """Return the dropped samples of some ordinals, by ordinal and key."""
    query = _between(schema.drops, version_id, first, count)

    def work(connection: Connection) -> list[Drop]:
        return [value_of(Drop, row) for row in connection.execute(query)]

    return database.read(work)


def dead_records(database: Database, version_id: int, operation: str | None) -> int:
    """Count the records of a version that have a dead letter of an operation, or of any."""
    table = schema.dead_letters.c
    query = select(func.count(table.ordinal.distinct())).where(table.version_id == version_id)
    if operation is not None:
        query = query.where(table.operation == operation)
    return database.read(lambda connection: int(connection.execute(query).scalar_one()))


def ended_counts(database: Database, version_id: int) -> dict[str, tuple[int, int]]:
    """Count the samples that ended at each operation: (dead, dropped). A sample with two letters counts once."""

    def work(connection: Connection) -> dict[str, tuple[int, int]]:
        found: dict[str, tuple[int, int]] = {}
        for position, table in enumerate((schema.dead_letters, schema.drops)):
            counted = func.count(table.c.ordinal.distinct())
            mine = select(table.c.operation, counted).where(table.c.version_id == version_id)
            for operation, count in connection.execute(mine.group_by(table.c.operation)):
                before = found.get(operation, (0, 0))
                found[operation] = (count, before[1]) if position == 0 else (before[0], count)
        return found

    return database.read(work)


def replay(
    database: Database,
    version_id: int,
    operation: str | None = None,
    ordinals: Collection[int] | None = None,
    *,
    operations: Collection[str] | None = None,
) -> list[WorkItem]:
    """Delete dead letters and reopen the items that hold their ordinals, in one transaction; return these.

    An item that is open now needs no reopening. Items that had a child before find it done: name in ``operations`` all
    those that shall run again, or None for all.

    Args:
        database: The registry.
        version_id: The version.
        operation: Only letters of this operation.
        ordinals: Only letters of these ordinals.
        operations: Only items of these operations are reopened.

    Raises:
        ValueError: If more than ``REPLAY_ORDINALS_MAX`` ordinals are named.
    """
    if ordinals is not None and len(ordinals) > REPLAY_ORDINALS_MAX:
        raise ValueError(f"replay of {len(ordinals)} ordinals, expected at most {REPLAY_ORDINALS_MAX}: replay in parts")
    table = schema.dead_letters
    chosen = [table.c.version_id == version_id]
    if operation is not None:
        chosen.append(table.c.operation == operation)

    def work(connection: Connection) -> list[WorkItem]:
        parts = [None] if ordinals is None else list(pages(sorted(ordinals)))
        reopened: dict[str, WorkItem] = {}
        for part in parts:
            these = [*chosen] if part is None else [*chosen, table.c.ordinal.in_(part)]
            seen = list(connection.execute(select(table.c.ordinal).where(*these).distinct()).scalars())
            for some in pages(sorted(seen)):
                reopened |= {item.key: item for item in _reopen_holding(connection, version_id, some, operations)}
            connection.execute(delete(table).where(*these))
        return [reopened[key] for key in sorted(reopened)]

    return database.write(work)


def _reopen_holding(
    connection: Connection, version_id: int, ordinals: Sequence[int], operations: Collection[str] | None
) -> list[WorkItem]:
    item = schema.work.c
    holds = or_(*((item.first <= ordinal) & (item.first + item.count > ordinal) for ordinal in ordinals))
    conditions = [item.version_id == version_id, holds]
    if operations is not None:
        conditions.append(item.stage.in_(sorted(operations)))
    return work_items.reopen_where(connection, conditions)


def _insert(connection: Connection, results: Results, now_s: float) -> None:
    version = {"version_id": results.version_id}
    insert_artifacts(connection, results.artifacts, now_s)
    blobs.hold_within(connection, results.blobs, now_s)
    blobs.hold_places(connection, results.reused, now_s)
    insert_actions(connection, results.actions)
    insert_new(connection, schema.samples, [{**version, **columns(row)} for row in results.samples])
    ended: list[tuple[Any, str, Sequence[Letter | Drop]]] = [
        (schema.dead_letters, "error", results.letters),
        (schema.drops, "reason", results.drops),
    ]
    for table, text, rows in ended:
        shown = [
            {
                **version,
                **columns(row),
                "sample_id": storable(row.sample_id)[:ID_CHARACTERS_MAX],
                text: storable(without_addresses(getattr(row, text)))[:ERROR_CHARACTERS_MAX],
                "created_s": now_s,
            }
            for row in rows
        ]
        insert_new(connection, table, shown)
    insert_new(connection, schema.indexes, [{**columns(row), "created_s": now_s} for row in results.indexes])
    samples = schema.samples.c
    for some in pages(results.removed):
        mine = (samples.version_id == results.version_id, samples.ordinal.in_(some))
        connection.execute(delete(schema.samples).where(*mine))
    _add_counts(connection, results.version_id, results.counts)


def _add_counts(connection: Connection, version_id: int, counts: Sequence[OperationCount]) -> None:
    """Add outcomes, last in the transaction and in order: commits of an operation share these rows."""
    table = schema.statistics
    ordered = sorted(counts, key=lambda count: count.operation)
    zero = {"hits": 0, "misses": 0, "dead": 0, "dropped": 0}
    insert_new(connection, table, [{"version_id": version_id, "stage": count.operation, **zero} for count in ordered])
    for count in ordered:
        added = {name: table.c[name] + getattr(count, name) for name in zero}
        mine = (table.c.version_id == version_id, table.c.stage == count.operation)
        connection.execute(update(table).where(*mine).values(**added))


def _between(table: Any, version_id: int, first: int, count: int) -> Select[Any]:
    mine = (table.c.version_id == version_id, table.c.ordinal >= first, table.c.ordinal < first + count)
    return select(table).where(*mine).order_by(table.c.ordinal, table.c.key)


def _letters(connection: Connection, *, query: Select[Any]) -> list[Letter]:
    return [value_of(Letter, row) for row in connection.execute(query)]
