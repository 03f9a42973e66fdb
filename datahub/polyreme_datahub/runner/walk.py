"""Walks over all samples of a version in order, with what the steps made of each: for barriers and for sealing."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence

from polyreme_datahub.lakehouse import Lakehouse
from polyreme_datahub.recipes.recipe import Step
from polyreme_datahub.registry import results
from polyreme_datahub.registry.datasets import DatasetVersion
from polyreme_datahub.registry.engine import Database
from polyreme_datahub.runner.inputs import Inputs
from polyreme_datahub.runner.resolution import Keys, Output, Sample, resolve
from polyreme_datahub.runner.stored import Stored

PAGE = 256
"""Samples that are looked up at once."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Walked:
    """A sample that no step ended."""

    ordinal: int
    sample_id: str
    record: str
    outputs: Mapping[str, Output]
    values: Mapping[str, Stored]
    """Values of the steps that were asked for."""


class Walk:
    """Walks over versions.

    Args:
        database: Registry.
        lakehouse: Where bytes lie.
        constants: Of the recipe.
    """

    def __init__(self, database: Database, lakehouse: Lakehouse, *, constants: Mapping[str, str]) -> None:
        self._database = database
        self._constants = constants
        self._inputs = Inputs(database, lakehouse, constants=constants)

    def samples(
        self,
        version: DatasetVersion,
        steps: Sequence[Step],
        *,
        values_of: Sequence[str],
        first: int = 0,
        count: int | None = None,
    ) -> Iterator[Walked]:
        """Yield the samples that came through all ``steps``, by ordinal.

        Args:
            version: The version.
            steps: Steps of the flow, in order.
            values_of: Names of the steps whose values are wanted.
            first: First ordinal.
            count: Count of ordinals; None: to the end.
        """
        stop = version.records if count is None else min(version.records, first + count)
        for start in range(first, stop, PAGE):
            yield from self._page(version, steps, values_of, start, min(PAGE, stop - start))

    def _page(
        self, version: DatasetVersion, steps: Sequence[Step], values_of: Sequence[str], first: int, count: int
    ) -> Iterator[Walked]:
        samples = read_samples(self._database, version.id, first=first, count=count)
        resolve(
            samples,
            steps,
            Keys(version.digest, self._constants),
            outputs_of=lambda keys: known_outputs(self._database, keys),
            ends=known_ends(self._database, version.id, first=first, count=count),
        )
        through = [sample for sample in samples if not sample.ended and not sample.missing]
        large = {
            sample.outputs[name].digest
            for sample in through
            for name in values_of
            if sample.outputs[name].value is None
        }
        read = self._inputs.stored(large)
        for sample in through:
            values = {name: sample.outputs[name].value or read[sample.outputs[name].digest] for name in values_of}
            yield Walked(
                ordinal=sample.ordinal,
                sample_id=sample.sample_id,
                record=sample.record,
                outputs=sample.outputs,
                values=values,
            )


def read_samples(database: Database, version_id: int, *, first: int, count: int) -> list[Sample]:
    """Return the samples of some ordinals that are read, in order."""
    rows = results.samples_between(database, version_id, first=first, count=count)
    return [Sample(ordinal=row.ordinal, sample_id=row.sample_id, record=row.record) for row in rows]


def known_outputs(database: Database, keys: Collection[str]) -> dict[str, Output]:
    """Return the outputs of the actions that are known, by key."""
    found = results.outputs_of(database, keys)
    return {key: Output(made.digest, text=made.value) for key, made in found.items()}


def known_ends(database: Database, version_id: int, *, first: int, count: int) -> set[str]:
    """Return the keys of the dead letters and of the dropped samples of some ordinals."""
    letters = results.letters_between(database, version_id, first=first, count=count)
    drops = results.drops_between(database, version_id, first=first, count=count)
    return {letter.key for letter in letters} | {drop.key for drop in drops}
