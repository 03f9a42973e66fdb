"""Index of PriorityClasses, which keeps the priorities of jobs up to date."""

from __future__ import annotations

import dataclasses

from polyreme_cluster.port import Manifest, ObjectRef
from polyreme_operator.cache.jobs import JobIndex
from polyreme_operator.cache.kinds import Kind
from polyreme_operator.types.changes import Changes
from polyreme_operator.types.priority import PriorityClassView, parse_priority_class, priority_of


class PriorityIndex(Kind):
    """PriorityClasses by name."""

    def __init__(self, jobs: JobIndex) -> None:
        self._jobs = jobs
        self.values: dict[str, PriorityClassView] = {}

    def put(self, ref: ObjectRef, manifest: Manifest, now_s: float) -> Changes:
        """Add or replace a class."""
        del now_s
        self.values[ref.name] = parse_priority_class(manifest)
        return self._update_jobs()

    def remove(self, ref: ObjectRef) -> Changes:
        """Remove a class."""
        self.values.pop(ref.name, None)
        return self._update_jobs()

    def _update_jobs(self) -> Changes:
        changes = Changes()
        for job in list(self._jobs.views.values()):
            found = priority_of(job.spec, self.values)
            if (found.value, found.class_missing) != (job.priority, job.class_missing):
                after = dataclasses.replace(job, priority=found.value, class_missing=found.class_missing)
                change = self._jobs.put(after)
                changes |= Changes(jobs={job.uid}, capacity=change.freed, asks=change.asks)
        return changes
