"""Seals a job's data in blocks that its ranks read while later ones are processed (``data.startWhileProcessing``).

The tokenizer is a released one, so a sample needs nothing of the others. A block is sealed when all records up to its
end are done, since an id that is used twice belongs to the earlier record. Blocks are the groups of the index, so the
finished index is the one that a job without the field has.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence

from polyreme_api.data_report import BLOCKS_OPERATION
from polyreme_datahub.digests import digest_value
from polyreme_datahub.errors import IndexDamagedError
from polyreme_datahub.index.blocks import Block, Growing, Journal, Opening, Sizes
from polyreme_datahub.index.damage import drop_notes, is_noted
from polyreme_datahub.index.format import NEWEST, ORDER, PIXELS
from polyreme_datahub.ingestion import Ingestion
from polyreme_datahub.job_plan import JobPlan
from polyreme_datahub.registry import progress, work_items
from polyreme_datahub.registry.datasets import DatasetVersion
from polyreme_datahub.registry.work_items import WorkItem
from polyreme_datahub.runner.flow import GROUP, Flow
from polyreme_datahub.runner.index_writer import IndexWriter

BLOCK_LOOKS_MAX = 5
"""As ``Pool``'s ``looks_max``: a block is sealed within about a second."""


@dataclasses.dataclass(kw_only=True)
class _Grown:
    """One version, as far as it is sealed."""

    version: DatasetVersion
    place: int
    """Among the dataset references that grow, sorted."""
    items: Sequence[WorkItem]
    """Those that seal its blocks."""
    starts: Sequence[int]
    """First ordinals of the items that process its records."""
    manifest: str
    """Digest of a manifest without shards: loaders note damage under it while blocks are sealed."""
    noted: bool
    """Whether its index was found damaged: every byte of its blocks is checked."""
    blocks: list[Block] = dataclasses.field(default_factory=list)


class BlockSealing:
    """Seals the blocks of some versions in order, as their records are done.

    Args:
        run: The run that processes the records.
        flow: Its flow.
        writer: Writes the blocks.
        versions: By dataset reference.
        journal: Where blocks are published; None: nowhere.
    """

    def __init__(
        self,
        run: Ingestion,
        flow: Flow,
        writer: IndexWriter,
        versions: Mapping[str, DatasetVersion],
        journal: Journal | None,
    ) -> None:
        self._run, self._flow, self._writer, self._journal = run, flow, writer, journal
        self._context, self._sealing = run.context, run.sealing(flow, writer)
        self._grown = {name: self._begun(place, versions[name]) for place, name in enumerate(sorted(versions))}

    def open(self, plan: JobPlan) -> None:
        """Publish what is known before any sample; what an earlier run has published counts."""
        opening = Opening(
            references=plan.references,
            tokenizer=plan.tokenizer,
            manifests=plan.manifests,
            growing={
                name: Growing(
                    identity=self._identity(one.version),
                    manifest=one.manifest,
                    records=one.version.records,
                    blocks=len(one.items),
                )
                for name, one in self._grown.items()
            },
            pixels=NEWEST[PIXELS],
            order=NEWEST[ORDER],
        )
        if self._journal is not None:
            opening = self._journal.open(opening)
        plan.made = {PIXELS: opening.pixels, ORDER: opening.order}
        plan.identities = {name: one.identity for name, one in opening.growing.items()}

    def seal(self) -> None:
        """Seal the blocks whose records are done, each after the ones before it."""
        for one in self._grown.values():
            while len(one.blocks) < len(one.items) and (block := self._sealed(one)) is not None:
                one.blocks.append(block)
                self._report()

    def finish(self, plan: JobPlan) -> None:
        """Join the blocks of each version in its index.

        Raises:
            IndexDamagedError: If a block is missing.
        """
        for name, one in self._grown.items():
            if len(one.blocks) < len(one.items):
                raise IndexDamagedError(f"block {len(one.blocks)} of {one.version.reference} was not sealed")
            row = self._writer.join(one.version, [block.group for block in one.blocks])
            progress.put_index(self._context.database, row, now_s=self._context.now_s())
            plan.manifests[name] = row.manifest
            if one.noted:
                for digest in (one.manifest, row.manifest):
                    drop_notes(self._context.lakehouse.store, digest)
                    progress.drop_tombstones(self._context.database, digest)
        plan.blocks = {
            name: Sizes(tuple(of.samples for of in one.blocks), tuple(of.tokens for of in one.blocks), len(one.blocks))
            for name, one in self._grown.items()
        }

    def _begun(self, place: int, version: DatasetVersion) -> _Grown:
        store = self._context.lakehouse.store
        manifest = self._context.lakehouse.put_blob(self._writer.manifest(version).to_bytes())
        known = progress.manifests_of(self._context.database, self._writer.name(version))
        return _Grown(
            version=version,
            place=place,
            items=self._sealing.items(version),
            starts=[item.first for item in self._flow.items(self._flow.chains[-1], version)],
            manifest=manifest,
            noted=any(is_noted(store, digest) for digest in (manifest, *known)),
        )

    def _sealed(self, one: _Grown) -> Block | None:
        """Return the next block, which is sealed now if its records are done; None if they are not."""
        number, item = len(one.blocks), one.items[len(one.blocks)]
        published = self._published(one.place, number)
        if published is not None and self._sealing.is_stored(published.group, every_byte=one.noted):
            return published
        if not self._is_processed(one, item):
            return None
        database, now_s = self._context.database, self._context.now_s()
        progress.reject_duplicates(database, one.version.id, first=item.first, count=item.count, now_s=now_s)
        [digest] = self._sealing.seal(one.version, [item], every_byte=one.noted)
        group = json.loads(self._context.lakehouse.get_blob(digest))
        block = Block(group=digest, samples=group["samples"], tokens=group["tokens"])
        if self._journal is not None:
            self._journal.append(one.place, number, block)
        return block

    def _published(self, place: int, number: int) -> Block | None:
        try:
            return self._journal.block(place, number) if self._journal is not None else None
        except IndexDamagedError:
            return None

    def _is_processed(self, one: _Grown, item: WorkItem) -> bool:
        stop = item.first + item.count
        wanted = sum(start < stop for start in one.starts)
        database, name = self._context.database, self._flow.chains[-1].name
        return work_items.done_before(database, self._flow.id, name, one.version.id, stop) >= wanted

    def _report(self) -> None:
        """Report how many blocks are sealed, once every version has one: training can start then."""
        sealed = [len(one.blocks) for one in self._grown.values()]
        if all(sealed):
            total = sum(len(one.items) for one in self._grown.values())
            self._run.meter.show_other(BLOCKS_OPERATION, done=sum(sealed), total=total)

    def _identity(self, version: DatasetVersion) -> str:
        parameters = self._writer.parameters.to_value()
        return digest_value(["blocks", GROUP, version.digest, version.reference, parameters])
