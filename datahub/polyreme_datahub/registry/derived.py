"""Versions derived from a version: a subset by expression, and splits that no group of samples crosses.

A derived version is written under a draft's name and published by one transaction, so that no reader sees a part of it.
A draft whose writer died is removed later (``remove_drafts``).
"""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from sqlalchemy import Connection, delete, select, update

from polyreme_datahub.digests import digest_value
from polyreme_datahub.errors import SourceInvalidError
from polyreme_datahub.registry import schema
from polyreme_datahub.registry.bulk import insert_new
from polyreme_datahub.registry.datasets import (
    DRAFT,
    DatasetVersion,
    VersionDocument,
    find_version,
    lock_name,
    next_number,
    row_of,
)
from polyreme_datahub.registry.engine import Database, pages
from polyreme_datahub.registry.lineage import samples_after
from polyreme_datahub.registry.rows import SampleRow, columns

PAGE_ROWS = 5000
"""Samples of one transaction of a draft."""
DRAFTS_MAX = 100
SPLITS_MAX = 100
SHARES = 2**16
Row = tuple[SampleRow, Mapping[str, Any]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Derivation:
    """One version to be: which samples it takes."""

    name: str
    """Name of the dataset that gets the version."""
    source: Mapping[str, Any]
    """How it was derived, JSON-able, without the content."""
    takes: Callable[[Mapping[str, Any]], bool]


def derive(
    database: Database,
    derivations: Iterable[Derivation],
    rows: Iterable[Row],
    *,
    token: str,
    now_s: float,
    store_first: Callable[[VersionDocument], None] | None = None,
) -> list[DatasetVersion]:
    """Write derived versions in one pass over samples, then publish each; samples are numbered from 0 again.

    The same samples again are the version that there is.

    Args:
        database: The registry.
        derivations: The versions.
        rows: Samples in order, each with its columns.
        token: A name that no other call uses.
        now_s: Now [s since the epoch].
        store_first: As of ``datasets.add_version``.

    Raises:
        SourceInvalidError: If a derivation takes no sample.
    """
    drafts = [_Draft(database, one, f"{DRAFT}{token}/{at}", now_s) for at, one in enumerate(derivations)]
    for sample, values in rows:
        for draft in drafts:
            if draft.derivation.takes(values):
                draft.add(sample)
    for draft in drafts:
        draft.finish()
    return [_publish(database, draft, now_s, store_first) for draft in drafts]


def rows_with_columns(database: Database, version_id: int) -> Iterator[Row]:
    """Yield the samples of a version with the columns that every version has: ``ordinal`` and ``sample_id``."""
    ordinal = -1
    while page := samples_after(database, version_id, ordinal):
        for sample in page:
            yield sample, {"ordinal": sample.ordinal, "sample_id": sample.sample_id}
        ordinal = page[-1].ordinal


def split_takers(
    shares: Mapping[str, float], group: Callable[[Mapping[str, Any]], object], *, salt: str = ""
) -> dict[str, Callable[[Mapping[str, Any]], bool]]:
    """Return which samples each split takes: the digest of its group decides, so that no group is in two splits.

    Args:
        shares: Share of each split; their sum is the whole.
        group: Returns the group of a sample, JSON-able.
        salt: Another salt gives other splits.

    Raises:
        SourceInvalidError: If a share is not positive, or there are too many splits.
    """
    if not 0 < len(shares) <= SPLITS_MAX or min(shares.values()) <= 0:
        raise SourceInvalidError(
            f"splits are not valid: {dict(shares)}, expected 1 to {SPLITS_MAX} positive shares", field="splits"
        )
    whole = sum(shares.values())
    bounds = [round(SHARES * part / whole) for part in itertools.accumulate(shares.values())]

    def place(values: Mapping[str, Any]) -> int:
        digest = hashlib.sha256(digest_value([salt, group(values)]).encode()).digest()
        return bisect.bisect_right(bounds, int.from_bytes(digest[:2], "big"))

    return {name: partial(lambda values, at: place(values) == at, at=at) for at, name in enumerate(shares)}


def remove_drafts(database: Database, *, older_than_s: float) -> int:
    """Remove drafts that were begun before a time and never published; return the number of rows removed.

    Bounded: call again until it returns 0.
    """
    versions, samples = schema.versions.c, schema.samples.c

    def work(connection: Connection) -> int:
        query = select(versions.id).where(versions.name.like(f"{DRAFT}%"), versions.created_s < older_than_s)
        removed = 0
        for version in connection.execute(query.order_by(versions.id).limit(DRAFTS_MAX)).scalars().all():
            some = select(samples.ordinal).where(samples.version_id == version).order_by(samples.ordinal)
            ordinals = list(connection.execute(some.limit(PAGE_ROWS - removed)).scalars())
            for few in pages(ordinals):
                mine = (samples.version_id == version, samples.ordinal.in_(few))
                connection.execute(delete(schema.samples).where(*mine))
            removed += len(ordinals)
            if removed >= PAGE_ROWS:
                return removed
            connection.execute(delete(schema.versions).where(versions.id == version))
            removed += 1
        return removed

    return database.write(work)


class _Draft:
    def __init__(self, database: Database, derivation: Derivation, name: str, now_s: float) -> None:
        self.derivation = derivation
        self.records = 0
        self._database = database
        self._waiting: list[SampleRow] = []
        self._content = hashlib.sha256()
        document = VersionDocument(name=name, number=1, source=derivation.source, digest="", records=0, created_s=now_s)

        def begin(connection: Connection) -> int:
            insert_new(connection, schema.versions, [row_of(document)])
            return int(
                connection.execute(select(schema.versions.c.id).where(schema.versions.c.name == name)).scalar_one()
            )

        self.version_id = database.write(begin)

    @property
    def digest(self) -> str:
        """Digest of how it was derived and of every sample that it has."""
        return digest_value([dict(self.derivation.source), self._content.hexdigest()])

    def add(self, sample: SampleRow) -> None:
        self._content.update(digest_value([sample.sample_id, sample.record]).encode())
        self._waiting.append(dataclasses.replace(sample, ordinal=self.records))
        self.records += 1
        if len(self._waiting) >= PAGE_ROWS:
            self.finish()

    def finish(self) -> None:
        rows = [{"version_id": self.version_id, **columns(row)} for row in self._waiting]
        self._waiting = []
        self._database.write(lambda connection: insert_new(connection, schema.samples, rows))


def _publish(
    database: Database, draft: _Draft, now_s: float, store_first: Callable[[VersionDocument], None] | None
) -> DatasetVersion:
    versions = schema.versions.c
    name, source = draft.derivation.name, {**draft.derivation.source, "content": draft.digest}
    if not draft.records:
        raise SourceInvalidError(f"{name} would have no sample: {dict(draft.derivation.source)}", field="where")

    def work(connection: Connection) -> int:
        lock_name(connection, name)
        mine = (versions.name == name, versions.digest == draft.digest)
        found = connection.execute(select(versions.number).where(*mine)).scalar()
        if found is not None:
            return int(found)
        document = VersionDocument(
            name=name,
            number=next_number(connection, name),
            source=source,
            digest=draft.digest,
            records=draft.records,
            created_s=now_s,
        )
        if store_first is not None:
            store_first(document)
        named = update(schema.versions).where(versions.id == draft.version_id)
        connection.execute(named.values(**row_of(document)))
        return document.number

    number = database.write(work)
    return find_version(database, f"{name}@{number}")
