"""The commands that only look: get, describe, why, queue, topology, top."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from polyreme.plugin.options import (
    AllNamespaces,
    Context,
    Form,
    Job,
    Jobs,
    Kubeconfig,
    Namespace,
    target,
)
from polyreme.plugin.printing import Output, emit_data, emit_names, envelope, is_data, show
from polyreme.plugin.target import Target
from polyreme_api.errors import InvalidConfigError


def get(
    names: Jobs = None,
    output: Form = Output.TABLE,
    namespace: Namespace = None,
    everywhere: AllNamespaces = False,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
) -> None:
    """List jobs: state, queue, workers that have joined, step, and the reason.

    Examples:

      kubectl polyreme get

      kubectl polyreme get -A -o wide

      kubectl polyreme get big -o yaml
    """
    from polyreme.plugin.rows import get_table
    from polyreme.plugin.snapshot import JOBS

    where = target(kubeconfig, context, namespace, everywhere=everywhere)
    seen = where.look(JOBS)
    if names:
        jobs = [seen.job(*where.split(name)) for name in names]
    else:
        jobs = [job for job in seen.jobs if where.shows(job.namespace)]
    if output is Output.NAME:
        emit_names(job.name for job in jobs)
    elif is_data(output):
        items = [seen.manifests[job.uid] for job in jobs]
        one = names is not None and len(names) == 1
        emit_data(items[0] if one else {"apiVersion": "v1", "kind": "List", "items": items}, output)
    elif jobs:
        show(get_table(jobs, now_s=seen.now_s, wide=output is Output.WIDE, namespaced=everywhere))
    else:
        _nothing(where, "jobs")


def describe(
    name: Job,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
) -> None:
    """Show one job in full: state and reason, workers by node, restarts, lost time, events.

    Example: kubectl polyreme describe big
    """
    from polyreme.plugin import description
    from polyreme.plugin.change import read
    from polyreme.plugin.snapshot import list_all, snapshot_of
    from polyreme_operator.port import ClusterPort, Manifest

    where = target(kubeconfig, context, namespace)

    async def story(cluster: ClusterPort) -> tuple[dict[str, list[Manifest]], list[Manifest]]:
        space, short = where.split(name)
        job, manifest = await read(cluster, space, short)
        found = {kind: await list_all(cluster, kind, namespace=space) for kind in ("Pod", "Lease")}
        events = await list_all(cluster, "Event", namespace=space)
        found["TrainingJob"] = [manifest]
        found["PriorityClass"] = await list_all(cluster, "PriorityClass")
        return found, [event for event in events if (event.get("involvedObject") or {}).get("uid") == job.uid]

    found, events = where.run(story)
    seen = snapshot_of(found, now_s=time.time())
    show(description.render(seen, seen.jobs[0], events))


def why(
    name: Job,
    output: Form = Output.TABLE,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
) -> None:
    """Say why a job is in its state: what would let it run, its place, the jobs ahead of it, the jobs it preempts.

    Examples:

      kubectl polyreme why big

      kubectl polyreme why team-a/big -o json
    """
    from polyreme.plugin import why as reasons
    from polyreme.plugin.snapshot import QUEUES

    where = target(kubeconfig, context, namespace)
    seen = where.look(QUEUES)
    answer = reasons.why(seen, seen.job(*where.split(name)))
    _answer("Why", answer.to_object(), output, reasons.render(answer))


def queue(
    name: Annotated[
        str | None, typer.Argument(metavar="[QUEUE]", help="Show only this queue and the jobs that wait there.")
    ] = None,
    output: Form = Output.TABLE,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
) -> None:
    """Draw the tree of queues: quota, what is used and borrowed, and waiting jobs.

    Examples:

      kubectl polyreme queue

      kubectl polyreme queue team-a
    """
    from polyreme.output import nearest
    from polyreme.plugin import queue_tree
    from polyreme.plugin.snapshot import QUEUES
    from polyreme_api.errors import NotFoundError

    seen = target(kubeconfig, context, None).look(QUEUES)
    rows = queue_tree.queue_rows(seen, only=name)
    if not rows:
        known = [row.name for row in queue_tree.queue_rows(seen)]
        raise NotFoundError(f"no queue {name!r}: {nearest(str(name), known)}", field="QUEUE")
    _answer("QueueList", [row.to_object() for row in rows], output, queue_tree.render(rows))


def topology(
    level: Annotated[str | None, typer.Option(help="Lowest level to show, such as block or host.")] = None,
    domain: Annotated[str | None, typer.Option(help="Show only this domain, down to its hosts.")] = None,
    output: Form = Output.TABLE,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
) -> None:
    """Draw the topology: devices used and free by domain, and the jobs that run there.

    Examples:

      kubectl polyreme topology

      kubectl polyreme topology --level block

      kubectl polyreme topology --domain b3
    """
    from polyreme.plugin import domains
    from polyreme.plugin.snapshot import ALL

    drawn = domains.picture(target(kubeconfig, context, None).look(ALL), level=level, domain=domain)
    value = {
        "levels": list(drawn.levels),
        "resource": drawn.resource,
        "problems": list(drawn.problems),
        "root": drawn.root.to_object(),
    }
    _answer("Topology", value, output, domains.render(drawn))


def top(
    output: Form = Output.TABLE,
    namespace: Namespace = None,
    everywhere: AllNamespaces = False,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
) -> None:
    """Show the progress of jobs that hold devices: step, step time, tokens, goodput, devices.

    Example: kubectl polyreme top -A
    """
    from polyreme.plugin.rows import top_rows, top_table
    from polyreme.plugin.snapshot import PROGRESS

    where = target(kubeconfig, context, namespace, everywhere=everywhere)
    seen = where.look(PROGRESS)
    rows = top_rows(seen, (job for job in seen.jobs if where.shows(job.namespace)))
    if not rows and not is_data(output):
        _nothing(where, "jobs with devices")
        return
    _answer("JobTop", rows, output, top_table(rows, namespaced=everywhere))


def _answer(kind: str, value: Any, output: Output, drawn: Any) -> None:
    if output is Output.NAME:
        raise InvalidConfigError(
            f"-o name is not supported for {kind}, expected table, wide, json or yaml", field="--output"
        )
    if is_data(output):
        emit_data(envelope(kind, value), output)
    else:
        show(drawn)


def _nothing(where: Target, what: str) -> None:
    from polyreme.output import note

    note(f"no {what} in any namespace" if where.all_namespaces else f"no {what} in namespace {where.in_namespace}")
