"""Rows of stored blobs: what garbage collection decides on, and what keeps a blob that results name.

Reuse and deletion lock the same row. A writer holds a blob before it puts it (``hold``), and again in the transaction
that commits what names it, so that no object is deleted between its put and its commit.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection, Mapping

from sqlalchemy import Connection, func, select, update

from polyreme_datahub.errors import BlobDeletingError
from polyreme_datahub.registry import schema
from polyreme_datahub.registry.bulk import insert_new
from polyreme_datahub.registry.engine import Database, pages

LIVE, CONDEMNED, DELETING = 0, 1, 2
TOUCH_EVERY_S = 3600.0
"""A live blob that was touched within this time is not written again: many commits may share it."""
_BLOBS = schema.blobs.c


class Verdict(enum.Enum):
    """What a collection does with a blob."""

    KEEP = "keep"
    CONDEMN = "condemn"
    REVIVE = "revive"
    DELETE = "delete"
    FINISH = "finish"
    """Its deletion was interrupted."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlobRow:
    """What is known of a stored blob."""

    digest: str
    size: int
    state: int
    touched_s: float
    condemned_s: float
    marked: int


def judge(blob: BlobRow, *, collection: int, started_s: float, now_s: float, grace_s: float) -> Verdict:
    """Decide on a blob after a collection has marked all that it can reach.

    Args:
        blob: The blob's row.
        collection: Number of this collection.
        started_s: When it started; what was touched since, or shortly before, counts as reached.
        now_s: Now [s since the epoch].
        grace_s: How long a blob stays condemned before it is deleted.
    """
    if blob.state == DELETING:
        return Verdict.FINISH
    reached = blob.marked >= collection or blob.touched_s >= started_s - TOUCH_EVERY_S
    if blob.state == CONDEMNED:
        if reached:
            return Verdict.REVIVE
        return Verdict.DELETE if blob.condemned_s + grace_s <= now_s else Verdict.KEEP
    return Verdict.KEEP if reached else Verdict.CONDEMN


def hold(database: Database, sizes: Mapping[str, int], *, now_s: float) -> None:
    """Keep blobs from deletion: call it before they are put.

    Raises:
        BlobDeletingError: If one of them is being deleted at this moment.
    """
    database.write(lambda connection: hold_within(connection, sizes, now_s))


def hold_within(connection: Connection, sizes: Mapping[str, int], now_s: float) -> None:
    """``hold`` within the transaction that commits what names the blobs."""
    fresh = {"state": LIVE, "touched_s": now_s, "condemned_s": 0.0, "marked": 0}
    insert_new(connection, schema.blobs, [{"digest": digest, "size": size, **fresh} for digest, size in sizes.items()])
    for some in pages(sorted(sizes)):
        query = select(_BLOBS.digest, _BLOBS.state, _BLOBS.touched_s).where(_BLOBS.digest.in_(some))
        seen = {digest: (state, touched_s) for digest, state, touched_s in connection.execute(query)}
        stale = [one for one in some if one not in seen or seen[one][0] != LIVE or seen[one][1] < now_s - TOUCH_EVERY_S]
        touch(connection, stale, now_s)


def touch(connection: Connection, digests: Collection[str], now_s: float) -> None:
    """Lock the rows of blobs and make them live.

    Raises:
        BlobDeletingError: If one of them is being deleted, or is gone.
    """
    for some in pages(sorted(digests)):
        query = select(_BLOBS.digest, _BLOBS.state).where(_BLOBS.digest.in_(some)).order_by(_BLOBS.digest)
        states = {row.digest: row.state for row in connection.execute(query.with_for_update())}
        for digest in some:
            if states.get(digest, DELETING) == DELETING:
                raise BlobDeletingError(f"blob {digest} is being deleted: put it again, then commit again")
        live = {"state": LIVE, "touched_s": now_s, "condemned_s": 0.0}
        connection.execute(update(schema.blobs).where(_BLOBS.digest.in_(some)).values(**live))


def hold_places(connection: Connection, digests: Collection[str], now_s: float) -> None:
    """Hold the blobs in which artifacts lie, within a transaction.

    Raises:
        BlobDeletingError: If one of them is being deleted, or an artifact is gone.
    """
    places = schema.artifacts.c
    sizes: dict[str, int] = {}
    for some in pages(sorted(set(digests))):
        mine = places.digest.in_(some)
        query = select(places.blob, func.max(places.start + places.length), func.count()).where(mine)
        found = 0
        for blob, size, parts in connection.execute(query.group_by(places.blob)):
            sizes[blob] = max(sizes.get(blob, 0), int(size))
            found += parts
        if found < len(some):
            there = set(connection.execute(select(places.digest).where(mine)).scalars())
            gone = min(set(some) - there, default=some[0])
            raise BlobDeletingError(f"artifact {gone} was deleted: recompute it, then commit again")
    hold_within(connection, sizes, now_s)


def mark(connection: Connection, digests: Collection[str], collection: int) -> None:
    """Note that a collection reached blobs; a digest that is no stored blob has no row and changes nothing."""
    for some in pages(sorted(digests)):
        unmarked = (_BLOBS.digest.in_(some), _BLOBS.marked < collection)
        connection.execute(update(schema.blobs).where(*unmarked).values(marked=collection))
