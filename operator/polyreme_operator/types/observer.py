"""Who is told what the operator does, so that people can see it: loop and applier tell, nothing here decides."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Protocol

from polyreme_api.job import TrainingJobStatus
from polyreme_operator.types.snapshot import JobSnapshot
from polyreme_operator.types.views import JobView


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CycleReport:
    """One round of the scheduler, in numbers."""

    cycle_s: float
    """Time that the decision took, the writes left out."""
    placement_s: tuple[float, ...] = ()
    """Time that each search for places took."""
    waiting: Mapping[tuple[str, str], int] = dataclasses.field(default_factory=dict)
    """Waiting jobs by queue and reason."""
    used: Mapping[tuple[str, str], int] = dataclasses.field(default_factory=dict)
    """Pieces in use by queue and resource."""
    quota: Mapping[tuple[str, str], int] = dataclasses.field(default_factory=dict)
    """Nominal quota by queue and resource."""
    objects: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Objects that the model holds, by kind."""
    quarantined: int = 0
    """Jobs that are left as they are, since reading them or deciding about them raised an error."""


class Observer(Protocol):
    """Is told what has happened; must be quick, and must never fail."""

    def on_status_written(self, job: JobView, after: TrainingJobStatus, *, now_s: float) -> None:
        """Take a status that the cluster has accepted; ``job`` is as it was before."""
        ...

    def on_job_observed(self, snapshot: JobSnapshot) -> None:
        """Take a job as it is looked at, with what its ranks say of their newest step."""
        ...

    def on_cycle_finished(self, seen: CycleReport) -> None:
        """Take a round of the scheduler."""
        ...

    def on_job_deleted(self, uid: str) -> None:
        """Take that a job is no more."""
        ...

    def on_event_dropped(self, reason: str) -> None:
        """Take that an event of this reason was told to nobody, since there were too many."""
        ...

    def on_job_failed(self, uid: str, error: Exception) -> None:
        """Take that a decision about a job raised an error: a bug of ours."""
        ...

    def on_object_unreadable(self, kind: str) -> None:
        """Take that an object of this kind is stored in a form that can't be read."""
        ...


class NullObserver:
    """Nobody looks."""

    def on_status_written(self, job: JobView, after: TrainingJobStatus, *, now_s: float) -> None:
        """Do nothing."""

    def on_job_observed(self, snapshot: JobSnapshot) -> None:
        """Do nothing."""

    def on_cycle_finished(self, seen: CycleReport) -> None:
        """Do nothing."""

    def on_job_deleted(self, uid: str) -> None:
        """Do nothing."""

    def on_event_dropped(self, reason: str) -> None:
        """Do nothing."""

    def on_job_failed(self, uid: str, error: Exception) -> None:
        """Do nothing."""

    def on_object_unreadable(self, kind: str) -> None:
        """Do nothing."""
