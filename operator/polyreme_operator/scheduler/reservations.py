"""Capacity reserved for a preemptor while its victims stop."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

from polyreme_operator.types.inventory import RowArray
from polyreme_operator.types.timestamps import parse_time_or
from polyreme_operator.types.views import JobView


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Nodes reserved for one preemptor."""

    by: JobView
    """The preemptor."""
    rows: RowArray
    """Nodes of its victims."""
    stopping: tuple[str, ...]
    """UIDs of the victims that still hold devices."""


def unused(jobs: Mapping[str, JobView], by: JobView, victims: Collection[str]) -> list[str]:
    """Return the victims that were preempted since the preemptor last started: a reservation is for one start only.

    A preemptor that lost its place again waits in the normal order. Times are whole seconds; within one second the
    start counts as earlier, since a running job preempts no other.
    """
    began_s = parse_time_or(None if by.attempt is None else by.attempt.started_at, 0.0)
    asked = ((uid, jobs[uid].status.preemption) for uid in sorted(victims))
    return [uid for uid, each in asked if each is not None and parse_time_or(each.requested_at, 0.0) >= began_s]
