"""The commands about nodes: nodes, quarantine, release."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from polyreme.plugin import nodes as views
from polyreme.plugin.domain_change import quarantine_domain, release_domain
from polyreme.plugin.identity import who_acts
from polyreme.plugin.options import Context, Form, Kubeconfig, target
from polyreme.plugin.printing import Output, columns, emit_data, envelope, is_data, show
from polyreme.plugin.reading import NotAllowedError, list_all
from polyreme.views.output import note
from polyreme_api.errors import InvalidConfigError
from polyreme_api.labels import KIND_TOPOLOGY
from polyreme_cluster.port import ClusterPort, Manifest

Node = Annotated[str, typer.Argument(metavar="NODE", help="Name of the node.", show_default=False)]
Domain = Annotated[
    str,
    typer.Option(
        "--domain",
        metavar="LEVEL=NAME",
        help="Instead of a node: all nodes of a domain, by a level of the ClusterTopology.",
        show_default=False,
    ),
]
Reason = Annotated[str, typer.Option("--reason", help="Why; it is recorded on the node.", show_default=False)]
FOR_MAX_S = 31_536_000.0


def nodes(
    everything: Annotated[bool, typer.Option("--all", help="Show nodes that are ready and healthy, too.")] = False,
    output: Form = Output.TABLE,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
) -> None:
    """Show which nodes take no new workers, are at risk or spares: why, since when, and what would bring them back.

    Example: kubectl polyreme nodes
    """

    async def story(cluster: ClusterPort) -> tuple[list[Manifest], list[Manifest] | None]:
        nodes = await list_all(cluster, "Node")
        try:
            return nodes, await list_all(cluster, KIND_TOPOLOGY)
        except NotAllowedError:
            return nodes, None

    read, topologies = target(kubeconfig, context, None).run(story)
    found = views.rows_of(read, everything=everything, spares=views.spares_of(topologies or ()))
    if is_data(output):
        emit_data(envelope("NodeHealth", [views.data_of(row) for row in found]), output)
    elif found:
        show(columns(views.HEADINGS, [row.cells for row in found]))
    else:
        note(f"all {len(read)} nodes are ready and healthy" if read else "there are no nodes")
    if topologies is None:
        note("spares are not marked: you may not list clustertopologies")


def quarantine(
    reason: Reason,
    node: Node = "",
    domain: Domain = "",
    for_s: Annotated[
        float,
        typer.Option("--for", metavar="SECONDS", min=0.0, max=FOR_MAX_S, help="Examine the node after this; 0: never."),
    ] = 0.0,
    evict: Annotated[bool, typer.Option("--evict", help="Move workers at once, without a checkpoint.")] = False,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
) -> None:
    """Take a node, or a whole domain, out of service: no new pods, and workers leave as their job's policy says.

    Example: kubectl polyreme quarantine node-17 --reason "new cable"
    """
    _one_of(node, domain)
    now_s = time.time()

    async def story(cluster: ClusterPort) -> None:
        who = await who_acts(cluster)
        if not domain:
            await views.quarantine(cluster, node, who=who, reason=reason, for_s=for_s, evict=evict, now_s=now_s)
            note(f"node {node} is out of service; `kubectl polyreme release {node}` returns it")
            return
        count = await quarantine_domain(
            cluster, domain, who=who, reason=reason, for_s=for_s, evict=evict, now_s=now_s, tell=note
        )
        note(
            f"took {count} nodes of {domain} out of service; `kubectl polyreme release --domain {domain}` returns them"
        )

    target(kubeconfig, context, None).run(story)


def release(
    reason: Reason,
    node: Node = "",
    domain: Domain = "",
    kubeconfig: Kubeconfig = None,
    context: Context = None,
) -> None:
    """Return a node to service, or the nodes of a domain that people took out; present faults take none out again.

    Example: kubectl polyreme release node-17 --reason "cable replaced"
    """
    _one_of(node, domain)
    now_s = time.time()

    async def story(cluster: ClusterPort) -> None:
        who = await who_acts(cluster)
        if not domain:
            await views.release(cluster, node, who=who, reason=reason, now_s=now_s)
            note(f"node {node} is back in service")
            return
        count = await release_domain(cluster, domain, who=who, reason=reason, now_s=now_s, tell=note)
        note(f"returned {count} nodes of {domain} to service")

    target(kubeconfig, context, None).run(story)


def _one_of(node: str, domain: str) -> None:
    if bool(node) == bool(domain):
        seen = f"{node} and --domain {domain}" if node else "neither"
        raise InvalidConfigError(f"name a NODE or a --domain, seen {seen}", field="NODE")
