"""Changes by the plugin: one field of a job's spec, as it was seen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from polyreme.plugin.reading import read_job
from polyreme.plugin.rows import state_of
from polyreme.plugin.snapshot import read_view
from polyreme_api.errors import InvalidConfigError, RefusedError
from polyreme_cluster.port import ClusterPort, ConflictError
from polyreme_operator.types.views import JobView

TRIES_MAX = 8
"""A patch that meets another version is recomputed this often."""
Change = Callable[[JobView], Mapping[str, Any] | None]


async def change(cluster: ClusterPort, namespace: str, name: str, wanted: Change) -> tuple[JobView, bool]:
    """Patch a job's spec as it was seen; if another client changed it in the meantime, it is read again.

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
        job = read_view(await read_job(cluster, namespace, name))
        patch = wanted(job)
        if patch is None:
            return job, False
        try:
            done = await cluster.patch(job.ref, {"spec": dict(patch)}, resource_version=job.resource_version)
            return read_view(done), True
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
    if job.paused:
        raise RefusedError(
            f"{job.namespace}/{job.name} is paused since its loss spiked again after rollbacks; change its spec, for "
            "example append an entry with skipSteps",
            field="spec.data.schedule, or suspend the job and resume it",
        )
    return None if job.spec is not None and not job.spec.suspend else {"suspend": False}


def scale_to(replicas: int) -> Change:
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
    """Delete a job as it was seen; its pods are deleted after it, its checkpoints stay.

    Raises:
        NotFoundError: If there is no such job.
        ConflictError: If it was replaced in the meantime.
    """
    job = read_view(await read_job(cluster, namespace, name))
    await cluster.delete(job.ref, uid=job.uid)
    return job


def _must_go_on(job: JobView, what: str) -> None:
    if job.status.finished:
        raise RefusedError(f"job {job.namespace}/{job.name} has finished ({state_of(job)[0]}), it can't be {what}")
    if job.deleting:
        raise RefusedError(f"job {job.namespace}/{job.name} is being deleted, it can't be {what}")
