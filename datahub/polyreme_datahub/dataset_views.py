"""Views of datasets for users: the list, and one version with its operations, indexes and dead letters."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Mapping

from polyreme_api.errors import InvalidConfigError
from polyreme_api.store import ObjectNotFoundError, ObjectStore
from polyreme_datahub.errors import DatasetNotFoundError, SourceInvalidError
from polyreme_datahub.index.damage import WHOLE, keys_of
from polyreme_datahub.named_versions import resolve
from polyreme_datahub.recipes.files import job_operations
from polyreme_datahub.recipes.recipe import INGEST
from polyreme_datahub.registry import datasets, progress, results
from polyreme_datahub.registry.datasets import DatasetVersion
from polyreme_datahub.registry.engine import Database
from polyreme_datahub.registry.progress import Tombstone
from polyreme_datahub.registry.rows import IndexRow, Letter, OperationCount
from polyreme_datahub.runner.index_writer import INDEX
from polyreme_datahub.runner.outcomes import SHOWN_MAX, Outcomes, outcomes_of
from polyreme_datahub.runner.sealed_version import find_source, recipe_of
from polyreme_datahub.sources.digits import sample_sources

NAME = re.compile(r"[a-z0-9]([-a-z0-9./]*[a-z0-9])?")
NAME_CHARACTERS_MAX = 240
OWN = "sample/"
NAMES_MAX = 1000
TOMBSTONES_MAX = 1000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DatasetSummary:
    """One line of the list."""

    name: str
    versions: int
    """0: brought along, and not used yet."""
    records: int
    """Of the newest version."""
    kind: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterView:
    """A dead letter by the names that users have always seen."""

    key: str
    stage: str
    """The operation that refused the record."""
    ordinal: int
    sample_id: str
    rule: str
    error: str

    @classmethod
    def of(cls, letter: Letter) -> DeadLetterView:
        """Show a row."""
        return cls(
            key=letter.key,
            stage=letter.operation,
            ordinal=letter.ordinal,
            sample_id=letter.sample_id,
            rule=letter.rule,
            error=letter.error,
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DropView:
    """A record that a filter or a barrier dropped."""

    stage: str
    ordinal: int
    sample_id: str
    reason: str
    """For a copy, with the record that stays."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeView:
    """What one operation did with the records of a version."""

    stage: str
    hits: int
    misses: int
    dead: int
    dropped: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DatasetDetails:
    """One version in full."""

    version: DatasetVersion
    versions: tuple[int, ...]
    """Every version's number."""
    samples: int
    """Ingested records."""
    stages: tuple[OutcomeView, ...]
    """Hits and misses over all runs; dead letters as they stand."""
    indexes: tuple[IndexRow, ...]
    dead_letters: tuple[DeadLetterView, ...]
    """At most ``SHOWN_MAX``, by ordinal."""
    dead: int
    """Records with a dead letter."""
    tombstones: tuple[Tombstone, ...]
    drops: tuple[DropView, ...] = ()
    """Of a version that a recipe made, the first ones, by ordinal."""


def check_name(name: str) -> None:
    """Refuse a name that no dataset of a user may have.

    Raises:
        SourceInvalidError: Naming the rule.
    """
    if not NAME.fullmatch(name) or len(name) > NAME_CHARACTERS_MAX:
        raise SourceInvalidError(
            f"dataset name is not valid: {name!r}, expected lower-case letters and digits, with '-', '.' or '/' inside",
            field="the dataset's name",
        )
    if name.startswith(OWN):
        raise SourceInvalidError(f"dataset name: {name!r}, names under {OWN} are reserved", field="the dataset's name")


def summaries(database: Database, *, after: str = "", count_max: int = NAMES_MAX) -> list[DatasetSummary]:
    """List the datasets whose names come after ``after``, by name."""
    newest: dict[str, DatasetSummary] = {
        name: DatasetSummary(name=name, versions=0, records=source["pages"], kind=source["kind"])
        for name, source in sample_sources().items()
        if name > after
    }
    for version in datasets.newest_versions(database, after=after, count_max=count_max):
        newest[version.name] = DatasetSummary(
            name=version.name, versions=version.number, records=version.records, kind=version.source["kind"]
        )
    return [newest[name] for name in sorted(newest)][:count_max]


def details(database: Database, store: ObjectStore, reference: str, *, now_s: float) -> DatasetDetails:
    """Show one version; see ``polyreme_datahub.hub.show_dataset``."""
    version = resolve(database, reference, now_s=now_s)
    indexes = progress.indexes_of(database, version.id)
    adopt_tombstones(database, store, [index.manifest for index in indexes])
    manifests = {index.manifest for index in indexes}
    made = _made_by_recipe(database, version)
    if made is None:
        ended = results.ended_counts(database, version.id)
        stages = _with_ends(version.records, progress.statistics_of(database, version.id), ended)
        letters = results.first_letters(database, version.id, count_max=SHOWN_MAX)
        samples, dead = progress.count_samples(database, version.id), sum(dead for dead, _ in ended.values())
    else:
        stages = tuple(
            OutcomeView(stage=step.name, hits=0, misses=step.through, dead=step.dead, dropped=step.dropped)
            for step in made.steps
        )
        letters, samples, dead = made.letters, version.records, made.dead
    return DatasetDetails(
        version=version,
        versions=tuple(datasets.numbers_of(database, version.name)),
        samples=samples,
        stages=stages,
        indexes=tuple(indexes),
        dead_letters=tuple(map(DeadLetterView.of, letters)),
        dead=dead,
        drops=tuple(
            DropView(stage=one.operation, ordinal=one.ordinal, sample_id=one.sample_id, reason=one.reason)
            for one in (() if made is None else made.drops)
        ),
        tombstones=tuple(progress.tombstones_of(database, manifests, count_max=TOMBSTONES_MAX)),
    )


def _made_by_recipe(database: Database, version: DatasetVersion) -> Outcomes | None:
    """Return what the recipe of a sealed version made of its records, as far as both are still known here."""
    try:
        recipe = recipe_of(version)
        return None if recipe is None else outcomes_of(database, find_source(database, version), recipe)
    except (DatasetNotFoundError, InvalidConfigError):
        return None


def _with_ends(
    records: int, counts: Mapping[str, OperationCount], ended: Mapping[str, tuple[int, int]]
) -> tuple[OutcomeView, ...]:
    """Return the counts of all operations of jobs, with dead letters and dropped samples as they are now.

    A record that was rejected after it went through (a doubled id), or was reprocessed, no longer counts as made.
    """
    views = []
    for name in (INGEST, *job_operations(), INDEX):
        dead, dropped = ended.get(name, (0, 0))
        records = max(0, records - dead - dropped)
        count = counts.get(name, OperationCount(operation=name))
        made = min(count.misses, records)
        views.append(OutcomeView(stage=name, hits=count.hits, misses=made, dead=dead, dropped=dropped))
    return tuple(views)


def adopt_tombstones(database: Database, store: ObjectStore, manifests: list[str]) -> None:
    """Take the notes that ranks left about damaged samples into the registry."""
    stones: list[Tombstone] = []
    for manifest in manifests:
        for key in keys_of(store, manifest):
            if key.endswith(f"/{WHOLE}.json"):
                continue
            with contextlib.suppress(ObjectNotFoundError, ValueError, TypeError):
                stones.append(Tombstone(index_digest=manifest, **json.loads(store.get(key))))
    if stones:
        progress.add_tombstones(database, stones)
