"""The commands that change a job: suspend, resume, scale, cancel."""

from __future__ import annotations

from typing import Annotated

import typer

from polyreme.output import confirm, note
from polyreme.plugin.options import Context, Job, Kubeconfig, Namespace, Timeout, Wait, target
from polyreme_api.errors import RefusedError


def suspend(
    name: Job,
    wait: Wait = False,
    timeout_s: Timeout = 600,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
) -> None:
    """Ask a job to save a checkpoint and stop; it releases its devices and keeps everything else.

    Example: kubectl polyreme suspend big --wait
    """
    from polyreme.plugin import change
    from polyreme_operator.port import ClusterPort

    where = target(kubeconfig, context, namespace)

    async def story(cluster: ClusterPort) -> None:
        job, changed = await change.change(cluster, *where.split(name), change.suspend)
        grace = job.spec.checkpoint.preemption_grace_seconds if job.spec is not None else None
        after = f"it saves a checkpoint and stops within about {grace} s" if job.admitted else "it leaves the queue"
        words = f"will be suspended: {after}" if changed else "has already been asked to suspend"
        note(f"{job.namespace}/{job.name} {words}")
        if wait:
            await change.follow(
                cluster,
                job,
                lambda seen: seen.status.is_true("Suspended") or seen.status.finished,
                timeout_s=timeout_s,
                what="suspended",
            )
            note(f"{job.namespace}/{job.name} is suspended; `kubectl polyreme resume {job.name}` continues it")

    where.run(story)


def resume(
    name: Job,
    wait: Wait = False,
    timeout_s: Timeout = 600,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
) -> None:
    """Put a suspended job back into its queue; it continues from its newest checkpoint.

    Example: kubectl polyreme resume big
    """
    from polyreme.plugin import change
    from polyreme_operator.port import ClusterPort

    where = target(kubeconfig, context, namespace)

    async def story(cluster: ClusterPort) -> None:
        job, changed = await change.change(cluster, *where.split(name), change.resume)
        queue = job.spec.queue_name if job.spec is not None else "?"
        step = job.status.last_checkpoint.step if job.status.last_checkpoint is not None else 0
        after = f"it waits in queue {queue} and continues after step {step}"
        note(f"{job.namespace}/{job.name} {f'is resumed: {after}' if changed else 'is not suspended'}")
        if wait:
            await change.follow(
                cluster,
                job,
                lambda seen: seen.status.is_true("Running") or seen.status.finished,
                timeout_s=timeout_s,
                what="running",
            )
            note(f"{job.namespace}/{job.name} runs")

    where.run(story)


def scale(
    name: Job,
    replicas: Annotated[int, typer.Option(min=1, max=15_000, help="New number of workers.")],
    wait: Wait = False,
    timeout_s: Timeout = 600,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
) -> None:
    """Change the number of workers: a running job saves a checkpoint and continues with a plan of that size.

    Example: kubectl polyreme scale big --replicas 8
    """
    from polyreme.plugin import change
    from polyreme_operator.port import ClusterPort

    where = target(kubeconfig, context, namespace)

    async def story(cluster: ClusterPort) -> None:
        job, changed = await change.change(cluster, *where.split(name), change.scale_to(replicas))
        after = "it saves a checkpoint, and a new attempt starts" if job.admitted else "it waits for that many"
        words = f"is scaled to {replicas} workers: {after}" if changed else f"already wants {replicas} workers"
        note(f"{job.namespace}/{job.name} {words}")
        if wait:
            seen = await change.follow(
                cluster,
                job,
                lambda seen: (
                    seen.status.finished
                    or seen.status.is_true("ResizeRefused")
                    or (seen.admitted and seen.attempt is not None and seen.attempt.replicas == replicas)
                ),
                timeout_s=timeout_s,
                what=f"of {replicas} workers",
            )
            refused = seen.status.condition("ResizeRefused")
            if refused is not None and refused.status == "True":
                raise RefusedError(f"{replicas} workers were refused: {refused.message}", field="--replicas")
            note(f"{job.namespace}/{job.name} has {replicas} workers")

    where.run(story)


def cancel(
    name: Job,
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Do not ask for confirmation.")] = False,
    wait: Wait = False,
    timeout_s: Timeout = 600,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
) -> None:
    """Delete a job and its pods without a last checkpoint. Checkpoints already written stay.

    Example: kubectl polyreme cancel big --yes
    """
    from polyreme.plugin import change
    from polyreme_operator.port import ClusterPort

    where = target(kubeconfig, context, namespace)
    space, short = where.split(name)
    confirm(f"delete job {space}/{short}? suspend would keep it", yes=yes)

    async def story(cluster: ClusterPort) -> None:
        job = await change.cancel(cluster, space, short)
        checkpoint = job.status.last_checkpoint
        kept = f"; its checkpoints up to step {checkpoint.step} stay" if checkpoint is not None else ""
        note(f"{space}/{short} is deleted{kept}")
        if wait:
            await change.until_gone(cluster, job, timeout_s=timeout_s)
            note(f"{space}/{short} and its pods are gone")

    where.run(story)
