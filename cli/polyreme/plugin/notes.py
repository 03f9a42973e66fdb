"""Notes on a job from its other conditions, beside the one that names its state."""

from __future__ import annotations

from polyreme_operator.types.reasons import ConditionType
from polyreme_operator.types.views import JobView

_TRUE = (ConditionType.STRAGGLERS_FOUND, ConditionType.HANG_DETECTION_OFF, ConditionType.TEMPLATE_FIELDS_UNKNOWN)
"""Conditions that say something while they hold."""


def notes_of(job: JobView) -> tuple[str, ...]:
    """Return why its pods are not ready while it holds its devices, who slows it down, and what has no effect."""
    ready = job.status.condition(ConditionType.PODS_READY)
    waits = ready is not None and job.admitted and not job.status.finished
    found = [ready.message] if ready is not None and waits else []
    for kind in _TRUE:
        condition = job.status.condition(kind)
        if condition is not None and condition.status == "True":
            found.append(condition.message)
    return tuple(filter(None, found))
