"""Outcomes of a version's records under one recipe: counts that add up, and the dead letters that count.

Rows of other recipes over the same version are no part of it.
"""

from __future__ import annotations

import dataclasses

from polyreme_datahub.recipes.recipe import INGEST, Recipe
from polyreme_datahub.registry import results
from polyreme_datahub.registry.datasets import DatasetVersion
from polyreme_datahub.registry.engine import Database
from polyreme_datahub.registry.rows import Drop, Letter, OperationCount
from polyreme_datahub.runner.resolution import Keys, Sample, letter_key, resolve
from polyreme_datahub.runner.walk import PAGE, known_outputs, read_samples

SHOWN_MAX = 1000
"""Dead letters, and dropped samples, of one report."""


@dataclasses.dataclass(slots=True, kw_only=True)
class StepOutcome:
    """Records at one operation; those that ended before are not counted."""

    name: str
    through: int = 0
    dead: int = 0
    dropped: int = 0
    waiting: int = 0
    """Records that the operation has not seen yet."""

    def count(self, made: int = 0) -> OperationCount:
        """Return the counts of a run that made so many of the outputs, and reused the others."""
        made = min(made, self.through)
        hits = self.through - made
        return OperationCount(operation=self.name, hits=hits, misses=made, dead=self.dead, dropped=self.dropped)


@dataclasses.dataclass(slots=True, kw_only=True)
class Outcomes:
    """Records of a version under one recipe."""

    steps: list[StepOutcome]
    """The reading of the source first, then the steps in order."""
    letters: list[Letter] = dataclasses.field(default_factory=list)
    """At most ``SHOWN_MAX``, by ordinal."""
    drops: list[Drop] = dataclasses.field(default_factory=list)
    """At most ``SHOWN_MAX``, by ordinal."""

    @property
    def dead(self) -> int:
        """Records with a dead letter."""
        return sum(step.dead for step in self.steps)

    @property
    def dropped(self) -> int:
        """Records that a filter or a barrier dropped."""
        return sum(step.dropped for step in self.steps)


def outcomes_of(database: Database, version: DatasetVersion, recipe: Recipe) -> Outcomes:
    """Look at every record of a version; reads rows of the registry only."""
    look = _Look(database, version, recipe)
    for first in range(0, version.records, PAGE):
        look.page(first, min(PAGE, version.records - first))
    return look.found


class _Look:
    """One pass over a version."""

    def __init__(self, database: Database, version: DatasetVersion, recipe: Recipe) -> None:
        self._database, self._version, self._recipe = database, version, recipe
        self._keys = Keys(version.digest, recipe.constants)
        self._letters: dict[str, Letter] = {}
        self._drops: dict[str, Drop] = {}
        names = (INGEST, *(step.name for step in recipe.steps))
        self.found = Outcomes(steps=[StepOutcome(name=name) for name in names])

    def page(self, first: int, count: int) -> None:
        """Look at some ordinals."""
        database, number = self._database, self._version.id
        letters = results.letters_between(database, number, first=first, count=count)
        self._letters = {one.key: one for one in letters}
        self._drops = {one.key: one for one in results.drops_between(database, number, first=first, count=count)}
        samples = read_samples(database, number, first=first, count=count)
        resolve(
            samples,
            self._recipe.steps,
            self._keys,
            outputs_of=lambda wanted: known_outputs(database, wanted),
            ends={*self._letters, *self._drops},
        )
        unread = {letter.ordinal: letter for letter in letters if letter.operation == INGEST}
        by_ordinal = {sample.ordinal: sample for sample in samples}
        for ordinal in range(first, first + count):
            if (sample := by_ordinal.get(ordinal)) is not None:
                self.found.steps[0].through += 1
                self._follow(sample)
            elif ordinal in unread:
                self.found.steps[0].dead += 1
                self._note_letter(unread[ordinal])
            else:
                self.found.steps[0].waiting += 1

    def _follow(self, sample: Sample) -> None:
        missing = {step.name for step in sample.missing}
        for at, step in enumerate(self._recipe.steps):
            count = self.found.steps[at + 1]
            if step.name == sample.ended:
                self._note_end(sample, at, count)
                return
            if step.name in missing:
                count.waiting += 1
                return
            count.through += 1

    def _note_end(self, sample: Sample, at: int, count: StepOutcome) -> None:
        step = self._recipe.steps[at]
        barrier = step.operation.barrier
        action = self._keys.of_barrier(step, self._recipe.steps[:at]) if barrier else self._keys.key_of(sample, step)
        key = letter_key(action or "", sample.ordinal)
        if key in self._letters:
            count.dead += 1
            self._note_letter(self._letters[key])
        else:
            count.dropped += 1
            if len(self.found.drops) < SHOWN_MAX:
                self.found.drops.append(self._drops[key])

    def _note_letter(self, letter: Letter) -> None:
        if len(self.found.letters) < SHOWN_MAX:
            self.found.letters.append(letter)
