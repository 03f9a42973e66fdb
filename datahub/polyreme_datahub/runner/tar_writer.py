"""Writes tar shards of samples as a recipe left them: records, images, and a row of facts for each."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from polyreme_datahub.digests import action_key, blob_key, digest_value
from polyreme_datahub.index.join_manifests import read_manifest
from polyreme_datahub.index.tar_shards import SampleFiles, Scalar, write_samples
from polyreme_datahub.registry.datasets import DatasetVersion
from polyreme_datahub.registry.rows import OperationCount
from polyreme_datahub.registry.work_items import WorkItem
from polyreme_datahub.runner.context import RunContext
from polyreme_datahub.runner.flow import Flow
from polyreme_datahub.runner.flow_run import read_whole
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
from polyreme_datahub.runner.sealing import Group
from polyreme_datahub.runner.walk import Walk, Walked

SEAL = "seal"
VERSION = 1
PAGE = 32
"""Samples whose images are in memory at once."""


class TarWriter:
    """Writes groups of tar shards of samples.

    Args:
        context: What work needs of its process.
        flow: The flow whose outcome is sealed.
    """

    operation = SEAL

    def __init__(self, context: RunContext, flow: Flow) -> None:
        self._context, self._flow, self._lakehouse = context, flow, context.lakehouse
        self._walk = Walk(context.database, context.lakehouse, constants=flow.recipe.constants)
        self._inputs = Inputs(context.database, context.lakehouse, constants=flow.recipe.constants)
        self._image_steps = image_steps(flow.recipe.steps)

    def name(self, version: DatasetVersion) -> str:
        """Return the name under which the items of a version's groups are leased."""
        return digest_value([SEAL, VERSION, self._flow.recipe.digest, version.digest, version.id])

    def key(self, version: DatasetVersion, item: WorkItem, walked: Iterable[Walked]) -> str:
        """Return the key of the group: it depends on what the steps made of every sample."""
        seen = hashlib.sha256()
        for one in walked:
            outputs = sorted((name, output.digest) for name, output in one.outputs.items())
            seen.update(digest_value([one.ordinal, one.sample_id, one.record, outputs]).encode())
        return action_key(self.name(version), digest_value([item.first, item.count, seen.hexdigest()]))

    def write(self, version: DatasetVersion, item: WorkItem) -> Group:
        """Write a group."""
        walked = list(self._walked(version, item.first, item.count))
        types = column_types(map(facts_of, walked))
        samples = self._samples(version, item, types)
        digest = write_samples(self._lakehouse, samples, columns={**types, **BASE})
        data = self._lakehouse.get_blob(digest)
        table, shards = read_manifest(data)
        return Group(
            key=self.key(version, item, walked),
            digest=digest,
            count=OperationCount(operation=SEAL, misses=table.num_rows),
            blobs={digest: len(data), **{shard.digest: shard.size_bytes for shard in shards}},
        )

    def is_whole(self, group: bytes, *, every_byte: bool) -> bool:
        """Tell whether the shards that a group lists are stored, each with its side index."""
        _, shards = read_manifest(group)
        stored = [digest for shard in shards for digest in (shard.digest, shard.index)]
        if every_byte:
            return all(self._lakehouse.get_blob(digest) for digest in stored)
        return all(self._lakehouse.store.exists(blob_key(digest)) for digest in stored)

    def _walked(
        self, version: DatasetVersion, first: int, count: int, *, values_of: Sequence[str] = ()
    ) -> Iterator[Walked]:
        return self._walk.samples(version, self._flow.recipe.steps, values_of=values_of, first=first, count=count)

    def _samples(self, version: DatasetVersion, item: WorkItem, types: Mapping[str, type]) -> Iterator[SampleFiles]:
        stop = item.first + item.count
        for first in range(item.first, stop, PAGE):
            ordinals = (version, first, min(PAGE, stop - first))
            page = read_whole(self._context, self._flow, ordinals, partial(self._page, *ordinals))
            for walked, record, pages, blobs in page:
                sample = sample_files(walked, record, pages, blobs)
                facts: dict[str, Scalar] = {
                    name: as_type(value, types[name]) for name, value in facts_of(walked).items()
                }
                yield SampleFiles(key=sample.key, files=sample.files, columns={**facts, **sample.columns})

    def _page(self, version: DatasetVersion, first: int, count: int) -> list[_Page]:
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
