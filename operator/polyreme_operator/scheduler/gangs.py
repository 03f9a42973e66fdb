"""Placement requests of jobs."""

from __future__ import annotations

import dataclasses

from polyreme_api.job.workers import Topology
from polyreme_operator.types.inventory import GangRequest
from polyreme_operator.types.views import JobView
from polyreme_planner.plan import Plan


def gang_of(job: JobView, workers: int, *, plan: Plan | None = None, topology: Topology | None = None) -> GangRequest:
    """Return the placement request for a number of a job's workers.

    Args:
        job: The job.
        workers: How many.
        plan: By whose traffic the ranks are ordered; None: in any order.
        topology: How near they must lie, where that is not what the job says of its whole gang.
    """
    assert job.spec is not None, "only jobs that can be read are placed"
    request = GangRequest(
        workers=workers,
        devices=job.spec.workers.devices,
        requests=job.requests,
        constraints=job.constraints,
        topology=job.spec.topology if topology is None else topology,
    )
    return request if plan is None else dataclasses.replace(request, layout=plan.layout, volumes=plan.volumes)
