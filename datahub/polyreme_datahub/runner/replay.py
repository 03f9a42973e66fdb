"""Replay: dead letters are deleted, and the next run tries their records again."""

from __future__ import annotations

import dataclasses

from polyreme_api.errors import InvalidConfigError
from polyreme_datahub.errors import DatasetNotFoundError
from polyreme_datahub.operations.declare import find_operation
from polyreme_datahub.registry import flows, progress, results, work_items
from polyreme_datahub.registry.datasets import DatasetVersion
from polyreme_datahub.registry.engine import Database
from polyreme_datahub.runner.sealed_version import find_source


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReplayReport:
    """What a replay deleted."""

    reference: str
    source: str
    """The version that holds the records; the same one for a dataset that no recipe made."""
    records: int
    """Records that will be tried again."""
    indexes: int
    """Finished indexes that will be sealed again."""


def replay(database: Database, version: DatasetVersion, operation: str | None) -> ReplayReport:
    """Delete the dead letters of a version, of one operation or of all, and what was finished without their records.

    A sealed version itself never changes: its recipe's next run seals another one.
    """
    versions = [version]
    try:
        if "from" in version.source:
            versions.append(find_source(database, version))
    except DatasetNotFoundError:
        # Its records are gone: what it has of dead letters is from jobs that train on it.
        pass
    records = indexes = 0
    for one in versions:
        dead = results.dead_records(database, one.id, operation)
        if not dead:
            continue
        for flow in work_items.flows_of(database, one.id):
            if _has_barrier(database, flow):
                # A reopened barrier would not wait for the records before it. The next run adds the items again.
                work_items.remove_items(database, flow, one.id)
        results.replay(database, one.id, operation)
        records += dead
        indexes += progress.remove_indexes(database, one.id)
    return ReplayReport(reference=version.reference, source=versions[-1].reference, records=records, indexes=indexes)


def _has_barrier(database: Database, flow: str) -> bool:
    """Tell whether a flow has a barrier; one whose operations can't be imported here may have one."""
    body = flows.find_flow(database, flow)
    try:
        return body is not None and any(find_operation(step["operation"]).barrier for step in body["steps"])
    except InvalidConfigError:
        return True
