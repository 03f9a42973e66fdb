"""The commands about nodes: nodes, quarantine, release."""

from __future__ import annotations

import getpass
import time
from typing import Annotated

import typer

from polyreme.output import note
from polyreme.plugin.options import Context, Form, Kubeconfig, target
from polyreme.plugin.printing import Output, columns, emit_data, envelope, is_data, show

Node = Annotated[str, typer.Argument(metavar="NODE", help="Name of the node.", show_default=False)]
Reason = Annotated[str, typer.Option("--reason", help="Why; it is recorded on the node.", show_default=False)]
FOR_MAX_S = 31_536_000.0


def nodes(
    everything: Annotated[bool, typer.Option("--all", help="Show healthy nodes, too.")] = False,
    output: Form = Output.TABLE,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
) -> None:
    """Show which nodes are out of service or at risk, why, since when, and what would bring them back.

    Example: kubectl polyreme nodes
    """
    from polyreme.plugin import nodes as views
    from polyreme_operator.port import ClusterPort

    found: list[views.NodeRow] = []

    async def story(cluster: ClusterPort) -> None:
        found.extend(views.rows_of(await views.read_nodes(cluster), everything=everything))

    target(kubeconfig, context, None).run(story)
    if is_data(output):
        emit_data(envelope("NodeHealth", [views.data_of(row) for row in found]), output)
    elif found:
        show(columns(views.HEADINGS, [row.cells for row in found]))
    else:
        note("every node is healthy")


def quarantine(
    node: Node,
    reason: Reason,
    for_s: Annotated[
        float,
        typer.Option("--for", metavar="SECONDS", min=0.0, max=FOR_MAX_S, help="Examine it then; 0: until released."),
    ] = 0.0,
    evict: Annotated[bool, typer.Option("--evict", help="Move workers at once, without a checkpoint.")] = False,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
) -> None:
    """Take a node out of service: it gets no new pods, and workers leave it as their job's policy says.

    Example: kubectl polyreme quarantine node-17 --reason "new cable"
    """
    from polyreme.plugin import nodes as views
    from polyreme_operator.port import ClusterPort

    async def story(cluster: ClusterPort) -> None:
        await views.quarantine(
            cluster, node, who=getpass.getuser(), reason=reason, for_s=for_s, evict=evict, now_s=time.time()
        )
        note(f"node {node} is out of service; `kubectl polyreme release {node}` returns it")

    target(kubeconfig, context, None).run(story)


def release(node: Node, reason: Reason, kubeconfig: Kubeconfig = None, context: Context = None) -> None:
    """Return a node to service; what it shows now does not take it out again, a new fault does.

    Example: kubectl polyreme release node-17 --reason "cable replaced"
    """
    from polyreme.plugin import nodes as views
    from polyreme_operator.port import ClusterPort

    async def story(cluster: ClusterPort) -> None:
        await views.release(cluster, node, who=getpass.getuser(), reason=reason, now_s=time.time())
        note(f"node {node} is back in service")

    target(kubeconfig, context, None).run(story)
