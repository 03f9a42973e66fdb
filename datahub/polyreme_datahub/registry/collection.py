"""Garbage collection of the lakehouse by reachability: condemn, wait, check again, delete.

A collection lists the stored blobs, marks what versions, indexes and pinned plans reach, then sweeps: an unmarked blob
is condemned; one that is still unmarked by a later collection, after the grace, is deleted. Its progress is a row, so
that one that was killed continues, and every step may run twice.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

from sqlalchemy import Connection, delete, insert, select, update

from polyreme_api.store import ObjectStore
from polyreme_datahub.digests import blob_key
from polyreme_datahub.errors import CollectionStoppedError
from polyreme_datahub.registry import schema
from polyreme_datahub.registry.blobs import CONDEMNED, DELETING, LIVE, BlobRow, Verdict, judge, mark
from polyreme_datahub.registry.bulk import insert_new
from polyreme_datahub.registry.engine import ROWS_MAX, Database, pages
from polyreme_datahub.registry.marks import Read, named, reach
from polyreme_datahub.registry.rows import value_of

BLOBS = "blobs/sha256/"
PLANS = "plans/"
"""Objects that name what jobs train on: each is a pin."""
GRACE_S = 7 * 86400.0
RESUME_MAX_S = 86400.0
"""A collection that began longer ago is not continued: its marks are old."""
LISTING, MARKING, SWEEPING, DONE = "list", "mark", "sweep", "done"
_BLOBS = schema.blobs.c
_RUNS = schema.collections.c


@dataclasses.dataclass(slots=True, kw_only=True)
class CollectionReport:
    """What a collection did, or would do: (objects, bytes) of each verdict."""

    number: int
    dry_run: bool
    kept: tuple[int, int] = (0, 0)
    condemned: tuple[int, int] = (0, 0)
    revived: tuple[int, int] = (0, 0)
    deleted: tuple[int, int] = (0, 0)

    def note(self, verdict: Verdict, size: int) -> None:
        """Count a blob."""
        name = _COUNTED[verdict]
        objects, size_bytes = getattr(self, name)
        setattr(self, name, (objects + 1, size_bytes + size))


_COUNTED = {
    Verdict.KEEP: "kept",
    Verdict.CONDEMN: "condemned",
    Verdict.REVIVE: "revived",
    Verdict.DELETE: "deleted",
    Verdict.FINISH: "deleted",
}
_DELETES = {Verdict.DELETE, Verdict.FINISH}


def collect(
    database: Database,
    store: ObjectStore,
    read: Read,
    *,
    now_s: Callable[[], float],
    grace_s: float = GRACE_S,
    dry_run: bool = False,
    is_pinned: Callable[[str], bool] = lambda _key: True,
) -> CollectionReport:
    """Run a collection, or continue the one that was interrupted.

    Args:
        database: The registry.
        store: The object store.
        read: Returns the bytes of artifacts (``Lakehouse.get_parts``).
        now_s: The clock [s since the epoch].
        grace_s: How long a blob stays condemned before it is deleted [s].
        dry_run: Marks, and counts what would be condemned and deleted; changes no blob.
        is_pinned: Tells whether a plan object, by its key, is still needed.

    Raises:
        CollectionStoppedError: If a plan can't be read: then nothing is condemned or deleted.
    """
    run = database.write(lambda connection: _begin(connection, now_s()))
    report = CollectionReport(number=run.id, dry_run=dry_run)
    if run.phase == LISTING:
        _list(database, store, now_s)
        run = _next(database, run, MARKING)
    if run.phase == MARKING:
        _mark(database, run, read)
        run = _next(database, run, SWEEPING)
    # Read at the end, and again by a collection that continues: a plan may be newer than the marks.
    _mark_plans(database, store, run, read, is_pinned)
    for blob in _sweep(database, run, report, now_s=now_s, grace_s=grace_s, dry_run=dry_run):
        store.delete(blob_key(blob))
        database.write(partial(_forget, blob=blob))
    _next(database, run, DONE)
    return report


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    id: int
    phase: str
    cursor: str
    started_s: float


def _begin(connection: Connection, now_s: float) -> _Run:
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql("LOCK TABLE collections IN SHARE ROW EXCLUSIVE MODE")
    query = select(schema.collections).where(_RUNS.phase != DONE).order_by(_RUNS.id.desc()).limit(1)
    row = connection.execute(query).first()
    if row is None or row.started_s < now_s - RESUME_MAX_S:
        connection.execute(insert(schema.collections).values(phase=LISTING, cursor="", started_s=now_s))
        row = connection.execute(query).one()
    return value_of(_Run, row)


def _next(database: Database, run: _Run, phase: str) -> _Run:
    database.write(lambda connection: _advance(connection, run, phase, ""))
    return dataclasses.replace(run, phase=phase, cursor="")


def _advance(connection: Connection, run: _Run, phase: str, cursor: str) -> None:
    connection.execute(update(schema.collections).where(_RUNS.id == run.id).values(phase=phase, cursor=cursor))


def _list(database: Database, store: ObjectStore, now_s: Callable[[], float]) -> None:
    """Give every stored blob a row; one that is first seen now counts as touched now."""
    listed = store.list(BLOBS)
    while some := list(itertools.islice(listed, ROWS_MAX)):
        fresh = {"state": LIVE, "touched_s": now_s(), "condemned_s": 0.0, "marked": 0}
        rows = [{"digest": one.key.rpartition("/")[2], "size": one.size_bytes, **fresh} for one in some]
        database.write(partial(insert_new, table=schema.blobs, rows=rows))


def _mark(database: Database, run: _Run, read: Read) -> None:
    """Mark what the samples and indexes of every version reach, page by page."""
    samples, versions, indexes = schema.samples.c, schema.versions.c, schema.indexes.c
    version, ordinal = (int(part) for part in (run.cursor or "0:-1").split(":"))
    while True:
        listings: set[str] = set()
        listed = (
            select(samples.ordinal, samples.record)
            .where(samples.version_id == version, samples.ordinal > ordinal)
            .order_by(samples.ordinal)
            .limit(ROWS_MAX)
        )
        page = database.read(lambda connection, listed=listed: connection.execute(listed).all())  # type: ignore[misc]
        if page:
            ordinal = page[-1].ordinal
            roots = [row.record for row in page]
        else:
            following = (
                select(versions.id, versions.digest, versions.source)
                .where(versions.id > version)
                .order_by(versions.id)
                .limit(1)
            )
            found = database.read(lambda connection, query=following: connection.execute(query).first())  # type: ignore[misc]
            if found is None:
                return
            version, ordinal = int(found.id), -1
            manifests = select(indexes.manifest).where(indexes.version_id == version)
            roots = database.read(lambda connection, query=manifests: list(connection.execute(query).scalars()))  # type: ignore[misc]
            # Actions on a whole version have its digest as their input: groups of shards of an index.
            roots.append(found.digest)
            # A listing of files is named by its version, and names no blob.
            listings = named(found.source.encode())
        _mark_roots(database, dataclasses.replace(run, cursor=f"{version}:{ordinal}"), roots, read, also=listings)


def _mark_plans(
    database: Database, store: ObjectStore, run: _Run, read: Read, is_pinned: Callable[[str], bool]
) -> None:
    for info in store.list(PLANS):
        if not is_pinned(info.key):
            continue
        content = store.get(info.key)
        try:
            readable = isinstance(json.loads(content), dict)
        except ValueError:
            readable = False
        if not readable:
            raise CollectionStoppedError(
                f"garbage collection stopped: {info.key} names what a job needs and can't be read: run the job again, "
                "or delete the object if the job is gone"
            )
        _mark_roots(database, run, sorted(named(content)), read)


def _mark_roots(database: Database, run: _Run, roots: list[str], read: Read, *, also: Collection[str] = ()) -> None:
    held = {*reach(database, roots, read), *also}

    def work(connection: Connection) -> None:
        mark(connection, held, run.id)
        _advance(connection, run, run.phase, run.cursor)

    database.write(work)


def _sweep(
    database: Database,
    run: _Run,
    report: CollectionReport,
    *,
    now_s: Callable[[], float],
    grace_s: float,
    dry_run: bool,
) -> Iterator[str]:
    """Judge every blob; yield those whose object is to be deleted now."""
    after = "" if dry_run else run.cursor
    while True:
        decide = _Judge(run=run, now_s=now_s(), grace_s=grace_s)
        judged = database.write(partial(_judge_page, after=after, decide=decide, dry_run=dry_run))
        if not judged:
            return
        for blob, verdict in judged:
            if verdict in _DELETES and not dry_run:
                if not database.write(partial(_doom, digest=blob.digest, decide=decide)):
                    report.note(Verdict.KEEP, blob.size)
                    continue
                yield blob.digest
            report.note(verdict, blob.size)
        after = judged[-1][0].digest
        if not dry_run:
            database.write(partial(_advance, run=run, phase=SWEEPING, cursor=after))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Judge:
    run: _Run
    now_s: float
    grace_s: float

    def __call__(self, row: Any) -> tuple[BlobRow, Verdict]:
        blob = value_of(BlobRow, row)
        began_s = self.run.started_s
        return blob, judge(blob, collection=self.run.id, started_s=began_s, now_s=self.now_s, grace_s=self.grace_s)


def _judge_page(connection: Connection, after: str, decide: _Judge, dry_run: bool) -> list[tuple[BlobRow, Verdict]]:
    query = select(schema.blobs).where(_BLOBS.digest > after).order_by(_BLOBS.digest).limit(ROWS_MAX)
    rows = connection.execute(query if dry_run else query.with_for_update())
    judged = [decide(row) for row in rows]
    if not dry_run:
        changes = {
            Verdict.CONDEMN: {"state": CONDEMNED, "condemned_s": decide.now_s},
            Verdict.REVIVE: {"state": LIVE, "condemned_s": 0.0},
        }
        for verdict, values in changes.items():
            digests = [blob.digest for blob, one in judged if one is verdict]
            if digests:
                connection.execute(update(schema.blobs).where(_BLOBS.digest.in_(digests)).values(**values))
    return judged


def _doom(connection: Connection, digest: str, decide: _Judge) -> bool:
    """Check a blob again under its lock, and forget what lies in it: from here on nothing can reuse it."""
    row = connection.execute(select(schema.blobs).where(_BLOBS.digest == digest).with_for_update()).first()
    if row is None or decide(row)[1] not in _DELETES:
        return False
    connection.execute(update(schema.blobs).where(_BLOBS.digest == digest).values(state=DELETING))
    places, actions, inputs = schema.artifacts.c, schema.actions.c, schema.action_inputs.c
    parts = [*connection.execute(select(places.digest).where(places.blob == digest)).scalars(), digest]
    for some in pages(sorted(parts)):
        unsaved = (actions.output.in_(some), actions.value.is_(None))
        keys = list(connection.execute(select(actions.key).where(*unsaved)).scalars())
        for few in pages(keys):
            connection.execute(delete(schema.action_inputs).where(inputs.action.in_(few)))
            connection.execute(delete(schema.actions).where(actions.key.in_(few)))
    connection.execute(delete(schema.artifacts).where(places.blob == digest))
    return True


def _forget(connection: Connection, blob: str) -> None:
    connection.execute(delete(schema.blobs).where(_BLOBS.digest == blob, _BLOBS.state == DELETING))
