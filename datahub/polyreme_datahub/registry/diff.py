"""Difference of two versions by sample id and digest of the record."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from functools import partial

from sqlalchemy import Connection, select

from polyreme_datahub.registry import schema
from polyreme_datahub.registry.engine import ROWS_MAX, Database

SHOWN_MAX = 1000
_SAMPLES = schema.samples.c


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class VersionDiff:
    """What differs: counts of samples, and the first ids of each kind."""

    added: int
    removed: int
    changed: int
    same: int
    first_added: Sequence[str]
    first_removed: Sequence[str]
    first_changed: Sequence[str]


def diff(database: Database, before: int, after: int, *, shown_max: int = SHOWN_MAX) -> VersionDiff:
    """Compare two versions; ids are shown in the order of the version that has them.

    Args:
        database: The registry.
        before: Row of the older version.
        after: Row of the newer version.
        shown_max: Most ids of each kind.
    """
    counts = {"added": 0, "removed": 0, "changed": 0, "same": 0}
    shown: dict[str, list[str]] = {"added": [], "removed": [], "changed": []}

    def note(kind: str, sample_id: str) -> None:
        counts[kind] += 1
        if kind in shown and len(shown[kind]) < shown_max:
            shown[kind].append(sample_id)

    for version, other, missing in ((before, after, "removed"), (after, before, "added")):
        ordinal = -1
        while page := database.read(partial(_page, version_id=version, after=ordinal)):
            ids = sorted({sample_id for _, sample_id, _ in page})
            records = database.read(partial(_records, version_id=other, ids=ids))
            for _, sample_id, record in page:
                if sample_id not in records:
                    note(missing, sample_id)
                elif missing == "added":
                    note("same" if record in records[sample_id] else "changed", sample_id)
            ordinal = page[-1][0]
    return VersionDiff(
        **counts,
        first_added=shown["added"],
        first_removed=shown["removed"],
        first_changed=shown["changed"],
    )


def _page(connection: Connection, version_id: int, after: int) -> list[tuple[int, str, str]]:
    query = (
        select(_SAMPLES.ordinal, _SAMPLES.sample_id, _SAMPLES.record)
        .where(_SAMPLES.version_id == version_id, _SAMPLES.ordinal > after)
        .order_by(_SAMPLES.ordinal)
        .limit(ROWS_MAX)
    )
    return [(ordinal, sample_id, record) for ordinal, sample_id, record in connection.execute(query)]


def _records(connection: Connection, version_id: int, ids: Sequence[str]) -> dict[str, set[str]]:
    mine = (_SAMPLES.version_id == version_id, _SAMPLES.sample_id.in_(ids))
    found: dict[str, set[str]] = defaultdict(set)
    for sample_id, record in connection.execute(select(_SAMPLES.sample_id, _SAMPLES.record).where(*mine)):
        found[sample_id].add(record)
    return found
