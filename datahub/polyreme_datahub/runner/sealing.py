"""Sealing what came through a flow: one item writes the shards of some thousand ordinals.

Written twice, shards are the same bytes. What a writer needs of stored intermediates and is lost is recomputed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from polyreme_api.store import ObjectNotFoundError
from polyreme_datahub.errors import IndexDamagedError
from polyreme_datahub.registry import results
from polyreme_datahub.registry.datasets import DatasetVersion
from polyreme_datahub.registry.rows import Action, Letter, OperationCount, Results
from polyreme_datahub.registry.work_items import WorkItem
from polyreme_datahub.runner.context import OnCounts, RunContext
from polyreme_datahub.runner.flow import Flow, group_items
from polyreme_datahub.runner.flow_run import run_seal
from polyreme_datahub.runner.walk import Walk, Walked


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """What was written of some ordinals."""

    key: str
    """Of the action that wrote it: it depends on every sample that came through."""
    digest: str
    """Of the stored object that lists the shards."""
    count: OperationCount
    blobs: Mapping[str, int]
    """Blobs to keep, with their bytes."""
    letters: Sequence[Letter] = ()


class GroupWriter(Protocol):
    """Writes groups of shards in one form."""

    @property
    def operation(self) -> str:
        """Name of the sealing."""
        ...

    def name(self, version: DatasetVersion) -> str:
        """Return the name under which the items of a version's groups are leased."""
        ...

    def key(self, version: DatasetVersion, item: WorkItem, walked: Iterable[Walked]) -> str:
        """Return the key of the group of the samples that came through."""
        ...

    def write(self, version: DatasetVersion, item: WorkItem) -> Group:
        """Write a group; errors as ``Sealing.do``."""
        ...

    def is_whole(self, group: bytes, *, every_byte: bool) -> bool:
        """Tell whether the shards that a group lists are stored; every byte of them, or their presence."""
        ...


class Sealing:
    """Seals versions of a flow.

    Args:
        context: What work needs of its process.
        flow: The flow whose outcome is sealed.
        writer: Writes it.
        on_counts: Called after each commit with what it added.
    """

    def __init__(self, context: RunContext, flow: Flow, writer: GroupWriter, on_counts: OnCounts) -> None:
        self._context, self._flow, self._writer, self._on_counts = context, flow, writer, on_counts
        self._walk = Walk(context.database, context.lakehouse, constants=flow.recipe.constants)
        self._groups: dict[str, str] = {}
        """Digests of the groups that are known, by item."""

    def items(self, version: DatasetVersion) -> list[WorkItem]:
        """Return the items of a version's groups."""
        return group_items(self._writer.name(version), self._writer.operation, version)

    def seal(
        self, version: DatasetVersion, items: Sequence[WorkItem] | None = None, *, every_byte: bool = False
    ) -> list[str]:
        """Write the groups that are not stored: never written, of other samples, or lost; return the digests of all.

        Args:
            version: The version.
            items: Groups to write; None: all.
            every_byte: Whether all bytes of known groups are read, since damage was found.

        Raises:
            EnvironmentFailedError: If store or registry stay away.
            IndexDamagedError: If stored data is lost that the source no longer gives.
        """
        items = self.items(version) if items is None else items
        lost = [item for item in items if not self.is_stored(self.group_of(version, item), every_byte=every_byte)]
        for item in lost:
            self._groups.pop(item.key, None)
        run_seal(self._context, self, lost)
        groups = []
        for item in items:
            group = self.group_of(version, item)
            if group is None:
                raise IndexDamagedError(f"no shards of {version.reference} for ordinals from {item.first} on")
            groups.append(group)
        return groups

    def do(self, item: WorkItem) -> None:
        """Write the shards of an item's ordinals.

        Raises:
            EnvironmentFailedError: If store or registry stay away; the item is still due.
            IndexDamagedError: If stored data is lost that the source no longer gives.
        """
        version = self._flow.versions[item.version_id]
        group = self._writer.write(version, item)
        operation = self._writer.operation
        made = Results(
            version_id=version.id,
            actions=[Action(key=group.key, operation=operation, inputs=(version.digest,), output=group.digest)],
            letters=group.letters,
            blobs=group.blobs,
            counts=[group.count],
        )
        self._context.finish(item, made, on_counts=self._on_counts)
        self._groups[item.key] = group.digest

    def close(self) -> None:
        """Nothing was started."""

    def group_of(self, version: DatasetVersion, item: WorkItem) -> str | None:
        """Return the digest of the group that an item has written; None if it wrote none of these samples."""
        if item.key not in self._groups:
            steps = self._flow.recipe.steps
            walked = self._walk.samples(version, steps, values_of=(), first=item.first, count=item.count)
            key = self._writer.key(version, item, walked)
            found = results.outputs_of(self._context.database, [key]).get(key)
            if found is None:
                return None
            self._groups[item.key] = found.digest
        return self._groups[item.key]

    def is_stored(self, group: str | None, *, every_byte: bool = False) -> bool:
        """Tell whether a group and its shards are stored."""
        try:
            return group is not None and self._writer.is_whole(
                self._context.lakehouse.get_blob(group), every_byte=every_byte
            )
        except (ObjectNotFoundError, IndexDamagedError):
            return False
