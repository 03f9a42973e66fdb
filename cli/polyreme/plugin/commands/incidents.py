"""The commands about the history of nodes: incidents, incident."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from polyreme.plugin import incidents as views
from polyreme.plugin.options import Context, Form, Kubeconfig, target
from polyreme.plugin.printing import Output, columns, emit_data, envelope, is_data, show
from polyreme.views.output import note

OfNode = Annotated[str | None, typer.Argument(metavar="[NODE]", help="Node or machine; default: all.")]
Since = Annotated[str | None, typer.Option("--since", help="Open within this time: 30m, 24h, 7d; default: all.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the incident.", show_default=False)]


def incidents(
    node: OfNode = None,
    since: Since = None,
    output: Form = Output.TABLE,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
) -> None:
    """List when nodes were out of service, why, and the device-hours that jobs lost.

    Example: kubectl polyreme incidents node-17 --since 24h
    """
    since_s, now_s = None if since is None else views.seconds_of(since), time.time()
    read = target(kubeconfig, context, None).run(views.read_incidents)
    found = views.chosen(read, node=node, since_s=since_s, now_s=now_s)
    if is_data(output):
        emit_data(envelope("NodeIncidents", [views.data_of(each) for each in found]), output)
    elif found:
        show(columns(views.HEADINGS, [views.row_of(each, now_s) for each in found]))
    else:
        note("no incident")


def incident(name: Name, output: Form = Output.TABLE, kubeconfig: Kubeconfig = None, context: Context = None) -> None:
    """Show one incident: what happened, the evidence, each step and its reason, and what it cost.

    Example: kubectl polyreme incident node-17-20261123031204-3fa4b2c1
    """
    from rich.text import Text

    found = target(kubeconfig, context, None).run(lambda cluster: views.read_incident(cluster, name))
    if is_data(output):
        emit_data(envelope("NodeIncident", views.data_of(found)), output)
        return
    story = views.story_of(found, time.time())
    show(*(Text(line) for line in story.head), Text(""), columns(("TIME", "STEP", "WHY"), story.steps))
    cost = f"Cost: {found.status.device_hours or '0.00'} device-hours."
    show(Text(""), Text(cost), *(Text(f"  {line}") for line in story.jobs), Text(""), Text(story.end))
