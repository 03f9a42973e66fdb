"""Work items: leased by one worker at a time, open until the transaction that commits their results.

Correctness rests on the row's state alone: a lease only keeps two workers from the same work. A topic carries keys of
items; ``published_s`` says when a key was last sent, so that a publisher finds what was never sent or was lost.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, Select, case, delete, func, or_, select, update

from polyreme_datahub.registry import schema
from polyreme_datahub.registry.bulk import insert_new
from polyreme_datahub.registry.engine import Database, pages
from polyreme_datahub.registry.rows import ERROR_CHARACTERS_MAX, columns, storable

OPEN, DONE = 0, 1
CLAIM_MAX = 1000
"""Most items of one claim."""
FLOWS_MAX = 100
"""Most flows that one purge looks at."""
_ITEMS = schema.work.c


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkItem:
    """A range of ordinals of one version at one chain, or one shard, or a barrier."""

    key: str
    flow: str
    operation: str
    """Name of the chain, which is that of its last operation; the column is called ``stage``."""
    version_id: int
    first: int
    count: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Claimed:
    """An item that this owner works on until its lease runs out."""

    item: WorkItem
    tries: int
    """From 1; counts this claim. One that the environment failed is taken back by ``release``."""


def add(database: Database, items: Sequence[WorkItem]) -> None:
    """Put items into the outbox; one that is there already, open or done, changes nothing."""
    database.write(lambda connection: insert_items(connection, items))


def insert_items(connection: Connection, items: Sequence[WorkItem]) -> None:
    """``add`` within a transaction."""
    insert_new(connection, schema.work, [_row(item) for item in items])


def claim(
    database: Database,
    flow: str | None,
    operations: Sequence[str],
    owner: str,
    *,
    now_s: float,
    ttl_s: float,
    count_max: int,
) -> list[Claimed]:
    """Lease items that are open, due, and not leased; the try is counted in the same transaction.

    Args:
        database: The registry.
        flow: The flow, or None for every flow (those with the smallest digest first).
        operations: Chains by name, the preferred first: later ones of a flow free memory and disk.
        owner: Name of the process, unique among all that ever ran.
        now_s: Now [s since the epoch].
        ttl_s: How long the lease lasts without ``renew`` [s].
        count_max: Most items, at most ``CLAIM_MAX``.
    """
    wanted = min(count_max, CLAIM_MAX)

    def work(connection: Connection) -> list[Claimed]:
        found: list[Row[Any]] = []
        for operation in operations:
            if len(found) >= wanted:
                break
            query = select(schema.work).where(_is_free(now_s), _ITEMS.stage == operation)
            if flow is not None:
                query = query.where(_ITEMS.flow == flow)
            query = query.order_by(_ITEMS.flow, _ITEMS.first).limit(wanted - len(found))
            found += connection.execute(query.with_for_update(skip_locked=True)).all()
        return _lease(connection, found, owner, now_s + ttl_s)

    return database.write(work)


def claim_one(database: Database, key: str, owner: str, *, now_s: float, ttl_s: float) -> Claimed | None:
    """Lease the item whose key a topic delivered; None if it is done, gone, not due, or leased to another."""

    def work(connection: Connection) -> list[Claimed]:
        query = select(schema.work).where(_ITEMS.key == key, _is_free(now_s))
        return _lease(
            connection, connection.execute(query.with_for_update(skip_locked=True)).all(), owner, now_s + ttl_s
        )

    return next(iter(database.write(work)), None)


def renew(database: Database, keys: Collection[str], owner: str, *, now_s: float, ttl_s: float) -> set[str]:
    """Extend leases; return the keys that this owner still holds (also late, if no other owner took them)."""

    def work(connection: Connection) -> set[str]:
        held: set[str] = set()
        for some in pages(sorted(keys)):
            mine = (_ITEMS.key.in_(some), _ITEMS.owner == owner, _ITEMS.state == OPEN)
            connection.execute(update(schema.work).where(*mine).values(lease_until_s=now_s + ttl_s))
            held |= set(connection.execute(select(_ITEMS.key).where(*mine)).scalars())
        return held

    return database.write(work)


def release(database: Database, key: str, owner: str, *, due_s: float, error: str, counts_try: bool) -> bool:
    """Give an item back after a failure; return whether this owner held it.

    Args:
        database: The registry.
        key: The item's key.
        owner: As in ``claim``.
        due_s: When it may be tried again [s since the epoch].
        error: Why it failed.
        counts_try: False if the environment failed: then the try is taken back.
    """
    tries = _ITEMS.tries if counts_try else case((_ITEMS.tries > 0, _ITEMS.tries - 1), else_=0)
    freed = {"owner": "", "lease_until_s": 0.0, "published_s": 0.0, "due_s": due_s, "tries": tries}
    shown = storable(error)[:ERROR_CHARACTERS_MAX]
    mine = (_ITEMS.key == key, _ITEMS.owner == owner, _ITEMS.state == OPEN)
    query = update(schema.work).where(*mine).values(**freed, error=shown)
    return database.write(lambda connection: connection.execute(query).rowcount > 0)


def end(connection: Connection, key: str, owner: str, now_s: float) -> bool:
    """End an item within the transaction of its results; False if another commit ended it before, or it is gone."""
    ended = {"state": DONE, "owner": owner, "lease_until_s": 0.0, "ended_s": now_s, "error": ""}
    query = update(schema.work).where(_ITEMS.key == key, _ITEMS.state == OPEN).values(**ended)
    return connection.execute(query).rowcount > 0


def is_held(connection: Connection, key: str, owner: str) -> bool:
    """Tell, and keep true until the transaction ends, whether an item is open and leased to this owner."""
    query = select(_ITEMS.key).where(_ITEMS.key == key, _ITEMS.state == OPEN, _ITEMS.owner == owner)
    return connection.execute(query.with_for_update()).first() is not None


def take_unpublished(
    database: Database,
    *,
    now_s: float,
    count_max: int,
    flow: str | None = None,
    operations: Collection[str] | None = None,
) -> list[WorkItem]:
    """Return open items that are due and whose keys no topic got; a publisher sends them, then marks them."""
    query = select(schema.work).where(_ITEMS.state == OPEN, _ITEMS.published_s == 0, _ITEMS.due_s <= now_s)
    if flow is not None:
        query = query.where(_ITEMS.flow == flow)
    if operations is not None:
        query = query.where(_ITEMS.stage.in_(sorted(operations)))
    return _items(database, query.limit(count_max))


def mark_published(database: Database, keys: Collection[str], *, now_s: float) -> None:
    """Note that a topic has the keys."""

    def work(connection: Connection) -> None:
        for some in pages(sorted(keys)):
            connection.execute(update(schema.work).where(_ITEMS.key.in_(some)).values(published_s=now_s))

    database.write(work)


def unpublish_expired(database: Database, *, now_s: float, lost_after_s: float, flow: str | None = None) -> int:
    """Make open items due for publishing again; return their number.

    Items whose lease ran out (their worker died), and items that were published ``lost_after_s`` ago and that no worker
    has claimed since (the topic lost the key).
    """
    ran_out = (_ITEMS.owner != "") & (_ITEMS.lease_until_s <= now_s)
    lost = (_ITEMS.owner == "") & (_ITEMS.published_s <= now_s - lost_after_s)
    query = (
        update(schema.work)
        .where(_ITEMS.state == OPEN, _ITEMS.published_s > 0, or_(ran_out, lost))
        .values(published_s=0.0)
    )
    if flow is not None:
        query = query.where(_ITEMS.flow == flow)
    return database.write(lambda connection: connection.execute(query).rowcount)


def owners_of(database: Database, flow: str) -> list[str]:
    """Return who holds open items of a flow, of very many only the first."""
    query = select(_ITEMS.owner).where(_ITEMS.flow == flow, _ITEMS.state == OPEN, _ITEMS.owner != "")
    query = query.distinct().order_by(_ITEMS.owner).limit(CLAIM_MAX)
    return database.read(lambda connection: list(connection.execute(query).scalars()))


def free_owner(database: Database, owner: str) -> None:
    """Give back every open item of an owner that is dead; its tries stay."""
    freed = {"owner": "", "lease_until_s": 0.0, "published_s": 0.0}
    query = update(schema.work).where(_ITEMS.owner == owner, _ITEMS.state == OPEN).values(**freed)
    database.write(lambda connection: connection.execute(query))


def open_count(database: Database, flow: str, operation: str) -> int:
    """Count the items of an operation that are not done."""
    query = select(func.count()).where(_ITEMS.flow == flow, _ITEMS.stage == operation, _ITEMS.state == OPEN)
    return database.read(lambda connection: int(connection.execute(query).scalar_one()))


def counts_by_operation(database: Database, flow: str) -> dict[str, tuple[int, int]]:
    """Count the items of each operation: (open, done)."""
    opened = func.sum(case((_ITEMS.state == OPEN, 1), else_=0))
    query = select(_ITEMS.stage, opened, func.count()).where(_ITEMS.flow == flow).group_by(_ITEMS.stage)

    def work(connection: Connection) -> dict[str, tuple[int, int]]:
        return {operation: (int(some), int(every) - int(some)) for operation, some, every in connection.execute(query)}

    return database.read(work)


def done_before(database: Database, flow: str, operation: str, version_id: int, ordinal: int) -> int:
    """Count the done items of an operation over one version that begin before an ordinal."""
    mine = (_ITEMS.flow == flow, _ITEMS.stage == operation, _ITEMS.version_id == version_id)
    query = select(func.count()).where(*mine, _ITEMS.state == DONE, _ITEMS.first < ordinal)
    return database.read(lambda connection: int(connection.execute(query).scalar_one()))


def done_records(database: Database, flow: str) -> dict[str, int]:
    """Count the records of the items of each operation that are done."""
    records = func.sum(_ITEMS["count"])
    query = select(_ITEMS.stage, records).where(_ITEMS.flow == flow, _ITEMS.state == DONE).group_by(_ITEMS.stage)
    return database.read(lambda connection: {operation: int(count) for operation, count in connection.execute(query)})


def flows_of(database: Database, version_id: int) -> list[str]:
    """Return the flows that have items of a version."""
    query = select(_ITEMS.flow).where(_ITEMS.version_id == version_id).distinct().order_by(_ITEMS.flow)
    return database.read(lambda connection: list(connection.execute(query).scalars()))


def remove_items(database: Database, flow: str, version_id: int) -> None:
    """Delete the items of one version of a flow; what they made stays, and a run that adds them again finds it."""
    query = delete(schema.work).where(_ITEMS.flow == flow, _ITEMS.version_id == version_id)
    database.write(lambda connection: connection.execute(query))


def reopen(database: Database, keys: Collection[str]) -> None:
    """Make done items due again, with fresh tries: what they made is lost or damaged."""

    def work(connection: Connection) -> None:
        for some in pages(sorted(keys)):
            connection.execute(update(schema.work).where(_ITEMS.key.in_(some), _ITEMS.state == DONE).values(**_FRESH))

    database.write(work)


def reopen_where(connection: Connection, conditions: Sequence[ColumnElement[bool]]) -> list[WorkItem]:
    """Reopen the done items that meet the conditions, within a transaction; return them."""
    query = select(schema.work).where(_ITEMS.state == DONE, *conditions).order_by(_ITEMS.key).with_for_update()
    found = [_item(row) for row in connection.execute(query)]
    for some in pages([item.key for item in found]):
        connection.execute(update(schema.work).where(_ITEMS.key.in_(some)).values(**_FRESH))
    return found


def purge(database: Database, *, older_than_s: float, count_max: int) -> int:
    """Delete done items of flows that have nothing open and whose last item ended before ``older_than_s``.

    A flow that starts again afterwards adds its items again, and finds what they made.

    Args:
        database: The registry.
        older_than_s: Time before which the whole flow must have ended [s since the epoch].
        count_max: Most items of one call; call again until it returns 0.
    """
    ended = (
        select(_ITEMS.flow)
        .group_by(_ITEMS.flow)
        .having(func.min(_ITEMS.state) == DONE, func.max(_ITEMS.ended_s) < older_than_s)
        .order_by(_ITEMS.flow)
        .limit(FLOWS_MAX)
    )

    def work(connection: Connection) -> int:
        flows = list(connection.execute(ended).scalars())
        query = select(_ITEMS.key).where(_ITEMS.flow.in_(flows), _ITEMS.state == DONE).order_by(_ITEMS.key)
        keys = list(connection.execute(query.limit(count_max)).scalars())
        for some in pages(keys):
            connection.execute(delete(schema.work).where(_ITEMS.key.in_(some), _ITEMS.state == DONE))
        return len(keys)

    return database.write(work)


_FRESH: dict[str, Any] = {
    "state": OPEN,
    "owner": "",
    "lease_until_s": 0.0,
    "tries": 0,
    "due_s": 0.0,
    "error": "",
    "published_s": 0.0,
    "ended_s": 0.0,
}


def _is_free(now_s: float) -> ColumnElement[bool]:
    return (_ITEMS.state == OPEN) & (_ITEMS.due_s <= now_s) & (_ITEMS.lease_until_s <= now_s)


def _lease(connection: Connection, rows: Sequence[Row[Any]], owner: str, until_s: float) -> list[Claimed]:
    for some in pages([row.key for row in rows]):
        taken = {"owner": owner, "lease_until_s": until_s, "tries": _ITEMS.tries + 1}
        connection.execute(update(schema.work).where(_ITEMS.key.in_(some)).values(**taken))
    return [Claimed(item=_item(row), tries=row.tries + 1) for row in rows]


def _row(item: WorkItem) -> dict[str, Any]:
    row = {**columns(item), **_FRESH}
    row["stage"] = row.pop("operation")
    return row


def _items(database: Database, query: Select[Any]) -> list[WorkItem]:
    return database.read(lambda connection: [_item(row) for row in connection.execute(query)])


def _item(row: Sequence[Any]) -> WorkItem:
    # By place: `count` is a method of every row.
    return WorkItem(key=row[0], flow=row[1], operation=row[2], version_id=row[3], first=row[4], count=row[5])
