"""Interface of a tracker, and what it is given of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

ATTEMPT = "train/attempt"
"""Name of the value that shows where a run restarted."""
Parameter = str | int | float | bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """A run, apart from its steps."""

    namespace: str
    name: str
    uid: str
    """Identifies the run for good; a run that ``--fresh`` began has another one."""
    created_s: float
    """When it was created [s since the epoch]."""
    parameters: Mapping[str, Parameter]
    """Leaves of the spec, by field."""
    state: str
    """``Running``, ``Succeeded``, ``Failed``, ``Stopped``, …"""
    tags: Mapping[str, str]

    @property
    def title(self) -> str:
        """Its name, with the namespace where that is not the default one."""
        return self.name if self.namespace == "default" else f"{self.namespace}/{self.name}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Values of one step."""

    step: int
    attempt: int
    at_s: float
    """Wall time of the step's end [s since the epoch]."""
    values: Mapping[str, float]


class Tracker(Protocol):
    """Takes the points of one run. Whatever fails midway may be repeated after another ``open``.

    Every method raises ``RetryableError`` where another try may succeed, and another ``PolyremeError`` where none will.
    """

    def open(self, run: TrackedRun) -> Mapping[str, int]:
        """Find or create what holds the run; return the last step that it holds of each name."""
        ...

    def write(self, points: Sequence[Point]) -> None:
        """Append points, which are newer than all that it holds of their names."""
        ...

    def describe(self, run: TrackedRun) -> None:
        """Record the run's state and tags as they are now."""
        ...

    def close(self) -> None:
        """Write out what is kept, and release files."""
        ...

    def shown_at(self) -> str:
        """Where a person finds the run."""
        ...
