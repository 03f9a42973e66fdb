"""The plans of a job's spec, and the request for them."""

from __future__ import annotations

import dataclasses

from polyreme_api.job import TrainingJobStatus
from polyreme_planner.plan import Plan


@dataclasses.dataclass(frozen=True, slots=True)
class PlanRequest:
    """What plans are made from. Equal requests have equal plans, so they are planned once."""

    spec_json: str
    """The spec of the job as it is stored."""
    rescaled: bool = False
    """Whether the worker count was changed later: an Explicit layout may then scale its dp."""
    in_force: tuple[int, ...] = ()
    """Other worker counts with which the job has trained or was accepted: it keeps the first that has a plan if
    ``spec.workers.replicas`` has none."""


@dataclasses.dataclass(frozen=True, slots=True)
class JobPlans:
    """Answer to a request."""

    plans: tuple[Plan, ...] = ()
    """For ``spec.workers.replicas``, or else for the count that stays in force, then for the other counts that the job
    accepts."""
    refused: str = ""
    """Why there is no plan for ``spec.workers.replicas``; empty if there is one."""


def counts_in_force(status: TrainingJobStatus, *, requested: int) -> tuple[int, ...]:
    """Return the worker counts that a job keeps if the requested one is refused: first the one that it holds."""
    attempt = status.attempt
    held = 0 if attempt is None else attempt.replicas
    known = (held, status.replicas_in_force) if status.is_true("Admitted") else (status.replicas_in_force, held)
    return tuple(count for count in dict.fromkeys(known) if count not in {0, requested})
