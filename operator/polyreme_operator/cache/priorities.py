"""Index of PriorityClasses, which keeps the priorities of jobs up to date."""

from __future__ import annotations

import dataclasses

from polyreme_operator.cache.jobs import JobIndex
from polyreme_operator.types.changes import Changes
from polyreme_operator.types.priority import PriorityClassView, priority_of


class PriorityIndex:
    """PriorityClasses by name."""

    def __init__(self, jobs: JobIndex) -> None:
        self._jobs = jobs
        self.values: dict[str, PriorityClassView] = {}

    def put(self, name: str, value: PriorityClassView | None) -> Changes:
        """Add, replace or, with None, remove a class."""
        if value is None:
            self.values.pop(name, None)
        else:
            self.values[name] = value
        changes = Changes()
        for job in list(self._jobs.views.values()):
            found = priority_of(job.spec, self.values)
            if (found.value, found.class_missing) != (job.priority, job.class_missing):
                after = dataclasses.replace(job, priority=found.value, class_missing=found.class_missing)
                change = self._jobs.put(after)
                changes |= Changes(jobs={job.uid}, capacity=change.freed, asks=change.asks)
        return changes
