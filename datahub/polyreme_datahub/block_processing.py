"""Processes a job's data in blocks that its ranks read while later ones are processed (``data.startWhileProcessing``).

The tokenizer is a released one, so a sample needs nothing of the others: pages are made and text is encoded in one go.
A block is sealed when all records up to its end are done, since an id that is used twice belongs to the earlier record.
Blocks are the groups of the index, so the finished index is the one that a job without the field has.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping

from polyreme_api.data_report import BLOCKS_OPERATION
from polyreme_api.errors import InvalidConfigError
from polyreme_api.job.spec import TrainingJobSpec
from polyreme_api.store import ObjectNotFoundError
from polyreme_datahub.digests import digest_value
from polyreme_datahub.errors import IndexDamagedError
from polyreme_datahub.index.blocks import Block, Growing, Journal, Opening, Sizes, shards_of
from polyreme_datahub.index.check import has_shards
from polyreme_datahub.index.damage import drop_notes, is_noted
from polyreme_datahub.index.format import NEWEST, ORDER, PIXELS, plan_key
from polyreme_datahub.job_data import longest_pack, plan_data
from polyreme_datahub.processing import Processing, ProcessReport, Progress, check_spec, page_parameters
from polyreme_datahub.registry import progress, work_items
from polyreme_datahub.registry.datasets import DatasetVersion
from polyreme_datahub.registry.work_items import WorkItem
from polyreme_datahub.runner.flow import GROUP, Flow
from polyreme_datahub.runner.flow_run import Surroundings, run_seal
from polyreme_datahub.runner.index_work import IndexParameters, IndexWork
from polyreme_datahub.tokens import TextTokenizer

BLOCK_LOOKS_MAX = 5
"""As ``Pool``'s ``looks_max``: a block is sealed within about a second."""


class BlockProcessing(Processing):
    """One run over a job's data, in blocks; arguments as ``Processing``."""

    def process(self, spec: TrainingJobSpec, *, job: str) -> ProcessReport:
        """Process the data of a spec; see ``polyreme_datahub.hub.process``."""
        started_s = self._now_s()
        check_spec(self._database, spec)
        key = plan_key(job, plan_data(spec))
        # Without a job nothing is pinned, and no rank trains meanwhile.
        journal = Journal(self._store, key) if job else None
        opening = journal.opening() if journal is not None else None
        pinned = opening.references if opening is not None else self._pinned(key) if job else {}
        trained = self._resolve([source.dataset for source in spec.data.sources], pinned)
        heldout = self._resolve([part.dataset for part in spec.evaluation.sets] if spec.evaluation else [], pinned)
        both = {**trained, **heldout}
        self._versions = {version.id: version for version in both.values()}
        digest, data = self._released_for(spec, key if job else "", opening)
        tokenizer, images = TextTokenizer(data), page_parameters(spec)
        of_all = IndexParameters(images=images, tokenizer=digest, sequence_tokens=longest_pack(spec))
        asked = {version.id: version for version in heldout.values()}
        if asked:
            flow, shared = self._encoding(images, digest, data, asked)
            self._run_flow(flow, shared)
            for id_ in asked:
                progress.reject_doubles(self._database, id_, now_s=self._now_s())
            self._index(flow, shared, dict.fromkeys(asked, of_all), tokenizer)
        of_trained = dataclasses.replace(of_all, long_samples=spec.data.long_samples)
        flow, shared = self._encoding(images, digest, data, {version.id: version for version in trained.values()})
        sealing = _Sealing(
            self._around,
            self._indexer(flow, shared, of_trained, tokenizer),
            flow,
            parameters=of_trained,
            versions=trained,
            journal=journal,
            on_progress=self._progress,
        )
        manifests = {
            reference: progress.find_index(self._database, of_all.key(version)).manifest
            for reference, version in heldout.items()
        }
        sealing.open(both, manifests, digest)
        self._run_flow(flow, shared, looks_max=BLOCK_LOOKS_MAX, on_look=sealing.seal)
        sealing.seal()
        manifests |= sealing.finish()
        parameters = {version.id: of_all if version.id in asked else of_trained for version in both.values()}
        reports = tuple(self._report(version, parameters[version.id]) for version in self._versions.values())
        self._put_plan(
            key,
            job,
            both,
            manifests,
            digest,
            identities=sealing.identities,
            blocks=sealing.sizes_by_reference,
            made=sealing.made,
        )
        return self._summary(key, digest, reports, started_s)

    def _released_for(self, spec: TrainingJobSpec, plan: str, opening: Opening | None) -> tuple[str, bytes]:
        if opening is not None and (kept := self._stored(opening.tokenizer)) is not None:
            return opening.tokenizer, kept
        found = self._released(spec, plan)
        if found is None:
            raise InvalidConfigError(
                "data.startWhileProcessing needs a released tokenizer", field="spec.data.tokenizer.location"
            )
        if opening is not None and found[0] != opening.tokenizer:
            raise IndexDamagedError(
                f"tokenizer {opening.tokenizer} is lost, and {spec.data.tokenizer.location} has another one now: "
                "restore it, or start the job again under another name"
            )
        return found


