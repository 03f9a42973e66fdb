"""Sealing what came through a recipe: one item writes the tar shards of some thousand ordinals, a manifest joins them.

Written twice, shards and manifest are the same bytes. Where stored images are lost, they are made again from the
source.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from polyreme_api.store import ObjectNotFoundError
from polyreme_datahub.digests import action_key, blob_key, digest_value
from polyreme_datahub.errors import IndexDamagedError
from polyreme_datahub.index.join_manifests import JoinedManifest, join_manifests, read_manifest
from polyreme_datahub.index.tar_shards import SampleFiles, Scalar, TarShard, write_samples
from polyreme_datahub.lakehouse import Lakehouse
from polyreme_datahub.registry import results
from polyreme_datahub.registry.datasets import DatasetVersion
from polyreme_datahub.registry.engine import Database
from polyreme_datahub.registry.rows import Action, Results, StageCount
from polyreme_datahub.registry.work_items import WorkItem
from polyreme_datahub.runner.flow import Flow, group_items
from polyreme_datahub.runner.inputs import Inputs
from polyreme_datahub.runner.sample_files import (
    BASE,
    Pages,
    as_type,
    column_types,
    facts_of,
    image_steps,
    pages_of,
    sample_files,
)
from polyreme_datahub.runner.walk import Walk, Walked

SEAL = "seal"
VERSION = 1
PAGE = 32
"""Samples whose images are in memory at once."""


class SealWork:
    """Writes groups of tar shards, and their manifests.

    Args:
        database: Registry.
        lakehouse: Where bytes lie.
        flow: The flow whose outcome is sealed.
        remake: Makes what is stored of some ordinals again, from the source.
        owner: Holder of the leases.
        now_s: Wall clock [s].
        on_counts: Called after each commit with what it added.
    """

    def __init__(
        self,
        database: Database,
        lakehouse: Lakehouse,
        flow: Flow,
        *,
        remake: Callable[[DatasetVersion, int, int], None],
        owner: str,
        now_s: Callable[[], float],
        on_counts: Callable[[WorkItem, Sequence[StageCount]], None],
    ) -> None:
        self._database, self._lakehouse, self._flow, self._remake = database, lakehouse, flow, remake
        self._owner, self._now_s, self._on_counts = owner, now_s, on_counts
        self._walk = Walk(database, lakehouse, constants=flow.recipe.constants)
        self._inputs = Inputs(database, lakehouse, constants=flow.recipe.constants)
        self._image_steps = image_steps(flow.recipe.steps)

    def flow_key(self, version: DatasetVersion) -> str:
        """Return the name under which the items of a version's groups are leased."""
        return digest_value([SEAL, VERSION, self._flow.recipe.digest, version.digest, version.id])

    def items(self, version: DatasetVersion) -> list[WorkItem]:
        """Return the items of a version's groups."""
        return group_items(self.flow_key(version), SEAL, version)

    def unwritten(self, version: DatasetVersion) -> list[WorkItem]:
        """Return the items whose shards are not there: never written, of other samples, or lost."""
        return [item for item in self.items(version) if self._group(version, item) is None]

    def do(self, item: WorkItem) -> None:
        """Write the shards of an item's ordinals.

        Raises:
            EnvironmentFailedError: If store or registry stay away; the item is still due.
            IndexDamagedError: If stored data is lost that the source no longer gives.
        """
        version = self._flow.versions[item.version_id]
        key = self._group_key(version, item)
        types = column_types(facts_of(walked) for walked in self._walked(version, item.first, item.count))
        samples = self._samples(version, item, types)
        digest = write_samples(self._lakehouse, samples, columns={**types, **BASE})
        data = self._lakehouse.get_blob(digest)
        table, shards = read_manifest(data)
        sizes = {digest: len(data), **{shard.digest: shard.size_bytes for shard in shards}}
        counts = [StageCount(stage=SEAL, misses=table.num_rows)]
        results.commit(
            self._database,
            Results(
                version_id=version.id,
                actions=[Action(key=key, operation=SEAL, inputs=(version.digest,), output=digest)],
                counts=counts,
                blobs=sizes,
            ),
            finished=item,
            owner=self._owner,
            now_s=self._now_s(),
        )
        self._on_counts(item, counts)

    def close(self) -> None:
        """Nothing was started."""

    def finish(self, version: DatasetVersion) -> JoinedManifest:
        """Join the manifests of all groups.

        Raises:
            IndexDamagedError: If a group is missing.
        """
        groups = []
        for item in self.items(version):
            group = self._group(version, item)
            if group is None:
                raise IndexDamagedError(f"no shards of {version.reference} for ordinals from {item.first} on")
            groups.append(group)
        return join_manifests(self._lakehouse, groups)

    def _group(self, version: DatasetVersion, item: WorkItem) -> str | None:
        """Return the digest of a group's manifest, or None where it, or a shard of it, is not there."""
        key = self._group_key(version, item)
        found = results.outputs_of(self._database, [key]).get(key)
        if found is None:
            return None
        try:
            _, shards = read_manifest(self._lakehouse.get_blob(found.digest))
        except (ObjectNotFoundError, IndexDamagedError):
            return None
        return found.digest if all(self._is_there(shard) for shard in shards) else None

    def _is_there(self, shard: TarShard) -> bool:
        return all(self._lakehouse.store.exists(blob_key(digest)) for digest in (shard.digest, shard.index))

    def _group_key(self, version: DatasetVersion, item: WorkItem) -> str:
        """Key of a group: it depends on every sample that came through, and on what the steps made of it."""
        seen = hashlib.sha256()
        for walked in self._walked(version, item.first, item.count):
            outputs = sorted((name, output.digest) for name, output in walked.outputs.items())
            seen.update(digest_value([walked.ordinal, walked.sample_id, walked.record, outputs]).encode())
        return action_key(self.flow_key(version), digest_value([item.first, item.count, seen.hexdigest()]))

    def _walked(
        self, version: DatasetVersion, first: int, count: int, *, values_of: Sequence[str] = ()
    ) -> Iterator[Walked]:
        return self._walk.samples(version, self._flow.recipe.steps, values_of=values_of, first=first, count=count)

    def _samples(self, version: DatasetVersion, item: WorkItem, types: Mapping[str, type]) -> Iterator[SampleFiles]:
        stop = item.first + item.count
        for first in range(item.first, stop, PAGE):
            for walked, record, pages, blobs in self._page(version, first, min(PAGE, stop - first)):
                sample = sample_files(walked, record, pages, blobs)
                facts: dict[str, Scalar] = {
                    name: as_type(value, types[name]) for name, value in facts_of(walked).items()
                }
                yield SampleFiles(key=sample.key, files=sample.files, columns={**facts, **sample.columns})

    def _page(self, version: DatasetVersion, first: int, count: int) -> list[_Page]:
        try:
            return self._read_page(version, first, count)
        except (IndexDamagedError, ObjectNotFoundError):
            self._remake(version, first, count)
            return self._read_page(version, first, count)

    def _read_page(self, version: DatasetVersion, first: int, count: int) -> list[_Page]:
        walked = list(self._walked(version, first, count, values_of=self._image_steps))
        contents = self._inputs.parts({one.record for one in walked})
        records = [json.loads(contents[one.record]) for one in walked]
        pages = [pages_of(one, self._image_steps) for one in walked]
        wanted: set[str] = set()
        for record, page in zip(records, pages, strict=True):
            raw = {*record.get("images", ()), *(mask for mask in record.get("masks", ()) if mask is not None)}
            wanted |= raw if page is None else page.blobs
        blobs = self._inputs.parts(wanted)
        return [(one, record, page, blobs) for one, record, page in zip(walked, records, pages, strict=True)]


_Page = tuple[Walked, Mapping[str, Any], Pages | None, Mapping[str, bytes]]
