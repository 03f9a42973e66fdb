"""The priority of a job: the only place that decides it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from polyreme_api.job import TrainingJobSpec
from polyreme_cluster.port import Manifest


@dataclasses.dataclass(frozen=True, slots=True)
class PriorityClassView:
    """A PriorityClass."""

    value: int
    is_default: bool = False
    """Whether it counts for pods, and so for jobs, that name no class (``globalDefault``)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Priority:
    """By what a job waits and is preempted."""

    value: int
    class_missing: bool = False
    """Whether the job names a class that does not exist; ``spec.priority`` counts meanwhile."""


def parse_priority_class(manifest: Manifest) -> PriorityClassView:
    """Parse a PriorityClass."""
    return PriorityClassView(int(manifest.get("value", 0)), manifest.get("globalDefault") is True)


def priority_of(spec: TrainingJobSpec | None, classes: Mapping[str, PriorityClassView]) -> Priority:
    """Return a job's priority: of the class that it names; else its own, or if that is 0, of the cluster's default.

    Args:
        spec: The job's spec; None if it can't be read.
        classes: PriorityClasses by name. Of several defaults the lowest counts, as Kubernetes decides for pods.
    """
    if spec is None:
        return Priority(0)
    if spec.priority_class_name:
        named = classes.get(spec.priority_class_name)
        return Priority(spec.priority, class_missing=True) if named is None else Priority(named.value)
    defaults = [each.value for each in classes.values() if each.is_default]
    return Priority(spec.priority or min(defaults, default=0))
