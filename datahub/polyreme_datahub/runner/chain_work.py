"""The work of one item of a chain: read samples, run the steps that are missing in a sandbox, commit as it goes.

Killed at any line it loses at most what it made since its last commit (``CommitPace``), and doubles nothing: bytes
lie under their digest, rows under their key, and the first commit wins. A sample ends by the verdict of a sandboxed
child or by its source's own rules, never because this process died.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence

from polyreme_api.errors import EnvironmentFailedError
from polyreme_datahub.digests import canonical_json, digest_bytes
from polyreme_datahub.errors import BadRecordError, IndexDamagedError
from polyreme_datahub.operations.declare import RECORD, Device
from polyreme_datahub.operations.values import Blob, Value
from polyreme_datahub.recipes.recipe import INGEST, Chain, Recipe
from polyreme_datahub.registry import results
from polyreme_datahub.registry.datasets import DatasetVersion
from polyreme_datahub.registry.result_lists import store_list
from polyreme_datahub.registry.rows import Letter, SampleRow
from polyreme_datahub.registry.work_items import WorkItem
from polyreme_datahub.runner.context import OnCounts, RunContext
from polyreme_datahub.runner.flow import Flow
from polyreme_datahub.runner.inputs import Inputs
from polyreme_datahub.runner.pace import CommitPace
from polyreme_datahub.runner.pending import Pending
from polyreme_datahub.runner.resolution import Keys, Output, Sample, next_wave, resolve
from polyreme_datahub.runner.walk import known_outputs, read_samples
from polyreme_datahub.sandbox.sandbox import Sandbox
from polyreme_datahub.sandbox.tasks import SampleTask, SandboxStep
from polyreme_datahub.sources.types import Source

WINDOW_BYTES_MAX = 32 * 2**20
"""Bytes of inputs that one item holds in memory."""
REMEMBERED_BYTES_MIN, REMEMBERED_MAX = 64 * 2**10, 1024
"""Stored bytes that a worker remembers, so that a document is stored once and not with each of its pages."""


class ChainWork:
    """Does items of the chains of one flow; one object for each worker thread.

    Args:
        context: What work needs of its process.
        flow: The flow.
        on_counts: Called after each commit with what it added.
    """

    def __init__(self, context: RunContext, flow: Flow, on_counts: OnCounts) -> None:
        self._context, self._flow, self._on_counts = context, flow, on_counts
        self._database, self._lakehouse = context.database, context.lakehouse
        self._pace = CommitPace(context.steady_s)
        self._sandboxes: dict[Device, Sandbox] = {}
        self._stored: OrderedDict[str, None] = OrderedDict()
        self._inputs = Inputs(context.database, context.lakehouse, constants=flow.recipe.constants)
        self._keys = {version.id: Keys(version.digest, flow.recipe.constants) for version in flow.versions.values()}

    def do(self, item: WorkItem) -> None:
        """Do an item to its end.

        Raises:
            EnvironmentFailedError: If store, registry or source stay away; what is committed stays.
            LeaseLostError: If another worker took the item over.
        """
        chain, version = self._flow.chain(item.operation), self._flow.versions[item.version_id]
        letters = results.letters_between(self._database, version.id, first=item.first, count=item.count)
        drops = results.drops_between(self._database, version.id, first=item.first, count=item.count)
        ends = {letter.key for letter in letters} | {drop.key for drop in drops}
        pending = Pending(chain, version, self._keys[version.id], ends, stored=self._stored.keys())
        samples = self._samples(item, pending, letters)
        hits = resolve(samples, chain.upto, pending.keys, outputs_of=self._outputs_of, ends=pending.ends)
        pending.reused = {digest for sample in samples for digest in _stored(sample)}
        for step in chain.steps:
            pending.count(step.name, hits=hits[step.name])
        if chain.reads_source:
            pending.count(INGEST, hits=sum(1 for sample in samples if sample.record))
        self._pace.begin()
        unread = [sample for sample in samples if not sample.record]
        known = [sample for sample in samples if sample.record and sample.missing]
        if unread:
            self._run(item, unread, pending)
        self._run_known(item, known, pending)
        self._commit(item, pending, finished=True)

    def _run_known(self, item: WorkItem, todo: Sequence[Sample], pending: Pending) -> None:
        """Run the missing steps of samples that were read before."""
        probed, hits = False, 0
        while todo:
            wave = next_wave(todo, probed=probed, hits=hits)
            self._run(item, wave, pending)
            todo = [sample for sample in todo if not sample.ended]
            before = sum(len(sample.outputs) for sample in todo)
            resolve(todo, pending.chain.upto, pending.keys, outputs_of=self._outputs_of, ends=pending.ends)
            probed, hits = True, sum(len(sample.outputs) for sample in todo) - before
            todo = [sample for sample in todo if sample.missing]
            if todo and pending.parts:
                # The next wave reads its inputs from the lakehouse.
                self._commit(item, pending, finished=False)
                self._pace.begin()

    def remake(self, version: DatasetVersion, first: int, count: int) -> None:
        """Make what the steps made of some ordinals again, from the source on: stored bytes of it are lost.

        Raises:
            EnvironmentFailedError: If store, registry or source stay away.
            IndexDamagedError: If the source no longer gives the records that it gave.
        """
        chain = self._flow.chains[-1]
        steps = [step for step in chain.upto if not step.operation.barrier]
        rows = results.samples_between(self._database, version.id, first=first, count=count)
        pending = Pending(chain, version, self._keys[version.id], remakes=True)
        samples = {str(row.ordinal): Sample(ordinal=row.ordinal, missing=list(steps)) for row in rows}
        for _ in self._outcomes(list(samples.values()), pending):
            pass
        for row in rows:
            if samples[str(row.ordinal)].record != row.record:
                raise IndexDamagedError(
                    f"stored data is damaged: record {row.sample_id} of {version.reference} is lost, and its source "
                    "no longer gives the same record"
                )
        artifacts = self._lakehouse.put_digested(pending.parts)
        results.replace_artifacts(self._database, artifacts, actions=pending.actions, now_s=self._context.now_s())

    def close(self) -> None:
        """End the sandboxes' children."""
        for sandbox in self._sandboxes.values():
            sandbox.close()

    def _sandbox(self, chain: Chain) -> Sandbox:
        device, limits = chain.device, self._context.limits
        if device not in self._sandboxes:
            if device != "cpu":
                # A GPU's driver maps far more memory than it uses, and opens devices.
                limits = dataclasses.replace(limits, memory_bytes=None, confine=False)
            steps = sandbox_steps(self._flow.recipe, device)
            self._sandboxes[device] = Sandbox(steps, limits, shared=self._flow.shared)
        return self._sandboxes[device]

    def _samples(self, item: WorkItem, pending: Pending, letters: Sequence[Letter]) -> list[Sample]:
        chain = pending.chain
        samples = read_samples(self._database, item.version_id, first=item.first, count=item.count)
        if not chain.reads_source:
            return samples
        ended = {letter.ordinal for letter in letters if letter.operation == INGEST}
        ended |= {sample.ordinal for sample in samples}
        unread = [
            Sample(ordinal=at, missing=list(chain.upto))
            for at in range(item.first, item.first + item.count)
            if at not in ended
        ]
        return sorted([*samples, *unread], key=lambda one: one.ordinal)

    def _run(self, item: WorkItem, wave: Sequence[Sample], pending: Pending) -> None:
        """Run a wave of samples, committing parts."""
        for _ in self._outcomes(wave, pending):
            if self._pace.due(pending.size_bytes):
                self._commit(item, pending, finished=False)
                self._pace.begin()

    def _outcomes(self, wave: Sequence[Sample], pending: Pending) -> Iterator[None]:
        """Read samples and run their steps in the sandbox; yield after each."""
        by_key = {str(sample.ordinal): sample for sample in wave}
        tasks = self._tasks(wave, pending)
        if not pending.chain.steps:
            yield from (None for _ in tasks)
            return
        for outcome in self._sandbox(pending.chain).run(tasks):
            pending.take(by_key[outcome.key], outcome)
            yield

    def _tasks(self, wave: Sequence[Sample], pending: Pending) -> Iterator[SampleTask]:
        """Yield a task for each sample that has a step to run; a record that breaks its source's rules has none."""
        unread = [sample for sample in wave if not sample.record]
        source = self._context.sources.open(pending.version, self._lakehouse) if unread else None
        for sample in unread:
            assert source is not None
            task = self._read(source, sample, pending)
            if task is not None:
                yield task
        known = [sample for sample in wave if sample.record and sample not in unread]
        yield from self._inputs.tasks(known, window_bytes_max=WINDOW_BYTES_MAX)

    def _read(self, source: Source, sample: Sample, pending: Pending) -> SampleTask | None:
        """Read a record from its source."""
        try:
            raw = source.read(sample.ordinal)
            content = canonical_json(raw.content)
        except BadRecordError as error:
            pending.refuse(sample, error, sample_id=error.sample_id or source.record_id(sample.ordinal))
            return None
        sample.sample_id, sample.record = raw.sample_id, digest_bytes(content)
        pending.samples.append(SampleRow(ordinal=sample.ordinal, sample_id=sample.sample_id, record=sample.record))
        digests = raw.digests or map(digest_bytes, raw.blobs)
        blobs = {digest: Blob(data, digest=digest) for digest, data in zip(digests, raw.blobs, strict=True)}
        pending.parts[sample.record] = content
        # The document of many pages is stored once, not with every part that is committed.
        pending.parts |= {digest: blob.data for digest, blob in blobs.items() if digest not in pending.stored}
        pending.reused |= blobs.keys() & pending.stored
        pending.count(INGEST, misses=1)
        # Most records of a later version are those of an earlier one.
        if not sample.missing or (pending.version.number > 1 and not pending.remakes and self._known(sample, pending)):
            return None
        value = Value(data=raw.content, blobs=blobs)
        steps = tuple(step.name for step in sample.missing)
        return SampleTask(key=str(sample.ordinal), values={RECORD: value}, steps=steps)

    def _known(self, sample: Sample, pending: Pending) -> bool:
        """Take over what another version's steps made of the same record, if that is all of it."""
        steps = sample.missing
        hits = resolve([sample], steps, pending.keys, outputs_of=self._outputs_of, ends=pending.ends)
        if sample.missing:
            sample.missing, sample.outputs = steps, {}
            return False
        for name, count in hits.items():
            pending.count(name, hits=count)
        pending.reused |= set(_stored(sample))
        return True

    def _commit(self, item: WorkItem, pending: Pending, *, finished: bool) -> None:
        """Store the bytes, then commit the rows that name them."""
        artifacts = self._lakehouse.put_digested(pending.parts) if pending.parts else []
        outcome = pending.results(artifacts, finished=finished)
        store_list(self._lakehouse.store, pending.version, outcome)
        written = results.commit(
            self._database,
            outcome,
            finished=item if finished else None,
            within=None if finished else item,
            owner=self._context.owner,
            children=self._flow.following(item) if finished else (),
            now_s=self._context.now_s(),
        )
        if not written and not finished:
            raise LeaseLostError(f"work item {item.key} was taken over by another worker")
        self._on_counts(item, outcome.counts)
        self._remember(pending.parts)
        pending.clear()

    def _remember(self, parts: Mapping[str, bytes]) -> None:
        for digest, data in parts.items():
            if len(data) >= REMEMBERED_BYTES_MIN:
                self._stored[digest] = None
        while len(self._stored) > REMEMBERED_MAX:
            self._stored.popitem(last=False)

    def _outputs_of(self, keys: Collection[str]) -> Mapping[str, Output]:
        return known_outputs(self._database, keys)


def sandbox_steps(recipe: Recipe, device: Device) -> list[SandboxStep]:
    """Return the steps that run in a child of one device: all of its kind, for lost outputs of earlier chains, too."""
    return [
        SandboxStep(
            name=step.name,
            operation=step.operation.path,
            inputs=step.inputs,
            parameters=dataclasses.asdict(step.parameters),
        )
        for step in recipe.steps
        if not step.operation.barrier and step.operation.device == device
    ]


def _stored(sample: Sample) -> Iterator[str]:
    """Yield the digests of the stored bytes that a sample's known outputs name."""
    if sample.record:
        yield sample.record
    for output in sample.outputs.values():
        if output.value is None:
            yield output.digest
        else:
            yield from output.value.blobs


class LeaseLostError(EnvironmentFailedError):
    """Another worker holds the item now."""
