"""Options that the plugin's commands share, and what the shell completes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from polyreme.plugin.printing import Output
from polyreme.plugin.target import Target

Namespace = Annotated[str | None, typer.Option("-n", "--namespace", help="Namespace; default: the context's.")]
AllNamespaces = Annotated[bool, typer.Option("-A", "--all-namespaces", help="Jobs of every namespace.")]
Kubeconfig = Annotated[Path | None, typer.Option("--kubeconfig", help="Default: KUBECONFIG, or ~/.kube/config.")]
Context = Annotated[str | None, typer.Option("--context", help="Context of the kubeconfig; default: the current one.")]
Form = Annotated[Output, typer.Option("-o", "--output", help="Output format.")]
Job = Annotated[str, typer.Argument(metavar="JOB", help="NAME, or NAMESPACE/NAME.")]
Jobs = Annotated[list[str] | None, typer.Argument(metavar="[JOB]...", help="NAME, or NAMESPACE/NAME; default: all.")]
Wait = Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until it is done.")]
Timeout = Annotated[float, typer.Option("--timeout", min=0, max=86_400, help="Longest wait [s].")]


def target(kubeconfig: Path | None, context: str | None, namespace: str | None, *, everywhere: bool = False) -> Target:
    """Return where a command looks."""
    return Target(kubeconfig=kubeconfig, context=context, namespace=namespace, all_namespaces=everywhere)
