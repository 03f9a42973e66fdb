"""Check that an operator works on the cluster: by the Lease of its leading replica, and by what it has looked at."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable

from polyreme.views.formatting import duration
from polyreme_api.labels import MANAGER
from polyreme_cluster.election import LEASE_NAME, RENEW_S
from polyreme_cluster.port import ClusterPort, ForbiddenError, ObjectRef
from polyreme_cluster.port import NotFoundError as PortNotFoundError
from polyreme_operator.settings import Settings
from polyreme_operator.types.timestamps import parse_time_or
from polyreme_operator.types.views import JobView

NAMESPACE_VARIABLE = "POLYREME_OPERATOR_NAMESPACE"
SILENT_S = 60.0
"""A Lease that was renewed within this time has a holder; another replica takes over within a third of it."""
LOOKS_WITHIN_S = 30.0
"""An operator looks at a new job long before this time."""
NAMED_MAX = 3
"""Jobs that one line names."""
Sleep = Callable[[float], Awaitable[None]]


def operator_lease() -> ObjectRef:
    """Return the Lease of the leading replica, in the namespace that the environment names."""
    return ObjectRef(
        kind="Lease", namespace=os.environ.get(NAMESPACE_VARIABLE) or Settings().namespace, name=LEASE_NAME
    )


async def silence(cluster: ClusterPort, now_s: float, *, sleep: Sleep = asyncio.sleep) -> str | None:
    """Return why no operator seems to work; empty if one does, None if the user may not see.

    A Lease that seems old is read again after two renewals, since the clocks of this machine and of the operator may
    differ.
    """
    ref = operator_lease()
    where = f"{ref.name} in namespace {ref.namespace}"
    try:
        lease = await cluster.get(ref)
        quiet_s = now_s - parse_time_or((lease.get("spec") or {}).get("renewTime"), 0.0)
        if quiet_s < SILENT_S:
            return ""
        await sleep(2 * RENEW_S)
        again = await cluster.get(ref)
    except PortNotFoundError:
        return f"no Lease {where}"
    except ForbiddenError:
        return None
    if again["metadata"]["resourceVersion"] != lease["metadata"]["resourceVersion"]:
        return ""
    return f"Lease {where} was renewed {duration(quiet_s)} ago"


def is_unseen(job: JobView) -> bool:
    """Tell whether no operator has looked at the present spec of a job that ours manages."""
    if job.status.finished or (job.spec is not None and job.spec.managed_by != MANAGER):
        return False
    looked = [job.status.observed_generation, *(entry.observed_generation for entry in job.status.conditions)]
    return max(looked) < job.generation


def doubt_of(job: JobView, why: str | None, now_s: float) -> str:
    """Say why the state of a job may not be what its status says; empty if there is no reason to doubt it.

    Args:
        job: The job.
        why: What ``silence`` returned.
        now_s: The time.
    """
    if job.status.finished or (why is None and now_s - job.created_s < LOOKS_WITHIN_S):
        return ""
    if is_unseen(job) and why != "":
        ref = operator_lease()
        return "no operator has looked at this job: is one installed? " + (
            f"({why})" if why else f"(you may not get the Lease {ref.name} in namespace {ref.namespace})"
        )
    return f"no operator works now, so this state may be old ({why})" if why else ""


def doubts_of(jobs: Iterable[JobView], why: str | None, now_s: float) -> list[str]:
    """Say the same of several jobs, in one line each for those that were looked at and those that were not."""
    busy = [job for job in jobs if not job.status.finished]
    lines = []
    for unseen in (True, False):
        alike = [job for job in busy if is_unseen(job) is unseen]
        if alike and (words := doubt_of(alike[0], why, now_s)):
            names = ", ".join(f"{job.namespace}/{job.name}" for job in alike[:NAMED_MAX])
            more = f" and {len(alike) - NAMED_MAX} more" if len(alike) > NAMED_MAX else ""
            lines.append(f"{names}{more}: {words}")
    return lines
