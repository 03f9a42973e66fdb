"""The commands that change a job: suspend, resume, scale, cancel."""

from __future__ import annotations

from typing import Annotated

import typer

from polyreme.plugin import change, following
from polyreme.plugin.options import Context, Job, Kubeconfig, Namespace, Timeout, Wait, target
from polyreme.views.output import confirm, note
from polyreme_cluster.port import ClusterPort


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
    where = target(kubeconfig, context, namespace)

    async def story(cluster: ClusterPort) -> None:
        job, changed = await change.change(cluster, *where.split(name), change.suspend)
        grace = job.spec.checkpoint.preemption_grace_seconds if job.spec is not None else None
        after = f"it saves a checkpoint and stops within about {grace} s" if job.admitted else "it leaves the queue"
        words = f"will be suspended: {after}" if changed else "has already been asked to suspend"
        rule = following.suspended(job) if wait else None
        await following.end(cluster, job, words, rule, timeout_s=timeout_s, what="suspended")

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
    where = target(kubeconfig, context, namespace)

    async def story(cluster: ClusterPort) -> None:
        job, changed = await change.change(cluster, *where.split(name), change.resume)
        queue = job.spec.queue_name if job.spec is not None else "?"
        step = job.status.last_checkpoint.step if job.status.last_checkpoint is not None else 0
        after = f"it waits in queue {queue} and continues after step {step}"
        words = f"is resumed: {after}" if changed else "is not suspended"
        rule = following.running(job) if wait else None
        await following.end(cluster, job, words, rule, timeout_s=timeout_s, what="running")

    where.run(story)


def scale(
    name: Job,
    replicas: Annotated[int, typer.Option(min=1, max=15_000, help="New number of workers.")],
    wait: Annotated[
        bool | None,
        typer.Option(
            "--wait/--no-wait",
            help="Wait until the job has that many, or only send the change; default: until the operator has decided.",
            show_default=False,
        ),
    ] = None,
    timeout_s: Timeout = 600,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
) -> None:
    """Change the number of workers: a running job saves a checkpoint and continues with a plan of that size.

    A number that the operator refuses ends with code 4; the job keeps its present size.

    Example: kubectl polyreme scale big --replicas 8
    """
    where = target(kubeconfig, context, namespace)

    async def story(cluster: ClusterPort) -> None:
        job, changed = await change.change(cluster, *where.split(name), change.scale_to(replicas))
        asked = f"was asked to take {replicas} workers" if changed else f"already asks for {replicas} workers"
        settled = following.resized if wait else following.decided
        rule = None if wait is False else settled(job, replicas)
        what = f"of {replicas} workers" if wait else "decided about"
        await following.end(cluster, job, asked, rule, timeout_s=timeout_s, what=what)

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
    where = target(kubeconfig, context, namespace)
    space, short = where.split(name)
    confirm(f"delete job {space}/{short}? suspend would keep it", yes=yes)

    async def story(cluster: ClusterPort) -> None:
        job = await change.cancel(cluster, space, short)
        checkpoint = job.status.last_checkpoint
        kept = f"; its checkpoints up to step {checkpoint.step} stay" if checkpoint is not None else ""
        note(f"{space}/{short} is deleted{kept}")
        if wait:
            unseen = await following.until_gone(cluster, job, timeout_s=timeout_s)
            pods = f"is gone; its pods were not waited for: {unseen}" if unseen else "and its pods are gone"
            note(f"{space}/{short} {pods}")

    where.run(story)
