"""Estimates an ingest without storing anything: counts, bytes, and times that are measured on a few records."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from polyreme_datahub.digests import canonical_json
from polyreme_datahub.errors import BadRecordError, DatasetNotFoundError
from polyreme_datahub.lakehouse import Lakehouse
from polyreme_datahub.objects import open_store
from polyreme_datahub.operations.declare import RECORD
from polyreme_datahub.operations.values import Blob, Value
from polyreme_datahub.recipes.recipe import Recipe, parse_recipe
from polyreme_datahub.registration import add_dataset
from polyreme_datahub.registry import datasets
from polyreme_datahub.registry.datasets import DatasetVersion
from polyreme_datahub.registry.engine import Database, open_database
from polyreme_datahub.runner.chain_work import sandbox_steps
from polyreme_datahub.runner.outcomes import outcomes_of
from polyreme_datahub.sandbox.sandbox import Sandbox
from polyreme_datahub.sandbox.tasks import Limits, SampleTask, StepDropped, StepMade, StepVerdict
from polyreme_datahub.source_ingestion import SOURCE, is_path
from polyreme_datahub.sources.open import open_source
from polyreme_datahub.sources.types import Source

PROBE = 9
"""Records that are tried. The first one also starts the child, so it counts for no time."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class IngestEstimate:
    """What an ingest would do."""

    records: int
    known: int
    """Records whose outcome under this recipe is known already."""
    probed: int
    """Records that were tried; barriers and operations on a GPU were not."""
    refused: int
    """Of those: would become dead letters."""
    dropped: int
    """Of those: filters would drop them."""
    untried: tuple[str, ...]
    """Steps that may drop more: they look at all records at once, or need a GPU."""
    seconds_each: float | None
    """Time of one record in one child [s]; None: not measured."""
    seconds: float | None
    """Time of all records that are left, with all workers [s]."""
    bytes_read: int
    """Raw images and texts of the records that are left, by the mean of those tried."""
    bytes_written: int
    """New images of the records that are left, by the mean of those tried."""


@dataclasses.dataclass(slots=True)
class _Probe:
    read: int = 0
    written: int = 0
    tried: int = 0
    refused: int = 0
    dropped: int = 0
    seconds_each: float | None = None


def estimate(
    database: Database,
    lakehouse: Lakehouse,
    source: str | Path | Mapping[str, Any],
    name: str,
    recipe: Mapping[str, Any],
    *,
    workers: int,
    steady_s: Callable[[], float],
) -> IngestEstimate:
    """Estimate; see ``polyreme_datahub.hub.estimate_ingest``."""
    parsed = parse_recipe(recipe)
    with tempfile.TemporaryDirectory() as folder:
        if is_path(source):
            lakehouse = Lakehouse(open_store(f"file://{folder}/objects"))
            with closing(open_database(f"sqlite:///{folder}/registry.sqlite")) as own:
                version = add_dataset(own, lakehouse, f"{name}/{SOURCE}", source, now_s=lambda: 0.0)
        else:
            version = datasets.find_version(database, str(source))
        probe = _try(version, open_source(version.source, lakehouse), parsed, steady_s)
    known = _known(database, version, parsed)
    left = version.records - known
    each = probe.seconds_each
    return IngestEstimate(
        records=version.records,
        known=known,
        probed=probe.tried,
        refused=probe.refused,
        dropped=probe.dropped,
        untried=tuple(step.name for step in parsed.steps if step.operation.barrier or step.operation.device != "cpu"),
        seconds_each=each,
        seconds=None if each is None else left * each / workers,
        bytes_read=probe.read * left // max(1, probe.tried),
        bytes_written=probe.written * left // max(1, probe.tried),
    )


def _known(database: Database, version: DatasetVersion, recipe: Recipe) -> int:
    try:
        found = datasets.find_version(database, version.name)
    except DatasetNotFoundError:
        return 0
    if found.digest != version.digest:
        return 0
    return version.records - sum(step.waiting for step in outcomes_of(database, found, recipe).steps)


def _try(version: DatasetVersion, source: Source, recipe: Recipe, steady_s: Callable[[], float]) -> _Probe:
    """Run some records, spread over the source, through the steps in a sandbox; nothing is stored."""
    probe = _Probe()
    count = min(PROBE, version.records)
    ordinals = [at * version.records // count for at in range(count)]
    steps = sandbox_steps(recipe, "cpu")
    times: list[float] = []
    with Sandbox(steps, Limits()) as sandbox:
        for outcome in sandbox.run(_tasks(source, ordinals, probe)):
            times.append(steady_s())
            for end in outcome.steps:
                if isinstance(end, StepMade):
                    probe.written += sum(len(end.value.blobs[name].data) for name in end.value.new)
                probe.refused += isinstance(end, StepVerdict)
                probe.dropped += isinstance(end, StepDropped)
    if len(times) > 1:
        probe.seconds_each = (times[-1] - times[0]) / (len(times) - 1)
    return probe


def _tasks(source: Source, ordinals: list[int], probe: _Probe) -> Iterator[SampleTask]:
    for ordinal in ordinals:
        probe.tried += 1
        try:
            raw = source.read(ordinal)
        except BadRecordError:
            probe.refused += 1
            continue
        blobs = {blob.digest: blob for blob in map(Blob, raw.blobs)}
        probe.read += len(canonical_json(raw.content)) + sum(len(blob.data) for blob in blobs.values())
        yield SampleTask(key=str(ordinal), values={RECORD: Value(data=raw.content, blobs=blobs)})
