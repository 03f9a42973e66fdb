"""A status that was decided on one version of a job, put on another that differs in nothing that was decided by.

A waiting job is told its reason while a round decides to admit it. Both write its status; without this the admission
would meet another version, be taken back, and be decided anew, for thousands of jobs at a time.
"""

from __future__ import annotations

import dataclasses

from polyreme_api.job import TrainingJobStatus
from polyreme_operator.types.actions import WriteStatus
from polyreme_operator.types.reasons import ConditionType
from polyreme_operator.types.views import JobView

_TOLD = frozenset({"conditions", "replicas", "ready_replicas", "observed_generation", "priority"})
"""Fields by which a waiting job is told how it stands, and nothing is decided."""


def rebased(write: WriteStatus, job: JobView) -> WriteStatus:
    """Return the write on the job's present version; as it is, and so refused, where more than words has changed."""
    before, now = write.before, job.status
    if job.deleting or before.is_true(ConditionType.ADMITTED) or job.generation != write.after.observed_generation:
        return write
    if any(before.condition(kind) != now.condition(kind) for kind in ConditionType if kind is not ConditionType.QUEUED):
        return write
    names = set(TrainingJobStatus.model_fields) - _TOLD
    if any(getattr(before, name) != getattr(now, name) for name in names):
        return write
    return dataclasses.replace(write, resource_version=job.resource_version, before=now)
