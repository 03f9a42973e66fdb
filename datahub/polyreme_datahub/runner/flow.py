"""A flow: a recipe bound to dataset versions, and the work items that it consists of. Pure.

Chains follow one another. The first one reads the source, so a record's bytes are still in memory when the first
operation looks at them. An item of one chain is followed by the same ordinals in the next chain; a barrier waits for
every item of the chain before it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cached_property

from polyreme_datahub.digests import digest_value
from polyreme_datahub.operations.values import Value
from polyreme_datahub.recipes.recipe import Chain, Recipe
from polyreme_datahub.registry.datasets import DatasetVersion
from polyreme_datahub.registry.work_items import WorkItem
from polyreme_datahub.sources.chunks import chunks_of

GROUP = 4096
"""Ordinals of one item that seals. A border of groups is a border of shards, so the bytes depend on nothing else."""
ITEMS_MIN, ITEM_RECORDS_MIN = 16, 64
"""A version of few records is cut into more items than it has chunks, so that workers end at about the same time:
into ``ITEMS_MIN``, but not into items of less than ``ITEM_RECORDS_MIN`` records."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flow:
    """A recipe over dataset versions."""

    recipe: Recipe
    versions: Mapping[int, DatasetVersion]
    shared: Mapping[str, Value] = dataclasses.field(default_factory=dict)
    """Values of the recipe's constants."""

    @cached_property
    def id(self) -> str:
        """Digest of steps and versions: the same work has the same items."""
        versions = sorted((version.id, version.digest) for version in self.versions.values())
        return digest_value(["flow", self.recipe.digest, versions])

    @cached_property
    def chains(self) -> tuple[Chain, ...]:
        """The chains, in order."""
        return self.recipe.chains()

    def chain(self, name: str) -> Chain:
        """Return the chain of that name."""
        return next(chain for chain in self.chains if chain.name == name)

    def items(self, chain: Chain, version: DatasetVersion) -> list[WorkItem]:
        """Return the items of a chain over one version."""
        if chain.is_barrier:
            return [self.item(chain, version.id, 0, version.records)]
        most = max(ITEM_RECORDS_MIN, -(-version.records // ITEMS_MIN))
        return [
            self.item(chain, version.id, at, min(most, first + count - at))
            for first, count in chunks_of(version.source, version.records)
            for at in range(first, first + count, most)
        ]

    def item(self, chain: Chain, version_id: int, first: int, count: int) -> WorkItem:
        """Return one item; the same ordinals of the same chain have the same key."""
        return WorkItem(
            key=f"{self.id}/{chain.name}/{version_id}/{first:012d}",
            flow=self.id,
            operation=chain.name,
            version_id=version_id,
            first=first,
            count=count,
        )

    def first_items(self) -> list[WorkItem]:
        """Return the items that wait for nothing."""
        return [item for version in self.versions.values() for item in self.items(self.chains[0], version)]

    def following(self, done: WorkItem) -> list[WorkItem]:
        """Return the items that the end of one item opens by itself: a barrier waits for the others, too."""
        chain = self.chain(done.operation)
        later = self.chains[self.chains.index(chain) + 1 :]
        if not later or later[0].is_barrier:
            return []
        if chain.is_barrier:
            return self.items(later[0], self.versions[done.version_id])
        return [self.item(later[0], done.version_id, done.first, done.count)]


def group_items(key: str, operation: str, version: DatasetVersion) -> list[WorkItem]:
    """Return the items that seal a version by groups of ``GROUP`` ordinals, leased under the name ``key``."""
    return [
        WorkItem(
            key=f"{key}/{operation}/{version.id}/{first:012d}",
            flow=key,
            operation=operation,
            version_id=version.id,
            first=first,
            count=min(GROUP, version.records - first),
        )
        for first in range(0, version.records, GROUP)
    ]
