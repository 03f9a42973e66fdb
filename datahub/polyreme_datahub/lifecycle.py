"""Public functions of a dataset's lifecycle: tags, pins, difference, subsets, splits, garbage collection, rebuild."""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Mapping
from typing import Any

from polyreme_datahub.dataset_views import check_name
from polyreme_datahub.lakehouse import Lakehouse
from polyreme_datahub.objects import open_store
from polyreme_datahub.registry import rebuild
from polyreme_datahub.registry.collection import GRACE_S, CollectionReport, collect
from polyreme_datahub.registry.datasets import DatasetVersion, find_version
from polyreme_datahub.registry.derived import Derivation, derive, remove_drafts, rows_with_columns, split_takers
from polyreme_datahub.registry.diff import VersionDiff
from polyreme_datahub.registry.diff import diff as compare
from polyreme_datahub.registry.opening import opened_database
from polyreme_datahub.registry.predicate import parse_predicate
from polyreme_datahub.registry.rebuild import RebuildReport, seal_samples, store_document
from polyreme_datahub.registry.tags import remove_tag, set_tag, tags_of
from polyreme_datahub.registry.work_items import purge
from polyreme_datahub.sources.open import inherited
from polyreme_datahub.sources.samples import KIND
from polyreme_datahub.version_facts import (
    SampleLineage,
    check_is_read,
    lineage_of_sample,
    sealed_columns,
    sealed_rows,
    statistics_of,
)

COLUMNS = ("ordinal", "sample_id")
"""Columns that every version has."""
DRAFT_S = 86_400.0
"""Age at which a draft's writer counts as dead: no derivation takes so long [s]."""
WORK_S = 7 * 86_400.0
"""Time for which the work items of a flow that ended are kept [s]."""
PURGED_MAX = 10_000
"""Work items that one transaction deletes."""


def tag(registry_url: str, reference: str, name: str) -> DatasetVersion:
    """Point a tag at a version: ``<dataset>@<name>`` is this version until the tag is moved.

    Raises:
        DatasetNotFoundError: If there is no such version.
        SourceInvalidError: If the tag is not valid.
    """
    with opened_database(registry_url) as database:
        return set_tag(database, reference, name, now_s=_now_s())


def untag(registry_url: str, dataset: str, name: str) -> bool:
    """Remove a tag; return whether there was one."""
    with opened_database(registry_url) as database:
        return remove_tag(database, dataset, name)


def list_tags(registry_url: str, dataset: str) -> dict[str, int]:
    """Return the number of the version of each tag."""
    with opened_database(registry_url) as database:
        return tags_of(database, dataset)


def diff(registry_url: str, before: str, after: str, *, shown_max: int = 20) -> VersionDiff:
    """Compare two versions by sample id and digest of the record.

    Raises:
        DatasetNotFoundError: If there is no such version.
        RefusedError: If records of one were not read yet.
    """
    with opened_database(registry_url) as database:
        versions = [find_version(database, reference) for reference in (before, after)]
        for version in versions:
            check_is_read(database, version)
        return compare(database, *(version.id for version in versions), shown_max=shown_max)


def subset(
    registry_url: str,
    objects_url: str,
    reference: str,
    name: str,
    where: str,
) -> DatasetVersion:
    """Make a version of the samples that an expression chooses.

    Args:
        registry_url: As in ``hub.register``.
        objects_url: As in ``hub.register``.
        reference: The version to choose from.
        name: Dataset of the new version.
        where: Expression over ``COLUMNS`` and the columns of a sealed version's manifest: ``width >= 512``.

    Raises:
        PredicateInvalidError: If the expression breaks a rule.
        SourceInvalidError: If no sample is chosen.
        RefusedError: If records of the version were not read yet.
    """

    def derivations(version: DatasetVersion) -> list[Derivation]:
        known = dict.fromkeys((*COLUMNS, *sealed_columns(Lakehouse(open_store(objects_url)), version)))
        takes = parse_predicate(where, tuple(known))
        source = {"kind": "subset", "of": version.digest, "where": where}
        return [Derivation(name=name, source=source, takes=takes)]

    return _derive(registry_url, objects_url, reference, derivations)[0]


