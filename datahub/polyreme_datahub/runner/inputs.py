"""Inputs of the steps that are missing, read from the lakehouse in windows of bounded size."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence

from polyreme_datahub.errors import IndexDamagedError
from polyreme_datahub.lakehouse import Artifact, Lakehouse
from polyreme_datahub.operations.declare import RECORD
from polyreme_datahub.operations.values import Blob, Value
from polyreme_datahub.registry import results
from polyreme_datahub.registry.engine import Database
from polyreme_datahub.runner.resolution import Sample
from polyreme_datahub.runner.stored import Stored
from polyreme_datahub.sandbox.tasks import SampleTask

SAMPLES_MAX = 64
"""Samples of one window."""


class Inputs:
    """Reads what missing steps need."""

    def __init__(self, database: Database, lakehouse: Lakehouse, *, constants: Collection[str]) -> None:
        self._database, self._lakehouse, self._constants = database, lakehouse, constants

    def tasks(self, samples: Sequence[Sample], *, window_bytes_max: int) -> Iterator[SampleTask]:
        """Yield a task for each sample that misses a step, with the values and the blobs that its steps read."""
        last: dict[str, bytes] = {}
        for first in range(0, len(samples), SAMPLES_MAX):
            some = samples[first : first + SAMPLES_MAX]
            values = self._values(some)
            wanted = {sample.ordinal: _blobs_wanted(sample, values[sample.ordinal]) for sample in some}
            places = results.places_of(self._database, {digest for digests in wanted.values() for digest in digests})
            for window in _windows(some, wanted, places, window_bytes_max):
                needed = {digest for sample in window for digest in wanted[sample.ordinal]}
                # A document's pages follow one another: it is in the window before, too.
                known = {digest: last[digest] for digest in needed & last.keys()}
                blobs = last = known | self._get(needed - known.keys(), places)
                for sample in window:
                    mine = {
                        name: Value(
                            data=value.data,
                            blobs={
                                digest: Blob(blobs[digest], digest=digest)
                                for digest in value.blobs
                                if digest in wanted[sample.ordinal]
                            },
                        )
                        for name, value in values[sample.ordinal].items()
                    }
                    yield SampleTask(
                        key=str(sample.ordinal), values=mine, steps=tuple(step.name for step in sample.missing)
                    )

    def stored(self, digests: set[str]) -> dict[str, Stored]:
        """Return stored values by digest."""
        return {digest: Stored.from_bytes(part) for digest, part in self.parts(digests).items()}

    def parts(self, digests: set[str]) -> dict[str, bytes]:
        """Return stored bytes by digest."""
        return self._get(digests, results.places_of(self._database, digests)) if digests else {}

    def _values(self, samples: Sequence[Sample]) -> dict[int, dict[str, Stored]]:
        """Return the values that the missing steps of each sample read and do not make themselves."""
        names = {sample.ordinal: self._wanted(sample) for sample in samples}
        records = {sample.record for sample in samples if RECORD in names[sample.ordinal]}
        large = {
            sample.outputs[name].digest
            for sample in samples
            for name in names[sample.ordinal]
            if name != RECORD and sample.outputs[name].value is None
        }
        read = self.stored(large)
        contents = {digest: Stored.of_record(json.loads(part)) for digest, part in self.parts(records).items()}
        return {
            sample.ordinal: {
                name: contents[sample.record]
                if name == RECORD
                else sample.outputs[name].value or read[sample.outputs[name].digest]
                for name in names[sample.ordinal]
            }
            for sample in samples
        }

    def _wanted(self, sample: Sample) -> list[str]:
        made = {step.name for step in sample.missing} | set(self._constants)
        return sorted({name for step in sample.missing for name in step.inputs if name not in made})

    def _get(self, digests: set[str], places: Mapping[str, Artifact]) -> dict[str, bytes]:
        if lost := sorted(digests - set(places)):
            raise IndexDamagedError(f"stored data is missing: no artifact {lost[0]} in the registry")
        return self._lakehouse.get_parts({digest: places[digest] for digest in digests}) if digests else {}


def _blobs_wanted(sample: Sample, values: Mapping[str, Stored]) -> set[str]:
    """Digests of the blobs that some missing step reads, of values that are not made on the way."""
    wanted: set[str] = set()
    for step in sample.missing:
        for name, reads in zip(step.inputs, step.operation.reads_blobs, strict=True):
            if reads and name in values:
                wanted |= set(values[name].blobs)
    return wanted


def _windows(
    samples: Sequence[Sample],
    wanted: Mapping[int, set[str]],
    places: Mapping[str, Artifact],
    bytes_max: int,
) -> Iterator[list[Sample]]:
    window: list[Sample] = []
    size_bytes, held = 0, set[str]()
    for sample in samples:
        fresh = wanted[sample.ordinal] - held
        if window and size_bytes + _length(fresh, places) > bytes_max:
            yield window
            window, size_bytes, held = [], 0, set()
            fresh = wanted[sample.ordinal]
        window.append(sample)
        size_bytes += _length(fresh, places)
        held |= fresh
    if window:
        yield window


def _length(digests: Collection[str], places: Mapping[str, Artifact]) -> int:
    return sum(places[digest].length for digest in digests if digest in places)
