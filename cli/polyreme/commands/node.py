"""``polyreme node``: this machine as nodes of a Kubernetes cluster."""

from __future__ import annotations

import logging
import socket
from pathlib import Path
from typing import Annotated

import typer

from polyreme.local_run.node_host import NodeSettings, parse_labels, serve_nodes
from polyreme.run_files.paths import Home
from polyreme_api.labels import RESOURCE_DEVICE


def node(
    context: typer.Context,
    name: Annotated[list[str] | None, typer.Option("--name", help="Name of a node; may be repeated.")] = None,
    devices: Annotated[int, typer.Option(min=1, max=1024, help="Devices that each node offers.")] = 2,
    resource: Annotated[str, typer.Option(help="Resource that counts devices.")] = RESOURCE_DEVICE,
    label: Annotated[
        list[str] | None, typer.Option(help="Label KEY=VALUE of all nodes, or NODE:KEY=VALUE of one; may be repeated.")
    ] = None,
    kubeconfig: Annotated[Path | None, typer.Option(help="Kubeconfig.", show_default="KUBECONFIG")] = None,
    cluster_context: Annotated[str | None, typer.Option("--context", help="Context of the kubeconfig.")] = None,
    namespace: Annotated[
        str | None, typer.Option(help="Process the data of this namespace's jobs only.", show_default="all")
    ] = None,
) -> None:
    """Join a Kubernetes cluster: pods bound to these nodes run here as processes, and job data is processed here.

    For a laptop or a test cluster. Needs the rights of a cluster administrator. The nodes leave the cluster when the
    command ends. Several nodes make a small cluster on one machine.

    Example: polyreme node --name left --name right --devices 2
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    home: Home = context.obj
    nodes = tuple(dict.fromkeys(name or [socket.gethostname().lower()]))
    settings = NodeSettings(
        nodes=nodes,
        devices=devices,
        resource=resource,
        labels=parse_labels(nodes, label or []),
        kubeconfig=kubeconfig,
        context=cluster_context,
        namespace=namespace,
    )
    serve_nodes(home, settings)