def split(
    registry_url: str,
    objects_url: str,
    reference: str,
    shares: Mapping[str, float],
    group: str,
    *,
    salt: str = "",
) -> list[DatasetVersion]:
    """Split a version into datasets ``<name>/<split>``: samples of one group are never in two of them.

    Args:
        registry_url: As in ``hub.register``.
        objects_url: As in ``hub.register``.
        reference: The version to split.
        shares: Share of each split.
        group: Column whose value is the group.
        salt: Another salt gives other splits.

    Raises:
        SourceInvalidError: If the shares are not valid, or a split would be empty.
    """
    takers = split_takers(shares, lambda values: values.get(group), salt=salt)

    def derivations(version: DatasetVersion) -> list[Derivation]:
        how = {"kind": "split", "of": version.digest, "group": group, "salt": salt, "shares": dict(shares)}
        return [
            Derivation(name=f"{version.name}/{part}", source={**how, "part": part}, takes=takes)
            for part, takes in takers.items()
        ]

    return _derive(registry_url, objects_url, reference, derivations)


def collect_garbage(
    registry_url: str, objects_url: str, *, grace_s: float | None = None, dry_run: bool = False
) -> CollectionReport:
    """Condemn what nothing reaches, and delete what was condemned a grace ago; may be killed and run again.

    Rows go, too: drafts of derived versions whose writer died, and work items of flows that ended a week ago.

    Args:
        registry_url: As in ``hub.register``.
        objects_url: As in ``hub.register``.
        grace_s: How long a blob stays condemned [s]; None: seven days. Longer than any write takes to be committed.
        dry_run: Count objects and bytes only.

    Raises:
        CollectionStoppedError: If what a job needs can't be read; nothing is deleted then.
    """
    store = open_store(objects_url)
    wait_s = GRACE_S if grace_s is None else grace_s
    with opened_database(registry_url) as database:
        if not dry_run:
            while remove_drafts(database, older_than_s=_now_s() - DRAFT_S):
                pass
            while purge(database, older_than_s=_now_s() - WORK_S, count_max=PURGED_MAX):
                pass
        return collect(database, store, Lakehouse(store).get_parts, now_s=_now_s, grace_s=wait_s, dry_run=dry_run)


def statistics(registry_url: str, objects_url: str, reference: str) -> dict[str, Any]:
    """Return counts of a version's samples, and quantiles of sizes and text lengths.

    Raises:
        DatasetNotFoundError: If there is no such version.
        RefusedError: If no sample of it was decoded yet.
    """
    with opened_database(registry_url) as database:
        return statistics_of(database, Lakehouse(open_store(objects_url)), find_version(database, reference))


def sample_lineage(registry_url: str, objects_url: str, reference: str, sample_id: str) -> SampleLineage:
    """Return how a sample of a version was made: its record, and what each step of the recipe made of it.

    Raises:
        NotFoundError: If there is no such version or sample.
        RefusedError: If no recipe made the version.
    """
    with opened_database(registry_url) as database:
        version = find_version(database, reference)
        return lineage_of_sample(database, Lakehouse(open_store(objects_url)), version, sample_id)


def rebuild_registry(registry_url: str, objects_url: str) -> RebuildReport:
    """Restore versions and samples from the object store into a registry; what it has stays."""
    with opened_database(registry_url) as database:
        return rebuild.rebuild_registry(database, open_store(objects_url))


def _derive(registry_url: str, objects_url: str, reference: str, derivations: Any) -> list[DatasetVersion]:
    with opened_database(registry_url) as database:
        version = find_version(database, reference)
        check_is_read(database, version)
        wanted = [
            dataclasses.replace(one, source={**one.source, **inherited(version.source)}) for one in derivations(version)
        ]
        for one in wanted:
            check_name(one.name)
        store = open_store(objects_url)
        lakehouse = Lakehouse(store)
        sealed = version.source["kind"] == KIND
        made = derive(
            database,
            wanted,
            sealed_rows(database, lakehouse, version) if sealed else rows_with_columns(database, version.id),
            token=secrets.token_hex(8),
            now_s=_now_s(),
            store_first=store_document(store),
        )
        for one in made:
            seal_samples(database, store, one, lakehouse.get_parts)
        return made


def _now_s() -> float:
    return time.time()  # noqa: TID251 - the shell
