"""What the plugin changes: one field of a job's spec, as it was seen, and what comes of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

from polyreme.output import note
from polyreme.plugin.rows import message_of, state_of
from polyreme.plugin.snapshot import list_all, no_job
from polyreme_api.errors import InvalidConfigError, NotFoundError, RefusedError, WaitTimeoutError
from polyreme_api.labels import KIND_JOB
from polyreme_operator.port import ClusterPort, ConflictError, Manifest, ObjectRef
from polyreme_operator.port import NotFoundError as PortNotFoundError
from polyreme_operator.types.parse import parse_job_view
from polyreme_operator.types.views import JobView

TRIES_MAX = 8
"""A patch that meets another version is worked out anew this often."""
POLL_S = 0.5
_Change = Callable[[JobView], Mapping[str, Any] | None]


async def read(cluster: ClusterPort, namespace: str, name: str) -> tuple[JobView, Manifest]:
    """Read one job.

    Raises:
        NotFoundError: Naming those that exist.
    """
    try:
        manifest = await cluster.get(ObjectRef(kind=KIND_JOB, namespace=namespace, name=name))
    except PortNotFoundError as error:
        known = [item["metadata"]["name"] for item in await list_all(cluster, KIND_JOB, namespace=namespace)]
        raise no_job(namespace, name, known) from error
    return parse_job_view(manifest), manifest


async def change(cluster: ClusterPort, namespace: str, name: str, wanted: _Change) -> tuple[JobView, bool]:
    """Patch a job's spec as it was seen; whoever changed it meanwhile is seen first.

    Args:
        cluster: The cluster.
        namespace: The job's namespace.
        name: The job's name.
        wanted: Returns the merge patch of the spec; None: it is so already.

    Returns:
        The job, and whether anything was changed.

    Raises:
        ConflictError: If others keep changing it.
        NotFoundError: If there is no such job.
    """
    for attempt in range(TRIES_MAX):
        job, _ = await read(cluster, namespace, name)
        patch = wanted(job)
        if patch is None:
            return job, False
        try:
            done = await cluster.patch(job.ref, {"spec": dict(patch)}, resource_version=job.resource_version)
            return parse_job_view(done), True
        except ConflictError:
            if attempt == TRIES_MAX - 1:
                raise
    raise AssertionError("the last try raises")


def suspend(job: JobView) -> Mapping[str, Any] | None:
    """Ask a job to checkpoint, stop and give its devices back."""
    _must_go_on(job, "suspended")
    return None if job.spec is not None and job.spec.suspend else {"suspend": True}


def resume(job: JobView) -> Mapping[str, Any] | None:
    """Let a suspended job queue again."""
    _must_go_on(job, "resumed")
    return None if job.spec is not None and not job.spec.suspend else {"suspend": False}


def scale_to(replicas: int) -> _Change:
    """Ask for another number of workers."""

    def wanted(job: JobView) -> Mapping[str, Any] | None:
        _must_go_on(job, "scaled")
        if job.spec is not None:
            workers = job.spec.workers
            low, high = workers.min_replicas or 1, workers.max_replicas
            if replicas < low or (high is not None and replicas > high):
                raise InvalidConfigError(
                    f"{job.namespace}/{job.name} can't have {replicas} workers, expected {low} to {high or 'any'} "
                    "by spec.workers.minReplicas and maxReplicas",
                    field="--replicas",
                )
            if workers.replicas == replicas:
                return None
        return {"workers": {"replicas": replicas}}

    return wanted


async def cancel(cluster: ClusterPort, namespace: str, name: str) -> JobView:
    """Delete a job as it was seen; its pods go behind it, its checkpoints stay.

    Raises:
        NotFoundError: If there is no such job.
        ConflictError: If it was replaced meanwhile.
    """
    job, _ = await read(cluster, namespace, name)
    await cluster.delete(job.ref, uid=job.uid)
    return job


async def follow(
    cluster: ClusterPort, job: JobView, holds: Callable[[JobView], bool], *, timeout_s: float, what: str
) -> JobView:
    """Wait until something holds of a job, and tell each new state on the way.

    Raises:
        WaitTimeoutError: If it does not in time.
        NotFoundError: If the job goes away.
    """
    deadline_s, told = time.monotonic() + timeout_s, ""
    while True:
        seen, _ = await read(cluster, job.namespace, job.name)
        if seen.uid != job.uid:
            raise NotFoundError(f"job {job.namespace}/{job.name} was deleted and created again", field="JOB")
        if holds(seen):
            return seen
        words = f"{state_of(seen)[0]}: {message_of(seen)}".rstrip(": ")
        if words != told:
            note(f"{job.namespace}/{job.name} {words}")
            told = words
        if time.monotonic() >= deadline_s:
            raise WaitTimeoutError(f"{job.namespace}/{job.name} is not {what} after {timeout_s:g} s", field="--timeout")
        await asyncio.sleep(POLL_S)


async def until_gone(cluster: ClusterPort, job: JobView, *, timeout_s: float) -> None:
    """Wait until a job and its pods are gone.

    Raises:
        WaitTimeoutError: If they are not in time.
    """
    from polyreme_operator.types.parse import parse_pod

    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            here = (await cluster.get(job.ref))["metadata"]["uid"] == job.uid
        except PortNotFoundError:
            here = False
        pods = [parse_pod(item) for item in await list_all(cluster, "Pod", namespace=job.namespace)]
        left = sum(pod is not None and pod.job_uid == job.uid for pod in pods)
        if not here and not left:
            return
        if time.monotonic() >= deadline_s:
            raise WaitTimeoutError(
                f"{job.namespace}/{job.name} is not gone after {timeout_s:g} s, {left} pods are left", field="--timeout"
            )
        await asyncio.sleep(POLL_S)


def _must_go_on(job: JobView, what: str) -> None:
    if job.status.finished:
        raise RefusedError(f"job {job.namespace}/{job.name} has finished ({state_of(job)[0]}), it can't be {what}")
    if job.deleting:
        raise RefusedError(f"job {job.namespace}/{job.name} is being deleted, it can't be {what}")
