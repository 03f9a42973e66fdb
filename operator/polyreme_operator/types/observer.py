"""Who is told what the operator does, so that people can see it: loop and applier tell, nothing here decides."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Protocol

from polyreme_api.job import TrainingJobStatus
from polyreme_operator.types.snapshot import JobScene
from polyreme_operator.types.views import JobView


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RoundSeen:
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

    def wrote(self, job: JobView, after: TrainingJobStatus, *, now_s: float) -> None:
        """Take a status that the cluster has accepted; ``job`` is as it was before."""
        ...

    def saw(self, scene: JobScene) -> None:
        """Take a job as it is looked at, with what its ranks say of their newest step."""
        ...

    def decided(self, seen: RoundSeen) -> None:
        """Take a round of the scheduler."""
        ...

    def gone(self, uid: str) -> None:
        """Take that a job is no more."""
        ...

    def untold(self, reason: str) -> None:
        """Take that an event of this reason was told to nobody, since there were too many."""
        ...

    def failed(self, uid: str, error: Exception) -> None:
        """Take that a decision about a job raised an error: a bug of ours."""
        ...

    def unreadable(self, kind: str) -> None:
        """Take that an object of this kind is stored in a form that can't be read."""
        ...


class NullObserver:
    """Nobody looks."""

    def wrote(self, job: JobView, after: TrainingJobStatus, *, now_s: float) -> None:
        """Do nothing."""

    def saw(self, scene: JobScene) -> None:
        """Do nothing."""

    def decided(self, seen: RoundSeen) -> None:
        """Do nothing."""

    def gone(self, uid: str) -> None:
        """Do nothing."""

    def untold(self, reason: str) -> None:
        """Do nothing."""

    def failed(self, uid: str, error: Exception) -> None:
        """Do nothing."""

    def unreadable(self, kind: str) -> None:
        """Do nothing."""
