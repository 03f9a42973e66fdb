"""Rebases a status write onto a newer version of its job that differs only in informational fields.

While a scheduling cycle decides to admit a waiting job, its pending reason may be written. Without a rebase the
admission would conflict, be cancelled and be decided again, for thousands of jobs at a time.
"""

from __future__ import annotations

import dataclasses

from polyreme_api.job import TrainingJobStatus
from polyreme_operator.reconcile.data_gate import awaits_data
from polyreme_operator.types.actions import WriteStatus
from polyreme_operator.types.reasons import ConditionType
from polyreme_operator.types.views import JobView

_INFORMATIONAL = frozenset(
    {"conditions", "replicas", "replicas_in_force", "ready_replicas", "observed_generation", "priority"}
)
"""Informational fields of a waiting job, on which no decision depends."""
_OF_DECISIONS = tuple(kind for kind in ConditionType if kind not in {ConditionType.QUEUED, ConditionType.DATA_READY})


def rebased(write: WriteStatus, job: JobView) -> WriteStatus:
    """Return the write for the job's present version; unchanged, so that it conflicts, if other fields differ."""
    before, now = write.before, job.status
    if awaits_data(job) or job.queue_refusal:
        # Its data was reported missing since, or its queue does not accept it any more.
        return write
    if job.deleting or before.is_true(ConditionType.ADMITTED) or job.generation != write.after.observed_generation:
        return write
    if any(before.condition(kind) != now.condition(kind) for kind in _OF_DECISIONS):
        return write
    names = set(TrainingJobStatus.model_fields) - _INFORMATIONAL
    if any(getattr(before, name) != getattr(now, name) for name in names):
        return write
    return dataclasses.replace(write, resource_version=job.resource_version, before=now)
