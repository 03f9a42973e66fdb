"""The commands that only look: get, describe, why, queue, topology, top."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Annotated, Any

import typer

from polyreme.plugin import description, domains, queue_tree
from polyreme.plugin import why as reasons
from polyreme.plugin.hang_stacks import stacks_of
from polyreme.plugin.operator_lease import doubt_of, doubts_of, silence
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
from polyreme.plugin.reading import Sight, list_all, look, read_job
from polyreme.plugin.rows import get_table, top_rows, top_table
from polyreme.plugin.snapshot import Snapshot, read_view, snapshot_of
from polyreme.plugin.target import Target
from polyreme.plugin.waiting import is_waiting
from polyreme.views.output import nearest, note
from polyreme_api.errors import InvalidConfigError, NotFoundError
from polyreme_api.labels import KIND_JOB
from polyreme_cluster.port import ClusterPort
from polyreme_operator.types.views import JobView


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
    where = target(kubeconfig, context, namespace, everywhere=everywhere)

    async def story(cluster: ClusterPort) -> tuple[Snapshot, list[str]]:
        if names:
            items = [await read_job(cluster, *where.split(name)) for name in names]
        else:
            items = await list_all(cluster, KIND_JOB, namespace=where.listed)
        seen = snapshot_of({KIND_JOB: items}, now_s=time.time())
        busy = any(not job.status.finished for job in seen.jobs) and not is_data(output) and output is not Output.NAME
        return seen, doubts_of(seen.jobs, await silence(cluster, seen.now_s), seen.now_s) if busy else []

    seen, doubts = where.run(story)
    if output is Output.NAME:
        emit_names(job.name for job in seen.jobs)
    elif is_data(output):
        items = list(seen.manifests.values())
        one = names is not None and len(names) == 1
        emit_data(items[0] if one else {"apiVersion": "v1", "kind": "List", "items": items}, output)
    elif seen.jobs:
        namespaced = everywhere or len({job.namespace for job in seen.jobs}) > 1
        show(get_table(seen.jobs, now_s=seen.now_s, wide=output is Output.WIDE, namespaced=namespaced))
    else:
        _nothing(where, "jobs")
    _say(doubts)


def describe(
    name: Job,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
) -> None:
    """Show one job in full: state and reason, workers by node, restarts, stacks of a hang, lost time, events.

    Example: kubectl polyreme describe big
    """
    where = target(kubeconfig, context, namespace)

    async def story(cluster: ClusterPort) -> tuple[Sight, JobView, str | None]:
        space, short = where.split(name)
        manifest, now_s = await read_job(cluster, space, short), time.time()
        wanted = dict.fromkeys(("Pod", "Lease", "Event"), space)
        sight = await look(cluster, wanted, known=[manifest], now_s=now_s)
        return sight, sight.job(manifest["metadata"]["uid"]), await silence(cluster, now_s)

    sight, job, quiet = where.run(story)
    events = [event for event in sight.events if (event.get("involvedObject") or {}).get("uid") == job.uid]
    stacks, unread = stacks_of(job)
    show(description.render(sight.seen, job, events, doubt=doubt_of(job, quiet, sight.seen.now_s), stacks=stacks))
    _say([unread] if unread else [])
    _say(sight.left_out("how its pods are is not shown", "Pod"))
    _say(sight.left_out("phase, pace and loss are not shown", "Lease"))
    _say(sight.left_out("events are not shown", "Event"))


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
    where = target(kubeconfig, context, namespace)

    async def story(cluster: ClusterPort) -> tuple[Sight, JobView, str | None]:
        space, short = where.split(name)
        manifest, now_s = await read_job(cluster, space, short), time.time()
        # Its place and the jobs that it preempts; a job that does not wait has neither.
        wanted = dict.fromkeys((KIND_JOB, "TrainingQueue", "Node")) if is_waiting(read_view(manifest)) else {}
        sight = await look(cluster, wanted, home=space, known=[manifest], now_s=now_s)
        return sight, sight.job(manifest["metadata"]["uid"]), await silence(cluster, now_s)

    sight, job, quiet = where.run(story)
    whole = not sight.hidden
    answer = reasons.why(sight.seen, job, doubt=doubt_of(job, quiet, sight.seen.now_s), whole=whole)
    _answer("Why", answer.to_object(), output, reasons.render(answer))
    if not whole:
        place = "its place" if answer.position is None else "jobs ahead of it in other queues"
        _say(sight.left_out(f"{place} and the jobs that it preempts are not shown", KIND_JOB, "TrainingQueue", "Node"))


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
    where = target(kubeconfig, context, None)
    wanted = dict.fromkeys((KIND_JOB, "TrainingQueue"))
    sight = where.run(
        lambda cluster: look(cluster, wanted, needed=("TrainingQueue",), home=where.in_namespace, now_s=time.time())
    )
    whole = not sight.hidden
    rows = queue_tree.queue_rows(sight.seen, only=name, whole=whole)
    if not rows:
        known = [row.name for row in queue_tree.queue_rows(sight.seen)]
        raise NotFoundError(f"no queue {name!r}: {nearest(str(name), known)}", field="QUEUE")
    _answer("QueueList", [row.to_object() for row in rows], output, queue_tree.render(rows))
    _say(
        sight.left_out(
            "jobs of other namespaces are counted as the operator last wrote into the status of queues", KIND_JOB
        )
    )


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
    where = target(kubeconfig, context, None)
    wanted = dict.fromkeys((KIND_JOB, "ClusterTopology", "Node", "Pod"))
    sight = where.run(
        lambda cluster: look(cluster, wanted, needed=("Node",), home=where.in_namespace, now_s=time.time())
    )
    whole = not sight.lacks(KIND_JOB, "Pod")
    drawn = domains.picture(sight.seen, level=level, domain=domain, whole=whole)
    value = {
        "levels": list(drawn.levels),
        "resource": drawn.resource,
        "problems": list(drawn.problems),
        "root": drawn.root.to_object(whole=whole),
    }
    _answer("Topology", value, output, domains.render(drawn))
    _say(sight.left_out(f"only pods and jobs of namespace {where.in_namespace} are counted", KIND_JOB, "Pod"))
    _say(sight.left_out("levels are not shown", "ClusterTopology"))


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
    where = target(kubeconfig, context, namespace, everywhere=everywhere)
    wanted = dict.fromkeys((KIND_JOB, "Lease"), where.listed)
    sight = where.run(lambda cluster: look(cluster, wanted, needed=(KIND_JOB,), now_s=time.time()))
    rows = top_rows(sight.seen, sight.seen.jobs)
    if not rows and not is_data(output):
        _nothing(where, "jobs with devices")
        return
    _answer("JobTop", rows, output, top_table(rows, namespaced=everywhere))
    _say(sight.left_out("step time, tokens, loss and time left are not shown", "Lease"))


def _answer(kind: str, value: Any, output: Output, drawn: Any) -> None:
    if output is Output.NAME:
        raise InvalidConfigError(
            f"-o name is not supported for {kind}, expected table, wide, json or yaml", field="--output"
        )
    if is_data(output):
        emit_data(envelope(kind, value), output)
    else:
        show(drawn)


def _say(lines: Iterable[str]) -> None:
    """Say to a person what an answer leaves out, or why it may be wrong."""
    for line in lines:
        note(line)


def _nothing(where: Target, what: str) -> None:
    note(f"no {what} in any namespace" if where.all_namespaces else f"no {what} in namespace {where.in_namespace}")
