"""Index of PriorityClasses, which keeps the priorities of jobs up to date."""

from __future__ import annotations

import dataclasses

from polyreme_operator.cache.jobs import JobIndex
from polyreme_operator.types.changes import Changes
from polyreme_operator.types.parse import lacks_class, priority_of


class PriorityIndex:
    """Values of PriorityClasses by name."""

    def __init__(self, jobs: JobIndex) -> None:
        self._jobs = jobs
        self.values: dict[str, int] = {}

    def put(self, name: str, value: int | None) -> Changes:
        """Add, replace or, with None, remove a class."""
        if value is None:
            self.values.pop(name, None)
        else:
            self.values[name] = value
        changes = Changes()
        for job in list(self._jobs.views.values()):
            priority, missing = priority_of(job.spec, self.values), lacks_class(job.spec, self.values)
            if (priority, missing) != (job.priority, job.class_missing):
                change = self._jobs.put(dataclasses.replace(job, priority=priority, class_missing=missing))
                changes |= Changes(jobs={job.uid}, capacity=change.freed, asks=change.asks)
        return changes