class _Sealing:
    """Seals the blocks of the trained versions in order, as their records are done.

    Args:
        around: What work needs of its process.
        indexer: Writes the blocks.
        flow: Encodes the trained versions.
        parameters: Of their indexes.
        versions: By dataset reference.
        journal: Where blocks are published; None: nowhere.
        on_progress: Takes the count of sealed blocks.
    """

    def __init__(
        self,
        around: Surroundings,
        indexer: IndexWork,
        flow: Flow,
        *,
        parameters: IndexParameters,
        versions: Mapping[str, DatasetVersion],
        journal: Journal | None,
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        self._around, self._indexer, self._flow, self._parameters = around, indexer, flow, parameters
        self._versions, self._journal, self._on_progress = versions, journal, on_progress
        self._lakehouse = around.lakehouse
        self._references = sorted(versions)
        self._items = {reference: indexer.items(versions[reference]) for reference in self._references}
        self._blocks: dict[str, list[Block]] = {reference: [] for reference in self._references}
        self._manifests: dict[str, str] = {}
        """Without shards, of each reference: loaders note damage under them while blocks are sealed."""
        self._noted: set[str] = set()
        """References whose index was found damaged: every byte of their blocks is checked."""
        self._starts = {
            reference: [item.first for item in flow.items(flow.stages[-1], versions[reference])]
            for reference in self._references
        }
        self.identities = {reference: self._identity(version) for reference, version in versions.items()}
        self.made = NEWEST

    def open(self, both: Mapping[str, DatasetVersion], manifests: Mapping[str, str], tokenizer: str) -> None:
        """Publish what is known before any sample, and take over the blocks that an earlier run has published."""
        growing: dict[str, Growing] = {}
        for reference in self._references:
            version = self._versions[reference]
            growing[reference] = Growing(
                identity=self.identities[reference],
                manifest=self._lakehouse.put_blob(self._indexer.manifest(version).to_bytes()),
                records=version.records,
                blocks=len(self._items[reference]),
            )
        opening = Opening(
            references={reference: version.reference for reference, version in both.items()},
            tokenizer=tokenizer,
            manifests=manifests,
            growing=growing,
            pixels=NEWEST[PIXELS],
            order=NEWEST[ORDER],
        )
        if self._journal is not None:
            opening = self._journal.open(opening)
        self.made = {PIXELS: opening.pixels, ORDER: opening.order}
        self.identities = {reference: one.identity for reference, one in opening.growing.items()}
        self._manifests = {reference: one.manifest for reference, one in growing.items()}
        store, database = self._lakehouse.store, self._around.database
        for reference, manifest in self._manifests.items():
            known = progress.manifests_of(database, self._parameters.key(self._versions[reference]))
            if any(is_noted(store, digest) for digest in (manifest, *known)):
                self._noted.add(reference)

    def seal(self) -> None:
        """Seal the blocks whose records are done, each after the ones before it."""
        for reference in self._references:
            items, blocks = self._items[reference], self._blocks[reference]
            while len(blocks) < len(items) and (block := self._sealed(reference, len(blocks))) is not None:
                blocks.append(block)
                self._report()

    def finish(self) -> dict[str, str]:
        """Join the blocks of each version in its index; return the manifests.

        Raises:
            IndexDamagedError: If a block is missing.
        """
        store, database = self._lakehouse.store, self._around.database
        found: dict[str, str] = {}
        for reference in self._references:
            row = self._indexer.finish(self._versions[reference])
            progress.put_index(database, row, now_s=self._around.now_s())
            found[reference] = row.manifest
            if reference in self._noted:
                for digest in (self._manifests[reference], row.manifest):
                    drop_notes(store, digest)
                    progress.drop_tombstones(database, digest)
        return found

    @property
    def sizes_by_reference(self) -> dict[str, Sizes]:
        """Samples and tokens of the blocks of each version."""
        return {
            reference: Sizes(tuple(of.samples for of in blocks), tuple(of.tokens for of in blocks), len(blocks))
            for reference, blocks in self._blocks.items()
        }

    def _sealed(self, reference: str, number: int) -> Block | None:
        """Return a block, which is sealed now if its records are done; None if they are not."""
        item, place = self._items[reference][number], self._references.index(reference)
        published = self._published(place, number)
        if published is not None and self._is_there(published.group, reference):
            self._indexer.take(item, published.group)
            return published
        if not self._is_processed(reference, item):
            return None
        version = self._versions[reference]
        database, now_s = self._around.database, self._around.now_s
        progress.reject_doubles_between(database, version.id, first=item.first, count=item.count, now_s=now_s())
        known = self._indexer.group_of(version, item) if work_items.is_done(database, item.key) else None
        if known is None or not self._is_there(known, reference):
            run_seal(self._around, self._indexer, [item], again=True)
            known = self._indexer.group_of(version, item)
        if known is None:
            raise IndexDamagedError(f"block {number} of {version.reference} was sealed and is not in the registry")
        group = json.loads(self._lakehouse.get_blob(known))
        block = Block(group=known, samples=group["samples"], tokens=group["tokens"])
        if self._journal is not None:
            self._journal.append(place, number, block)
        return block

    def _published(self, place: int, number: int) -> Block | None:
        try:
            return self._journal.block(place, number) if self._journal is not None else None
        except IndexDamagedError:
            return None

    def _is_there(self, group: str, reference: str) -> bool:
        try:
            shards = shards_of(self._lakehouse.get_blob(group))
        except (ObjectNotFoundError, IndexDamagedError):
            return False
        return has_shards(self._lakehouse.store, shards, every_byte=reference in self._noted)

    def _is_processed(self, reference: str, item: WorkItem) -> bool:
        stop = item.first + item.count
        wanted = sum(start < stop for start in self._starts[reference])
        database, version, stage = self._around.database, self._versions[reference], self._flow.stages[-1].name
        return work_items.done_before(database, self._flow.id, stage, version.id, stop) >= wanted

    def _report(self) -> None:
        """Report how many blocks are sealed, once every version has one: training can start then."""
        if self._on_progress is None or not all(self._blocks.values()):
            return
        done = sum(map(len, self._blocks.values()))
        self._on_progress(Progress(stage=BLOCKS_OPERATION, done=done, total=sum(map(len, self._items.values()))))

    def _identity(self, version: DatasetVersion) -> str:
        parameters = dataclasses.asdict(self._parameters)
        return digest_value(["blocks", GROUP, version.digest, version.reference, parameters])
