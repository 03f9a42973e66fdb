"""A flow: a recipe bound to dataset versions, and the work items that it consists of. Pure.

Stages follow one another. The first one reads the source, so a record's bytes are still in memory when the first
operation looks at them. An item of one chain is followed by the same ordinals in the next chain; a barrier waits for
every item of the stage before it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cached_property

from polyreme_datahub.digests import digest_value
from polyreme_datahub.operations.declare import Device
from polyreme_datahub.recipes.recipe import Chain, Recipe, Step
from polyreme_datahub.registry.datasets import DatasetVersion
from polyreme_datahub.registry.work_items import WorkItem
from polyreme_datahub.sources.chunks import chunks_of

INGEST = "ingest"
GROUP = 4096
"""Ordinals of one item that seals. A border of groups is a border of shards, so the bytes depend on nothing else."""
ITEMS_MIN, ITEM_RECORDS_MIN = 16, 64
"""A version of few records is cut into more items than it has chunks, so that workers end at about the same time:
into ``ITEMS_MIN``, but not into items of less than ``ITEM_RECORDS_MIN`` records."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The items that one pool of workers does."""

    name: str
    chain: Chain | None
    """None: reading the source and nothing else."""
    steps_before: tuple[Step, ...]
    """Steps of earlier stages, whose outputs this stage may read."""
    reads_source: bool

    @property
    def is_barrier(self) -> bool:
        """Whether it is a barrier."""
        return self.chain is not None and self.chain.is_barrier

    @property
    def device(self) -> Device:
        """Which workers do it."""
        return "cpu" if self.chain is None else self.chain.device

    @property
    def steps(self) -> tuple[Step, ...]:
        """Every step up to the end of this stage."""
        return (*self.steps_before, *(self.chain.steps if self.chain is not None else ()))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flow:
    """A recipe over dataset versions."""

    recipe: Recipe
    versions: Mapping[int, DatasetVersion]

    @cached_property
    def id(self) -> str:
        """Digest of steps and versions: the same work has the same items."""
        versions = sorted((version.id, version.digest) for version in self.versions.values())
        return digest_value(["flow", self.recipe.digest, versions])

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The stages, in order."""
        chains = self.recipe.chains()
        stages: list[Stage] = []
        if not chains or chains[0].is_barrier:
            stages.append(Stage(name=INGEST, chain=None, steps_before=(), reads_source=True))
        before: tuple[Step, ...] = ()
        for chain in chains:
            stages.append(Stage(name=chain.name, chain=chain, steps_before=before, reads_source=not stages))
            before = (*before, *chain.steps)
        return tuple(stages)

    def stage(self, name: str) -> Stage:
        """Return the stage of that name."""
        return next(stage for stage in self.stages if stage.name == name)

    def stage_after(self, stage: Stage) -> Stage | None:
        """Return the stage that follows, if any."""
        at = self.stages.index(stage) + 1
        return self.stages[at] if at < len(self.stages) else None

    def items(self, stage: Stage, version: DatasetVersion) -> list[WorkItem]:
        """Return the items of a stage over one version."""
        if stage.is_barrier:
            return [self.item(stage, version.id, 0, version.records)]
        most = max(ITEM_RECORDS_MIN, -(-version.records // ITEMS_MIN))
        return [
            self.item(stage, version.id, at, min(most, first + count - at))
            for first, count in chunks_of(version.source, version.records)
            for at in range(first, first + count, most)
        ]

    def item(self, stage: Stage, version_id: int, first: int, count: int) -> WorkItem:
        """Return one item; the same ordinals of the same stage have the same key."""
        return WorkItem(
            key=f"{self.id}/{stage.name}/{version_id}/{first:012d}",
            flow=self.id,
            stage=stage.name,
            version_id=version_id,
            first=first,
            count=count,
        )

    def first_items(self) -> list[WorkItem]:
        """Return the items that wait for nothing."""
        return [item for version in self.versions.values() for item in self.items(self.stages[0], version)]

    def following(self, done: WorkItem) -> list[WorkItem]:
        """Return the items that the end of one item opens by itself: a barrier waits for the others, too."""
        stage = self.stage(done.stage)
        after = self.stage_after(stage)
        if after is None or after.is_barrier:
            return []
        if stage.is_barrier:
            return self.items(after, self.versions[done.version_id])
        return [self.item(after, done.version_id, done.first, done.count)]


def group_items(key: str, stage: str, version: DatasetVersion) -> list[WorkItem]:
    """Return the items that seal a version by groups of ``GROUP`` ordinals, leased under the name ``key``."""
    return [
        WorkItem(
            key=f"{key}/{stage}/{version.id}/{first:012d}",
            flow=key,
            stage=stage,
            version_id=version.id,
            first=first,
            count=min(GROUP, version.records - first),
        )
        for first in range(0, version.records, GROUP)
    ]
